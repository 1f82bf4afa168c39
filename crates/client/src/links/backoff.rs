//! When to try to connect again.

use std::time::{Duration, Instant};

const FIRST: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_secs(2);

/// Doubling pauses between attempts, from 50 ms to 2 s.
#[derive(Debug)]
pub struct Backoff {
    next: Instant,
    pause: Duration,
}

impl Backoff {
    /// The first attempt is due at once.
    pub fn new(now: Instant) -> Self {
        Self { next: now, pause: FIRST }
    }

    /// Whether to try now.
    pub fn is_due(&self, now: Instant) -> bool {
        now >= self.next
    }

    /// When to try.
    pub fn due(&self) -> Instant {
        self.next
    }

    /// How long not to try yet.
    pub fn until_due(&self, now: Instant) -> Duration {
        self.next.saturating_duration_since(now)
    }

    /// An attempt failed.
    pub fn failed(&mut self, now: Instant) {
        self.next = now + self.pause;
        self.pause = (self.pause * 2).min(LONGEST);
    }

    /// A connection came up.
    pub fn succeeded(&mut self) {
        self.pause = FIRST;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_two_seconds_and_start_again_after_success() {
        let mut now = Instant::now();
        let mut backoff = Backoff::new(now);
        let mut pauses = Vec::new();
        for _ in 0..8 {
            assert!(backoff.is_due(now));
            backoff.failed(now);
            pauses.push(backoff.until_due(now).as_millis());
            now += backoff.until_due(now);
        }
        assert_eq!(pauses, [50, 100, 200, 400, 800, 1600, 2000, 2000]);
        backoff.succeeded();
        backoff.failed(now);
        assert_eq!(backoff.until_due(now), FIRST);
    }
}
