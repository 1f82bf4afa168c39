//! [`Residence`]: how long evicted blocks had been in the pool, in buckets.

use std::time::Instant;

/// Upper bounds of the buckets, in seconds. One more bucket is above all of them.
pub const RESIDENCE_BOUNDS_S: [u64; 9] = [1, 10, 60, 300, 900, 3600, 4 * 3600, 24 * 3600, 7 * 24 * 3600];

/// How long evicted blocks had been in the pool since they were saved or fetched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Residence {
    /// Blocks in each bucket of [`RESIDENCE_BOUNDS_S`], and above.
    pub counts: [u64; RESIDENCE_BOUNDS_S.len() + 1],
    /// Their seconds together.
    pub seconds: u64,
}

impl Residence {
    pub(crate) fn add(&mut self, seconds: u32) {
        let seconds = u64::from(seconds);
        self.counts[RESIDENCE_BOUNDS_S.partition_point(|bound| *bound < seconds)] += 1;
        self.seconds += seconds;
    }

    /// How many blocks were evicted.
    pub fn blocks(&self) -> u64 {
        self.counts.iter().sum()
    }
}

/// Whole seconds since the index was first used: a time in 4 bytes for each block.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Clock {
    began: Option<Instant>,
    now: u32,
}

impl Clock {
    /// Moves to `now`, never back.
    pub(crate) fn set(&mut self, now: Instant) {
        let began = *self.began.get_or_insert(now);
        let seconds = now.saturating_duration_since(began).as_secs();
        self.now = self.now.max(u32::try_from(seconds).unwrap_or(u32::MAX));
    }

    /// The time that was last set.
    pub(crate) fn now(self) -> u32 {
        self.now
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_bucket_has_what_is_at_most_its_bound() {
        let mut residence = Residence::default();
        for seconds in [0, 1, 2, 10, 3600, 3601, u32::MAX] {
            residence.add(seconds);
        }
        assert_eq!(residence.counts, [2, 2, 0, 0, 0, 1, 1, 0, 0, 1]);
        assert_eq!((residence.blocks(), residence.seconds), (7, 7214 + u64::from(u32::MAX)));
    }

    #[test]
    fn the_clock_does_not_go_back() {
        let (mut clock, start) = (Clock::default(), Instant::now());
        let mut at = |ms| {
            clock.set(start + Duration::from_millis(ms));
            clock.now()
        };
        assert_eq!([at(5), at(2004), at(2005), at(5)], [0, 1, 2, 2]);
    }
}
