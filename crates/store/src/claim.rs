//! A claim: which shards of a block are being written, and by which worker.

use std::time::Instant;

use crate::api::{OwnerId, ShardNumber, WriterId};

/// A block being saved by the workers of one engine.
pub(crate) struct Claim {
    /// The engine that saves it.
    pub(crate) owner: OwnerId,
    /// Time of the claim, or of its last commit.
    pub(crate) since: Instant,
    pub(crate) shards: Box<[ShardState]>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ShardState {
    Waiting,
    Writing(WriterId),
    Written,
}

impl Claim {
    /// The worker that may be writing this shard.
    pub(crate) fn writer(&self, shard: ShardNumber) -> Option<WriterId> {
        match self.shards.get(shard.index()) {
            Some(&ShardState::Writing(writer)) => Some(writer),
            _ => None,
        }
    }

    /// Whether a worker has claimed this shard.
    pub(crate) fn is_granted(&self, shard: ShardNumber) -> bool {
        self.shards.get(shard.index()).is_some_and(|&shard| shard != ShardState::Waiting)
    }

    pub(crate) fn is_being_written(&self) -> bool {
        self.shards.iter().any(|shard| matches!(shard, ShardState::Writing(_)))
    }

    pub(crate) fn is_written(&self) -> bool {
        self.shards.iter().all(|&shard| shard == ShardState::Written)
    }
}
