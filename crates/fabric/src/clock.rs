//! The time of a hub.

use std::time::{Duration, Instant};

/// How long ago a hub was made; in simulations, what they say.
#[derive(Debug, Clone)]
pub(crate) enum Clock {
    Since(Instant),
    #[cfg(test)]
    Simulated(std::sync::Arc<std::sync::atomic::AtomicU64>),
}

impl Clock {
    /// It begins now.
    pub(crate) fn begin() -> Clock {
        Clock::Since(Instant::now())
    }

    pub(crate) fn now(&self) -> Duration {
        match self {
            Clock::Since(begun) => begun.elapsed(),
            #[cfg(test)]
            Clock::Simulated(micros) => {
                Duration::from_micros(micros.load(std::sync::atomic::Ordering::Relaxed))
            }
        }
    }
}
