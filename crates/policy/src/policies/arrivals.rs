//! [`Arrivals`]: recognises a run that continues a recent one, for policies that evict in the order of arrival.

use super::per_slot::PerSlot;

/// When blocks arrived. A prompt may be stored in several parts, each of which continues the one before. If the part
/// before arrived recently, both are to be evicted as if they had arrived together, the tail first.
#[derive(Default)]
pub(super) struct Arrivals {
    came: PerSlot<u32>,
    /// Blocks that arrived so far, which is the clock of `came`.
    blocks: u32,
}

impl Arrivals {
    /// A block is recent while no more than one in this many of the queue's length arrived after it.
    const LATELY: usize = 4;

    /// Records the arrival of `run` in a queue of `len` blocks. `parent` is the block that the run continues, if that
    /// is in the queue. Returns `parent` if it arrived recently.
    pub(super) fn add(&mut self, run: &[u32], parent: Option<u32>, len: usize) -> Option<u32> {
        let age = |parent: &u32| self.blocks.wrapping_sub(self.came.get(*parent)) as usize;
        let parent = parent.filter(|parent| age(parent) <= len / Self::LATELY);
        let came = parent.map_or(self.blocks, |parent| self.came.get(parent));
        run.iter().for_each(|&slot| self.came.set(slot, came));
        self.blocks = self.blocks.wrapping_add(run.len() as u32);
        parent
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.came.heap_bytes()
    }
}
