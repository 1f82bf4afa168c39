//! Requests of the tier's callers, and their outcomes: write, read, drop a namespace.

use std::io;
use std::path::PathBuf;
use std::time::Instant;

use kvlane_block::{BlockKey, PoolExtent, PoolOffset, SealedShard, Space};
use kvlane_policy::Memo;
use thiserror::Error;

/// A block to be written. Its bytes must not change before `done` is called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The key under which lookups find the block.
    pub key: BlockKey,
    /// The block's shards, in the order of the cut.
    pub shards: Vec<SealedShard>,
    /// The policy's memo of the block.
    pub memo: Memo,
}

/// A block to be read. Its extents belong to the tier and the kernel until `done` is called.
pub struct Read {
    /// The key under which the block was written.
    pub key: BlockKey,
    /// The destination of each shard in the pool.
    pub into: Vec<PoolExtent>,
    /// A read that has not begun by then ends as [`Miss::Late`]. One that has begun is counted as late, and goes on to
    /// its end.
    pub deadline: Option<Instant>,
}

/// Outcome of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteEnd {
    /// The block is found from now on, also after a crash of this process.
    Stored,
    /// The block is not stored: the device failed (see its status), its namespace was dropped, or the tier closed.
    Failed,
}

/// Outcome of a read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadEnd {
    /// The extents hold exactly the bytes that were written.
    Found {
        /// crc32c of each shard.
        crcs: Vec<u32>,
    },
    /// The bytes in the extents mean nothing.
    Miss(Miss),
}

/// Why a read that was accepted found no block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Miss {
    /// The bytes on the device are not the ones that were written. The block leaves the index.
    Damaged,
    /// The block was written with shards of other lengths.
    Lengths,
    /// The device reported an error.
    Failed,
    /// The deadline passed before the device was asked.
    Late,
    /// The tier was closed before the device was asked.
    Closed,
}

/// A file whose drop table lacks a dropped namespace.
#[derive(Debug, Error)]
#[error("the SSD file {path} could not note it: {why}")]
pub struct NotNoted {
    /// The file as it was named.
    pub path: PathBuf,
    /// Whether its drop table is full, or the device failed.
    pub why: NoteError,
}

/// Why a namespace could not be written into a file's drop table.
#[derive(Debug, Error)]
pub enum NoteError {
    /// The drop table is full, and the file may have records of every namespace in it. Holds the table's capacity.
    #[error(
        "it has blocks of {0} other namespaces that were dropped, the most it can name; restart the daemon, which erases what it can, or stop it and remove the file"
    )]
    Full(usize),
    /// The device failed.
    #[error(transparent)]
    Io(io::Error),
}

/// A namespace and cut that has stored blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpaceUse {
    /// The namespace, and how its blocks are cut into shards.
    pub space: Space,
    /// Blocks that can be read, on all devices together.
    pub blocks: u64,
    /// Bytes of their records.
    pub bytes: u64,
}

/// Why a call was refused. Its `done` is never called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Refused {
    /// The block is stored already, or being stored.
    #[error("the block is stored already, or being stored")]
    Present,
    /// The block is not stored.
    #[error("the block is not stored")]
    Absent,
    /// The backlog of writes, or the queue of reads, is at its limit.
    #[error("the queue is full")]
    Full,
    /// Every device pauses writes after an error; the status says why.
    #[error("no device accepts writes at the moment")]
    Degraded,
    /// The block does not fit into a segment of any device.
    #[error("a block of {pages} pages does not fit into a segment of {segment_pages}")]
    TooLarge {
        /// Pages of 4096 bytes of its record.
        pages: u64,
        /// Pages of a segment.
        segment_pages: u32,
    },
    /// The block is stored with other lengths or another number of shards.
    #[error("the block is stored with other lengths")]
    Lengths,
    /// An extent is empty, does not begin a page, or ends outside of the pool; or a block has no shards.
    #[error("{bytes} bytes at offset {offset} are not an extent of the pool")]
    BadExtent {
        /// Start of the extent, in the pool.
        offset: PoolOffset,
        /// Length of the extent.
        bytes: u64,
    },
    /// The tier is closed.
    #[error("the tier is closed")]
    Closed,
}
