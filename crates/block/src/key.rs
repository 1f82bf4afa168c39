//! The key of a block: its name in the pool, in every tier below it, and in every run of the daemon.

use crate::hash::{BlockHash, CutDigest, Namespace};

/// A namespace with one cut. Engines of the same space share blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Space {
    /// Digest of everything that changes what the blocks' bytes mean.
    pub namespace: Namespace,
    /// Digest of how a block is cut into shards.
    pub cut: CutDigest,
}

/// The name of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey {
    /// The namespace and cut that it belongs to.
    pub space: Space,
    /// The engine's hash, unique within the space.
    pub hash: BlockHash,
}
