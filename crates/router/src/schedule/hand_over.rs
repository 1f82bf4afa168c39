//! What a hand-over takes between two nodes, learned from those that came, and which decode nodes are near a prefill node.
//!
//! ```text
//!  from the prefill node's last token to the decode node's first one, ms = a + b * tokens of the prompt + c * requests there
//! ```
//! One formula for each *way*: the classes of both nodes, and whether they are on one host.

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use super::{
    least_squares::LeastSquares,
    load::CACHE_PERCENT_MAX,
    nodes::{Node, NodeId},
    pick::Candidate,
    prediction::Prediction,
    scheduler::Scheduler,
};

/// What a hand-over is said to depend on.
const TERMS: usize = 3;
/// Decode nodes are as near as the nearest one, whose hand-over takes no longer than this many times as long, and
const NEAR: f64 = 1.1;
/// so much.
const NEAR_MS: f64 = 2.0;
/// Where no limit is set, a decode node whose tokens take this many times as long as another one's has too much to do.
const SLOWER: f64 = 1.5;

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
}

/// What is known of decode nodes of one class, on the prefill node's host or on another one.
struct Reach<'a> {
    class: &'a Arc<str>,
    is_one_host: bool,
    takes: Option<&'a LeastSquares<TERMS>>,
    prediction: Option<&'a Prediction>,
}

fn terms(prompt_tokens: u64, requests: u64) -> [f64; TERMS] {
    [1.0, prompt_tokens as f64 / 1e3, requests as f64 / 10.0]
}

impl Scheduler {
    /// What both legs of a pair keep of their hand-over.
    pub(super) fn handing(&self, prefill: NodeId, decode: NodeId, prompt_tokens: u64) -> Option<Handing> {
        let (prefill, decode) = (self.nodes.get(prefill)?, self.nodes.get(decode)?);
        Some(Handing {
            way: Way::between(prefill, decode),
            terms: terms(prompt_tokens, decode.load.batch()),
            prefilled: Arc::default(),
        })
    }

    /// Of decode nodes, those that this prefill node hands over to soonest, among those whose tokens come within the limit. None
    /// if that is not known of each of them, or all of them are alike in this.
    pub(super) fn near(
        &self,
        prefill: NodeId,
        decodes: &[Candidate],
        prompt_tokens: u64,
    ) -> Option<Vec<Candidate>> {
        let from = self.nodes.get(prefill)?;
        let nodes: Vec<&Node> = decodes.iter().map(|each| self.nodes.get(each.id)).collect::<Option<_>>()?;
        // Of a thousand nodes few are reached in different ways.
        let mut reaches: Vec<Reach<'_>> = Vec::new();
        let mut by: Vec<usize> = Vec::with_capacity(nodes.len());
        for node in &nodes {
            let is_one_host = node.host == from.host;
            let is_this = |each: &Reach<'_>| each.is_one_host == is_one_host && *each.class == node.class;
            by.push(match reaches.iter().position(is_this) {
                Some(at) => at,
                None => {
                    let takes = self.ways.0.get(&Way::between(from, node)).filter(|it| it.is_calibrated());
                    let prediction = self.predictions.get(&node.class);
                    reaches.push(Reach { class: &node.class, is_one_host, takes, prediction });
                    reaches.len() - 1
                }
            });
        }
        if reaches.len() < 2 || reaches.iter().any(|reach| reach.takes.is_none()) {
            return None;
        }
        let takes = |at: usize| {
            let terms = terms(prompt_tokens, nodes[at].load.batch());
            reaches[by[at]].takes.map_or(f64::INFINITY, |takes| takes.predict(&terms))
        };
        let token = |at: usize| reaches[by[at]].prediction?.further_token(nodes[at].load.batch() + 1);
        let all = 0..decodes.len();
        let least = all.clone().filter_map(token).fold(f64::INFINITY, f64::min);
        let limit = self.tpot.map_or(least * SLOWER, |limit| limit.as_secs_f64() * 1e3);
        let is_free = |at: &usize| {
            let has_room = nodes[*at].load.cache_percent.is_none_or(|percent| percent < CACHE_PERCENT_MAX);
            has_room && token(*at).is_none_or(|ms| ms <= limit)
        };
        let free: Vec<(usize, f64)> = all.filter(is_free).map(|at| (at, takes(at))).collect();
        let nearest = free.iter().map(|(_, takes)| *takes).min_by(f64::total_cmp)?;
        let is_near = |(_, takes): &&(usize, f64)| *takes <= nearest * NEAR + NEAR_MS;
        Some(free.iter().filter(is_near).map(|(at, _)| decodes[*at]).collect())
    }

    /// Tokens are to come within this time, one after the other; None: no limit is set.
    pub fn set_tpot(&mut self, limit: Option<Duration>) {
        self.tpot = limit;
    }
}
