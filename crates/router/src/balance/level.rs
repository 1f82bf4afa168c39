//! A role's load as one of three levels, with hysteresis and a dwell time so that the level does not flicker.
//!
//! ```text
//!         low-enter    low-exit           high-exit    high-enter
//!   --- low --|------------|----- middle -----|-------------|-- high --->  score
//!             <- becomes low        stays high ->           becomes high ->
//!                          <- stays low
//! ```

use std::time::{Duration, Instant};

/// How loaded a role's nodes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Level {
    /// So little that fewer nodes would be enough.
    Low,
    /// Neither low nor high; also without a score.
    #[default]
    Middle,
    /// Enough that more nodes are needed.
    High,
}

/// Where a level begins and ends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Thresholds {
    /// The level becomes high at this score or above.
    pub high_enter: f64,
    /// A high level stays down to this score.
    pub high_exit: f64,
    /// The level becomes low at this score or below.
    pub low_enter: f64,
    /// A low level stays up to this score.
    pub low_exit: f64,
}

/// A role's level with its hysteresis.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Latch {
    level: Level,
    /// When it last changed.
    since: Option<Instant>,
}

impl Latch {
    /// Updates the level with a new score. A level lasts at least `dwell`. Without a score it is the middle one at once.
    pub(super) fn update(
        &mut self,
        score: Option<f64>,
        thresholds: &Thresholds,
        dwell: Duration,
        now: Instant,
    ) -> Level {
        let Some(score) = score else {
            *self = Self::default();
            return self.level;
        };
        let next = match self.level {
            _ if score >= thresholds.high_enter => Level::High,
            Level::High if score >= thresholds.high_exit => Level::High,
            _ if score <= thresholds.low_enter => Level::Low,
            Level::Low if score <= thresholds.low_exit => Level::Low,
            _ => Level::Middle,
        };
        let may_change = self.since.is_none_or(|since| now.saturating_duration_since(since) >= dwell);
        if next != self.level && may_change {
            *self = Self { level: next, since: Some(now) };
        }
        self.level
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const THRESHOLDS: Thresholds =
        Thresholds { high_enter: 0.8, high_exit: 0.6, low_enter: 0.2, low_exit: 0.4 };

    #[test]
    fn a_level_is_left_further_in_than_it_was_entered() {
        let (mut latch, start) = (Latch::default(), Instant::now());
        let steps = [
            (0.5, Level::Middle),
            (0.79, Level::Middle),
            (0.8, Level::High),
            (0.61, Level::High),
            (0.59, Level::Middle),
            (0.7, Level::Middle),
            (0.2, Level::Low),
            (0.39, Level::Low),
            (0.41, Level::Middle),
            (0.3, Level::Middle),
            (0.9, Level::High),
            (0.1, Level::Low),
            (0.9, Level::High),
        ];
        for (at, (score, level)) in steps.into_iter().enumerate() {
            let now = start + Duration::from_secs(at as u64);
            assert_eq!(latch.update(Some(score), &THRESHOLDS, Duration::ZERO, now), level, "step {at}");
        }
    }

    #[test]
    fn it_stays_for_its_time_also_where_the_clock_goes_back() {
        let (mut latch, start) = (Latch::default(), Instant::now() + Duration::from_secs(60));
        let dwell = Duration::from_secs(2);
        assert_eq!(latch.update(Some(0.9), &THRESHOLDS, dwell, start), Level::High);
        assert_eq!(
            latch.update(Some(0.1), &THRESHOLDS, dwell, start + Duration::from_millis(1999)),
            Level::High
        );
        assert_eq!(latch.update(Some(0.1), &THRESHOLDS, dwell, start - Duration::from_secs(30)), Level::High);
        assert_eq!(latch.update(Some(0.1), &THRESHOLDS, dwell, start + dwell), Level::Low);
        assert_eq!(latch.update(None, &THRESHOLDS, dwell, start + dwell), Level::Middle);
    }
}
