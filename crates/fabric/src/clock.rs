//! The time of a hub.

use std::time::{Duration, Instant};

/// How long ago a hub was made; in simulations, what they say.
#[derive(Debug, Clone)]
pub(crate) enum Clock {
    /// Read once in each hold of the hub's lock: to look at the time for each small thing took a third of a small transfer.
    Since { begun: Instant, read: Duration },
    #[cfg(test)]
    Simulated(std::sync::Arc<std::sync::atomic::AtomicU64>),
}

impl Clock {
    /// It begins now.
    pub(crate) fn begin() -> Clock {
        Clock::Since { begun: Instant::now(), read: Duration::ZERO }
    }

    /// When it was read the last time: no later than now.
    pub(crate) fn now(&self) -> Duration {
        match self {
            Clock::Since { read, .. } => *read,
            #[cfg(test)]
            Clock::Simulated(micros) => {
                Duration::from_micros(micros.load(std::sync::atomic::Ordering::Relaxed))
            }
        }
    }

    /// Reads it.
    pub(crate) fn read(&mut self) -> Duration {
        match self {
            Clock::Since { begun, read } => *read = begun.elapsed(),
            #[cfg(test)]
            Clock::Simulated(_) => {}
        }
        self.now()
    }
}
