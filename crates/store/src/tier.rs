//! What a tier below the pool has to do: keep blocks that the pool may lose, and bring them back.

use std::fmt;
use std::time::Instant;

use kvlane_block::{BlockKey, Namespace, PoolExtent, SealedShard};
use kvlane_policy::Memo;

/// Called when a tier does not read a block's bytes any more: whether it keeps the block.
pub type WriteDone = Box<dyn FnOnce(bool) + Send>;

/// Called when a tier does not write to the extents any more: the crc32c of each shard, if all bytes are there and were
/// compared with what was written once.
pub type ReadDone = Box<dyn FnOnce(Option<Vec<u32>>) + Send>;

/// A tier below the pool. No call but [`note_forgotten`](Self::note_forgotten) waits for a device. `done` is called exactly
/// once, whatever happens, on any thread and maybe before the call returns; until then the memory belongs to the tier.
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

/// The pool's policy, as a tier asks it which blocks deserve to be written again when room is needed. Called by the tier's
/// threads, without a lock of the tier.
pub trait Judge: Send + Sync {
    /// For each block, of which the policy knew this when it was written or left the pool, the hits that it will bring for each
    /// reference that it is kept. None if the policy does not tell.
    fn densities(&self, blocks: &[(BlockKey, Memo)]) -> Option<Vec<f32>>;

    /// The mean density of what the tier gave up lately, of that device of which it is the least: 0 as long as one had to give
    /// up nothing, and where [`densities`](Self::densities) does not tell.
    fn given_up(&self, density: f32);
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
