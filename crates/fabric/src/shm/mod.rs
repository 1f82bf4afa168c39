//! Bytes between two processes of one host through memory that both map: a [`Segment`] holds a ring of bytes for each
//! way.

mod ring;
mod segment;
mod sync;
#[cfg(all(loom, test))]
mod under_loom;

pub(crate) use ring::{Reader, RingError, Writer};
pub(crate) use segment::{RING_BYTES, Segment, Side};
