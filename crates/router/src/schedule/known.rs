//! What is known of a prompt beside its text.

use super::nodes::NodeId;

/// Tokens of a prompt that nodes have, where their engines tell of it. Others are judged by the prompt's marks.
#[derive(Debug, Clone, Default)]
pub struct Known {
    /// Tokens of the prompt, if they were counted.
    pub prompt_tokens: Option<u64>,
    /// By slot.
    cached: Vec<Option<(NodeId, u64)>>,
}

impl Known {
    /// The prompt has so many tokens.
    pub fn counted(tokens: u64) -> Self {
        Self { prompt_tokens: Some(tokens), cached: Vec::new() }
    }

    /// The node has that many tokens of it.
    pub fn set(&mut self, id: NodeId, tokens: u64) {
        if self.cached.len() <= id.slot() {
            self.cached.resize(id.slot() + 1, None);
        }
        self.cached[id.slot()] = Some((id, tokens));
    }

    /// Tokens of it that the node has. None where nothing is known exactly.
    pub fn of(&self, id: NodeId) -> Option<u64> {
        self.cached.get(id.slot()).copied().flatten().filter(|(of, _)| *of == id).map(|(_, tokens)| tokens)
    }
}
