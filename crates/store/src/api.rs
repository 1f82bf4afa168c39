//! The types of the store's interface: who saves which blocks, and what a lookup returns.

use std::fmt;
use std::time::{Duration, Instant};

use kvlane_block::BlockHash;
use kvlane_memory::PoolPage;
use kvlane_policy::Choice;

/// How long leases and claims live, which blocks go first, and how much other hosts' blocks may take.
#[derive(Clone, Copy, Debug)]
pub struct StoreOptions {
    /// A lease that its owner's heartbeat does not name is given back at this age.
    pub lease_ttl: Duration,
    /// A claim without progress and without a shard being written dies at this age.
    pub claim_ttl: Duration,
    /// Which blocks are evicted, and which are admitted.
    pub policy: Choice,
    /// The part of the pool, 0 to 1, that copies may take before own blocks do. A copy is a block that a source brought from
    /// another host. Above it they are evicted first.
    pub copies_share: f64,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            lease_ttl: Duration::from_secs(60),
            claim_ttl: Duration::from_secs(60),
            policy: Choice::default(),
            copies_share: 0.25,
        }
    }
}

/// An engine. It holds leases, and its workers together save a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OwnerId(pub u64);

impl OwnerId {
    /// The store itself, while it fetches. No engine has this id.
    pub(crate) const FETCHER: Self = Self(u64::MAX);
    /// The store itself, for blocks that other hosts read. No engine has this id.
    pub(crate) const LENDER: Self = Self(u64::MAX - 1);
}

/// A worker's session. It writes shards, and its unfinished ones die with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WriterId(pub u64);

impl WriterId {
    /// The store itself, while it fetches. No worker has this id.
    pub(crate) const FETCHER: Self = Self(u64::MAX);
}

/// Blocks promised by one lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseId(pub u64);

/// A namespace with one cut. Valid in the store that made it, until that store forgets the space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SpaceId(pub(crate) u32);

/// Index of a shard in its block; below the number of shards that the space's blocks have.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShardNumber(pub u32);

impl ShardNumber {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }

    /// All shards of a block that has `count`, in order.
    pub(crate) fn all(count: usize) -> impl Iterator<Item = ShardNumber> {
        (0..count as u32).map(ShardNumber)
    }
}

impl fmt::Display for ShardNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A block in the store, from its claim to its death. The generation tells a stale reference from a current one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StoredBlock {
    /// Index of the block's entry, by which the policy knows it too. Reused after the block's death.
    pub slot: u32,
    /// How many blocks died in this slot before.
    pub generation: u32,
}

/// The worker that claims, and which shard. The same for all blocks of a call.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// The engine that saves the blocks.
    pub owner: OwnerId,
    /// Its worker, which writes the shard.
    pub writer: WriterId,
    /// The space that the blocks belong to.
    pub space: SpaceId,
    /// The shard that it writes of each block.
    pub shard: ShardNumber,
    /// The time of the call, from which `claim_ttl` counts.
    pub now: Instant,
}

/// The parent of the first block of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chain {
    /// None: the first block starts a prompt. Each further block is the child of the one before it.
    Start,
    /// This block, in the same space. Each further block is the child of the one before it.
    After(BlockHash),
    /// The blocks are of a group with a window: each is useful without the ones before it and may outlive them.
    Unchained,
}

impl Chain {
    /// The parent of the block that follows `last` in this chain.
    pub(crate) fn behind(self, last: BlockHash) -> Self {
        match self {
            Self::Start | Self::After(_) => Self::After(last),
            Self::Unchained => Self::Unchained,
        }
    }
}

/// Where the bytes of a claimed block come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// An engine has computed it. The policy judges whether it is worth its victims.
    Engine,
    /// A source of this host brings it back.
    ThisHost,
    /// A source brings it from another host: it is a copy.
    OtherHost,
}

/// One shard of a block to write: `shard_bytes` bytes from `page` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardClaim {
    /// The claimed block. Stale once the claim has died.
    pub block: StoredBlock,
    /// The shard that the caller writes.
    pub shard: ShardNumber,
    /// First page of the shard's extent.
    pub page: PoolPage,
}

/// The answer for one block of a claim.
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

/// The result of a lookup. The blocks stay where they are until the lease is released.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hit {
    /// Length of the reusable prefix; above 0.
    pub tokens: u64,
    /// Give it back with `release`.
    pub lease: LeaseId,
    /// One for each group of the lookup, in order.
    pub groups: Vec<HitGroup>,
}

/// Where one group's blocks of a hit lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HitGroup {
    /// First block that the hit includes: 0, or the start of the window.
    pub first_block: u64,
    /// Blocks from the prompt's first one that need no saving: those of the hit, and those after it that are stored
    /// too. The lease covers only those of the hit.
    pub stored_blocks: u64,
    /// First pool page of each extent, block-major: `pages[block * shards + shard]`.
    pub pages: Vec<PoolPage>,
    /// Bytes of each block, not rounded up to pages.
    pub block_bytes: u64,
}
