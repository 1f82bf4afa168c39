//! The bytes of a tier's file: encode and decode, nothing else. All numbers are little-endian.
//!
//! Every structure begins with 8 bytes that name its kind, the crc32c of the rest, and its length, so that whatever is
//! found on a device is either exactly what was written or an error.

use std::fmt;

mod drops;
mod fields;
mod record;
mod segment;
mod superblock;

use thiserror::Error;

pub use drops::Drops;
pub use record::{RecordHeader, ShardSum};
pub(crate) use record::{header_pages, record_pages, shard_pages};
pub(crate) use segment::table_bytes;
pub use segment::{SegmentFoot, SegmentHead, Table, TableRecord};
pub(crate) use superblock::FORMAT_VERSION;
pub use superblock::Superblock;

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

/// Why bytes are not what they should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// Another kind of structure, or none.
    #[error("it does not begin with the right name")]
    OtherKind,
    /// The length it claims is impossible.
    #[error("it has an impossible length")]
    Length,
    /// Its checksum is wrong.
    #[error("its checksum is wrong")]
    Checksum,
    /// Fields contradict each other.
    #[error("its fields contradict each other")]
    Fields,
}
