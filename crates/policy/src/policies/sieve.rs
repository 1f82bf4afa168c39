use super::arrivals::Arrivals;
use super::per_slot::PerSlot;
use crate::PrefixLru;
use crate::kind::PolicyKind;
use crate::replacement::{Blocks, ReplacementPolicy};

/// Visits of a search to the same block before it takes it: at the first the block may be used. A block that must stay
/// is refused at each visit.
const ROUNDS: usize = 2;
/// Limit of used blocks that one search passes over. Then the next evictable block is the victim, used or not.
const PASSES: usize = 4096;

/// One queue, and a hand that moves from old to new and takes blocks that were not used since its last visit.
///
/// Zhang, Yang, Yue, Vigfusson, Rashmi, "SIEVE is Simpler than LRU", NSDI 2024. A hit costs one bit. Good if some
/// blocks are used all the time. Old conversations that were used once stay for long.
#[derive(Default)]
pub struct Sieve {
    queue: PrefixLru,
    used: PerSlot<bool>,
    /// The next slot that a search visits; None stands for the oldest.
    hand: Option<u32>,
    arrivals: Arrivals,
}

impl Sieve {
    /// An empty policy.
    pub fn new() -> Self {
        Self::default()
    }
}

impl ReplacementPolicy for Sieve {
    fn kind(&self) -> PolicyKind {
        PolicyKind::Sieve
    }

    fn insert(&mut self, run: &[u32], parent: Option<u32>, _blocks: &dyn Blocks) {
        run.iter().for_each(|&slot| self.used.set(slot, false));
        let parent = parent.filter(|&parent| self.queue.contains(parent));
        let parent = self.arrivals.add(run, parent, self.queue.len());
        self.queue.insert_run(run.iter().copied(), parent);
    }

    fn touch(&mut self, prefix: &[u32], _blocks: &dyn Blocks) {
        for &slot in prefix.iter().filter(|&&slot| self.queue.contains(slot)) {
            self.used.set(slot, true);
        }
    }

    fn remove(&mut self, slot: u32) -> bool {
        if self.hand == Some(slot) {
            self.hand = self.queue.newer(slot);
        }
        self.queue.remove(slot)
    }

    fn take_victim(&mut self, max_refusals: usize, blocks: &dyn Blocks) -> Option<u32> {
        let (mut refusals, mut passes) = (0, 0);
        while refusals <= max_refusals.min(ROUNDS * self.len()) {
            let slot = self.hand.or_else(|| self.queue.oldest())?;
            self.hand = self.queue.newer(slot);
            if self.used.get(slot) && passes < PASSES {
                passes += 1;
                self.used.set(slot, false);
            } else if blocks.may_evict(slot) {
                self.queue.remove(slot);
                return Some(slot);
            } else {
                refusals += 1;
            }
        }
        None
    }

    fn len(&self) -> usize {
        self.queue.len()
    }

    fn contains(&self, slot: u32) -> bool {
        self.queue.contains(slot)
    }

    fn heap_bytes(&self) -> usize {
        self.queue.heap_bytes() + self.used.heap_bytes() + self.arrivals.heap_bytes()
    }

    fn slots(&self) -> Vec<u32> {
        self.queue.iter().collect()
    }
}
