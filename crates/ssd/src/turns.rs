//! When writes may go beside reads. Pure: time comes in as an argument.

use std::time::{Duration, Instant};

/// Beside reads, one byte is written for so many that are read. Writing costs an SSD more than reading, about twice as
/// much, so that reads keep above 0.7 of what they get alone.
const READS_FOR_A_WRITE: u64 = 10;
/// Reads come in bursts; so long after the last one, writes still stand back.
const READS_LINGER: Duration = Duration::from_millis(3);
/// Bytes of writes in flight when nothing is being read: what a read that comes now has to wait behind.
const BETWEEN_READS: u64 = 8 << 20;
/// The same when nothing has been read for [`READS_ARE_RARE`]. With 8 MiB in flight, writes of a virtual machine's disk
/// reached 0.75 of what they did with 32.
const ALONE: u64 = 32 << 20;
const READS_ARE_RARE: Duration = Duration::from_secs(1);

/// Who may go next.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    reads_in_flight: u64,
    writes_in_flight: u64,
    /// Bytes that may be written beside reads.
    credit: u64,
    last_read: Option<Instant>,
}

impl Turns {
    pub(crate) fn read_started(&mut self, bytes: u64) {
        self.reads_in_flight += bytes;
    }

    pub(crate) fn read_ended(&mut self, bytes: u64, now: Instant) {
        self.reads_in_flight -= bytes;
        self.last_read = Some(now);
        self.credit = (self.credit + bytes / READS_FOR_A_WRITE).min(BETWEEN_READS);
    }

    pub(crate) fn write_started(&mut self, bytes: u64) {
        self.writes_in_flight += bytes;
        self.credit = self.credit.saturating_sub(bytes);
    }

    pub(crate) fn write_ended(&mut self, bytes: u64) {
        self.writes_in_flight -= bytes;
    }

    /// None: a write of so many bytes may start. Otherwise what to wait for: the end of a transfer, or this time.
    pub(crate) fn wait(&self, bytes: u64, now: Instant) -> Option<Duration> {
        let since_read = self.last_read.map(|last| now.saturating_duration_since(last));
        let lingers = since_read.map(|since| READS_LINGER.saturating_sub(since));
        let reading = self.reads_in_flight > 0 || lingers.is_some_and(|left| !left.is_zero());
        if reading {
            let may = self.writes_in_flight == 0 && self.credit >= bytes;
            return (!may).then(|| lingers.unwrap_or_default().max(Duration::from_millis(1)));
        }
        let window =
            if since_read.is_none_or(|since| since >= READS_ARE_RARE) { ALONE } else { BETWEEN_READS };
        // Above all one at a time, however large.
        let may = self.writes_in_flight == 0 || self.writes_in_flight + bytes <= window;
        (!may).then_some(READS_LINGER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn alone_writes_fill_their_window() {
        let (mut turns, now) = (Turns::default(), Instant::now());
        for _ in 0..32 {
            assert_eq!(turns.wait(MIB, now), None);
            turns.write_started(MIB);
        }
        assert!(turns.wait(MIB, now).is_some());
        turns.write_ended(MIB);
        assert_eq!(turns.wait(MIB, now), None);
        assert_eq!(Turns::default().wait(100 * MIB, now), None, "one of any size");
    }

    #[test]
    fn soon_after_a_read_fewer_writes_are_in_flight_than_long_after() {
        let (mut turns, now) = (Turns::default(), Instant::now());
        turns.read_started(MIB);
        turns.read_ended(MIB, now);
        let mut in_flight = |now| {
            while turns.wait(MIB, now).is_none() {
                turns.write_started(MIB);
            }
            turns.writes_in_flight
        };
        assert_eq!(in_flight(now + READS_LINGER), BETWEEN_READS);
        assert_eq!(in_flight(now + READS_ARE_RARE), ALONE);
    }

    #[test]
    fn beside_reads_a_tenth_is_written_and_after_them_everything() {
        let (mut turns, mut now) = (Turns::default(), Instant::now());
        let (mut read, mut written) = (0, 0);
        turns.read_started(4 * MIB);
        for _ in 0..1000 {
            now += Duration::from_millis(1);
            turns.read_started(MIB);
            turns.read_ended(MIB, now);
            read += MIB;
            while turns.wait(MIB / 2, now).is_none() {
                turns.write_started(MIB / 2);
                turns.write_ended(MIB / 2);
                written += MIB / 2;
            }
        }
        assert!(written * 10 <= read && written * 12 >= read, "{written} beside {read}");
        turns.read_ended(4 * MIB, now);
        while turns.wait(MIB, now).is_none() {
            turns.write_started(MIB);
            turns.write_ended(MIB);
        }
        let wait = turns.wait(MIB, now).unwrap();
        assert_eq!(turns.wait(MIB, now + wait), None);
    }
}
