//! Counts since the start of the router, without a lock.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::beats_refused::BeatsRefused;

/// What has happened since the start.
#[derive(Debug, Default)]
pub struct Counters {
    /// Requests that no node could serve.
    pub refused: AtomicU64,
    /// Requests that were refused in an overload.
    pub shed: AtomicU64,
    /// Pairs whose prefill node named no blocks: the decode node computes the prompt.
    pub not_handed_over: AtomicU64,
    /// Legs whose client left before the last byte.
    pub left: AtomicU64,
    /// Requests that went to a node of another role, since none of the right one was left.
    pub other_role: AtomicU64,
    /// Beats of nodes that counted.
    pub beats: AtomicU64,
    /// Beats, pings and connections for them that did not count.
    pub beats_refused: BeatsRefused,
    /// Look-ups of names that failed.
    pub names_failed: AtomicU64,
    /// Whether operators can reach the router over its socket: 1, or 0.
    pub control: AtomicU64,
    /// Bytes of bodies that are held, and of the ranges and hashes of their contents.
    pub body_bytes: AtomicU64,
    /// Clients' connections that are open.
    pub connections: AtomicU64,
}

impl Counters {
    /// One more. Answers whether it is the first one.
    pub(crate) fn count(counter: &AtomicU64) -> bool {
        counter.fetch_add(1, Ordering::Relaxed) == 0
    }
}
