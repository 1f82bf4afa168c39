use crate::PrefixLru;
use crate::kind::PolicyKind;
use crate::replacement::{Blocks, ReplacementPolicy};

/// Evicts the least recently used block.
///
/// Right if a block is used again soon or never, as in the turns of a conversation. A stream of prompts that never come
/// back displaces everything.
#[derive(Default)]
pub struct Lru {
    order: PrefixLru,
}

impl Lru {
    /// An empty policy.
    pub fn new() -> Self {
        Self::default()
    }
}

impl ReplacementPolicy for Lru {
    fn kind(&self) -> PolicyKind {
        PolicyKind::Lru
    }

    fn insert(&mut self, run: &[u32], parent: Option<u32>, _blocks: &dyn Blocks) {
        self.order.insert_run(run.iter().copied(), parent);
    }

    fn touch(&mut self, prefix: &[u32], _blocks: &dyn Blocks) {
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

    fn len(&self) -> usize {
        self.order.len()
    }

    fn contains(&self, slot: u32) -> bool {
        self.order.contains(slot)
    }

    fn heap_bytes(&self) -> usize {
        self.order.heap_bytes()
    }

    fn slots(&self) -> Vec<u32> {
        self.order.iter().collect()
    }
}
