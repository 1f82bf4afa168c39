//! The last choices, for people who ask why a request went where it went.

use std::{collections::VecDeque, sync::Arc, time::SystemTime};

use serde_json::{Value, json};

use crate::{ids::RequestId, schedule::Why};

/// Choices that are remembered.
pub const DECISIONS_MAX: usize = 1000;

/// One choice.
#[derive(Debug, Clone)]
pub struct Decision {
    /// When it was made.
    pub at: SystemTime,
    /// Of which request.
    pub id: RequestId,
    /// What its client calls it.
    pub client_id: String,
    /// The model that it names.
    pub model: Option<String>,
    /// How often it had been tried before.
    pub attempt: u32,
    /// The node that prefills for another one.
    pub prefill: Option<Arc<str>>,
    /// The node that answers.
    pub node: Arc<str>,
    /// What led to it.
    pub why: Why,
    /// Tokens of the prompt, estimated.
    pub prompt_tokens: u64,
    /// Of them, those that the prefilling node probably has.
    pub cached_tokens: u64,
    /// Nodes that could have prefilled it.
    pub candidates: usize,
}

/// The last ones.
#[derive(Debug, Default)]
pub struct Decisions(VecDeque<Decision>);

impl Decisions {
    /// Remembers one; the oldest goes.
    pub fn push(&mut self, decision: Decision) {
        if self.0.len() == DECISIONS_MAX {
            self.0.pop_front();
        }
        self.0.push_back(decision);
    }

    /// The last `most`, the newest first.
    pub fn page(&self, most: usize) -> Value {
        self.0.iter().rev().take(most).map(Decision::page).collect()
    }
}

impl Decision {
    fn page(&self) -> Value {
        let at = self.at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        json!({
            "time": at,
            "id": self.id.name(),
            "client_id": self.client_id,
            "model": self.model,
            "attempt": self.attempt,
            "prefill": self.prefill.as_deref(),
            "node": &*self.node,
            "why": self.why.name(),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "candidates": self.candidates,
        })
    }
}
