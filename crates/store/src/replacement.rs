//! The replacement policy at work: what it may know of the blocks, how large it takes the pool to be, what it keeps out.
//!
//! One policy has all blocks, of all spaces and sizes, each counting as one. Room for a large block may so cost several
//! small ones; that a large one holds more bytes is not weighed.

use std::sync::Weak;

use kvlane_block::{BlockHash, BlockKey};
use kvlane_memory::PAGE_BYTES;
use kvlane_policy::{Blocks, Memo, PolicyKind, ReplacementPolicy};
use parking_lot::MutexGuard;

use crate::api::{Caller, Chain, SpaceId};
use crate::entries::{Entries, NONE, State, fingerprint};
use crate::index::Index;
use crate::store::Store;
use crate::tier::Judge;

/// Of so many blocks in a row the tier below has kept none: it does not work.
const REFUSED_SPILLS: u32 = 64;
impl Blocks for Entries {
    fn key(&self, slot: u32) -> u64 {
        let entry = self.at(slot);
        fingerprint(entry.space, &entry.hash)
    }

    fn parent(&self, slot: u32) -> Option<u32> {
        let parent = self.at(slot).parent;
        (parent != NONE).then_some(parent)
    }

    /// Also while it is being checked, though its memory is free only after that: to pass it over would be to pass over all
    /// its ancestors too, and to find no victim at all below a long prefix.
    fn may_evict(&self, slot: u32) -> bool {
        self.at(slot).children == 0 && !self.in_use(slot)
    }

    fn in_use(&self, slot: u32) -> bool {
        let entry = self.at(slot);
        entry.state != State::Sealed || entry.leases > 0
    }
}

impl Index {
    /// Blocks that the pool holds when it is full: what the first space says, until the pool is full of something else.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// A block as the policy sees it.
    pub fn fingerprint(space: SpaceId, hash: &BlockHash) -> u64 {
        fingerprint(space, hash)
    }

    /// Goes on with another policy, which takes over what is resident, in order.
    pub fn switch_policy(&mut self, kind: PolicyKind) {
        if kind != self.policy.kind() {
            let (capacity, references) = (self.capacity, self.references);
            // How dense the tier below is, is for the new one to say.
            self.below = self.below.map(|_| 0.0);
            self.set_policy(kind.take_over(self.policy.as_ref(), capacity, references, &self.entries));
        }
    }

    fn set_policy(&mut self, policy: Box<dyn ReplacementPolicy>) {
        self.policy = policy;
        self.tell_of_below(!self.is_spilling_in_vain());
    }

    /// Tells a policy that learns how dense the blocks are that the tier below gives up, or that there is no tier.
    fn tell_of_below(&mut self, is_useful: bool) {
        if let Some(learning) = self.policy.learning_mut() {
            learning.set_below(self.below.filter(|_| is_useful));
        }
    }

    /// The tier below has given up blocks of this density lately; 0 before it had to.
    pub(crate) fn set_below(&mut self, density: f32) {
        self.below = Some(density);
        self.tell_of_below(!self.is_spilling_in_vain());
    }

    /// The tier below has kept a block, or refused it. One that keeps nothing is as good as none: what is let into the pool for
    /// its sake would be lost. Says whether it is worth something, where that has changed.
    pub(crate) fn spill_ended(&mut self, is_kept: bool) -> Option<bool> {
        let was_in_vain = self.is_spilling_in_vain();
        self.refused_spills = if is_kept { 0 } else { self.refused_spills.saturating_add(1) };
        let has_changed = self.is_spilling_in_vain() != was_in_vain;
        if has_changed {
            self.tell_of_below(was_in_vain);
        }
        has_changed.then_some(was_in_vain)
    }

    fn is_spilling_in_vain(&self) -> bool {
        self.refused_spills >= REFUSED_SPILLS
    }

    /// A block is evicted: the tier below is to hear what is known of it.
    pub(crate) fn note_lost(&mut self, slot: u32) {
        if self.below.is_some()
            && let Some(memo) = self.policy_memo(slot)
        {
            self.lost.push((self.tier_key(slot), memo));
        }
    }

    /// What the policy knows of a slot, for the tier below; None from a policy that does not learn.
    pub(crate) fn policy_memo(&self, slot: u32) -> Option<Memo> {
        self.policy.learning()?.memo(slot)
    }

    /// What a block is called in the tier below.
    fn tier_key(&self, slot: u32) -> BlockKey {
        let entry = self.entries.at(slot);
        BlockKey { space: self.space_name(entry.space), hash: entry.hash }
    }

    /// For each block of the tier below how dense it is: by what the policy knows of it, if the pool has it too, else by what it
    /// knew. None if it does not tell.
    fn densities(&self, blocks: &[(BlockKey, Memo)]) -> Option<Vec<f32>> {
        let learning = self.policy.learning()?;
        let density = |(key, memo): &(BlockKey, Memo)| {
            let spaces = self.spaces_of(key.space.namespace, key.space.cut);
            let found = spaces.filter_map(|space| self.entries.find(space, &key.hash));
            let known = found.filter(|&slot| self.policy.contains(slot)).find_map(|slot| learning.memo(slot));
            learning.density(known.unwrap_or(*memo))
        };
        blocks.iter().map(density).collect()
    }

    /// Leased or being saved, at most.
    pub(crate) fn blocks_in_use(&self) -> usize {
        let unsealed = self.claims.len() + self.seal_queue.len() + self.sealing.len();
        usize::try_from(self.leases.blocks).unwrap_or(usize::MAX / 8) + unsealed
    }

    pub(crate) fn set_first_capacity(&mut self, shard_bytes: &[u64]) {
        let block_bytes: u64 = shard_bytes.iter().map(|bytes| bytes.next_multiple_of(PAGE_BYTES)).sum();
        self.capacity =
            usize::try_from(self.extents.capacity_bytes() / block_bytes).unwrap_or(usize::MAX).max(1);
        let mut policy = self.policy.kind().build(self.capacity);
        if let Some(learning) = policy.learning_mut() {
            learning.begin_at(self.references);
        }
        self.set_policy(policy);
    }

    /// The pool is full: corrects what it was taken to hold, if that is off by more than a factor of two.
    pub(crate) fn correct_capacity(&mut self) {
        let blocks = self.policy.len().max(1);
        if blocks > 2 * self.capacity || blocks < self.capacity / 2 {
            self.capacity = blocks;
            self.policy.grow(blocks);
        }
    }

    /// Whether these consecutive blocks, which a worker claims, are worth the victims that they cost: those of them that are
    /// missing are judged as one.
    pub(crate) fn are_worth_victims(&mut self, caller: &Caller, chain: Chain, hashes: &[BlockHash]) -> bool {
        let Caller { owner, space, shard, .. } = *caller;
        let Some(&first) = hashes.first() else { return true };
        if !self.policy.has_gate() {
            return true;
        }
        let shard_bytes = &self.spaces[space].shard_bytes;
        let shards = shard_bytes.len();
        let block_bytes: u64 = shard_bytes.iter().map(|bytes| bytes.next_multiple_of(PAGE_BYTES)).sum();
        let free_bytes = self.extents.free_bytes();
        if hashes.len() as u64 * block_bytes <= free_bytes {
            return true;
        }
        if self.refusals.includes(owner, space, shard, shards, first) {
            return false;
        }
        let is_missing = |hash: &&BlockHash| {
            self.entries.find(space, hash).is_none_or(|slot| self.entries.at(slot).state == State::Gap)
        };
        let found = |hash: &BlockHash| self.entries.find(space, hash);
        let before = match chain {
            Chain::After(hash) => Some(hash),
            Chain::Start | Chain::Unchained => None,
        };
        // Behind what of them is stored already.
        let stored = hashes.iter().take_while(|hash| !is_missing(hash)).last().copied();
        let parent = stored.or(before).and_then(|hash| found(&hash));
        let missing: Vec<u64> =
            hashes.iter().filter(is_missing).map(|hash| fingerprint(space, hash)).collect();
        let lacking = (missing.len() as u64 * block_bytes).saturating_sub(free_bytes);
        if lacking == 0 {
            return true;
        }
        let mean_bytes =
            self.extents.used_bytes().checked_div(self.policy.len() as u64).unwrap_or(block_bytes);
        let victims = lacking.div_ceil(mean_bytes.max(1));
        let is_worth = self.policy.admit(
            &missing,
            parent,
            usize::try_from(victims).unwrap_or(usize::MAX),
            &self.entries,
        );
        if !is_worth && shards > 1 {
            self.refusals.insert(owner, space, shard, first);
        }
        is_worth
    }
}

/// Blocks that are judged under one hold of the lock.
const BLOCKS_A_HOLD: usize = 256;

impl Store {
    /// For each block that the tier below has, and what it keeps of the policy's knowledge of it, the hits that it is expected to
    /// bring for each reference that it is kept. None if the policy does not tell. See [`Memo`].
    pub fn densities(&self, blocks: &[(BlockKey, Memo)]) -> Option<Vec<f32>> {
        let mut densities = Vec::with_capacity(blocks.len());
        for part in blocks.chunks(BLOCKS_A_HOLD) {
            let index = self.index.lock();
            let of_part = index.densities(part);
            MutexGuard::unlock_fair(index);
            densities.extend(of_part?);
        }
        Some(densities)
    }

    /// The tier below has given up blocks of this density lately: what is as dense is let into the pool, by which it gets there.
    fn set_given_up_below(&self, density: f32) {
        self.index.lock().set_below(density);
    }
}

/// The policy of a store, for the tier below it. Weak, because the store owns the tier.
impl Judge for Weak<Store> {
    fn densities(&self, blocks: &[(BlockKey, Memo)]) -> Option<Vec<f32>> {
        self.upgrade()?.densities(blocks)
    }

    fn given_up(&self, density: f32) {
        if let Some(store) = self.upgrade() {
            store.set_given_up_below(density);
        }
    }
}
