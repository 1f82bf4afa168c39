//! How many tokens of a prompt each node and each pool has cached, by their engines' events.

use super::nodes::NodeId;

/// The cached tokens of one prompt. It has no entry for nodes without events; the scheduler judges these by the prompt's marks.
#[derive(Debug, Clone, Default)]
pub struct CachedPrefixes {
    /// Length of the prompt in tokens, if a tokenizer counted them.
    pub prompt_tokens: Option<u64>,
    /// By the node's slot.
    cached: Vec<Option<(NodeId, Cached)>>,
    /// Leading tokens that each pool has, by its slot. None if they are not known exactly.
    pooled: Vec<Option<u64>>,
}

/// The prefix of a prompt that a node has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cached {
    /// Leading tokens of the prompt.
    pub tokens: u64,
    /// Tokens of a block of this engine.
    pub block_size: u64,
}

impl CachedPrefixes {
    /// A prompt of this length. No node has any of it yet, as far as is known.
    pub fn of_length(tokens: u64) -> Self {
        Self { prompt_tokens: Some(tokens), ..Self::default() }
    }

    /// Sets the prefix that a node has.
    pub fn set(&mut self, id: NodeId, cached: Cached) {
        if self.cached.len() <= id.slot() {
            self.cached.resize(id.slot() + 1, None);
        }
        self.cached[id.slot()] = Some((id, cached));
    }

    /// Sets the number of leading tokens that the pool with this slot has.
    pub fn set_pooled(&mut self, pool: usize, tokens: u64) {
        if self.pooled.len() <= pool {
            self.pooled.resize(pool + 1, None);
        }
        self.pooled[pool] = Some(tokens);
    }

    /// Leading tokens that a pool has. None if they are not known exactly.
    pub(super) fn pooled(&self, pool: usize) -> Option<u64> {
        self.pooled.get(pool).copied().flatten()
    }

    /// The prefix that a node has. None if its engine reports no events.
    pub fn of(&self, id: NodeId) -> Option<Cached> {
        self.cached.get(id.slot()).copied().flatten().filter(|(of, _)| *of == id).map(|(_, cached)| cached)
    }
}
