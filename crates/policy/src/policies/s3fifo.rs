use super::arrivals::Arrivals;
use super::per_slot::PerSlot;
use crate::PrefixLru;
use crate::ghost::Ghost;
use crate::kind::PolicyKind;
use crate::replacement::{Blocks, ReplacementPolicy};

/// The small queue, through which new blocks pass, holds one block in this many of the cache.
const SMALL_SHARE: usize = 10;
/// Uses in the small queue that move a block to the main one.
const PROMOTING_USES: u8 = 2;
/// Visits of a search to the same block before it takes it. Each visit counts a use down, and a move from the small
/// queue to the main one costs one more. A block that must stay is refused at each visit.
const ROUNDS: usize = 5;
/// Limit of blocks that are moved within the queues for one victim. Then the next evictable block is the victim, even
/// if it would have been moved too.
const MOVES: usize = 4096;

/// A small queue that blocks leave soon unless they are used, and a main queue for the rest.
///
/// Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023. The small queue is a
/// tenth of the cache. A block that was evicted from it and comes back goes to the main queue at once. Prompts that
/// never come back stay in the small queue. Best for caches that hold a few percent of the requested blocks.
#[derive(Default)]
pub struct S3Fifo {
    small: PrefixLru,
    main: PrefixLru,
    evicted: Ghost,
    /// Uses of each slot since it was inserted or last moved; at most 3.
    uses: PerSlot<u8>,
    arrivals: Arrivals,
}

impl S3Fifo {
    /// An empty policy.
    pub fn new() -> Self {
        Self::default()
    }
}

impl ReplacementPolicy for S3Fifo {
    fn kind(&self) -> PolicyKind {
        PolicyKind::S3Fifo
    }

    fn insert(&mut self, run: &[u32], parent: Option<u32>, blocks: &dyn Blocks) {
        for &slot in run.iter().rev() {
            self.uses.set(slot, 0);
            if self.evicted.remove(blocks.key(slot)) {
                self.main.push_newest(slot);
            }
        }
        let parent = parent.filter(|&parent| self.small.contains(parent));
        let parent = self.arrivals.add(run, parent, self.small.len());
        let main = &self.main;
        self.small.insert_run(run.iter().copied().filter(|&slot| !main.contains(slot)), parent);
    }

    fn touch(&mut self, prefix: &[u32], _blocks: &dyn Blocks) {
        for &slot in prefix.iter().filter(|&&slot| self.small.contains(slot) || self.main.contains(slot)) {
            self.uses.set(slot, (self.uses.get(slot) + 1).min(3));
        }
    }

    fn remove(&mut self, slot: u32) -> bool {
        self.small.remove(slot) || self.main.remove(slot)
    }

    fn take_victim(&mut self, max_refusals: usize, blocks: &dyn Blocks) -> Option<u32> {
        let mut refusals = 0;
        let mut moves = 0;
        // Refusals in a row in the main queue.
        let mut refused_in_main = 0;
        let len = self.len();
        while refusals <= max_refusals.min(ROUNDS * len) {
            // If nothing in the main queue is evictable, take from the small one.
            let stuck_after = self.main.len().min(max_refusals / 4);
            let main_is_stuck = refused_in_main >= stuck_after && !self.small.is_empty();
            let from_small = main_is_stuck || self.small.len() * SMALL_SHARE > len;
            let slot = if from_small { self.small.oldest() } else { self.main.oldest() }?;
            let uses = self.uses.get(slot);
            let promising = moves < MOVES && uses >= if from_small { PROMOTING_USES } else { 1 };
            if promising {
                moves += 1;
                refused_in_main = 0;
                self.uses.set(slot, if from_small { 0 } else { uses - 1 });
            } else if blocks.may_evict(slot) {
                self.remove(slot);
                if from_small {
                    self.evicted.push(blocks.key(slot));
                    self.evicted.trim(len);
                }
                return Some(slot);
            } else {
                refusals += 1;
                refused_in_main += usize::from(!from_small);
            }
            // Move a refused block like a used one, because a block that continues it was used.
            self.small.remove(slot);
            self.main.remove(slot);
            self.main.push_newest(slot);
        }
        None
    }

    fn len(&self) -> usize {
        self.small.len() + self.main.len()
    }

    fn contains(&self, slot: u32) -> bool {
        self.small.contains(slot) || self.main.contains(slot)
    }

    fn heap_bytes(&self) -> usize {
        self.small.heap_bytes()
            + self.main.heap_bytes()
            + self.evicted.heap_bytes()
            + self.uses.heap_bytes()
            + self.arrivals.heap_bytes()
    }

    fn slots(&self) -> Vec<u32> {
        self.small.iter().chain(self.main.iter()).collect()
    }
}
