//! Runs of blocks that the policy refused, remembered for the other workers of their engine.

use std::collections::{BTreeSet, VecDeque};

use kvlane_block::BlockHash;

use crate::api::{OwnerId, ShardNumber, SpaceId};

/// Most runs that are remembered. Beyond that the oldest is forgotten.
const REFUSALS_KEPT: usize = 64;

/// Runs that were refused when the first worker of an engine claimed them. The other workers get the same answer, because
/// a block of which only some shards are saved never becomes visible.
#[derive(Default)]
pub(crate) struct Refusals(VecDeque<Refusal>);

struct Refusal {
    owner: OwnerId,
    space: SpaceId,
    first: BlockHash,
    /// The shards whose workers got the refusal.
    shards: BTreeSet<ShardNumber>,
}

impl Refusals {
    /// True if the run that begins with `first` was refused to another worker, so that this one is refused too. A worker
    /// that claims the run a second time, and the last worker, end the refusal: the next claim is judged anew.
    pub(crate) fn repeat(
        &mut self,
        owner: OwnerId,
        space: SpaceId,
        shard: ShardNumber,
        shards: usize,
        first: BlockHash,
    ) -> bool {
        let is_it =
            |refusal: &Refusal| (refusal.owner, refusal.space, refusal.first) == (owner, space, first);
        let Some(at) = self.0.iter().position(is_it) else { return false };
        let is_new = self.0[at].shards.insert(shard);
        if !is_new || self.0[at].shards.len() == shards {
            self.0.remove(at);
        }
        is_new
    }

    pub(crate) fn insert(&mut self, owner: OwnerId, space: SpaceId, shard: ShardNumber, first: BlockHash) {
        if self.0.len() == REFUSALS_KEPT {
            self.0.pop_front();
        }
        self.0.push_back(Refusal { owner, space, first, shards: BTreeSet::from([shard]) });
    }
}
