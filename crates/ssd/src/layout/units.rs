//! Units of a file: pages, segment numbers, generations and device ids.

use std::fmt;

/// Bytes of a page, the unit of every address and length in a file.
pub const PAGE_BYTES: u64 = 4096;

/// Number of a segment in its file, from 0. The superblock has the count.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentNumber(pub u32);

impl SegmentNumber {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for SegmentNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Upper bound of generations and of the drop table's sequence numbers. No file reaches it, so the next number always
/// fits, and a higher one was not written by us.
pub(crate) const GENERATIONS: u64 = 1 << 63;

/// Random bytes that identify a file.
pub(crate) type DeviceId = [u8; 16];
