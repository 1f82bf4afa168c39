//! What all structures of a file count in.

use std::fmt;

/// The unit of all addresses in a file.
pub const PAGE_BYTES: u64 = 4096;

/// Which of a file's segments; below their number, which the superblock says.
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

/// No file has so many generations, nor as many changes of its drops: the next one can always be counted. A higher number
/// was not written by us.
pub(crate) const GENERATIONS: u64 = 1 << 63;

/// Random bytes that tell files apart.
pub(crate) type DeviceId = [u8; 16];
