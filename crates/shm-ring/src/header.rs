//! The header of a ring: the positions, by which the two sides agree on the owner of each byte, and the flags.

use crate::sync::{AtomicU32, AtomicU64};

/// Bytes of the header: a page, so that the ring's bytes begin one.
pub const HEADER_BYTES: usize = 4096;

/// The words that both sides read and write. All are zero in a new ring.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Header {
    pub(crate) writer: WriterLine,
    pub(crate) reader: ReaderLine,
}

/// The words that the writer writes with each message. Aligned to 128 bytes, because processors fetch lines of 64 in
/// pairs.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct WriterLine {
    pub(crate) written: AtomicU64,
    pub(crate) reader_sleeps: AtomicU32,
}

/// The words that the reader writes with each read.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct ReaderLine {
    pub(crate) read: AtomicU64,
    pub(crate) writer_waits: AtomicU32,
}

const _: () = assert!(size_of::<Header>() <= HEADER_BYTES);

impl Header {
    /// The header of an empty ring after `position` bytes were written and read.
    #[cfg(test)]
    pub(crate) fn new(position: u64) -> Header {
        let writer = WriterLine { written: AtomicU64::new(position), reader_sleeps: AtomicU32::new(0) };
        let reader = ReaderLine { read: AtomicU64::new(position), writer_waits: AtomicU32::new(0) };
        Header { writer, reader }
    }
}
