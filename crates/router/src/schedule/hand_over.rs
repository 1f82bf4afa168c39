//! What a hand-over takes between two nodes, learned from those that came.
//!
//! ```text
//!  from the prefill node's last token to the decode node's first one, ms = a + b * tokens of the prompt + c * requests there
//! ```
//! One formula for each *way*: the classes of both nodes, and whether they are on one host.

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
    time::Instant,
};

use super::{least_squares::LeastSquares, nodes::Node};

/// What a hand-over is said to depend on.
const TERMS: usize = 3;

/// Between which nodes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Way {
    from: Arc<str>,
    to: Arc<str>,
    is_one_host: bool,
}

impl Way {
    fn between(prefill: &Node, decode: &Node) -> Self {
        Self {
            from: Arc::clone(&prefill.class),
            to: Arc::clone(&decode.class),
            is_one_host: prefill.host == decode.host,
        }
    }
}

/// Of one request, while its prompt goes from a prefill node to a decode node. Both legs have it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Handing {
    way: Way,
    terms: [f64; TERMS],
    /// When the prefill node was done.
    prefilled: Arc<OnceLock<Instant>>,
}

impl Handing {
    /// Of a prompt of so many tokens between these nodes.
    pub(super) fn of(prefill: &Node, decode: &Node, prompt_tokens: u64) -> Self {
        Self {
            way: Way::between(prefill, decode),
            terms: terms(prompt_tokens, decode.load.batch()),
            prefilled: Arc::default(),
        }
    }

    /// The prefill node is done.
    pub(super) fn begin(&self, now: Instant) {
        // It is done once.
        let _ = self.prefilled.set(now);
    }
}

/// All ways that are known.
#[derive(Debug, Default)]
pub(super) struct Ways(HashMap<Way, LeastSquares<TERMS>>);

impl Ways {
    /// The decode node's first token has come.
    pub(super) fn observe(&mut self, handing: Handing, now: Instant) {
        if let Some(since) = handing.prefilled.get() {
            let took = now.saturating_duration_since(*since).as_secs_f64() * 1e3;
            self.0.entry(handing.way).or_default().observe(&handing.terms, took);
        }
    }

    /// What is known of hand-overs between these nodes; None while that is too little.
    pub(super) fn between(&self, prefill: &Node, decode: &Node) -> Option<Takes<'_>> {
        self.0.get(&Way::between(prefill, decode)).filter(|known| known.is_calibrated()).map(Takes)
    }
}

/// What hand-overs of one way take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Takes<'a>(&'a LeastSquares<TERMS>);

impl Takes<'_> {
    /// Milliseconds for a prompt of so many tokens, to a node with so many requests.
    pub(super) fn predict(self, prompt_tokens: u64, requests: u64) -> f64 {
        self.0.predict(&terms(prompt_tokens, requests))
    }
}

fn terms(prompt_tokens: u64, requests: u64) -> [f64; TERMS] {
    [1.0, prompt_tokens as f64 / 1e3, requests as f64 / 10.0]
}
