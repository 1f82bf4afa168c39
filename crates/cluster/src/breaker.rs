//! Whether a member is asked: one that does not answer costs each lookup its patience, so it is left out for a while. Pure.
//!
//! ```text
//!   closed --- 3 questions in a row missed ---> open for 0.1 s, then 0.2, .. 10 s
//!     ^                                           | time is over: one question may try
//!     '------------- it answers <-----------------'--- missed: open for twice as long
//! ```

use std::time::{Duration, Instant};

/// Missed questions in a row after which the member is left out.
const MISSES: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// The questions of one member.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    misses: u32,
    /// When it may be asked again, and the pause before.
    open: Option<(Instant, Duration)>,
    round_trip: Duration,
}

impl Breaker {
    /// Whether to ask it now. After a pause this allows one question, and pauses again unless that is answered.
    pub(crate) fn may_ask(&mut self, now: Instant) -> bool {
        match self.open {
            None => true,
            Some((until, _)) if now < until => false,
            Some((_, pause)) => {
                let pause = (2 * pause).min(LONGEST_PAUSE);
                self.open = Some((now + pause, pause));
                true
            }
        }
    }

    /// The member has done what it was asked for.
    pub(crate) fn alive(&mut self) {
        (self.misses, self.open) = (0, None);
    }

    /// The member has answered a question after this time.
    pub(crate) fn answered(&mut self, after: Duration) {
        self.alive();
        self.round_trip = if self.round_trip.is_zero() { after } else { (7 * self.round_trip + after) / 8 };
    }

    /// A question's time is over, and it has not answered. True if it is left out from now on.
    pub(crate) fn missed(&mut self, now: Instant) -> bool {
        self.misses += 1;
        let opens = self.misses >= MISSES && self.open.is_none();
        if opens {
            self.open = Some((now + FIRST_PAUSE, FIRST_PAUSE));
        }
        opens
    }

    /// Mean time from a question to its answer. 0 before the first.
    pub(crate) fn round_trip(&self) -> Duration {
        self.round_trip
    }

    /// Whether it is closed, or its pause is over by then.
    pub(crate) fn is_over(&self, then: Instant) -> bool {
        self.open.is_none_or(|(until, _)| until <= then)
    }

    pub(crate) fn is_open(&self) -> bool {
        self.open.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_that_does_not_answer_is_asked_ever_more_rarely_until_it_does() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut breaker = Breaker::default();
        for ms in 0..2 {
            assert!(breaker.may_ask(at(ms)));
            assert!(!breaker.missed(at(ms)));
        }
        breaker.answered(Duration::from_millis(1));
        assert_eq!((0..5).filter(|_| breaker.missed(start)).count(), 1);
        let asked: Vec<u64> = (0..60_000).filter(|ms| breaker.may_ask(at(*ms))).collect();
        assert_eq!(asked, [100, 300, 700, 1500, 3100, 6300, 12_700, 22_700, 32_700, 42_700, 52_700]);
        breaker.answered(Duration::from_millis(1));
        assert!(breaker.may_ask(at(60_000)) && breaker.may_ask(at(60_000)));
    }

    #[test]
    fn the_round_trip_is_a_moving_mean() {
        let mut breaker = Breaker::default();
        assert_eq!(breaker.round_trip(), Duration::ZERO);
        breaker.answered(Duration::from_micros(800));
        assert_eq!(breaker.round_trip(), Duration::from_micros(800));
        breaker.answered(Duration::from_micros(1600));
        assert_eq!(breaker.round_trip(), Duration::from_micros(900));
    }
}
