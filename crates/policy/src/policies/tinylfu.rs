use crate::PrefixLru;
use crate::kind::PolicyKind;
use crate::replacement::{Blocks, ReplacementPolicy};
use crate::sketch::FrequencySketch;

/// LRU behind a gate: a full cache admits a run only if it was requested more often than the blocks it would displace.
///
/// Einziger, Friedman, Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM TOS 2017. A missed run is
/// judged as one, by the mean of its blocks' recent uses against that of all the victims it needs. A tie keeps it out.
/// Blocks that are used all the time survive any stream of prompts that never come back. But new conversations are kept
/// out too, so the policy is off by default.
pub struct TinyLfu {
    order: PrefixLru,
    uses: FrequencySketch,
}

impl TinyLfu {
    /// An empty policy for a cache of about `capacity` blocks.
    pub fn new(capacity: usize) -> Self {
        Self { order: PrefixLru::new(), uses: FrequencySketch::new(capacity) }
    }
}

/// The mean of the recent uses of `keys`; 0 without keys.
pub(super) fn mean_uses(sketch: &FrequencySketch, keys: impl Iterator<Item = u64>) -> f64 {
    let (mut sum, mut count) = (0, 0u32);
    for key in keys {
        sum += sketch.estimate(key);
        count += 1;
    }
    f64::from(sum) / f64::from(count.max(1))
}

impl ReplacementPolicy for TinyLfu {
    fn kind(&self) -> PolicyKind {
        PolicyKind::TinyLfu
    }

    fn missed(&mut self, _cached: usize, run: &mut dyn Iterator<Item = u64>) {
        run.for_each(|key| self.uses.increment(key));
    }

    fn has_gate(&self) -> bool {
        true
    }

    fn admit(&self, run: &[u64], _parent: Option<u32>, victims: usize, blocks: &dyn Blocks) -> bool {
        let candidate = mean_uses(&self.uses, run.iter().copied());
        let displaced = self.order.iter().filter(|&slot| !blocks.in_use(slot)).take(victims);
        let displaced = mean_uses(&self.uses, displaced.map(|slot| blocks.key(slot)));
        candidate > displaced
    }

    fn insert(&mut self, run: &[u32], parent: Option<u32>, _blocks: &dyn Blocks) {
        self.order.insert_run(run.iter().copied(), parent);
    }

    fn touch(&mut self, prefix: &[u32], blocks: &dyn Blocks) {
        prefix.iter().for_each(|&slot| self.uses.increment(blocks.key(slot)));
        self.order.touch_prefix(prefix);
    }

    fn renew(&mut self, from_tail: &mut dyn Iterator<Item = u32>) {
        self.order.touch_from_tail(from_tail);
    }

    fn remove(&mut self, slot: u32) -> bool {
        self.order.remove(slot)
    }

    fn take_victim(&mut self, max_refusals: usize, blocks: &dyn Blocks) -> Option<u32> {
        self.order.take_oldest(max_refusals, |slot| blocks.may_evict(slot))
    }

    fn grow(&mut self, capacity: usize) {
        self.uses.grow(capacity);
    }

    fn len(&self) -> usize {
        self.order.len()
    }

    fn contains(&self, slot: u32) -> bool {
        self.order.contains(slot)
    }

    fn heap_bytes(&self) -> usize {
        self.order.heap_bytes() + self.uses.heap_bytes()
    }

    fn slots(&self) -> Vec<u32> {
        self.order.iter().collect()
    }
}
