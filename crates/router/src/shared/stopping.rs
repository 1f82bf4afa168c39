//! Shutdown of the router: first `/health` answers 503, then the router accepts no more connections, then it waits for
//! requests.

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

    /// Requests that the router cut because its time to drain had passed.
    pub fn cut(&self) -> usize {
        self.cut.load(Ordering::Relaxed)
    }
}
