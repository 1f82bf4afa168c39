//! What a scheduler's link counts.

/// Counters since the last [`take_stats`](super::SchedulerLink::take_stats).
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SchedulerStats {
    /// Lookups that the engine asked for, those without a daemon included.
    pub lookups: u64,
    /// Lookups answered with at least one block.
    pub hits: u64,
    /// Lookups answered with nothing.
    pub misses: u64,
    /// Lookups that were misses because no answer came in time.
    pub timeouts: u64,
    /// Lookups that were misses because there is no connection.
    pub unavailable: u64,
    /// Times that the daemon took the engine in.
    pub connects: u64,
    /// Connections that ended, greeted or not, otherwise than by our goodbye.
    pub losses: u64,
    /// Seconds from asking to answer, over answered lookups.
    pub lookup_seconds: f64,
}
