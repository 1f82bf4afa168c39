//! Builds a policy from its kind, empty or as the successor of another one.

use crate::kind::PolicyKind;
use crate::policies::{Arc, Learned, Lru, S3Fifo, Sieve, TinyLfu, WTinyLfu};
use crate::replacement::{Blocks, ReplacementPolicy};

impl PolicyKind {
    /// Builds an empty policy for a cache of about `capacity` blocks. The capacity sizes sketches and samples, and
    /// limits nothing.
    pub fn build(self, capacity: usize) -> Box<dyn ReplacementPolicy> {
        match self {
            Self::Lru => Box::new(Lru::new()),
            Self::Arc => Box::new(Arc::new()),
            Self::S3Fifo => Box::new(S3Fifo::new()),
            Self::Sieve => Box::new(Sieve::new()),
            Self::TinyLfu => Box::new(TinyLfu::new(capacity)),
            Self::WTinyLfu => Box::new(WTinyLfu::new(capacity)),
            Self::Learned => Box::new(Learned::new(capacity)),
        }
    }

    /// Builds a policy for a cache of about `capacity` blocks that takes over the slots of `from`, in its order, at
    /// time `references`. The new policy learns anew how often blocks are used and which were evicted.
    pub fn take_over(
        self,
        from: &dyn ReplacementPolicy,
        capacity: usize,
        references: u64,
        blocks: &dyn Blocks,
    ) -> Box<dyn ReplacementPolicy> {
        let mut policy = self.build(capacity);
        if let Some(learning) = policy.learning_mut() {
            learning.begin_at(references);
        }
        for slot in from.slots() {
            policy.insert(&[slot], None, blocks);
        }
        policy
    }
}
