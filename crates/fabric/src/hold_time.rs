//! What is measured of the engine's lock.

use std::time::Duration;

/// How long one hold of an engine's lock took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HoldTime {
    /// Of the holder's processor: what others wait for at least.
    pub cpu: Duration,
    /// On the wall, also while the holder had no processor.
    pub wall: Duration,
}
