//! A leg's share of its node's load, from the choice to the leg's end. The table in [`super`] shows when each count is added
//! and released.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    nodes::{NodeId, Nodes},
    prediction::Terms,
    transfer_cost::Transfer,
};

/// Fewest tokens after the first one for a mean.
const FURTHER_MIN: u32 = 8;

/// A router's request to one engine: the part of a client's request that a node serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leg {
    /// Prompt and answer.
    Whole,
    /// The prompt, and one token.
    Prefill,
    /// The answer, with the prompt's blocks from a prefill node.
    Decode,
}

impl Leg {
    /// As in metrics and answers.
    pub fn name(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// How a leg ended, which decides whether the end counts for or against its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LegEnd {
    /// With an answer, even if the answer is that the request was wrong.
    Served,
    /// Without an answer, or the node said that it cannot serve.
    Failed,
    /// The node answered 500, which may be the request's fault ([`Doubt`](super::Doubt)).
    InDoubt,
    /// The router or its client gave up.
    Left,
}

/// A leg's share of its node's load. It cannot be copied, because [`Scheduler::end`](super::Scheduler::end) has to release it
/// exactly once.
#[derive(Debug, PartialEq)]
#[must_use = "the node counts as loaded until the scheduler hears of the leg's end"]
pub struct Reservation {
    /// The node whose load it is part of.
    pub node: NodeId,
    /// The part of the request that the node serves.
    pub leg: Leg,
    /// Part of the node's `own_tokens`: tokens to prefill; 0 after the first byte.
    pub(super) tokens: u64,
    /// Part of the node's `own_unseen`.
    unseen: u64,
    /// Whether it is part of the node's `own_decodes`.
    decodes: bool,
    /// Prefill leg: the decode node in whose `own_awaited` it is.
    awaited_by: Option<NodeId>,
    /// When the first byte came, and how many requests the node had then.
    first_byte: Option<(Instant, u64)>,
    /// Whether the answer comes token by token.
    pub(super) streams: bool,
    /// Tokens that the proxy has counted so far.
    generated: u64,
    /// Terms of the first token's time, and when its wait began. None if the prediction learns nothing from it.
    pub(super) first_token: Option<(Terms, Instant)>,
    /// Leg of a pair: the transfer between both nodes, until its time was learned.
    pub(super) transfer: Option<Arc<Transfer>>,
}

impl Reservation {
    /// Adds the leg to its node's load.
    pub(super) fn take(nodes: &mut Nodes, node: NodeId, leg: Leg, tokens: u64) -> Self {
        if let Some(node) = nodes.get_mut(node) {
            node.load.own_requests += 1;
            node.load.own_tokens += tokens;
        }
        let mut taken = Self {
            unseen: 0,
            decodes: false,
            node,
            leg,
            tokens,
            awaited_by: None,
            first_byte: None,
            streams: false,
            generated: 0,
            first_token: None,
            transfer: None,
        };
        if leg == Leg::Decode {
            taken.begin_decoding(nodes);
        }
        taken
    }

    /// The answer comes in one piece, so nothing shows when its prompt is prefilled: it counts as decoding from now on, and its
    /// tokens as unseen.
    pub(super) fn begin_unseen(&mut self, nodes: &mut Nodes) {
        self.begin_decoding(nodes);
        if let Some(node) = nodes.get_mut(self.node) {
            node.load.own_unseen += self.tokens;
            self.unseen = self.tokens;
        }
    }

    /// Counts it as decoding, once.
    pub(super) fn begin_decoding(&mut self, nodes: &mut Nodes) {
        if let Some(node) = nodes.get_mut(self.node).filter(|_| !self.decodes) {
            node.load.own_decodes += 1;
            self.decodes = true;
        }
    }

    /// The decode node has nothing to do for this request until the leg has prefilled it.
    pub(super) fn await_at(&mut self, nodes: &mut Nodes, decode: NodeId) {
        if let Some(node) = nodes.get_mut(decode) {
            node.load.own_awaited += 1;
            self.awaited_by = Some(decode);
        }
    }

    fn end_await(&mut self, nodes: &mut Nodes) {
        if let Some(node) = self.awaited_by.take().and_then(|decode| nodes.get_mut(decode)) {
            node.load.own_awaited -= 1;
        }
    }

    /// The predictions learn nothing from this leg, because its answer's time does not show what a first token or a transfer
    /// costs.
    pub fn learn_nothing(&mut self) {
        (self.first_token, self.transfer) = (None, None);
    }

    /// Counts tokens that have come.
    pub fn generated(&mut self, tokens: u64) {
        self.generated += tokens;
    }

    /// The node's mean number of requests since the first byte, and the mean time for each further token. None for a prefill
    /// leg, for an answer in one piece, and for fewer than [`FURTHER_MIN`] tokens.
    pub(super) fn further_token(&self, requests_now: u64, now: Instant) -> Option<(u64, Duration)> {
        let (begun, requests_then) = self.first_byte.filter(|_| self.streams && self.leg != Leg::Prefill)?;
        let behind =
            u32::try_from(self.generated).ok()?.checked_sub(1).filter(|behind| *behind >= FURTHER_MIN)?;
        Some((requests_then.midpoint(requests_now), now.saturating_duration_since(begun) / behind))
    }

    /// The first byte has come, so nothing is left to prefill: releases the tokens.
    pub(super) fn prefilled(&mut self, nodes: &mut Nodes, now: Instant) {
        self.end_await(nodes);
        if self.leg == Leg::Whole {
            self.begin_decoding(nodes);
        }
        let (tokens, unseen) = (std::mem::take(&mut self.tokens), std::mem::take(&mut self.unseen));
        if let Some(node) = nodes.get_mut(self.node) {
            node.load.own_tokens -= tokens;
            node.load.own_unseen -= unseen;
            self.first_byte.get_or_insert((now, node.load.batch()));
        }
    }

    /// Releases all that is left. If the node has been removed, its load went with it.
    pub(super) fn release(mut self, nodes: &mut Nodes) {
        self.end_await(nodes);
        if let Some(node) = nodes.get_mut(self.node) {
            node.load.own_tokens -= self.tokens;
            node.load.own_unseen -= self.unseen;
            node.load.own_requests -= 1;
            node.load.own_decodes -= u64::from(self.decodes);
        }
    }
}
