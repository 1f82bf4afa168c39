//! Shared memory between two processes of one host: a [`Segment`] that both map holds a ring of bytes for each direction
//! ([`kvlane_shm_ring`]). Control connections within a host use it instead of the socket.
//!
//! A connection has no rings without memfd, if seccomp forbids pidfd_getfd, or if its two ends have different addresses.

mod segment;

pub(crate) use segment::{RING_BYTES, RingSide, Segment};
