//! The tier below the pool: [`Below`] keeps blocks that the pool may lose. crates/ssd is one; it brings them back as a
//! [`Source`](crate::Source).

use std::fmt;

use kvlane_block::{BlockKey, Namespace, SealedShard};
use kvlane_policy::Memo;

use crate::done::Done;

/// Called once the tier no longer reads the block's bytes, with whether it keeps the block.
pub type WriteDone = Done<bool>;

/// Keeps blocks that the pool may lose. No call but [`note_forgotten`](Self::note_forgotten) waits for a device.
pub trait Below: Send + Sync {
    /// Whether it has the block. Reading it may still fail.
    fn contains(&self, key: &BlockKey) -> bool;

    /// Starts to write a block, with the policy's memo of it. Until `done` is called, on any thread, the memory belongs to
    /// the tier.
    fn write(&self, key: BlockKey, shards: Vec<SealedShard>, memo: Memo, done: WriteDone);

    /// The memo of a block, from its write or from [`remember`](Self::remember), whichever was later. None if the tier does
    /// not have the block.
    fn memo(&self, key: &BlockKey) -> Option<Memo>;

    /// The pool has evicted these blocks. The tier replaces its memos of those that it has.
    fn remember(&self, lost: &[(BlockKey, Memo)]);

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
