//! Predicts when a load is near enough to its end for its request to compute. Pure.
//!
//! If no other request runs, a load is released at once. Otherwise a step that waits for the load makes the other requests wait
//! too. So the load is released when the rest of it is predicted to take no longer than a step: vLLM learns of the release at
//! the end of a step, and the next step reads the load's layers one after the other.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// Number of last loads that a prediction uses.
const LOADS: usize = 8;
/// Number of last steps that a prediction uses.
const STEPS: usize = 8;

/// Predicts the ends of loads from the speed of the last ones.
#[derive(Debug, Default)]
pub struct LoadPace {
    /// Bytes and duration of the last loads.
    loads: VecDeque<(u64, Duration)>,
    /// The predicted end of all loads requested so far.
    busy_until: Option<Instant>,
}

/// Measures the engine's steps.
#[derive(Debug, Default)]
pub struct StepClock {
    /// From the start of one step that computes to the start of the next one.
    steps: VecDeque<Duration>,
    /// When the last step began; None if it computes nothing.
    step: Option<Instant>,
}

impl StepClock {
    /// A step begins; `computes` is false for a step without a forward pass.
    pub fn step_began(&mut self, now: Instant, computes: bool) {
        if let (Some(before), true) = (self.step, computes) {
            push(&mut self.steps, STEPS, now.saturating_duration_since(before));
        }
        self.step = computes.then_some(now);
    }

    /// The shortest of the last steps; None until two steps in a row have computed.
    pub fn shortest(&self) -> Option<Duration> {
        self.steps.iter().min().copied()
    }
}

impl LoadPace {
    /// Queues a load of so many bytes, beside steps of length `step`. Returns when it may be released; None if no load or no
    /// step was measured to predict it from.
    pub fn schedule(&mut self, now: Instant, bytes: u64, step: Option<Duration>) -> Option<Instant> {
        let predicted = self.predict(bytes)?;
        // The daemon carries out one load of a worker after the other.
        let start = self.busy_until.map_or(now, |busy| busy.max(now));
        let end = start + predicted;
        self.busy_until = Some(end);
        Some(end.checked_sub(step?).unwrap_or(now).max(now))
    }

    /// Records a load that ran alone; it took `took` from its request to its end.
    pub fn record(&mut self, bytes: u64, took: Duration) {
        if bytes > 0 && !took.is_zero() {
            push(&mut self.loads, LOADS, (bytes, took));
        }
    }

    /// Forgets predicted ends, because no load is in flight.
    pub fn reset(&mut self) {
        self.busy_until = None;
    }

    /// The time at the fastest rate of the last loads, plus the longest delay that any of them had beyond that rate.
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

        fn schedule(&mut self, now: Instant, bytes: u64) -> Option<Instant> {
            self.loads.schedule(now, bytes, self.steps.shortest())
        }

        fn record(&mut self, bytes: u64, took: Duration) {
            self.loads.record(bytes, took);
        }

        fn reset(&mut self) {
            self.loads.reset();
        }
    }

    /// Steps of 10 ms, and loads of 50 GB/s.
    fn known(start: Instant) -> Pace {
        let mut pace = Pace::default();
        (0..4).for_each(|step| pace.step_began(start + ms(10 * step), true));
        pace.record(GB, ms(20));
        pace
    }

    #[test]
    fn a_load_is_released_a_step_before_its_end() {
        let start = Instant::now();
        let mut pace = known(start);
        assert_eq!(pace.schedule(start, 2 * GB), Some(start + ms(30)), "40 ms of which the last 10 overlap");
        // The second comes after the first.
        assert_eq!(pace.schedule(start + ms(5), GB), Some(start + ms(50)));
        pace.reset();
        assert_eq!(pace.schedule(start + ms(100), GB), Some(start + ms(110)));
    }

    #[test]
    fn a_load_that_takes_less_than_a_step_is_released_at_once() {
        let start = Instant::now();
        assert_eq!(known(start).schedule(start, GB / 4), Some(start));
    }

    #[test]
    fn without_loads_or_steps_to_learn_from_nothing_is_predicted() {
        let now = Instant::now();
        assert_eq!(Pace::default().schedule(now, GB), None);
        let mut no_steps = Pace::default();
        no_steps.record(GB, ms(20));
        assert_eq!(no_steps.schedule(now, GB), None);
        let mut no_loads = Pace::default();
        (0..4).for_each(|step| no_loads.step_began(now + ms(10 * step), true));
        assert_eq!(no_loads.schedule(now, GB), None);
    }

    #[test]
    fn the_latest_and_the_shortest_step_are_expected() {
        let start = Instant::now();
        let mut pace = known(start);
        // A small load shows the time that every load takes beside its bytes. A long prefill does not count as a usual step.
        pace.record(1, ms(4));
        pace.step_began(start + ms(330), true);
        assert_eq!(pace.schedule(start + ms(330), GB), Some(start + ms(330 + 24 - 10)));
    }

    #[test]
    fn time_between_steps_that_compute_nothing_is_no_step() {
        let start = Instant::now();
        let mut pace = Pace::default();
        pace.record(GB, ms(20));
        for step in 0..6 {
            pace.step_began(start + ms(step), step % 2 == 0);
        }
        assert_eq!(pace.schedule(start, GB), None);
    }

    #[test]
    fn what_is_long_ago_is_forgotten() {
        let start = Instant::now();
        let mut pace = known(start);
        (0..LOADS).for_each(|_| pace.record(GB, ms(40)));
        (0..=STEPS as u64).for_each(|step| pace.step_began(start + ms(1000 + 15 * step), true));
        assert_eq!(pace.schedule(start + ms(2000), GB), Some(start + ms(2025)));
    }
}
