//! Between the index and its replacement policy: which blocks the policy may evict, how many it believes the pool
//! holds, and which claims it refuses.
//!
//! One policy orders all blocks of all spaces and sizes, and each block counts as one. So room for a large block may
//! cost several small ones, and the policy does not weigh bytes.

use std::sync::Weak;

use kvlane_block::{BlockHash, BlockKey};
use kvlane_memory::PAGE_BYTES;
use kvlane_policy::{Blocks, Memo, PolicyKind, ReplacementPolicy};
use parking_lot::MutexGuard;

use crate::api::{Caller, Chain, SpaceId};
use crate::below::Judge;
use crate::entries::{CopyState, Entries, NONE, State, fingerprint};
use crate::index::Index;
use crate::store::Store;

/// After so many refused spills in a row the tier below counts as broken.
pub(crate) const REFUSED_SPILLS: u32 = 64;

impl Blocks for Entries {
    fn key(&self, slot: u32) -> u64 {
        let entry = self.at(slot);
        fingerprint(entry.space, &entry.hash)
    }

    fn parent(&self, slot: u32) -> Option<u32> {
        let parent = self.at(slot).parent;
        (parent != NONE).then_some(parent)
    }

    /// A block that is being checked may go too, although its memory is free only after the check. To pass it over would
    /// mean to pass over all its ancestors, and a long prefix would then offer no victim at all.
    fn may_evict(&self, slot: u32) -> bool {
        self.at(slot).children == 0 && !self.in_use(slot)
    }

    fn in_use(&self, slot: u32) -> bool {
        let entry = self.at(slot);
        entry.state != State::Sealed || entry.leases > 0
    }
}

impl Index {
    /// How many blocks a full pool holds: estimated from the first space's blocks, corrected once the pool is full.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The key by which the policy knows a block.
    pub fn fingerprint(space: SpaceId, hash: &BlockHash) -> u64 {
        fingerprint(space, hash)
    }

    /// Switches to another policy, which takes over the resident blocks in their order.
    pub fn switch_policy(&mut self, kind: PolicyKind) {
        if kind != self.policy.kind() {
            let (capacity, references) = (self.capacity, self.references);
            // The old policy measured the tier's density; the new one starts from 0.
            self.tier_density = self.tier_density.map(|_| 0.0);
            self.set_policy(kind.take_over(self.policy.as_ref(), capacity, references, &self.entries));
        }
    }

    fn set_policy(&mut self, policy: Box<dyn ReplacementPolicy>) {
        self.policy = policy;
        self.report_tier_density(!self.is_tier_broken());
    }

    /// Reports the density of the blocks that the tier below gives up to a policy that learns. A tier that is not useful
    /// is reported as none.
    fn report_tier_density(&mut self, is_useful: bool) {
        if let Some(learning) = self.policy.learning_mut() {
            learning.set_below(self.tier_density.filter(|_| is_useful));
        }
    }

    /// Sets the density of the blocks that the tier below gave up lately; 0 as long as it had to give up none.
    pub(crate) fn set_tier_density(&mut self, density: f32) {
        self.tier_density = Some(density);
        self.report_tier_density(!self.is_tier_broken());
    }

    /// Records whether the tier below kept a block. A tier that keeps nothing counts as none, because blocks that the
    /// pool admits for its sake would be lost. Returns whether the tier works, if that has changed.
    pub(crate) fn record_spill(&mut self, is_kept: bool) -> Option<bool> {
        let was_broken = self.is_tier_broken();
        self.refused_spills = if is_kept { 0 } else { self.refused_spills.saturating_add(1) };
        let has_changed = self.is_tier_broken() != was_broken;
        if has_changed {
            self.report_tier_density(was_broken);
        }
        has_changed.then_some(was_broken)
    }

    fn is_tier_broken(&self) -> bool {
        self.refused_spills >= REFUSED_SPILLS
    }

    /// Queues the policy's memo of a block that is being evicted, for the tier below.
    pub(crate) fn note_lost(&mut self, slot: u32) {
        if self.tier_density.is_some()
            && let Some(memo) = self.policy_memo(slot)
        {
            self.lost.push((self.tier_key(slot), memo));
        }
    }

    /// The policy's memo of a slot, for the tier below; None from a policy that does not learn, and of a copy.
    pub(crate) fn policy_memo(&self, slot: u32) -> Option<Memo> {
        if self.entries.at(slot).copy != CopyState::Own {
            return None;
        }
        self.policy.learning()?.memo(slot)
    }

    /// Whether the policy learns, and so has memos.
    pub(crate) fn learns(&self) -> bool {
        self.policy.learning().is_some()
    }

    /// The block's key in the tier below.
    fn tier_key(&self, slot: u32) -> BlockKey {
        let entry = self.entries.at(slot);
        BlockKey { space: self.space_name(entry.space), hash: entry.hash }
    }

    /// Hit density of each of these blocks of the tier below: by the policy's present memo if the pool has the block too,
    /// else by the memo that the tier kept. None from a policy that does not learn.
    fn densities(&self, blocks: &[(BlockKey, Memo)]) -> Option<Vec<f32>> {
        let learning = self.policy.learning()?;
        let density = |(key, memo): &(BlockKey, Memo)| {
            let spaces = self.spaces_of(key.space.namespace, key.space.cut);
            let found = spaces.filter_map(|space| self.entries.find(space, &key.hash));
            let resident =
                found.filter(|&slot| self.policy.contains(slot)).find_map(|slot| learning.memo(slot));
            learning.density(resident.unwrap_or(*memo))
        };
        blocks.iter().map(density).collect()
    }

    /// Upper bound of the blocks that are leased or being saved.
    pub(crate) fn blocks_in_use(&self) -> usize {
        let unsealed = self.claims.len() + self.seal_queue.len() + self.sealing.len();
        usize::try_from(self.leases.blocks).unwrap_or(usize::MAX / 8) + unsealed
    }

    /// Blocks with memory, those being saved included.
    fn blocks_in_pool(&self) -> usize {
        self.policy.len() + self.copies.len()
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

    /// Called when the pool is full. Corrects the capacity if its estimate is off by more than a factor of two.
    pub(crate) fn correct_capacity(&mut self) {
        let blocks = self.blocks_in_pool().max(1);
        if blocks > 2 * self.capacity || blocks < self.capacity / 2 {
            self.capacity = blocks;
            self.policy.grow(blocks);
        }
    }

    /// Asks the policy whether the consecutive blocks of a claim are worth the victims that they would cost. The missing
    /// ones are judged as one run. A refusal is remembered for the engine's other workers.
    pub(crate) fn judge_run(&mut self, caller: &Caller, chain: Chain, hashes: &[BlockHash]) -> bool {
        let Caller { owner, space, shard, .. } = *caller;
        let Some(&first) = hashes.first() else { return true };
        if !self.policy.has_gate() {
            return true;
        }
        let shards = self.spaces[space].shards();
        let block_bytes = self.spaces[space].room_bytes();
        // Copies above their share go first, and the policy has no victim for them.
        let free_bytes = self.extents.free_bytes() + self.copies.bytes_above_share();
        if hashes.len() as u64 * block_bytes <= free_bytes {
            return true;
        }
        if self.refusals.repeat(owner, space, shard, shards, first) {
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
        // The missing ones continue the last of them that is stored.
        let stored = hashes.iter().take_while(|hash| !is_missing(hash)).last().copied();
        let parent = stored.or(before).and_then(|hash| found(&hash));
        let missing: Vec<u64> =
            hashes.iter().filter(is_missing).map(|hash| fingerprint(space, hash)).collect();
        let lacking = (missing.len() as u64 * block_bytes).saturating_sub(free_bytes);
        if lacking == 0 {
            return true;
        }
        let mean_bytes =
            self.extents.used_bytes().checked_div(self.blocks_in_pool() as u64).unwrap_or(block_bytes);
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

/// Blocks whose density is taken under one hold of the lock.
const BLOCKS_A_HOLD: usize = 256;

impl Store {
    /// Hit density of each of these blocks of the tier below, given the memos that the tier kept: the hits that a block is
    /// expected to bring for each block reference that passes while it is kept. None if the policy does not learn. See
    /// [`Memo`].
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

    /// Sets the density of the blocks that the tier below gave up lately. The pool then admits blocks that are as dense,
    /// because they can reach the tier only by way of the pool.
    fn set_tier_density(&self, density: f32) {
        self.index.lock().set_tier_density(density);
    }
}

/// The policy of a store, for the tier below it. Weak, because the store owns the tier.
impl Judge for Weak<Store> {
    fn densities(&self, blocks: &[(BlockKey, Memo)]) -> Option<Vec<f32>> {
        self.upgrade()?.densities(blocks)
    }

    fn given_up(&self, density: f32) {
        if let Some(store) = self.upgrade() {
            store.set_tier_density(density);
        }
    }
}
