//! [`Clock`]: the time of a hub, which the simulation can set.

use std::time::{Duration, Instant};

/// Counts from the time at which the hub was made.
#[derive(Debug, Clone)]
pub(crate) enum Clock {
    /// Read once in each hold of the hub's lock. Reading it for each step took a third of a small transfer's time.
    Since { begun: Instant, read: Duration },
    /// Microseconds, which the simulation sets.
    #[cfg(test)]
    Simulated(std::sync::Arc<std::sync::atomic::AtomicU64>),
}

impl Clock {
    /// Starts a clock at 0.
    pub(crate) fn begin() -> Clock {
        Clock::Since { begun: Instant::now(), read: Duration::ZERO }
    }

    /// The time at which it was last read, so never later than the real one.
    pub(crate) fn now(&self) -> Duration {
        match self {
            Clock::Since { read, .. } => *read,
            #[cfg(test)]
            Clock::Simulated(micros) => {
                Duration::from_micros(micros.load(std::sync::atomic::Ordering::Relaxed))
            }
        }
    }

    /// Reads the real time, and returns it.
    pub(crate) fn read(&mut self) -> Duration {
        match self {
            Clock::Since { begun, read } => *read = begun.elapsed(),
            #[cfg(test)]
            Clock::Simulated(_) => {}
        }
        self.now()
    }
}
