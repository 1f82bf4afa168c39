//! [`Turns`]: when writes may go beside reads, which an engine waits for. Pure: time comes in as an argument.
//!
//! | reads | writes that may be in flight |
//! |---|---|
//! | in flight, or ended within 3 ms | one operation, of one byte for ten that were read |
//! | ended within 1 s | 8 MiB |
//! | none for 1 s | 32 MiB |

use std::time::{Duration, Instant};

/// Bytes read for each byte written beside reads. An SSD spends about twice as much on writing a byte as on reading one,
/// so reads keep above 0.7 of their throughput alone.
const READS_FOR_A_WRITE: u64 = 10;
/// Writes hold back this long after the last read, because reads come in bursts.
const READS_LINGER: Duration = Duration::from_millis(3);
/// Limit of write bytes in flight when no read is: a new read has to wait behind them.
const BETWEEN_READS: u64 = 8 << 20;
/// The limit after [`READS_ARE_RARE`] without a read. On a virtual machine's disk, writes with 8 MiB in flight reached
/// 0.75 of their throughput with 32 MiB.
const ALONE: u64 = 32 << 20;
const READS_ARE_RARE: Duration = Duration::from_secs(1);

/// Bytes in flight, and the credit that reads have earned for writes.
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

    /// Returns None if a write of `bytes` may start now. Otherwise the caller waits for the end of a transfer or for this
    /// time, whichever comes first.
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
        // One write may always go, however large.
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
