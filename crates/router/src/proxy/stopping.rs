//! How the router stops: it says so first, then takes no connections, then waits for what is under way.

use std::sync::atomic::Ordering;

use super::shared::Shared;

impl Shared {
    /// From now on `/health` says that the router stops, and answers ask clients to close their connections. Requests are still
    /// served.
    pub fn begin_stopping(&self) {
        self.is_stopping.store(true, Ordering::Relaxed);
    }

    /// Whether the router stops.
    pub(crate) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Relaxed)
    }

    /// Requests that were cut because the time to drain was over.
    pub fn cut(&self) -> usize {
        self.cut.load(Ordering::Relaxed)
    }
}
