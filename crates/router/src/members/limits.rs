//! How long nodes are waited for, and how many there may be.

use std::time::Duration;

/// Three beats, which come every 3 s.
pub const BEAT_MISSED: Duration = Duration::from_secs(9);
/// After so long without a beat, or without a record and an answer, a node is forgotten.
pub const FORGOTTEN: Duration = Duration::from_secs(30);
/// Most nodes that are not named by flags or the file.
pub const NODES_MAX: usize = 1024;
