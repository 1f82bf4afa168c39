//! Makes a policy of a kind.

use crate::kind::PolicyKind;
use crate::policies::{Arc, Learned, Lru, S3Fifo, Sieve, TinyLfu, WTinyLfu};
use crate::replacement::{Blocks, ReplacementPolicy};

impl PolicyKind {
    /// An empty policy for a cache of about `capacity` blocks: frequency sketches are sized by it, nothing else.
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

    /// A policy for a cache of about `capacity` blocks that takes over what `from` holds, in its order, when `references` went by;
    /// how often blocks were used and which were evicted is learned anew.
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
