//! Counts since the start of the router, without a lock.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::beats_refused::BeatsRefused;

/// Counts since the start of the router, and a few current values.
#[derive(Debug, Default)]
pub struct Counters {
    /// Requests that no node could serve.
    pub refused: AtomicU64,
    /// Requests that were refused because all nodes were overloaded.
    pub shed: AtomicU64,
    /// Pairs whose prefill node handed nothing over, so that the decode node computed the prompt.
    pub not_handed_over: AtomicU64,
    /// Legs that were dropped before their last byte: the client left, or the other leg of a direct pair failed or ended first.
    pub left: AtomicU64,
    /// Requests that went to a node of another role, because no node of the right role was left.
    pub other_role: AtomicU64,
    /// Beats and pings that the router could parse, from nodes inside `--ping-allow`.
    pub beats: AtomicU64,
    /// Beats, pings and connections for them that the router refused.
    pub beats_refused: BeatsRefused,
    /// DNS lookups that failed.
    pub names_failed: AtomicU64,
    /// Whether operators can reach the router over its socket: 1, or 0.
    pub control: AtomicU64,
    /// Bytes of requests in memory: bodies, ranges and hashes of their contents, and answers that the router has read.
    pub body_bytes: AtomicU64,
    /// Open client connections.
    pub connections: AtomicU64,
}

impl Counters {
    /// Adds one. Returns whether it is the first.
    pub(crate) fn count(counter: &AtomicU64) -> bool {
        counter.fetch_add(1, Ordering::Relaxed) == 0
    }
}
