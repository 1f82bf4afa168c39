//! The SSD tier: keeps sealed blocks in log-structured files and finds them again after a restart.
//!
//! The daemon opens one [`SsdTier`] over one file per device. Each file is cut into segments. A record is a header page
//! and the shards of one block, and is appended to the file's open segment. `layout` draws every byte.
//!
//! ```text
//!  write -> queue --+                    +-> append to the log; record and head written -> index -> done(Stored)
//!                   +-> device's thread -+
//!  read  -> queue --+                    +-> pages into the pool -> header and crc32c right -> done(Found)
//! ```
//!
//! Four invariants hold, whatever happens to the process or the machine:
//!
//! - **A hit is right or it is a miss.** A read ends as [`ReadEnd::Found`] only if the record's header on the media
//!   names this key and every shard has its crc32c.
//! - **No late write.** The tier calls `done` exactly once, after the kernel has finished with the memory of the call. If
//!   a device's thread panics, the tier drops `done` uncalled instead, also only then.
//! - **A crash leaves a usable tier.** A structure counts only with a valid checksum and the right generation. A block
//!   that was reported as [`WriteEnd::Stored`] before the process died is found again.
//! - **Reads and writes never block the caller.** They return at once, and are refused when the queues are full. Only
//!   opening, closing, and writing down a dropped namespace wait for a device.
//!
//! `layout` (bytes), `index`, `holdings`, `log`, `rate`, `turns` and `health` are pure. The rest does I/O: one thread per
//! device (`device`) drives an [`Io`], which is an io_uring or a few threads.
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
mod latency;
mod layout;
mod log;
mod measure;
mod memory;
mod options;
mod pages;
mod path_chooser;
mod rate;
mod read;
mod recover;
mod request;
mod shared;
mod staging;
mod stats;
mod store_tier;
mod threads;
mod tier;
mod turns;
mod uring;
mod way;
mod way_file;

pub use error::OpenError;
pub use io::{Completion, Io, Op, OpKind, Piece, Waker, WrapIo};
pub use latency::{LATENCY_BOUNDS_US, Latencies};
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
pub use way::{PathRates, PathStatus, SsdPath};
