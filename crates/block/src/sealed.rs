//! Shards in the pool, as the pool and the tiers below it name them to each other.

use crate::numbers::PoolOffset;

/// Bytes of the pool. A transfer may touch all pages that they lie in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolExtent {
    /// Where they begin: on a page.
    pub offset: PoolOffset,
    /// How many there are; above 0.
    pub bytes: u64,
}

/// A shard whose bytes are in the pool. Its owner changes none of them until every reader is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SealedShard {
    /// Where its bytes lie.
    pub extent: PoolExtent,
    /// The crc32c of its bytes, from the seal.
    pub crc32c: u32,
}
