//! Decides when to try to connect again.

use std::time::{Duration, Instant};

const FIRST: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_secs(2);

/// Pauses between attempts, which double from 50 ms to 2 s. Only a connection that served for 2 s makes them short again.
/// Otherwise a daemon that accepts every registration and then answers nonsense would be tried twenty times a second, with a
/// line of log each time.
#[derive(Debug)]
pub struct Backoff {
    next: Instant,
    pause: Duration,
    /// When the daemon began to serve the present connection.
    opened: Option<Instant>,
}

impl Backoff {
    /// The first attempt is due at once.
    pub fn new(now: Instant) -> Self {
        Self { next: now, pause: FIRST, opened: None }
    }

    /// Whether the next attempt is due.
    pub fn is_due(&self, now: Instant) -> bool {
        now >= self.next
    }

    /// When the next attempt is due.
    pub fn due(&self) -> Instant {
        self.next
    }

    /// An attempt failed, or a connection ended.
    pub fn failed(&mut self, now: Instant) {
        if self.opened.take().is_some_and(|opened| now.saturating_duration_since(opened) >= LONGEST) {
            self.pause = FIRST;
        }
        self.next = now + self.pause;
        self.pause = (self.pause * 2).min(LONGEST);
    }

    /// The daemon serves the present connection.
    pub fn opened(&mut self, now: Instant) {
        self.opened = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_two_seconds_and_start_again_after_a_connection_that_lasted() {
        let mut now = Instant::now();
        let mut backoff = Backoff::new(now);
        let mut pauses = Vec::new();
        let mut fail = |backoff: &mut Backoff, now: &mut Instant| {
            assert!(backoff.is_due(*now));
            backoff.failed(*now);
            pauses.push((backoff.due() - *now).as_millis());
            *now = backoff.due();
        };
        for _ in 0..8 {
            // A connection that served for less than 2 s is no success.
            backoff.opened(now);
            now += LONGEST - Duration::from_millis(1);
            fail(&mut backoff, &mut now);
        }
        backoff.opened(now);
        now += LONGEST;
        for _ in 0..2 {
            fail(&mut backoff, &mut now);
        }
        assert_eq!(pauses, [50, 100, 200, 400, 800, 1600, 2000, 2000, 50, 100]);
    }
}
