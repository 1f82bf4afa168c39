//! Time limits that hold on an idle machine, and stretch with the load of a busy one.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// Steps of the calibration loop, and what they take on an idle machine. A slower machine gets proportionally more time.
const STEPS: u64 = 12_000_000;
const IDLE: Duration = Duration::from_millis(25);
/// A machine that is busier than this fails its tests.
const LOAD_MAX: f64 = 10.0;

/// How much longer than on an idle machine the calibration loop takes now.
fn load() -> f64 {
    let begun = Instant::now();
    let mut word = 1u64;
    let mut step = 0;
    while step < STEPS {
        word = black_box(word ^ word << 13);
        step += 1;
    }
    (begun.elapsed().as_secs_f64() / IDLE.as_secs_f64()).clamp(1.0, LOAD_MAX)
}

/// A time limit that begins now.
#[derive(Debug)]
pub(crate) struct Deadline {
    begun: Instant,
    limit: Duration,
    /// What the calibration loop said at the beginning.
    load: f64,
}

impl Deadline {
    pub(crate) fn after(limit: Duration) -> Deadline {
        let load = load();
        Deadline { begun: Instant::now(), limit, load }
    }

    /// Whether the time is over. The load counts as it was at the beginning, or as it is now if that is more.
    pub(crate) fn has_passed(&self) -> bool {
        let elapsed = self.begun.elapsed();
        elapsed > self.limit && elapsed > self.limit.mul_f64(self.load.max(load()))
    }

    /// Fails the test if the time is over.
    pub(crate) fn assert_kept(&self) {
        let elapsed = self.begun.elapsed();
        assert!(
            !self.has_passed(),
            "after {elapsed:?} instead of {:?}, at a load of {:.1}",
            self.limit,
            self.load
        );
    }
}
