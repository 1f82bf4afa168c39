//! What a tier below the pool has to do: keep blocks that the pool may lose, and bring them back.

use std::fmt;
use std::time::Instant;

use kvlane_block::{BlockHash, CutDigest, Namespace, PoolOffset};
use kvlane_policy::Memo;

/// A block's name below the pool: the same in every run of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey {
    /// What the content means.
    pub namespace: Namespace,
    /// How it is cut into shards.
    pub cut: CutDigest,
    /// Which block it is.
    pub hash: BlockHash,
}

/// Where a shard lies in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolExtent {
    /// Where it begins: on a page.
    pub offset: PoolOffset,
    /// Bytes of the shard.
    pub bytes: u64,
}

/// A shard whose bytes are in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealedShard {
    /// The shard's extent, which nobody changes before the tier is done.
    pub at: PoolExtent,
    /// Taken when the block was sealed.
    pub crc32c: u32,
}

/// Called when a tier does not read a block's bytes any more: whether it keeps the block.
pub type WriteDone = Box<dyn FnOnce(bool) + Send>;

/// Called when a tier does not write to the extents any more: the crc32c of each shard, if all bytes are there and were
/// compared with what was written once.
pub type ReadDone = Box<dyn FnOnce(Option<Vec<u32>>) + Send>;

/// A tier below the pool. No call but [`note_forgotten`](Self::note_forgotten) waits for a device. `done` is called exactly once, whatever happens, on any thread and
/// maybe before the call returns; until then the memory belongs to the tier.
pub trait Tier: Send + Sync {
    /// Whether it has the block, as far as it knows.
    fn contains(&self, key: &BlockKey) -> bool;

    /// Starts to keep a block, and with it what the pool's policy knows of it.
    fn write(&self, key: BlockKey, shards: Vec<SealedShard>, memo: Memo, done: WriteDone);

    /// What the policy knew of a block when it was written, or when [`remember`](Self::remember) was called; None if it is not
    /// kept.
    fn memo(&self, key: &BlockKey) -> Option<Memo>;

    /// The pool has lost these blocks, of which its policy knows this: what of them is kept is kept with that.
    fn remember(&self, lost: &[(BlockKey, Memo)]);

    /// Starts to bring a block back, into one extent for each of its shards. After `deadline` nobody waits for it.
    fn read(&self, key: BlockKey, shards: Vec<PoolExtent>, deadline: Instant, done: ReadDone);

    /// Forgets all blocks of a namespace, also those being written now, until a restart.
    fn forget_namespace(&self, namespace: Namespace);

    /// Makes sure that a restart does not bring back what was forgotten. The one call that waits for the devices, which note
    /// it.
    ///
    /// # Errors
    /// [`NotForGood`]: a restart would bring it back.
    fn note_forgotten(&self, namespace: Namespace) -> Result<(), NotForGood>;
}

/// Why a restart would bring back what was dropped, in a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotForGood(pub String);

impl fmt::Display for NotForGood {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotForGood {}

/// What became of a namespace that was dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// Blocks that the pool had, those being saved included.
    pub blocks: u64,
    /// Whether the tier below forgot it for good; `Ok` without one.
    pub below: Result<(), NotForGood>,
}
