//! Makes room: allocates the extents of a block, and evicts victims until they fit. Copies above their share go before the
//! policy's victims.

use std::collections::HashSet;
use std::ops::Range;

use kvlane_memory::PoolPage;
use kvlane_policy::Blocks;

use crate::api::SpaceId;
use crate::entries::{CopyState, Entry, NONE, State};
use crate::index::Index;
use crate::limbo::Extent;

/// Victims that one block may cost before the pool counts as too fragmented for it.
const VICTIMS: usize = 64;
/// Blocks that a search for one victim may pass over, beside those in use. A policy that orders by age meets the blocks of
/// a prompt, which have children, before those that a decode added. It moves what it passed, so that the next search does
/// not meet them again.
const REFUSALS: usize = 4096;
/// Slabs cut for another size that one call considers.
const SLABS: usize = 4;

/// The means that a claim call still has to make room. The first block that finds no room uses them up, which bounds the
/// work of a call.
pub(crate) struct Effort {
    /// The blocks that need room are copies.
    is_copy: bool,
    /// The policy found the blocks worth their victims. If not, they get free memory and that of copies above their share.
    is_worth_victims: bool,
    may_evict: bool,
    may_clear_slab: bool,
    /// False once a search for a victim has failed, until something makes another one likely.
    has_own_victims: bool,
    has_copy_victims: bool,
}

impl Effort {
    pub(crate) fn new(is_worth_victims: bool, is_copy: bool) -> Self {
        Self {
            is_copy,
            is_worth_victims,
            may_evict: true,
            may_clear_slab: is_worth_victims,
            has_own_victims: true,
            has_copy_victims: true,
        }
    }
}

impl Index {
    /// An extent for each shard of a block of `space`, or none at all.
    pub(crate) fn allocate_block(&mut self, space: SpaceId, effort: &mut Effort) -> Option<Vec<PoolPage>> {
        if self.spaces[space].block_bytes() > self.pool_bytes {
            return None;
        }
        let shards = self.spaces[space].shards();
        let mut pages = Vec::with_capacity(shards);
        let mut victims = VICTIMS;
        while pages.len() < shards {
            let bytes = self.spaces[space].shard_bytes[pages.len()];
            if let Some(page) = self.extents.alloc(bytes) {
                pages.push(page);
            } else if effort.may_evict && victims > 0 && self.evict_next(space, effort) {
                victims -= 1;
            } else if effort.may_evict && effort.may_clear_slab && self.may_take_own(space, effort) {
                effort.may_clear_slab = false;
                self.clear_slab(bytes);
                (effort.has_own_victims, effort.has_copy_victims) = (true, true);
            } else {
                effort.may_evict = false;
                for (page, &bytes) in pages.into_iter().zip(&self.spaces[space].shard_bytes) {
                    self.extents.free(page, bytes);
                }
                return None;
            }
        }
        Some(pages)
    }

    /// Evicts one block for a block of `space`: a copy if the copies exceed their share, else the policy's victim, else a
    /// copy.
    fn evict_next(&mut self, space: SpaceId, effort: &mut Effort) -> bool {
        if self.is_share_exceeded(space, effort) {
            self.evict_copy(effort) || self.may_take_own(space, effort) && self.evict_own(effort)
        } else {
            effort.is_worth_victims && (self.evict_own(effort) || self.evict_copy(effort))
        }
    }

    /// Whether the copies exceed their share, with a block of `space` if that is to be one.
    fn is_share_exceeded(&self, space: SpaceId, effort: &Effort) -> bool {
        let more = if effort.is_copy { self.spaces[space].room_bytes() } else { 0 };
        self.copies.exceed_share(more)
    }

    /// Whether a block of `space` may cost own blocks. A copy beyond the share may not.
    fn may_take_own(&self, space: SpaceId, effort: &Effort) -> bool {
        effort.is_worth_victims && !(effort.is_copy && self.is_share_exceeded(space, effort))
    }

    fn evict_own(&mut self, effort: &mut Effort) -> bool {
        if effort.has_own_victims
            && let Some(slot) = self.policy.take_victim(self.max_refusals(), &self.entries)
        {
            self.evict_below_parent(slot, effort);
            return true;
        }
        effort.has_own_victims = false;
        false
    }

    fn evict_copy(&mut self, effort: &mut Effort) -> bool {
        if effort.has_copy_victims
            && let Some(slot) = self.copies.take_victim(self.max_refusals(), &self.entries)
        {
            self.evict_below_parent(slot, effort);
            return true;
        }
        effort.has_copy_victims = false;
        false
    }

    /// Evicts a block. Its parent may be the next victim, although a search of the parent's order has failed before.
    fn evict_below_parent(&mut self, slot: u32, effort: &mut Effort) {
        let parent = self.entries.at(slot).parent;
        self.evict(slot);
        if parent != NONE && self.entries.may_evict(parent) {
            match self.entries.at(parent).copy {
                CopyState::Own => effort.has_own_victims = true,
                CopyState::Unhit | CopyState::HitOnce => effort.has_copy_victims = true,
            }
        }
    }

    /// The orders contain blocks in use. A search must be able to pass over all of them, wherever they stand.
    fn max_refusals(&self) -> usize {
        REFUSALS + 4 * self.blocks_in_use()
    }

    fn evict(&mut self, slot: u32) {
        let Entry { space, copy, stored_at, .. } = *self.entries.at(slot);
        self.note_lost(slot);
        self.residence.add(self.clock.now().saturating_sub(stored_at));
        self.counters.evicted_copies += u64::from(copy != CopyState::Own);
        self.counters.evicted_blocks += 1;
        self.counters.evicted_bytes += self.spaces[space].block_bytes();
        self.drop_block(slot);
    }

    /// Empties a slab, so that it can hold extents of `bytes`. Takes the one that costs the fewest blocks among the `SLABS`
    /// cheapest, if any of these can be emptied.
    fn clear_slab(&mut self, bytes: u64) {
        let slabs = self.extents.cheapest_slabs(bytes);
        let sacrifices = slabs.into_iter().take(SLABS).filter_map(|slab| self.blocks_in_and_below(slab));
        let Some(doomed) = sacrifices.min_by_key(HashSet::len) else { return };
        let mut ready: Vec<u32> =
            doomed.iter().copied().filter(|&slot| self.entries.at(slot).children == 0).collect();
        while let Some(slot) = ready.pop() {
            // A gap goes with its last child, and then the block above it may be next.
            let parent = self.nearest_block(self.entries.at(slot).parent);
            self.evict(slot);
            if doomed.contains(&parent) && self.entries.at(parent).children == 0 {
                ready.push(parent);
            }
        }
    }

    /// All blocks with an extent in these pages, and their descendants wherever those lie. None if one of them cannot be
    /// evicted now.
    fn blocks_in_and_below(&self, slab: Range<PoolPage>) -> Option<HashSet<u32>> {
        if self.limbo.iter().any(|Extent { page, .. }| slab.contains(&page)) {
            return None;
        }
        let mut found: HashSet<u32> = HashSet::new();
        for space in self.spaces.iter() {
            for (slot, row) in space.rows.iter() {
                if space.rows.shards(row).any(|(page, _)| slab.contains(&page)) {
                    found.insert(slot);
                }
            }
        }
        self.add_descendants(&mut found);
        let can_go = |&slot: &u32| {
            let entry = self.entries.at(slot);
            entry.state == State::Gap
                || entry.state == State::Sealed && entry.leases == 0 && entry.checks == 0
        };
        found.iter().all(can_go).then_some(found)
    }

    /// Adds all descendants of `slots`. Walks all entries, unless every child of `slots` is one of them.
    fn add_descendants(&self, slots: &mut HashSet<u32>) {
        let children: u32 = slots.iter().map(|&slot| self.entries.at(slot).children).sum();
        let inside = slots.iter().filter(|&&slot| slots.contains(&self.entries.at(slot).parent)).count();
        if children as usize == inside {
            return;
        }
        let mut others = vec![false; self.entries.slots() as usize];
        let mut path = Vec::new();
        for (slot, _) in self.entries.iter() {
            let mut at = slot;
            while at != NONE && !others[at as usize] && !slots.contains(&at) {
                path.push(at);
                at = self.entries.at(at).parent;
            }
            if slots.contains(&at) {
                slots.extend(path.drain(..));
            } else {
                path.drain(..).for_each(|slot| others[slot as usize] = true);
            }
        }
    }

    /// The slot itself, or the first above it that holds a block; `NONE` if there is none.
    fn nearest_block(&self, mut slot: u32) -> u32 {
        while slot != NONE && self.entries.at(slot).state == State::Gap {
            slot = self.entries.at(slot).parent;
        }
        slot
    }
}
