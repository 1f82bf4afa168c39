//! When a load is near enough for its request to compute: pure.
//!
//! A load for which nobody else waits is released at once. Beside other requests a step that waits for a load makes
//! those wait too, so the load is released when what is left of it is predicted to take no longer than a step: vLLM learns
//! of the release at the end of a step, and the layers of the next one read it one after the other.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// Loads that are remembered.
const LOADS: usize = 8;
/// Steps that are remembered.
const STEPS: usize = 8;

/// How fast loads come.
#[derive(Debug, Default)]
pub struct LoadPace {
    /// Bytes and duration of the last loads.
    loads: VecDeque<(u64, Duration)>,
    /// When everything that was asked for is predicted to be there.
    busy_until: Option<Instant>,
}

/// How fast steps follow each other.
#[derive(Debug, Default)]
pub struct StepClock {
    /// From the beginning of one step that computes to that of the next.
    steps: VecDeque<Duration>,
    /// When the last step began, if it computes.
    step: Option<Instant>,
}

impl StepClock {
    /// A step begins.
    pub fn step_began(&mut self, now: Instant, computes: bool) {
        if let (Some(before), true) = (self.step, computes) {
            push(&mut self.steps, STEPS, now.saturating_duration_since(before));
        }
        self.step = computes.then_some(now);
    }

    /// The shortest of the last steps; None as long as no two that compute followed each other.
    pub fn shortest(&self) -> Option<Duration> {
        self.steps.iter().min().copied()
    }
}

impl LoadPace {
    /// A load of so many bytes is asked for, beside steps of that length. When it may be released; None as long as nothing
    /// is known to predict it from.
    pub fn asked(&mut self, now: Instant, bytes: u64, step: Option<Duration>) -> Option<Instant> {
        let predicted = self.predict(bytes)?;
        // Loads of one worker come one after the other.
        let start = self.busy_until.map_or(now, |busy| busy.max(now));
        let end = start + predicted;
        self.busy_until = Some(end);
        Some(end.checked_sub(step?).unwrap_or(now).max(now))
    }

    /// A load has ended that was alone: `took` from asking to its end.
    pub fn ended(&mut self, bytes: u64, took: Duration) {
        if bytes > 0 && !took.is_zero() {
            push(&mut self.loads, LOADS, (bytes, took));
        }
    }

    /// Nothing is under way any more.
    pub fn is_idle(&mut self) {
        self.busy_until = None;
    }

    /// The fastest rate seen, and on top of it the most that a load took longer.
    fn predict(&self, bytes: u64) -> Option<Duration> {
        let rate =
            self.loads.iter().map(|(bytes, took)| *bytes as f64 / took.as_secs_f64()).reduce(f64::max)?;
        let more = |(bytes, took): &(u64, Duration)| took.as_secs_f64() - *bytes as f64 / rate;
        let late = self.loads.iter().map(more).fold(0.0, f64::max);
        Some(Duration::from_secs_f64(late + bytes as f64 / rate))
    }
}

fn push<T>(of: &mut VecDeque<T>, most: usize, value: T) {
    if of.len() == most {
        of.pop_front();
    }
    of.push_back(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    /// Both together, as a worker has them.
    #[derive(Default)]
    struct Pace {
        loads: LoadPace,
        steps: StepClock,
    }

    impl Pace {
        fn step_began(&mut self, now: Instant, computes: bool) {
            self.steps.step_began(now, computes);
        }

        fn asked(&mut self, now: Instant, bytes: u64) -> Option<Instant> {
            self.loads.asked(now, bytes, self.steps.shortest())
        }

        fn ended(&mut self, bytes: u64, took: Duration) {
            self.loads.ended(bytes, took);
        }

        fn is_idle(&mut self) {
            self.loads.is_idle();
        }
    }

    /// Steps of 10 ms, and loads of 50 GB/s.
    fn known(start: Instant) -> Pace {
        let mut pace = Pace::default();
        (0..4).for_each(|step| pace.step_began(start + ms(10 * step), true));
        pace.ended(GB, ms(20));
        pace
    }

    #[test]
    fn a_load_is_released_a_step_before_its_end() {
        let start = Instant::now();
        let mut pace = known(start);
        assert_eq!(pace.asked(start, 2 * GB), Some(start + ms(30)), "40 ms of which the last 10 overlap");
        // The second comes after the first.
        assert_eq!(pace.asked(start + ms(5), GB), Some(start + ms(50)));
        pace.is_idle();
        assert_eq!(pace.asked(start + ms(100), GB), Some(start + ms(110)));
    }

    #[test]
    fn a_load_that_takes_less_than_a_step_is_released_at_once() {
        let start = Instant::now();
        assert_eq!(known(start).asked(start, GB / 4), Some(start));
    }

    #[test]
    fn without_loads_or_steps_to_learn_from_nothing_is_predicted() {
        let now = Instant::now();
        assert_eq!(Pace::default().asked(now, GB), None);
        let mut no_steps = Pace::default();
        no_steps.ended(GB, ms(20));
        assert_eq!(no_steps.asked(now, GB), None);
        let mut no_loads = Pace::default();
        (0..4).for_each(|step| no_loads.step_began(now + ms(10 * step), true));
        assert_eq!(no_loads.asked(now, GB), None);
    }

    #[test]
    fn the_latest_and_the_shortest_step_are_expected() {
        let start = Instant::now();
        let mut pace = known(start);
        // A small load shows what every load takes beside its bytes; a long prefill is no step to count on.
        pace.ended(1, ms(4));
        pace.step_began(start + ms(330), true);
        assert_eq!(pace.asked(start + ms(330), GB), Some(start + ms(330 + 24 - 10)));
    }

    #[test]
    fn time_between_steps_that_compute_nothing_is_no_step() {
        let start = Instant::now();
        let mut pace = Pace::default();
        pace.ended(GB, ms(20));
        for step in 0..6 {
            pace.step_began(start + ms(step), step % 2 == 0);
        }
        assert_eq!(pace.asked(start, GB), None);
    }

    #[test]
    fn what_is_long_ago_is_forgotten() {
        let start = Instant::now();
        let mut pace = known(start);
        (0..LOADS).for_each(|_| pace.ended(GB, ms(40)));
        (0..=STEPS as u64).for_each(|step| pace.step_began(start + ms(1000 + 15 * step), true));
        assert_eq!(pace.asked(start + ms(2000), GB), Some(start + ms(2025)));
    }
}
