//! Makes room: allocates the extents of a block, and evicts the policy's victims until they fit.

use std::collections::HashSet;
use std::ops::Range;

use kvlane_memory::PoolPage;

use crate::api::SpaceId;
use crate::entries::{NONE, State};
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
    may_evict: bool,
    may_clear_slab: bool,
}

impl Effort {
    /// All means if the blocks are worth victims, else only free memory.
    pub(crate) fn new(is_worth_victims: bool) -> Self {
        Self { may_evict: is_worth_victims, may_clear_slab: is_worth_victims }
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
            } else if effort.may_evict && victims > 0 && self.evict_next() {
                victims -= 1;
            } else if effort.may_evict && effort.may_clear_slab {
                effort.may_clear_slab = false;
                self.clear_slab(bytes);
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

    fn evict_next(&mut self) -> bool {
        // The policy's order contains blocks in use. A search must be able to pass over all of them, wherever they stand.
        let victim = self.policy.take_victim(REFUSALS + 4 * self.blocks_in_use(), &self.entries);
        if let Some(slot) = victim {
            self.evict(slot);
        }
        victim.is_some()
    }

    fn evict(&mut self, slot: u32) {
        let space = self.entries.at(slot).space;
        self.note_lost(slot);
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
