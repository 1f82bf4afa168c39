//! Making room: extents for a block, at the cost of the least recently used ones.

use std::collections::HashMap;
use std::ops::Range;

use crate::api::SpaceId;
use crate::entries::{NONE, State};
use crate::index::Index;
use crate::limbo::Extent;

/// Victims that one block may cost before the pool counts as too fragmented for it.
const VICTIMS: usize = 64;
/// Blocks that cannot be evicted now, passed over in search of one victim.
const REFUSALS: usize = 256;
/// Slabs cut for another size that one call considers.
const SLABS: usize = 4;

/// What a claim call may still do to make room. The first block that finds no room ends it, so that a call's work
/// is bounded.
pub(crate) struct Effort {
    may_evict: bool,
    may_clear_slab: bool,
}

impl Effort {
    pub(crate) fn new() -> Self {
        Self { may_evict: true, may_clear_slab: true }
    }
}

impl Index {
    /// An extent for each shard of a block of `space`, or none at all.
    pub(crate) fn allocate_block(&mut self, space: SpaceId, effort: &mut Effort) -> Option<Vec<u32>> {
        let space = space.0 as usize;
        if self.spaces[space].block_bytes() > self.pool_bytes {
            return None;
        }
        let shards = self.spaces[space].shards();
        let mut pages = Vec::with_capacity(shards);
        let mut victims = VICTIMS;
        while pages.len() < shards {
            let bytes = self.spaces[space].shard_bytes[pages.len()];
            if let Some(page) = self.extents.alloc(bytes, None) {
                pages.push(page);
            } else if effort.may_evict && victims > 0 && self.evict_oldest() {
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

    fn evict_oldest(&mut self) -> bool {
        let entries = &self.entries;
        let victim = self.lru.take_oldest(REFUSALS, |slot| {
            let entry = entries.at(slot);
            entry.children == 0 && !entry.checking
        });
        if let Some(slot) = victim {
            self.evict(slot);
        }
        victim.is_some()
    }

    fn evict(&mut self, slot: u32) {
        let space = self.entries.at(slot).space as usize;
        self.counters.evicted_blocks += 1;
        self.counters.evicted_bytes += self.spaces[space].block_bytes();
        self.drop_block(slot);
    }

    /// Hands one slab over to extents of `bytes`: of the cheapest ones, the first that can be emptied.
    fn clear_slab(&mut self, bytes: u64) {
        let slabs = self.extents.cheapest_slabs(bytes);
        let _cleared = slabs.into_iter().take(SLABS).any(|slab| self.empty(slab));
    }

    /// Evicts all blocks that have an extent in these pages, if every one of them can go without leaving a child
    /// behind; otherwise none.
    fn empty(&mut self, slab: Range<u32>) -> bool {
        if self.limbo.iter().any(|Extent { page, .. }| slab.contains(&page)) {
            return false;
        }
        // For each block in the slab, how many of its children are in the slab too.
        let mut inside: HashMap<u32, u32> = HashMap::new();
        for space in &self.spaces {
            for (slot, row) in space.rows.iter() {
                if space.rows.shards(row).any(|(page, _)| slab.contains(&page)) {
                    inside.insert(slot, 0);
                }
            }
        }
        let slots: Vec<u32> = inside.keys().copied().collect();
        for &slot in &slots {
            if let Some(children) = inside.get_mut(&self.entries.at(slot).parent) {
                *children += 1;
            }
        }
        let can_go = inside.iter().all(|(&slot, &children)| {
            let entry = self.entries.at(slot);
            let free_to_go = entry.state == State::Sealed && entry.leases == 0 && !entry.checking;
            free_to_go && entry.children == children
        });
        if !can_go {
            return false;
        }
        let mut ready: Vec<u32> =
            slots.into_iter().filter(|&slot| self.entries.at(slot).children == 0).collect();
        while let Some(slot) = ready.pop() {
            let parent = self.entries.at(slot).parent;
            self.evict(slot);
            if parent != NONE && inside.contains_key(&parent) && self.entries.at(parent).children == 0 {
                ready.push(parent);
            }
        }
        true
    }
}
