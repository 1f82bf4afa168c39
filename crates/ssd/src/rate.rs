//! [`RateLimit`]: a token bucket for the bytes that a device may write a second. Pure: time comes in as an argument.

use std::time::{Duration, Instant};

/// Capacity of the bucket, as the time in which it fills.
const BURST: Duration = Duration::from_millis(50);

/// A bucket of bytes that fills at a fixed rate. A transfer may overdraw it, so that none is too large.
#[derive(Debug)]
pub(crate) struct RateLimit {
    bytes_per_second: f64,
    credit: f64,
    since: Option<Instant>,
}

impl RateLimit {
    /// A full bucket. 0 counts as 1 byte a second.
    pub(crate) fn new(bytes_per_second: u64) -> RateLimit {
        let bytes_per_second = bytes_per_second.max(1) as f64;
        RateLimit { bytes_per_second, credit: bytes_per_second * BURST.as_secs_f64(), since: None }
    }

    /// Returns None if a transfer may start now, or else how long to wait before the next call.
    pub(crate) fn wait(&mut self, now: Instant) -> Option<Duration> {
        let passed = self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        self.since = Some(now);
        let full = self.bytes_per_second * BURST.as_secs_f64();
        self.credit = (self.credit + passed.as_secs_f64() * self.bytes_per_second).min(full);
        // Round up, so that one wait of this length is enough.
        (self.credit <= 0.0).then(|| {
            let seconds = (-self.credit / self.bytes_per_second).min(3600.0);
            Duration::from_secs_f64(seconds) + Duration::from_micros(10)
        })
    }

    /// Takes the bytes of a transfer that has started.
    pub(crate) fn take(&mut self, bytes: u64) {
        self.credit -= bytes as f64;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_more_is_written_than_the_rate_a_burst_and_one_transfer(
            rate in 1u64..1 << 32,
            transfers in prop::collection::vec((1u64..1 << 22, 0u64..100_000), 1..200),
        ) {
            let start = Instant::now();
            let (mut now, mut limit, mut written, mut last) = (start, RateLimit::new(rate), 0u64, 0u64);
            for (bytes, pause_us) in transfers {
                now += Duration::from_micros(pause_us);
                while let Some(wait) = limit.wait(now) {
                    prop_assert!(wait > Duration::ZERO);
                    now += wait;
                }
                limit.take(bytes);
                let allowed = rate as f64 * (now - start + BURST).as_secs_f64() + last.max(bytes) as f64;
                written += bytes;
                last = last.max(bytes);
                prop_assert!(written as f64 <= allowed * 1.000_001 + 1.0, "{} of {}", written, allowed);
            }
        }

        #[test]
        fn after_a_wait_the_next_transfer_starts(rate in 1000u64..1 << 32, bytes in 1u64..1 << 22) {
            let now = Instant::now();
            let mut limit = RateLimit::new(rate);
            prop_assert_eq!(limit.wait(now), None);
            limit.take(bytes);
            if let Some(wait) = limit.wait(now) {
                // The longest wait that is asked for at once is an hour.
                prop_assume!(wait < Duration::from_secs(3600));
                prop_assert_eq!(limit.wait(now + wait), None);
            }
        }
    }
}
