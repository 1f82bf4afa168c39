use super::arrivals::Arrivals;
use crate::PrefixLru;
use crate::ghost::Ghost;
use crate::kind::PolicyKind;
use crate::replacement::{Blocks, ReplacementPolicy};

/// Two LRU lists, of blocks used once and of blocks used again, whose shares adapt to the blocks that come back.
///
/// Megiddo, Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. The policy remembers the keys of
/// blocks that were evicted from either list, together as many as there are blocks. If such a block comes back, the
/// share of its list grows. Prompts that never come back displace only blocks that were used once.
#[derive(Default)]
pub struct Arc {
    /// Blocks used once; T1 in the paper.
    once: PrefixLru,
    /// Blocks used again; T2 in the paper.
    again: PrefixLru,
    /// Keys evicted from `once`; B1 in the paper.
    evicted_once: Ghost,
    /// Keys evicted from `again`; B2 in the paper.
    evicted_again: Ghost,
    /// Blocks that `once` should hold; p in the paper.
    once_target: f64,
    arrivals: Arrivals,
}

impl Arc {
    /// An empty policy.
    pub fn new() -> Self {
        Self::default()
    }

    /// Trims the keys so that |T1| + |B1| <= c and |T1| + |T2| + |B1| + |B2| <= 2c, where c is the number of blocks
    /// when the cache was last full.
    fn trim(&mut self, capacity: usize) {
        self.evicted_once.trim(capacity.saturating_sub(self.once.len()));
        let rest = (2 * capacity).saturating_sub(self.len() + self.evicted_once.len());
        self.evicted_again.trim(rest);
    }
}

impl ReplacementPolicy for Arc {
    fn kind(&self) -> PolicyKind {
        PolicyKind::Arc
    }

    /// Adapts the shares to the blocks that come back, before victims are chosen.
    fn missed(&mut self, _cached: usize, run: &mut dyn Iterator<Item = u64>) {
        for key in run {
            let (once, again) = (self.evicted_once.len() as f64, self.evicted_again.len() as f64);
            if self.evicted_once.contains(key) {
                self.once_target = (self.once_target + (again / once).max(1.0)).min(self.len() as f64);
            } else if self.evicted_again.contains(key) {
                self.once_target = (self.once_target - (once / again).max(1.0)).max(0.0);
            }
        }
    }

    fn insert(&mut self, run: &[u32], parent: Option<u32>, blocks: &dyn Blocks) {
        for &slot in run.iter().rev() {
            let key = blocks.key(slot);
            if self.evicted_once.remove(key) || self.evicted_again.remove(key) {
                self.again.push_newest(slot);
            }
        }
        let parent = parent.filter(|&parent| self.once.contains(parent));
        let parent = self.arrivals.add(run, parent, self.once.len());
        let again = &self.again;
        self.once.insert_run(run.iter().copied().filter(|&slot| !again.contains(slot)), parent);
    }

    fn touch(&mut self, prefix: &[u32], _blocks: &dyn Blocks) {
        for &slot in prefix.iter().rev() {
            if self.once.remove(slot) {
                self.again.push_newest(slot);
            } else {
                self.again.touch(slot);
            }
        }
    }

    fn remove(&mut self, slot: u32) -> bool {
        self.once.remove(slot) || self.again.remove(slot)
    }

    fn take_victim(&mut self, max_refusals: usize, blocks: &dyn Blocks) -> Option<u32> {
        let capacity = self.len();
        let may_evict = |slot| blocks.may_evict(slot);
        let once_first = self.once.len() as f64 > self.once_target || self.again.is_empty();
        let from_once = |policy: &mut Self| {
            let slot = policy.once.take_oldest(max_refusals / 2, may_evict)?;
            policy.evicted_once.push(blocks.key(slot));
            Some(slot)
        };
        let from_again = |policy: &mut Self| {
            let slot = policy.again.take_oldest(max_refusals / 2, may_evict)?;
            policy.evicted_again.push(blocks.key(slot));
            Some(slot)
        };
        let victim = if once_first {
            from_once(self).or_else(|| from_again(self))
        } else {
            from_again(self).or_else(|| from_once(self))
        };
        self.trim(capacity);
        victim
    }

    fn len(&self) -> usize {
        self.once.len() + self.again.len()
    }

    fn contains(&self, slot: u32) -> bool {
        self.once.contains(slot) || self.again.contains(slot)
    }

    fn heap_bytes(&self) -> usize {
        self.once.heap_bytes()
            + self.again.heap_bytes()
            + self.evicted_once.heap_bytes()
            + self.evicted_again.heap_bytes()
            + self.arrivals.heap_bytes()
    }

    fn slots(&self) -> Vec<u32> {
        self.once.iter().chain(self.again.iter()).collect()
    }
}
