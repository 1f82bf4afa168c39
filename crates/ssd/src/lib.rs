//! The SSD tier: sealed blocks, kept in log-structured files, and found again after a restart.
//!
//! [`SsdTier`] is what a daemon uses. A file is cut into segments; records, a header page and the shards of one block each,
//! are appended to one open segment. docs/ssd.md draws every byte. What holds, whatever happens to the process or the
//! machine:
//!
//! - **A hit is right or it is a miss.** A read answers [`ReadEnd::Found`] only after the record's header on the media
//!   named this key and every shard had its crc32c.
//! - **No late write.** Who gives memory away gets exactly one call of `done`, and only when the kernel is done with it.
//! - **A crash leaves a usable tier.** Nothing is trusted that has no valid checksum and the right generation; what was
//!   stored (`done` was told so) before the process died is found again.
//! - **Nobody is kept waiting.** Every call returns at once; what does not fit into the queues is refused.
//!
//! Pure parts: `layout` (bytes), `index`, `holdings`, `log`, `rate`, `turns`, `health`. The rest does I/O: a thread for each
//! device (`device`), which drives an [`Io`], a ring of io_uring or a few threads.
#![deny(unsafe_code)]

pub mod bench;
mod device;
mod drops;
mod error;
mod file;
#[cfg(any(feature = "fuzzing", test))]
pub mod fuzzing;
mod headers;
mod health;
mod holdings;
mod index;
mod io;
mod job;
mod layout;
mod log;
mod memory;
mod options;
mod pages;
mod rate;
mod read;
mod recover;
mod request;
mod shared;
mod stats;
mod store_tier;
mod threads;
mod tier;
mod turns;
mod uring;

pub use error::OpenError;
pub use io::{Ended, Io, Op, OpKind, Piece, Waker, WrapIo};
pub use layout::{
    Drops, LayoutError, PAGE_BYTES, RecordHeader, SegmentFoot, SegmentHead, SegmentNumber, ShardSum,
    Superblock, Table, TableRecord,
};
pub use memory::Memory;
pub use options::{DeviceOptions, Options};
pub use request::{Miss, NotNoted, NoteError, Read, ReadEnd, Record, Refused, SpaceUse, WriteEnd};
pub use stats::{DeviceStatus, Stats};
pub use tier::SsdTier;
pub use uring::try_io_uring;
