//! Bytes between two processes of one host through memory that both map: a [`Segment`] holds a ring of bytes for each
//! way ([`kvlane_shm_ring`]).

mod segment;

pub(crate) use segment::{RING_BYTES, Segment, Side};
