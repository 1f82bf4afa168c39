//! Keeps the last choices of nodes, so that operators can see why a request went where it went.

use std::{collections::VecDeque, sync::Arc, time::SystemTime};

use serde_json::{Value, json};

use crate::{ids::RequestId, request_metrics::OTHER, schedule::Why};

/// Most choices that are kept.
pub const DECISIONS_MAX: usize = 1000;

/// Members of a decision that reveal whether somebody has sent the same prefix before. `why` is one of them, because it may say
/// that a decode node has the prompt and needs no prefill node.
const REVEAL_PREFIXES: [&str; 3] = ["cached_tokens", "prefill", "why"];

/// One choice of nodes, for one attempt at a request.
#[derive(Debug, Clone)]
pub struct Decision {
    /// When the choice was made.
    pub at: SystemTime,
    /// The request's id in logs.
    pub id: RequestId,
    /// The request's id at its client.
    pub client_id: String,
    /// The model that the request names.
    pub model: Option<String>,
    /// Number of the attempt, from 0.
    pub attempt: u32,
    /// The prefill node of a pair.
    pub prefill: Option<Arc<str>>,
    /// The node that answers.
    pub node: Arc<str>,
    /// Why the scheduler chose these nodes.
    pub why: Why,
    /// Tokens of the prompt, estimated.
    pub prompt_tokens: u64,
    /// Tokens of the prompt that the prefilling node probably has in its cache.
    pub cached_tokens: u64,
    /// Nodes that could have prefilled the prompt.
    pub candidates: usize,
}

/// The last [`DECISIONS_MAX`] choices.
#[derive(Debug, Default)]
pub struct Decisions(VecDeque<Decision>);

impl Decisions {
    /// Keeps a choice, and drops the oldest one if there are too many.
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

    /// The same without the ids of requests, and without models that no node serves, which clients make up.
    pub fn page_without_ids(&self, most: usize, is_quiet: bool, serves: impl Fn(&str) -> bool) -> Value {
        let mut page = self.page(most, is_quiet);
        for row in page.as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut) {
            row.remove("id");
            row.remove("client_id");
            if row.get("model").and_then(Value::as_str).is_some_and(|model| !serves(model)) {
                row.insert("model".into(), OTHER.into());
            }
        }
        page
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
            REVEAL_PREFIXES.iter().for_each(|name| drop(members.remove(*name)));
        }
        page
    }
}
