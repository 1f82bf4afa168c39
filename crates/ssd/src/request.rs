//! The words of the tier's interface.

use std::io;
use std::path::PathBuf;
use std::time::Instant;

use kvlane_block::{BlockKey, PoolExtent, PoolOffset, SealedShard, Space};
use kvlane_policy::Memo;
use thiserror::Error;

/// A block to be written. Nobody may change its bytes before `done` is called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The name under which the block is found again.
    pub key: BlockKey,
    /// Its shards, in the order of the cut.
    pub shards: Vec<SealedShard>,
    /// What the pool's policy knows of it.
    pub memo: Memo,
}

/// A block to be read. The extents are the tier's, and the kernel's, until `done` is called.
pub struct Read {
    /// The name under which the block was written.
    pub key: BlockKey,
    /// Where each shard goes.
    pub into: Vec<PoolExtent>,
    /// From then on nobody waits for it: a read that has not begun ends as [`Miss::Late`]. One that has begun is counted as
    /// late, and goes on to its end.
    pub deadline: Option<Instant>,
}

/// How a write ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteEnd {
    /// It will be found, after a crash of this process too.
    Stored,
    /// It is not stored: the device refused (see its status), or the tier was closed.
    Failed,
}

/// How a read ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadEnd {
    /// All bytes are there, and are those that were written.
    Found {
        /// crc32c of each shard.
        crcs: Vec<u32>,
    },
    /// The bytes in the extents mean nothing.
    Miss(Miss),
}

/// Why there is nothing after all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Miss {
    /// What is on the device is not what was written. The block is dropped.
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

/// A file that could not note that a namespace was dropped.
#[derive(Debug, Error)]
#[error("the SSD file {path} could not note it: {why}")]
pub struct NotNoted {
    /// The file that lacks the note.
    pub path: PathBuf,
    /// Whether it has no room for the note, or the device failed.
    pub why: NoteError,
}

/// Why a file does not note that a namespace was dropped.
#[derive(Debug, Error)]
pub enum NoteError {
    /// It names as many namespaces as it has room for, and has blocks of all of them.
    #[error(
        "it has blocks of {0} other namespaces that were dropped, the most it can name; restart the daemon, which erases what it can, or stop it and remove the file"
    )]
    Full(usize),
    /// The device failed.
    #[error(transparent)]
    Io(io::Error),
}

/// A namespace and cut of which something is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpaceUse {
    /// What the blocks are of.
    pub space: Space,
    /// Blocks that can be read, on all devices together.
    pub blocks: u64,
    /// Bytes of their records.
    pub bytes: u64,
}

/// Why a call did nothing. `done` was not called and never will be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Refused {
    /// The block is stored already, or being stored.
    #[error("the block is stored already, or being stored")]
    Present,
    /// The block is not stored.
    #[error("the block is not stored")]
    Absent,
    /// As much is waiting as may wait.
    #[error("the queue is full")]
    Full,
    /// No device accepts writes; their status says why.
    #[error("no device accepts writes at the moment")]
    Degraded,
    /// The block does not fit into a segment.
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
        /// Where it was to begin.
        offset: PoolOffset,
        /// How long it was to be.
        bytes: u64,
    },
    /// The tier is closed.
    #[error("the tier is closed")]
    Closed,
}
