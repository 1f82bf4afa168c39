use super::per_slot::PerSlot;

/// When blocks came, for policies that evict in about that order. A prompt may come by and by, each time with what continues
/// the part before; as long as that part came lately, they are to be evicted as if they had come together, the tail first.
#[derive(Default)]
pub(super) struct Arrivals {
    came: PerSlot<u32>,
    blocks: u32,
}

impl Arrivals {
    /// One block in so many of a queue came lately.
    const LATELY: usize = 4;

    /// Notes that `run` comes into a queue of `len` blocks. `parent`, if it is in that queue, is the block that the run
    /// continues; it is answered if it came lately.
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
