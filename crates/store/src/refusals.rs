//! Runs that the policy kept out, for the other workers of their engine.

use std::collections::{BTreeSet, VecDeque};

use kvlane_block::BlockHash;

use crate::api::{OwnerId, ShardNumber, SpaceId};

/// Refused runs that are remembered for the other workers of their engine.
const REFUSALS_KEPT: usize = 64;

/// Runs that were not admitted when the first worker of an engine claimed them. Its other workers are told the same: a block
/// of which only some shards were saved would never become visible.
#[derive(Default)]
pub(crate) struct Refusals(VecDeque<Refusal>);

struct Refusal {
    owner: OwnerId,
    space: SpaceId,
    first: BlockHash,
    /// Whose workers were told.
    shards: BTreeSet<ShardNumber>,
}

impl Refusals {
    /// Whether the run that begins so was refused to another worker. A worker that asks again, or the last one, ends it:
    /// what comes then is judged anew.
    pub(crate) fn includes(
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
