//! Shutdown of the router: `/health` answers 503 first, then the router accepts no connections, then it waits for requests.

use std::sync::atomic::Ordering;

use super::state::Shared;

impl Shared {
    /// Makes `/health` answer 503, and answers ask clients to close their connections. The router still serves requests.
    pub fn begin_stopping(&self) {
        self.is_stopping.store(true, Ordering::Relaxed);
    }

    /// Whether the shutdown has begun.
    pub(crate) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Relaxed)
    }

    /// Requests that were cut because the time to drain was over.
    pub fn cut(&self) -> usize {
        self.cut.load(Ordering::Relaxed)
    }
}
