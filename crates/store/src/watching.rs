//! Awaited saves: a lookup waits for blocks that another engine is expected to save. The blocks that are visible already
//! are leased meanwhile, and the others are watched ([`Watches`](crate::watch::Watches)).

use std::sync::Arc;
use std::time::Instant;

use kvlane_block::BlockHash;
use kvlane_policy::longest_hit;
use parking_lot::MutexGuard;

use crate::api::{ClaimOutcome, LeaseId, LookupGroup, OwnerId, ShardNumber, SpaceId};
use crate::entries::{NONE, State};
use crate::index::Index;
use crate::needs::needs;
use crate::store::Store;
use crate::watch::{InitialState, Key, OnWatchEvent, WatchId};

/// Blocks that one hold of the lock adds to a watch, or removes.
const BLOCKS_A_HOLD: usize = 512;

/// The result of [`Store::watch`].
pub enum Watching {
    /// There is nothing to wait for, because every block is visible.
    Complete,
    /// The store watches as many blocks already as it may.
    TooMany,
    /// Blocks are missing. They are watched until this is dropped.
    Waits(Watch),
}

/// A watch on missing blocks, with a lease on the visible prefix. Dropping it ends both.
pub struct Watch {
    store: Arc<Store>,
    id: WatchId,
    owner: OwnerId,
    lease: Option<LeaseId>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        loop {
            let mut index = self.store.index.lock();
            let is_over = index.watches.forget(self.id, BLOCKS_A_HOLD);
            MutexGuard::unlock_fair(index);
            if is_over {
                break;
            }
        }
        if let Some(lease) = self.lease {
            self.store.release(self.owner, lease);
        }
    }
}

/// The visible prefix of a prompt, leased.
struct Held {
    tokens: u64,
    /// Tokens of the longest possible hit.
    most: u64,
    lease: Option<LeaseId>,
}

impl Store {
    /// Watches the blocks that `owner` needs for a hit of `tokens` and that are not visible yet. `saver` is expected to
    /// save them, but `on_event` hears of other engines' saves too. The visible prefix is leased for `owner` meanwhile.
    /// This does not count as a lookup; the lookup follows.
    pub fn watch(
        self: &Arc<Self>,
        (owner, saver): (OwnerId, OwnerId),
        groups: &[LookupGroup<'_>],
        tokens: u64,
        now: Instant,
        on_event: OnWatchEvent,
    ) -> Watching {
        let (watch, held) = {
            let mut index = self.index.lock();
            let Some(held) = index.lease_visible(owner, groups, tokens, now) else {
                return Watching::Complete;
            };
            let id = index.watches.begin(saver, on_event);
            (Watch { store: Arc::clone(self), id, owner, lease: held.lease }, held)
        };
        for (group, need) in groups.iter().zip(needs(groups, held.most).iter().flatten()) {
            let tokens_per_block = u64::from(need.tokens_per_block);
            let leased = if need.window_blocks == 0 { held.tokens / tokens_per_block } else { 0 };
            let first = need.first_block(held.most).max(leased) as usize;
            let wanted = &group.hashes[first..(held.most / tokens_per_block) as usize];
            for part in wanted.chunks(BLOCKS_A_HOLD) {
                let mut index = self.index.lock();
                let has_room = part.iter().all(|hash| index.watch_block(watch.id, group.space, hash, now));
                MutexGuard::unlock_fair(index);
                if !has_room {
                    return Watching::TooMany;
                }
            }
        }
        let is_complete = self.index.lock().watches.finish(watch.id);
        if is_complete { Watching::Complete } else { Watching::Waits(watch) }
    }

    /// A worker's request to save its shard of these blocks was refused before any of them was claimed. Lookups that await
    /// them are notified, and those that begin to await them within the next seconds.
    pub fn save_refused(
        &self,
        owner: OwnerId,
        space: SpaceId,
        shard: ShardNumber,
        hashes: &[BlockHash],
        now: Instant,
    ) {
        for part in hashes.chunks(BLOCKS_A_HOLD) {
            let mut index = self.index.lock();
            part.iter().for_each(|hash| index.save_refused(owner, space, shard, hash, now));
            MutexGuard::unlock_fair(index);
        }
    }

    /// Blocks that are watched; one that two lookups await counts twice.
    pub fn watched_blocks(&self) -> usize {
        self.index.lock().watches.blocks()
    }
}

impl Index {
    /// Leases the longest visible prefix. None if it is the longest possible hit already.
    fn lease_visible(
        &mut self,
        owner: OwnerId,
        groups: &[LookupGroup<'_>],
        max_tokens: u64,
        now: Instant,
    ) -> Option<Held> {
        let needs = needs(groups, max_tokens)?;
        let most = longest_hit(&needs, max_tokens, |_, _| true);
        let mut found: Vec<Vec<u32>> = needs.iter().map(|need| vec![NONE; need.blocks as usize]).collect();
        let tokens = longest_hit(&needs, max_tokens, |group, block| {
            let LookupGroup { space, hashes, .. } = groups[group];
            let slot = self.find_visible(space, &hashes[block as usize]);
            found[group][block as usize] = slot.unwrap_or(NONE);
            slot.is_some()
        });
        if tokens == most {
            return None;
        }
        let mut leased = Vec::new();
        for ((group, need), slots) in groups.iter().zip(&needs).zip(&found).filter(|_| tokens > 0) {
            let end = (tokens / u64::from(need.tokens_per_block)) as usize;
            self.lease_blocks(group.space, &slots[need.first_block(tokens) as usize..end], &mut leased);
        }
        let lease = (tokens > 0).then(|| self.leases.insert(owner, now, leased));
        Some(Held { tokens, most, lease })
    }

    fn find_visible(&self, space: SpaceId, hash: &BlockHash) -> Option<u32> {
        self.entries.find(space, hash).filter(|slot| self.entries.at(*slot).state == State::Sealed)
    }

    fn watch_block(&mut self, watch: WatchId, space: SpaceId, hash: &BlockHash, now: Instant) -> bool {
        let key = (space, *hash);
        let saver = self.watches.saver(watch);
        let slot = self.entries.find(space, hash);
        let state = slot.map(|slot| self.entries.at(slot).state);
        let claimed_by = slot.and_then(|slot| self.claims.get(&slot)).map(|claim| claim.owner);
        let shards = self.shards_of(space);
        let was_refused = saver.is_some_and(|saver| self.not_saved.has(key, saver, shards, now));
        let is_claimed_by_saver = claimed_by.is_some() && claimed_by == saver;
        let is_requested = match state {
            Some(State::Committed) => true,
            _ => was_refused || is_claimed_by_saver,
        };
        let is_absent = matches!(state, None | Some(State::Gap));
        let is_visible = state == Some(State::Sealed);
        // A block that the saver has claimed still lacks the refused shard, whose worker does not request it again.
        let is_lost = was_refused && (is_absent || is_claimed_by_saver);
        self.watches.add(watch, key, InitialState { is_visible, is_requested, is_lost })
    }

    /// Records an engine's request to save a shard of a block, and its outcome. Notifies the watches of the block.
    pub(crate) fn save_requested(
        &mut self,
        owner: OwnerId,
        key: Key,
        shard: ShardNumber,
        outcome: &ClaimOutcome,
        now: Instant,
    ) {
        match outcome {
            ClaimOutcome::Claimed(_) => self.not_saved.forget(key, owner, shard),
            ClaimOutcome::NoRoom => self.not_saved.note(key, owner, shard, now),
            ClaimOutcome::Present | ClaimOutcome::InFlight => {}
        }
        self.watches.save_requested(owner, key, outcome);
    }

    fn save_refused(
        &mut self,
        owner: OwnerId,
        space: SpaceId,
        shard: ShardNumber,
        hash: &BlockHash,
        now: Instant,
    ) {
        let slot = self.entries.find(space, hash);
        let is_stored = |slot| matches!(self.entries.at(slot).state, State::Committed | State::Sealed);
        let outcome = match slot.map(|slot| (slot, self.claims.get(&slot))) {
            Some((_, Some(claim))) if claim.owner != owner => ClaimOutcome::InFlight,
            Some((_, Some(claim))) if claim.is_granted(shard) => ClaimOutcome::Present,
            Some((slot, None)) if is_stored(slot) => ClaimOutcome::Present,
            _ => ClaimOutcome::NoRoom,
        };
        self.save_requested(owner, (space, *hash), shard, &outcome, now);
    }
}
