//! Whether a member is asked: one that does not answer costs each lookup its patience, so it is left out for a while. The same
//! for loans that come late or damaged. Pure.
//!
//! ```text
//!   closed --- 3 misses, over 20 ms at least; an answer makes up for 2 ---> open for 0.1 s, then 0.2, .. 10 s
//!     ^                                                                       | time is over: one question may try
//!     '------------- it answers <---------------------------------------------'--- missed: open for twice as long
//! ```

use std::time::{Duration, Instant};

/// Missed questions after which the member is left out.
const MISSES: u32 = 3;
/// The least time from the first of these misses to the last. With many lookups a second, three are missed whenever
/// a busy host gives the member no processor for a moment.
const SILENCE: Duration = Duration::from_millis(20);
/// No more misses than this are remembered, or answers would not make up for a long silence.
const MISSES_MAX: u32 = 6;
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// The questions of one member.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    misses: u32,
    first_miss: Option<Instant>,
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
        (self.misses, self.first_miss, self.open) = (0, None, None);
    }

    /// The member has answered a question after this time. That makes up for two misses, so that a member which answers less
    /// than every third question is left out.
    pub(crate) fn answered(&mut self, after: Duration) {
        self.misses = self.misses.min(MISSES_MAX).saturating_sub(2);
        if self.open.is_some() || self.misses == 0 {
            self.alive();
        }
        self.round_trip = if self.round_trip.is_zero() { after } else { (7 * self.round_trip + after) / 8 };
    }

    /// A question's time is over, and it has not answered. True if it is left out from now on.
    pub(crate) fn missed(&mut self, now: Instant) -> bool {
        self.misses += 1;
        let silent_for = now.saturating_duration_since(*self.first_miss.get_or_insert(now));
        let opens = self.misses >= MISSES && silent_for >= SILENCE && self.open.is_none();
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
        assert_eq!((0..5).filter(|number| breaker.missed(at(10 * number))).count(), 1);
        let asked: Vec<u64> = (40..60_000).filter(|ms| breaker.may_ask(at(*ms))).collect();
        assert_eq!(asked, [120, 320, 720, 1520, 3120, 6320, 12_720, 22_720, 32_720, 42_720, 52_720]);
        breaker.answered(Duration::from_millis(1));
        assert!(breaker.may_ask(at(60_000)) && breaker.may_ask(at(60_000)));
    }

    /// A host under load gave a replica no processor for 3 ms. At 1,000 lookups a second that was three misses, and no
    /// replica was asked for the next 0.1 s.
    #[test]
    fn a_member_that_is_silent_for_a_moment_is_not_left_out() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut breaker = Breaker::default();
        for ms in 0..20 {
            assert!(!breaker.missed(at(ms)) && breaker.may_ask(at(ms)));
        }
        breaker.answered(Duration::from_millis(1));
        (0..2).for_each(|_| breaker.answered(Duration::from_millis(1)));
        for ms in 100..120 {
            assert!(!breaker.missed(at(ms)), "counts anew after some answers");
        }
        assert!(breaker.missed(at(120)) && !breaker.may_ask(at(121)));
        let mut breaker = Breaker::default();
        let opened: Vec<u64> = (0..5).filter(|seconds| breaker.missed(at(1000 * seconds))).collect();
        assert_eq!(opened, [2], "with few questions the third miss is enough");
    }

    /// One answer made up for all misses. At 1,000 lookups a second a member that answered a third of them was never left out, and
    /// the others waited in vain.
    #[test]
    fn a_member_that_answers_a_part_of_the_questions_is_left_out() {
        let start = Instant::now();
        for (answered_of_ten, is_left_out) in [(1, true), (2, true), (5, false), (9, false)] {
            let mut breaker = Breaker::default();
            let opens = (0..1000).any(|ms| match ms % 10 < answered_of_ten {
                true => {
                    breaker.answered(Duration::from_millis(1));
                    false
                }
                false => breaker.missed(start + Duration::from_millis(ms)),
            });
            assert_eq!(opens, is_left_out, "{answered_of_ten} of ten");
        }
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
