//! Which decode nodes a prefill node's prompt reaches soonest, for [`Policy::LeastDelay`](super::Policy).

use std::{sync::Arc, time::Instant};

use super::{
    load::CACHE_PERCENT_MAX,
    nodes::{Node, NodeId},
    pick::Candidate,
    prediction::Prediction,
    scheduler::Scheduler,
    transfer_cost::{Transfer, TransferCost},
};

/// A decode node is near if its transfer takes at most this many times as long as the fastest one,
const NEAR: f64 = 1.1;
/// plus this many milliseconds.
const NEAR_MS: f64 = 2.0;
/// A decode node is too busy, even within the limit, if its tokens take this many times as long as the fastest one's.
const SLOWER: f64 = 1.5;

/// Predictions for decode nodes of one class, on the prefill node's host or on other hosts.
struct Reach<'a> {
    class: &'a Arc<str>,
    is_one_host: bool,
    cost: Option<TransferCost<'a>>,
    prediction: Option<&'a Prediction>,
}

impl Scheduler {
    /// A new transfer, for the reservations of both legs.
    pub(super) fn transfer(
        &self,
        prefill: NodeId,
        decode: NodeId,
        prompt_tokens: u64,
    ) -> Option<Arc<Transfer>> {
        Some(Arc::new(Transfer::new(self.nodes.get(prefill)?, self.nodes.get(decode)?, prompt_tokens)))
    }

    /// The decode nodes that this prefill node reaches soonest, among those whose tokens come within the limit. None if all are
    /// reached alike. None also if one path's cost is unknown or stale, so that choices go there and show it.
    pub(super) fn near(
        &self,
        prefill: NodeId,
        decodes: &[Candidate],
        prompt_tokens: u64,
        now: Instant,
    ) -> Option<Vec<Candidate>> {
        let from = self.nodes.get(prefill)?;
        let nodes: Vec<&Node> = decodes.iter().map(|each| self.nodes.get(each.id)).collect::<Option<_>>()?;
        // A thousand nodes share a few classes and hosts, so each is looked up once.
        let mut reaches: Vec<Reach<'_>> = Vec::new();
        let mut by: Vec<usize> = Vec::with_capacity(nodes.len());
        for node in &nodes {
            let is_one_host = node.host == from.host;
            let is_this = |each: &Reach<'_>| each.is_one_host == is_one_host && *each.class == node.class;
            by.push(match reaches.iter().position(is_this) {
                Some(at) => at,
                None => {
                    let cost = self.transfer_costs.between(from, node, now);
                    let prediction = self.predictions.get(&node.class);
                    reaches.push(Reach { class: &node.class, is_one_host, cost, prediction });
                    reaches.len() - 1
                }
            });
        }
        if reaches.len() < 2 || reaches.iter().any(|reach| reach.cost.is_none()) {
            return None;
        }
        let takes = |at: usize| {
            let requests = nodes[at].load.batch();
            reaches[by[at]].cost.map_or(f64::INFINITY, |cost| cost.predict(prompt_tokens, requests))
        };
        let token = |at: usize| reaches[by[at]].prediction?.further_token(nodes[at].load.batch() + 1);
        let all = 0..decodes.len();
        let least = all.clone().filter_map(token).fold(f64::INFINITY, f64::min);
        let limit = self.tpot.map_or(f64::INFINITY, |limit| limit.as_secs_f64() * 1e3).min(least * SLOWER);
        let is_free = |at: &usize| {
            let has_room = nodes[*at].load.cache_percent.is_none_or(|percent| percent < CACHE_PERCENT_MAX);
            has_room && token(*at).is_none_or(|ms| ms <= limit)
        };
        let free: Vec<(usize, f64)> = all.filter(is_free).map(|at| (at, takes(at))).collect();
        let nearest = free.iter().map(|(_, takes)| *takes).min_by(f64::total_cmp)?;
        let is_near = |(_, takes): &&(usize, f64)| *takes <= nearest * NEAR + NEAR_MS;
        Some(free.iter().filter(is_near).map(|(at, _)| decodes[*at]).collect())
    }
}
