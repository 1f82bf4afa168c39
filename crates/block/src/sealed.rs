//! Shards in the pool, in the terms of the interface between the pool and the tiers below it.

use crate::numbers::PoolOffset;

/// A range of bytes in the pool. A transfer may touch the whole of each page that it lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolExtent {
    /// Start of the range, at the start of a page.
    pub offset: PoolOffset,
    /// Length in bytes; above 0.
    pub bytes: u64,
}

/// A shard whose bytes are in the pool. Its owner changes none of them until every reader is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SealedShard {
    /// The bytes of the shard.
    pub extent: PoolExtent,
    /// The crc32c of its bytes, from the seal.
    pub crc32c: u32,
}
