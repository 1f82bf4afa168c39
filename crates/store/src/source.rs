//! [`Source`]: brings blocks into the pool. The SSD is one, other hosts are another.
//!
//! ```text
//!   a lookup's missing blocks --> find --> FindDone: which holder has which of them
//!                                              |
//!                  shares of each holder <-- plan
//!                     '--> read --> ReadDone, once for each block
//! ```
//! A *holder* is a part of a source that fails and is slow on its own: the SSD tier as a whole, or one other host.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane_block::{BlockHash, BlockKey, PoolExtent, Space};
use kvlane_memory::Arena;

use crate::done::Done;

/// The source's own number for one of its holders. It stays the same as long as the source lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HolderId(pub u32);

/// Which blocks of one space a prompt needs, in the prompt's order.
#[derive(Clone, Debug)]
pub struct Question {
    /// Namespace and cut of the blocks.
    pub space: Space,
    /// Bytes of each shard. A holder whose blocks have other shards does not have these.
    pub shard_bytes: Arc<[u64]>,
    /// The engine's hash of each block.
    pub hashes: Arc<[BlockHash]>,
    /// Whether blocks after the first that the source lacks are of no use.
    pub only_prefix: bool,
}

/// The blocks of a question that one holder has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The holder of these blocks.
    pub holder: HolderId,
    /// Runs of positions in [`Question::hashes`], ascending, without overlap.
    pub positions: Vec<Range<u32>>,
    /// How long the holder takes before the first byte.
    pub round_trip: Duration,
}

/// Called with the answer: at most one entry for a holder. Empty if the source does not know.
pub type FindDone = Done<Vec<Found>>;

/// Called once the source no longer writes to the extents. With the crc32c of each shard if all bytes are there and match
/// what was written once, else with None.
pub type ReadDone = Done<Option<Vec<u32>>>;

/// A block to read.
pub struct BlockRead {
    /// Its name in every pool and tier.
    pub key: BlockKey,
    /// Where each of its shards goes.
    pub extents: Vec<PoolExtent>,
    /// Until it is called, on any thread, the extents belong to the source.
    pub done: ReadDone,
}

impl BlockRead {
    /// crc32c of each shard, as it is in the pool now. Call it once nothing writes to the extents any more.
    #[allow(unsafe_code, reason = "reads the pool")]
    pub fn crcs(&self, arena: &Arena) -> Vec<u32> {
        let crc = |extent: &PoolExtent| {
            // SAFETY: The extents are claimed for this read alone until it is done, and the source, which has it, writes to
            // them no more.
            kvlane_block::crc32c(unsafe { arena.bytes_at(extent.offset, extent.bytes) })
        };
        self.extents.iter().map(crc).collect()
    }
}

/// Brings blocks. No call waits for a device or another host.
pub trait Source: Send + Sync {
    /// Asks which holder has which of these blocks. The answer may come before this returns, and on any thread.
    fn find(&self, question: Question, done: FindDone);

    /// Starts to read blocks of one holder. After `deadline` no lookup waits for them.
    fn read(&self, holder: HolderId, blocks: Vec<BlockRead>, deadline: Instant);

    /// Whether its blocks are copies of another host's. The pool evicts copies above their share first, and the tier below
    /// does not get them.
    fn brings_copies(&self) -> bool {
        false
    }
}
