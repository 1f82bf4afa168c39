//! Encodes and decodes the structures of a tier's file, and does nothing else. All numbers are little-endian.
//!
//! ```text
//!  byte 0       4 KiB      8 KiB   36 KiB     64 KiB
//!  +------------+----------+-------+----------+-----------+-----------+- - - -+-----------+
//!  | superblock | its copy | drops | its copy | segment 0 | segment 1 |       | segment n |
//!  +------------+----------+-------+----------+-----------+-----------+- - - -+-----------+
//!
//!  a segment    page 0  page 1                                                        last page
//!  +------+--------+--------------+--------+--------- - - -+-------+------ - - - -----+------+
//!  | head | record | record       | record |               | table | unused           | foot |
//!  +------+--------+--------------+--------+--------- - - -+-------+------ - - - -----+------+
//!            |                                                 ^                         |
//!            |                                                 '------- table_page ------'
//!            v  a record
//!         +--------------+------------------+-----------------+- - -
//!         | header       | shard 0          | shard 1         |       each begins a page of 4 KiB
//!         | 1 page for   | its bytes, then  |                 |
//!         | 497 shards   | the pool's bytes |                 |
//!         |              | behind them      |                 |
//!         +--------------+------------------+-----------------+- - -
//! ```
//! Every structure begins with a kind (8 bytes: `kvlnSSD\0`, `kvlnHEAD`, `kvlnBLCK`, `kvlnTABL`, `kvlnFOOT` or `kvlnDROP`), the
//! crc32c of all bytes from 12 to its end (4), and its length in bytes with these 16 (4). So bytes from a device decode to
//! exactly the structure that was written, or to an error. Then follow, without gaps:
//!
//! | structure | fields (bytes) |
//! |---|---|
//! | superblock | format version (4), device id (16), bytes of a segment (8), segments (4) |
//! | drops | device id (16), sequence number (8), generation up to which nothing counts (8), number of namespaces (4); for each: namespace (16), generation up to which its records do not count (8) |
//! | head | device id (16), segment (4), generation (8) |
//! | record header | device id (16), generation (8), segment (4), page (4), namespace (16), cut digest (16), block hash (16), zeros (20), number of shards (4); for each shard: length (4), crc32c (4) |
//! | table | device id (16), generation (8), number of spaces (4), number of records (4); for each space: namespace (16), cut digest (16); for each record: block hash (16), space (4), page (4), pages (4) |
//! | foot | device id (16), segment (4), generation (8), table's page (4), table's length in bytes (4), page from which to scan (4) |
//!
//! - A space without a record means that the segment has records of its namespace that do not count. A space of 32 zero bytes
//!   is a mark: the table names every namespace of which the segment has records. Earlier builds wrote no mark, so a segment
//!   with such a table may hold anything until it is reused, and no drop that would reach it is taken out.
//! - The device id is random, drawn when the file is made. The generation counts the segments that were opened in the file.
//!   Generation and page together number the records in the order of writing.
//! - A structure counts only if device id, generation, segment and page are those of the location where it was found. So neither
//!   remains of an earlier use of the segment nor content of a block is taken for a record.
//! - A record's header stands directly before its shards, so one run reads both, and the header proves whose bytes they are.
//! - Both copies of the drops are zeros until something is dropped. If they are not, and neither can be read, nothing in the file
//!   counts.
//! - A drop's generation is 2^64 - 1 while the process that dropped goes on writing. The next open of the file sets it to the
//!   highest generation in the file. So a dropped namespace is cold once after the next restart.

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
