//! Encodes and decodes the structures of a tier's file, and does nothing else. docs/ssd.md draws them. All numbers are
//! little-endian.
//!
//! Every structure begins with 8 bytes that name its kind, the crc32c of the rest, and its length. So bytes from a
//! device decode to exactly the structure that was written, or to an error.

mod drops;
mod error;
mod fields;
mod record;
mod segment;
mod superblock;
mod units;

pub use drops::Drops;
pub use error::LayoutError;
pub use record::{RecordHeader, ShardSum};
pub(crate) use record::{header_pages, record_pages, shard_pages};
pub(crate) use segment::table_bytes;
pub use segment::{SegmentFoot, SegmentHead, Table, TableRecord};
pub(crate) use superblock::FORMAT_VERSION;
pub use superblock::Superblock;
pub use units::{PAGE_BYTES, SegmentNumber};
