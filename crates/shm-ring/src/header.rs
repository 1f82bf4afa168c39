//! The header of a ring, by which its two sides agree on what is whose.

use crate::sync::{AtomicU32, AtomicU64};

/// Bytes before those of the ring: a page, so that they begin one.
pub const HEADER_BYTES: usize = 4096;

/// What the two sides tell each other. Zeros are a new ring's.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Header {
    pub(crate) writer: WriterLine,
    pub(crate) reader: ReaderLine,
}

/// Processors fetch lines of 64 bytes in pairs.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct WriterLine {
    pub(crate) written: AtomicU64,
    pub(crate) reader_sleeps: AtomicU32,
}

#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct ReaderLine {
    pub(crate) read: AtomicU64,
    pub(crate) writer_waits: AtomicU32,
}

const _: () = assert!(size_of::<Header>() <= HEADER_BYTES);

impl Header {
    /// The header of an empty ring: `position` bytes were written and read.
    #[cfg(test)]
    pub(crate) fn new(position: u64) -> Header {
        let writer = WriterLine { written: AtomicU64::new(position), reader_sleeps: AtomicU32::new(0) };
        let reader = ReaderLine { read: AtomicU64::new(position), writer_waits: AtomicU32::new(0) };
        Header { writer, reader }
    }
}
