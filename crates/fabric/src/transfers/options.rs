//! The limits of transfers: sizes, counts and times, with their defaults.

use std::time::Duration;

/// The limits of [`crate::Transfers`].
#[derive(Debug, Clone)]
pub struct Options {
    /// Most bytes of one post, unless its path's [`crate::PathSpec`] says otherwise.
    pub chunk_bytes: u64,
    /// Most runs of one post.
    pub chunk_runs: usize,
    /// Most posts under way on one path. A path whose rate is not known yet gets one.
    pub credits: u32,
    /// One in so many posts to a peer is of [`crate::Priority::Bulk`], if any waits; at least 2.
    pub bulk_every: u32,
    /// Most transfers that are not over.
    pub live_max: usize,
    /// Most connections that may break in a row while they carry a transfer. Each part that is placed begins the count anew.
    pub breaks_max: u32,
    /// How long a transfer that was given up waits for its posts, before its paths are closed.
    pub drain_patience: Duration,
    /// How long a post may take before its path is closed.
    pub post_patience: Duration,
    /// How long no path that serves a route may be up, before the peer counts as lost for that route.
    pub peer_patience: Duration,
    /// The first pause before a broken path is connected again. It doubles until a post has been placed over the path. Each
    /// path adds up to a quarter of its own, so that not all reconnect at once.
    pub backoff: Duration,
    /// The longest of these pauses, before the quarter.
    pub backoff_max: Duration,
    /// Most bytes of messages that are not over.
    pub message_bytes: usize,
    /// The first pause before a message is posted again for which the peer had no room. It doubles.
    pub room_pause: Duration,
    /// The longest pause for want of room.
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
