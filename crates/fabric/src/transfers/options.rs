//! How much, how often and for how long: the limits of transfers.

use std::time::Duration;

/// The limits.
#[derive(Debug, Clone)]
pub struct Options {
    /// Most bytes of one post, unless its path's [`crate::PathSpec`] says otherwise.
    pub chunk_bytes: u64,
    /// Most runs of one post.
    pub chunk_runs: usize,
    /// Most posts under way on one path. A path whose rate is not known yet gets one.
    pub credits: u32,
    /// Of so many posts to a peer one is of [`crate::Priority::Bulk`]; at least 2.
    pub bulk_every: u32,
    /// Most transfers that are not over.
    pub live_max: usize,
    /// How many connections in a row may break that carried a transfer, with nothing of it placed in between.
    pub breaks_max: u32,
    /// How long a transfer that was given up waits for what was posted, before its paths are closed.
    pub drain_patience: Duration,
    /// How long a post may take before its path is closed.
    pub post_patience: Duration,
    /// How long a peer may have no path up that serves a route before it counts as lost for that route.
    pub peer_patience: Duration,
    /// The first pause before a broken path is connected again. It doubles until something has been placed over the path,
    /// and is up to a quarter longer, another part for each path.
    pub backoff: Duration,
    /// The longest pause.
    pub backoff_max: Duration,
    /// Most bytes of messages that are not over.
    pub message_bytes: usize,
    /// The first pause before a message is posted again for which the peer had no room. It doubles.
    pub room_pause: Duration,
    /// The longest of these pauses.
    pub room_pause_max: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            chunk_bytes: 1 << 20,
            chunk_runs: 256,
            credits: 16,
            bulk_every: 8,
            live_max: 65_536,
            breaks_max: 8,
            drain_patience: Duration::from_secs(1),
            post_patience: Duration::from_secs(5),
            peer_patience: Duration::from_millis(2500),
            backoff: Duration::from_millis(20),
            backoff_max: Duration::from_secs(2),
            message_bytes: 64 << 20,
            room_pause: Duration::from_millis(1),
            room_pause_max: Duration::from_millis(100),
        }
    }
}
