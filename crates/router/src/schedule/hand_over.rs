//! What a hand-over takes between two nodes, learned from those that came.
//!
//! ```text
//!  from the prefill node's last token to the decode node's first one, ms = a + b * tokens of the prompt + c * requests there
//! ```
//! One formula for each *way*: the group and connector, the classes of both nodes, and whether they are on one host.

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use super::{
    least_squares::LeastSquares,
    nodes::{Connector, Node},
};

/// What a hand-over is said to depend on.
const TERMS: usize = 3;
/// What has not been seen for so long may be otherwise now: it is tried again.
const STALE: Duration = Duration::from_secs(60);

/// Between which nodes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Way {
    group: Arc<str>,
    connector: Connector,
    from: Arc<str>,
    to: Arc<str>,
    is_one_host: bool,
}

impl Way {
    fn between(prefill: &Node, decode: &Node) -> Self {
        Self {
            group: Arc::clone(&prefill.group),
            connector: prefill.connector,
            from: Arc::clone(&prefill.class),
            to: Arc::clone(&decode.class),
            is_one_host: prefill.host == decode.host,
        }
    }
}

/// Of one request, while its prompt goes from a prefill node to a decode node. Both legs have it.
#[derive(Debug, PartialEq)]
pub(super) struct Handing {
    way: Way,
    terms: [f64; TERMS],
    /// When the prefill node was done.
    prefilled: OnceLock<Instant>,
}

impl Handing {
    /// Of a prompt of so many tokens between these nodes.
    pub(super) fn of(prefill: &Node, decode: &Node, prompt_tokens: u64) -> Self {
        Self {
            way: Way::between(prefill, decode),
            terms: terms(prompt_tokens, decode.load.batch()),
            prefilled: OnceLock::new(),
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
pub(super) struct Ways(HashMap<Way, Seen>);

/// Hand-overs that came, and when the last one did.
#[derive(Debug)]
struct Seen {
    takes: LeastSquares<TERMS>,
    last: Instant,
}

impl Ways {
    /// The decode node's first token has come.
    pub(super) fn observe(&mut self, handing: &Handing, now: Instant) {
        if let Some(since) = handing.prefilled.get() {
            let took = now.saturating_duration_since(*since).as_secs_f64() * 1e3;
            let new = || Seen { takes: LeastSquares::default(), last: now };
            let seen = self.0.entry(handing.way.clone()).or_insert_with(new);
            seen.takes.observe(&handing.terms, took);
            seen.last = now;
        }
    }

    /// What is known of hand-overs between these nodes; None while that is too little, or was seen long ago.
    pub(super) fn between(&self, prefill: &Node, decode: &Node, now: Instant) -> Option<Takes<'_>> {
        let seen = self.0.get(&Way::between(prefill, decode))?;
        let is_known = seen.takes.is_calibrated() && now.saturating_duration_since(seen.last) < STALE;
        is_known.then_some(Takes(&seen.takes))
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
