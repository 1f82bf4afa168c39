//! Measurements of the engine's lock, for benchmarks.

use std::time::Duration;

/// How long one hold of an engine's lock took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HoldTime {
    /// Processor time of the holder: the least that other threads waited.
    pub cpu: Duration,
    /// Wall time, which includes the time in which the holder had no processor.
    pub wall: Duration,
}
