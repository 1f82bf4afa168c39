//! What is known of a prompt beside its text.

use super::nodes::NodeId;

/// Tokens of a prompt that nodes have, where their engines tell of it. Others are judged by the prompt's marks.
#[derive(Debug, Clone, Default)]
pub struct Known {
    /// Tokens of the prompt, if they were counted.
    pub prompt_tokens: Option<u64>,
    /// By slot.
    cached: Vec<Option<(NodeId, Cached)>>,
    /// Tokens that each pool has, by its slot. None if they are not known exactly.
    pooled: Vec<Option<u64>>,
}

/// What a node has of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cached {
    /// Tokens, from the prompt's beginning.
    pub tokens: u64,
    /// Tokens of a block: they come and go together.
    pub block_size: u64,
}

impl Known {
    /// The prompt has so many tokens.
    pub fn counted(tokens: u64) -> Self {
        Self { prompt_tokens: Some(tokens), ..Self::default() }
    }

    /// The node has that much of it.
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

    /// What the node has of it. None where nothing is known exactly.
    pub fn of(&self, id: NodeId) -> Option<Cached> {
        self.cached.get(id.slot()).copied().flatten().filter(|(of, _)| *of == id).map(|(_, cached)| cached)
    }
}
