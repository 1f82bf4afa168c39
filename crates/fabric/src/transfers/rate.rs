//! Measures how fast a path is.

use std::time::Duration;

/// Weight of a completed post relative to the next one.
const REMEMBERED: f64 = 0.875;

/// Bytes a second, over the time in which any bytes were under way. So the time that a post waits behind others counts once.
#[derive(Debug, Default)]
pub(super) struct Rate {
    bytes: f64,
    seconds: f64,
    /// The time is counted until then. Only meaningful while bytes are under way.
    counted: Duration,
}

impl Rate {
    /// Starts the clock: bytes are posted while none were under way.
    pub(super) fn begin(&mut self, now: Duration) {
        self.counted = now;
    }

    /// Counts a post that completed, and the time since the last one. None: its bytes were not placed, or may not have been.
    pub(super) fn note(&mut self, now: Duration, placed: Option<u64>) {
        let busy = now.saturating_sub(self.counted).as_secs_f64();
        self.counted = now;
        let Some(bytes) = placed else { return };
        self.bytes = self.bytes * REMEMBERED + bytes as f64;
        self.seconds = self.seconds * REMEMBERED + busy;
    }

    /// None before the first post is placed.
    pub(super) fn per_second(&self) -> Option<f64> {
        (self.bytes > 0.0).then(|| self.bytes / self.seconds.max(1e-9))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    /// Sixteen posts at once on a path that does one in 100 us: each waits for those before it, and the path counted as
    /// an eighth as fast as it was.
    #[test]
    fn a_path_is_as_fast_as_it_is_and_not_as_its_queue_is_long() {
        for posts in [1, 16] {
            let mut rate = Rate::default();
            let mut now = 0;
            for _ in 0..10 {
                rate.begin(at(now));
                for _ in 0..posts {
                    now += 100;
                    rate.note(at(now), Some(100));
                }
                // Nothing is under way.
                now += 5000;
            }
            let rate = rate.per_second().unwrap_or_default();
            assert!((rate - 1e6).abs() < 1.0, "{posts} posts at once: {rate}");
        }
    }

    #[test]
    fn what_comes_back_at_one_instant_counts_together() {
        let mut rate = Rate::default();
        rate.begin(at(0));
        rate.note(at(200), Some(100));
        rate.note(at(200), Some(100));
        let known = rate.per_second().unwrap_or_default();
        assert!((0.9e6..1.1e6).contains(&known), "{known}");
    }

    #[test]
    fn what_was_not_placed_says_nothing() {
        let mut rate = Rate::default();
        rate.begin(at(0));
        rate.note(at(100), None);
        assert_eq!(rate.per_second(), None);
        rate.note(at(200), Some(100));
        assert_eq!(rate.per_second(), Some(1e6));
    }
}
