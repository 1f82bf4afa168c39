//! [`Health`]: backoff of a device's writes after a failure. Pure: time comes in as an argument.

use std::time::{Duration, Instant};

const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// A failed write pauses all writes for 1 s, and each failure after a pause doubles the next one, up to a minute. A
/// success after the pause resets the backoff.
#[derive(Debug, Default)]
pub(crate) struct Health {
    failures: u32,
    pause_until: Option<Instant>,
    reason: Option<String>,
    /// The device's thread has ended; no pause ends this.
    ended: bool,
}

impl Health {
    pub(crate) fn failed(&mut self, reason: String, now: Instant) {
        // Transfers that were in flight together fail together, so they count as one failure.
        if self.pause_until.is_none_or(|until| now >= until) {
            let pause = FIRST_PAUSE.saturating_mul(1 << self.failures.min(10)).min(LONGEST_PAUSE);
            self.pause_until = Some(now + pause);
            self.failures += 1;
        }
        self.reason = Some(reason);
    }

    /// Called when a write succeeded. During a pause it changes nothing, because the write was in flight beside the
    /// failed one.
    pub(crate) fn succeeded(&mut self, now: Instant) {
        if self.pause_until.is_some_and(|until| now >= until) {
            *self = Health::default();
        }
    }

    /// Ends all writes for good.
    pub(crate) fn ended(&mut self, reason: String) {
        self.ended = true;
        self.reason = Some(reason);
    }

    pub(crate) fn accepts_writes(&self, now: Instant) -> bool {
        !self.ended && self.pause_until.is_none_or(|until| now >= until)
    }

    /// Error of the last failed write, until a write succeeds.
    pub(crate) fn reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_minute_and_a_success_ends_the_story() {
        let (mut health, mut now) = (Health::default(), Instant::now());
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            assert!(health.accepts_writes(now));
            health.failed("no space".into(), now);
            health.failed("no space".into(), now);
            health.succeeded(now);
            assert_eq!(health.reason(), Some("no space"));
            assert!(!health.accepts_writes(now + Duration::from_secs(seconds) - Duration::from_millis(1)));
            now += Duration::from_secs(seconds);
        }
        assert!(health.accepts_writes(now));
        health.succeeded(now);
        assert_eq!(health.reason(), None);
        health.failed("again".into(), now);
        assert!(health.accepts_writes(now + FIRST_PAUSE));
    }
}
