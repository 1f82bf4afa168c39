//! Counters of a scheduler's link.

/// Counters since the last [`take_stats`](super::SchedulerLink::take_stats).
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SchedulerStats {
    /// Lookups that the engine started, those without a daemon included.
    pub lookups: u64,
    /// Lookups answered with at least one block.
    pub hits: u64,
    /// Lookups answered with nothing.
    pub misses: u64,
    /// Lookups that were misses because no answer came in time.
    pub timeouts: u64,
    /// Lookups that were misses because there is no connection.
    pub unavailable: u64,
    /// Times that the daemon opened the engine.
    pub connects: u64,
    /// Connections that ended without our goodbye, welcomed or not.
    pub losses: u64,
    /// Seconds from lookup to answer, summed over answered lookups.
    pub lookup_seconds: f64,
}
