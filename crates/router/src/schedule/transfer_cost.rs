//! How long a prompt's transfer from a prefill to a decode node takes, learned from the transfers that came.
//!
//! ```text
//!  from the prefill node's last token to the decode node's first one:
//!  ms = a + b * (tokens of the prompt) + c * (requests at the decode node)
//! ```
//! Each [`Path`] has its own coefficients.

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use super::{
    least_squares::LeastSquares,
    nodes::{Connector, Node},
};

/// Terms of the formula.
const TERMS: usize = 3;
/// A path without a transfer for this long has no known cost any more, so that the router tries it again.
const STALE: Duration = Duration::from_secs(60);

/// Transfers that are alike: the group and connector, the classes of both nodes, and whether they are on one host.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Path {
    group: Arc<str>,
    connector: Connector,
    from: Arc<str>,
    to: Arc<str>,
    is_one_host: bool,
}

impl Path {
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

/// One request's transfer from a prefill to a decode node. Both legs' reservations share it.
#[derive(Debug, PartialEq)]
pub(super) struct Transfer {
    path: Path,
    terms: [f64; TERMS],
    /// When the prefill node's token came, which begins the transfer's time.
    prefilled: OnceLock<Instant>,
}

impl Transfer {
    pub(super) fn new(prefill: &Node, decode: &Node, prompt_tokens: u64) -> Self {
        Self {
            path: Path::between(prefill, decode),
            terms: terms(prompt_tokens, decode.load.batch()),
            prefilled: OnceLock::new(),
        }
    }

    /// The prefill node is done, so the transfer's time begins. Only the first call counts.
    pub(super) fn start(&self, now: Instant) {
        let _ = self.prefilled.set(now);
    }
}

/// The learned cost of each path.
#[derive(Debug, Default)]
pub(super) struct TransferCosts(HashMap<Path, Learned>);

#[derive(Debug)]
struct Learned {
    cost: LeastSquares<TERMS>,
    /// When its last transfer ended.
    last: Instant,
}

impl TransferCosts {
    /// Learns from a transfer whose decode node has just sent its first token.
    pub(super) fn observe(&mut self, transfer: &Transfer, now: Instant) {
        if let Some(since) = transfer.prefilled.get() {
            let took = now.saturating_duration_since(*since).as_secs_f64() * 1e3;
            let new = || Learned { cost: LeastSquares::default(), last: now };
            let learned = self.0.entry(transfer.path.clone()).or_insert_with(new);
            learned.cost.observe(&transfer.terms, took);
            learned.last = now;
        }
    }

    /// The cost of transfers between these nodes. None with too few transfers, or none within [`STALE`].
    pub(super) fn between(&self, prefill: &Node, decode: &Node, now: Instant) -> Option<TransferCost<'_>> {
        let learned = self.0.get(&Path::between(prefill, decode))?;
        let is_known = learned.cost.is_calibrated() && now.saturating_duration_since(learned.last) < STALE;
        is_known.then_some(TransferCost(&learned.cost))
    }
}

/// The cost of transfers along one path.
#[derive(Debug, Clone, Copy)]
pub(super) struct TransferCost<'a>(&'a LeastSquares<TERMS>);

impl TransferCost<'_> {
    /// Milliseconds for a prompt of this length, to a node with this many requests.
    pub(super) fn predict(self, prompt_tokens: u64, requests: u64) -> f64 {
        self.0.predict(&terms(prompt_tokens, requests))
    }
}

fn terms(prompt_tokens: u64, requests: u64) -> [f64; TERMS] {
    [1.0, prompt_tokens as f64 / 1e3, requests as f64 / 10.0]
}
