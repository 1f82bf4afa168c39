//! Predicts when a load is near enough to its end for its request to compute. Pure.
//!
//! If no other request runs, a load is released at once. Otherwise a step that waits for the load makes the other requests wait
//! too. So the load is released so early that it has ended when the step begins in which its request computes:
//!
//! ```text
//!                   released      seen              planned
//!   async           |             |                 |
//!   scheduling      v             v                 v
//!   GPU     | step 0 | step 1 | step 2 | step 3 | its request's step
//!   load    ------------------------------------|
//! ```
//!
//! vLLM sees a release when it gets the results of a step that began after it. With async scheduling it has planned the next step
//! by then. [`ReleaseAhead`] says how many steps lie between.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// Number of last loads that a prediction uses.
const LOADS: usize = 8;
/// Number of last steps that a prediction uses.
const STEPS: usize = 8;

/// How long before a load's predicted end its request is released.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReleaseAhead {
    /// Steps that at least lie between a release and the step of its request.
    pub steps: f64,
    /// How long that step may wait for the load, and with it the other requests.
    pub stall: Duration,
}

impl Default for ReleaseAhead {
    /// For an engine that plans a step once it has the results of the one before. It sees the releases from before that step
    /// was computed, so at least half a step passes.
    fn default() -> Self {
        ReleaseAhead { steps: 0.5, stall: Duration::ZERO }
    }
}

impl ReleaseAhead {
    /// Beside steps of this length.
    pub fn of(&self, step: Duration) -> Duration {
        step.mul_f64(self.steps) + self.stall
    }
}

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
    /// Queues a load of so many bytes. Returns the time that is `ahead` of its end; None if no load was measured to predict it
    /// from, or without `ahead`.
    pub fn schedule(&mut self, now: Instant, bytes: u64, ahead: Option<Duration>) -> Option<Instant> {
        let predicted = self.predict(bytes)?;
        // The daemon carries out one load of a worker after the other.
        let start = self.busy_until.map_or(now, |busy| busy.max(now));
        let end = start + predicted;
        self.busy_until = Some(end);
        Some(end.checked_sub(ahead?).unwrap_or(now).max(now))
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
    fn steps_and_a_stall_add_up() {
        let ahead = ReleaseAhead { steps: 2.5, stall: ms(3) };
        assert_eq!(ahead.of(ms(10)), ms(28));
        assert_eq!(ReleaseAhead::default().of(ms(10)), ms(5));
    }

    /// An engine whose steps take 10 ms, and whose worker reports `report` after a step began. Returns for loads of 60 ms that begin
    /// at each 0.1 ms of a step: the longest wait of a step for its load, and the mean time between a load's end and its step.
    fn played(ahead: Duration, is_async: bool, report: u64) -> (Duration, Duration) {
        let origin = Instant::now() + ms(1000);
        let step = ms(10);
        let tenth = Duration::from_micros(100);
        let (mut longest, mut idle) = (Duration::ZERO, Duration::ZERO);
        for start in (0..100).map(|tenths| origin + tenth * tenths) {
            let mut pace = LoadPace::default();
            pace.record(3 * GB, ms(60));
            let released = pace.schedule(start, 3 * GB, Some(ahead)).unwrap();
            let end = start + ms(60);
            // With async scheduling the worker reports with step k while the GPU computes step k - 1, and step k + 1 is planned.
            let (first_seen, later) = if is_async { (1, 2) } else { (0, 1) };
            let reported = |k: u32| origin + step * k + ms(report) - step * first_seen;
            let seen = (0u32..20).find(|&k| reported(k) >= released).unwrap();
            let begins = origin + step * (seen + later);
            longest = longest.max(end.saturating_duration_since(begins));
            idle += begins.saturating_duration_since(end);
        }
        (longest, idle / 100)
    }

    #[test]
    fn no_step_waits_for_a_load_and_its_request_does_not_wait_long() {
        for report in [1, 3, 5] {
            let ahead = |steps| ReleaseAhead { steps, stall: Duration::ZERO }.of(ms(10));
            let (stall, idle) = played(ahead(2.5), true, report);
            assert_eq!(stall, Duration::ZERO);
            assert!(idle <= ms(10), "{idle:?}");
            let (_, before) = played(ahead(1.0), true, report);
            assert!(before >= idle + ms(14), "control: a step ahead was too late, {before:?}");
            assert!(played(ahead(4.0), true, report).0 >= ms(5), "control: this is too early");
            let (stall, idle) = played(ahead(0.5), false, report);
            assert_eq!(stall, Duration::ZERO);
            assert!(idle <= ms(10), "{idle:?}");
        }
    }

    #[test]
    fn a_step_waits_no_longer_than_it_may() {
        for report in [1, 3, 5] {
            let may = ReleaseAhead { steps: 2.5, stall: ms(4) };
            let (stall, idle) = played(may.of(ms(10)), true, report);
            assert!(stall <= ms(4), "{stall:?}");
            assert!(idle < played(ms(25), true, report).1);
        }
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
