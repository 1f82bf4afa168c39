//! The last choices, for people who ask why a request went where it went.

use std::{collections::VecDeque, sync::Arc, time::SystemTime};

use serde_json::{Value, json};

use crate::{ids::RequestId, schedule::Why};

/// Choices that are remembered.
pub const DECISIONS_MAX: usize = 1000;

/// Members of a decision that reveal whether somebody has sent the beginning of a prompt before. `why` is one of them, because it
/// says that a decode node has the prompt and needs no prefill node.
const TELLS_OF_PREFIXES: [&str; 3] = ["cached_tokens", "prefill", "why"];

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

    /// The last `most` decisions, newest first. `is_quiet` leaves out the members that reveal other users' prompts.
    pub fn page(&self, most: usize, is_quiet: bool) -> Value {
        self.0.iter().rev().take(most).map(|decision| decision.page(is_quiet)).collect()
    }
}

impl Decision {
    fn page(&self, is_quiet: bool) -> Value {
        let at = self.at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let mut page = json!({
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
        });
        if let (true, Some(members)) = (is_quiet, page.as_object_mut()) {
            TELLS_OF_PREFIXES.iter().for_each(|name| drop(members.remove(*name)));
        }
        page
    }
}
