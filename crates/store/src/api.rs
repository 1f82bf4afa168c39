//! The words of the store's interface.

use std::fmt;
use std::time::{Duration, Instant};

use kvlane_block::BlockHash;
use kvlane_memory::PoolPage;
use kvlane_policy::Choice;

/// How long what was promised is kept, and what goes when room is needed.
#[derive(Clone, Copy, Debug)]
pub struct StoreOptions {
    /// A lease that its owner's heartbeat does not name is given back at this age.
    pub lease_ttl: Duration,
    /// A claim without progress and without a shard being written dies at this age.
    pub claim_ttl: Duration,
    /// Which blocks are evicted, and which are taken in.
    pub policy: Choice,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            lease_ttl: Duration::from_secs(60),
            claim_ttl: Duration::from_secs(60),
            policy: Choice::default(),
        }
    }
}

/// An engine. Holds leases; its workers together save a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OwnerId(pub u64);

impl OwnerId {
    /// The store itself, as it claims what it fetches: no engine has this id.
    pub(crate) const FETCHER: Self = Self(u64::MAX);
}

/// A worker's session. Writes shards; its unfinished ones die with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WriterId(pub u64);

impl WriterId {
    /// The store itself, as it writes what it fetches: no worker has this id.
    pub(crate) const FETCHER: Self = Self(u64::MAX);
}

/// Blocks promised by one lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseId(pub u64);

/// A namespace with one cut. Valid for the store that gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SpaceId(pub(crate) u32);

/// Which shard of a block; below the number of shards that the space's blocks have.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShardNumber(pub u32);

impl ShardNumber {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }

    /// All of a block that has so many, in order.
    pub(crate) fn all(count: usize) -> impl Iterator<Item = ShardNumber> {
        (0..count as u32).map(ShardNumber)
    }
}

impl fmt::Display for ShardNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A block in the store, from its claim to its end. What names one that has ended is known to be stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StoredBlock {
    /// Where the store keeps it, and what the policy calls it. Used again when the block has ended.
    pub slot: u32,
    /// How many blocks had ended in this slot before.
    pub generation: u32,
}

/// Who claims which shard: what is the same for all blocks of a call.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// The engine that saves the blocks.
    pub owner: OwnerId,
    /// Its worker, which writes the shard.
    pub writer: WriterId,
    /// The space that the blocks belong to.
    pub space: SpaceId,
    /// Which shard of each block.
    pub shard: ShardNumber,
    /// When it claims.
    pub now: Instant,
}

/// What comes before the first block of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chain {
    /// Nothing: the first block starts a prompt. Each further block is the child of the one before it.
    Start,
    /// This block, in the same space. Each further block is the child of the one before it.
    After(BlockHash),
    /// The blocks are of a group with a window: each is useful without the ones before it and may outlive them.
    Unchained,
}

/// One shard of a block to write: `shard_bytes` bytes from `page` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardClaim {
    /// The block, or what was to become one.
    pub block: StoredBlock,
    /// Which shard of it.
    pub shard: ShardNumber,
    /// First page of the shard's extent.
    pub page: PoolPage,
}

/// What became of one block of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimOutcome {
    /// Write this shard, then commit or abort it.
    Claimed(ShardClaim),
    /// Stored already, or this shard of it is being written or was written for the same engine.
    Present,
    /// Another engine is saving it.
    InFlight,
    /// Not stored: nothing could be evicted, the block's parent is not in the store, or the policy found it not worth what
    /// it would displace.
    NoRoom,
}

/// The blocks of a prompt in one group.
#[derive(Clone, Copy, Debug)]
pub struct LookupGroup<'a> {
    /// The space that the group's blocks belong to.
    pub space: SpaceId,
    /// Tokens a block covers. 0 makes the lookup a miss.
    pub tokens_per_block: u32,
    /// 0: a hit needs all blocks from the first. n: the last n before its end.
    pub window_blocks: u32,
    /// From the first block of the prompt.
    pub hashes: &'a [BlockHash],
}

/// The answer of a lookup. The blocks stay where they are until the lease is released.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hit {
    /// Length of the reusable prefix; above 0.
    pub tokens: u64,
    /// Give it back with `release`.
    pub lease: LeaseId,
    /// One for each group asked for, in order.
    pub groups: Vec<HitGroup>,
}

/// Where one group's blocks of a hit lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HitGroup {
    /// First block that the hit includes: 0, or the start of the window.
    pub first_block: u64,
    /// Blocks from the prompt's first one that need no saving: the hit's, and those after it that are stored too. No
    /// lease is on the latter.
    pub stored_blocks: u64,
    /// First pool page of each extent, block-major: `pages[block * shards + shard]`.
    pub pages: Vec<PoolPage>,
}
