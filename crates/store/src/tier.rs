//! The seam to a tier below the pool, which keeps blocks that the pool may lose and brings them back. crates/ssd is one.

use std::fmt;
use std::time::Instant;

use kvlane_block::{BlockKey, Namespace, PoolExtent, SealedShard};
use kvlane_policy::Memo;

/// Called once the tier no longer reads the block's bytes, with whether it keeps the block.
pub type WriteDone = Box<dyn FnOnce(bool) + Send>;

/// Called once the tier no longer writes to the extents. With the crc32c of each shard if all bytes are there and match
/// what was written once, else with None.
pub type ReadDone = Box<dyn FnOnce(Option<Vec<u32>>) + Send>;

/// A tier below the pool. No call but [`note_forgotten`](Self::note_forgotten) waits for a device.
///
/// `done` is called exactly once, whatever happens, on any thread, and maybe before the call returns. Until then the memory
/// belongs to the tier.
pub trait Tier: Send + Sync {
    /// Whether the tier's index has the block. Reading it may still fail.
    fn contains(&self, key: &BlockKey) -> bool;

    /// Starts to write a block, with the policy's memo of it.
    fn write(&self, key: BlockKey, shards: Vec<SealedShard>, memo: Memo, done: WriteDone);

    /// The memo of a block, from its write or from [`remember`](Self::remember), whichever was later. None if the tier does
    /// not have the block.
    fn memo(&self, key: &BlockKey) -> Option<Memo>;

    /// The pool has evicted these blocks. The tier replaces its memos of those that it has.
    fn remember(&self, lost: &[(BlockKey, Memo)]);

    /// Starts to read a block into one extent for each of its shards. After `deadline` no lookup waits for it.
    fn read(&self, key: BlockKey, shards: Vec<PoolExtent>, deadline: Instant, done: ReadDone);

    /// Forgets all blocks of a namespace, also those being written now, until a restart.
    fn forget_namespace(&self, namespace: Namespace);

    /// Writes to the devices that the namespace was forgotten, so that a restart does not bring its blocks back. The only
    /// call that waits for the devices.
    ///
    /// # Errors
    /// [`NotForGood`]: a restart would bring it back.
    fn note_forgotten(&self, namespace: Namespace) -> Result<(), NotForGood>;
}

/// The pool's policy, which a tier asks when it needs room: is a block worth writing again? Called by the tier's threads,
/// without a lock of the tier.
pub trait Judge: Send + Sync {
    /// Hit density of each block, given the memo from its write or its eviction: the hits expected for each block reference
    /// that passes while it is kept. None from a policy that does not learn.
    fn densities(&self, blocks: &[(BlockKey, Memo)]) -> Option<Vec<f32>>;

    /// Reports the mean density of the blocks that the tier gave up lately, on the device where it is lowest. 0 as long as
    /// one device had to give up none, and if [`densities`](Self::densities) returns None.
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

/// The result of dropping a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// Blocks that the pool had, those being saved included.
    pub blocks: u64,
    /// Whether the tier below forgot it for good; `Ok` without one.
    pub below: Result<(), NotForGood>,
}
