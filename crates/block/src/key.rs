//! A block's name: the same in every run of the daemon, in the pool and in every tier below it.

use crate::hash::{BlockHash, CutDigest, Namespace};

/// Blocks that engines share: a namespace with one cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Space {
    /// What the content means.
    pub namespace: Namespace,
    /// How it is cut into shards.
    pub cut: CutDigest,
}

/// A block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey {
    /// The namespace and cut that it belongs to.
    pub space: Space,
    /// The engine's hash, unique within the space.
    pub hash: BlockHash,
}
