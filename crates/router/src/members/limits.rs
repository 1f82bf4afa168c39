//! Timeouts and bounds of membership.

use std::time::Duration;

/// A node known by beats only is suspect after this time without one: three beats, which come every 3 s.
pub const BEAT_MISSED: Duration = Duration::from_secs(9);
/// A node is forgotten after this time without a beat, or without a DNS record and an answer.
pub const FORGET_AFTER: Duration = Duration::from_secs(30);
/// Most nodes that neither flags nor the file name.
pub const NODES_MAX: usize = 1024;
