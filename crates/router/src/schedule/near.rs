//! Which decode nodes a prompt reaches soon from a prefill node.

use std::{sync::Arc, time::Instant};

use super::{
    hand_over::{Handing, Takes},
    load::CACHE_PERCENT_MAX,
    nodes::{Node, NodeId},
    pick::Candidate,
    prediction::Prediction,
    scheduler::Scheduler,
};

/// Decode nodes are as near as the nearest one, whose hand-over takes no longer than this many times as long, and
const NEAR: f64 = 1.1;
/// so much.
const NEAR_MS: f64 = 2.0;
/// A decode node whose tokens take this many times as long as another one's has too much to do, also within the limit.
const SLOWER: f64 = 1.5;

/// What is known of decode nodes of one class, on the prefill node's host or on another one.
struct Reach<'a> {
    class: &'a Arc<str>,
    is_one_host: bool,
    takes: Option<Takes<'a>>,
    prediction: Option<&'a Prediction>,
}

impl Scheduler {
    /// What both legs of a pair keep of their hand-over.
    pub(super) fn handing(
        &self,
        prefill: NodeId,
        decode: NodeId,
        prompt_tokens: u64,
    ) -> Option<Arc<Handing>> {
        Some(Arc::new(Handing::of(self.nodes.get(prefill)?, self.nodes.get(decode)?, prompt_tokens)))
    }

    /// Of decode nodes, those that this prefill node hands over to soonest, among those whose tokens come within the limit. None
    /// if that is not known of each of them, or all of them are alike in this: so a way that was not taken for a while is.
    pub(super) fn near(
        &self,
        prefill: NodeId,
        decodes: &[Candidate],
        prompt_tokens: u64,
        now: Instant,
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
                    let takes = self.ways.between(from, node, now);
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
            let requests = nodes[at].load.batch();
            reaches[by[at]].takes.map_or(f64::INFINITY, |takes| takes.predict(prompt_tokens, requests))
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
