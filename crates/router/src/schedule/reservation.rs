//! What a request takes of a node from the choice to its last byte.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    hand_over::Handing,
    nodes::{NodeId, Nodes},
    prediction::Terms,
};

/// Of fewer tokens behind the first one no mean is taken.
const FURTHER_MIN: u32 = 8;

/// What a node does for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leg {
    /// All of it.
    Whole,
    /// The prompt.
    Prefill,
    /// What comes after the prompt.
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

/// How a leg ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LegEnd {
    /// With an answer, even if the answer is that the request was wrong.
    Served,
    /// Without one, or the node said that it cannot.
    Failed,
    /// The node answered 500, which may be the request's fault ([`Doubt`](super::Doubt)).
    InDoubt,
    /// The router or its client gave up.
    Left,
}

/// A leg's share of its node's load. It has to be given back to the scheduler, once: so it cannot be copied.
#[derive(Debug, PartialEq)]
#[must_use = "the node counts as loaded until the scheduler hears of the leg's end"]
pub struct Reservation {
    /// The node that it counts at.
    pub node: NodeId,
    /// What the node does.
    pub leg: Leg,
    /// Tokens that were to be prefilled when the node was chosen, and are not yet.
    pub(super) tokens: u64,
    /// Of its tokens, those that count as unseen.
    unseen: u64,
    /// Whether it counts as decoding.
    decodes: bool,
    /// The node that waits for this prompt.
    awaited_by: Option<NodeId>,
    /// When its first byte came, and how many requests the node had then.
    pub(super) begun: Option<(Instant, u64)>,
    /// Whether its tokens come one by one.
    pub(super) streams: bool,
    /// Tokens that have come, as far as they are counted.
    generated: u64,
    /// What its first token will depend on, and since when it is awaited, where that is to be learned.
    pub(super) asked: Option<(Terms, Instant)>,
    /// Of a leg of a pair, as long as its hand-over is to be learned from.
    pub(super) handing: Option<Arc<Handing>>,
}

impl Reservation {
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
            begun: None,
            streams: false,
            generated: 0,
            asked: None,
            handing: None,
        };
        if leg == Leg::Decode {
            taken.begin_decoding(nodes);
        }
        taken
    }

    /// Its answer comes in one piece: it counts as decoding from now on, and when its prompt has been prefilled nobody sees.
    pub(super) fn begin_unseen(&mut self, nodes: &mut Nodes) {
        self.begin_decoding(nodes);
        if let Some(node) = nodes.get_mut(self.node) {
            node.load.own_unseen += self.tokens;
            self.unseen = self.tokens;
        }
    }

    /// It counts as decoding from now on.
    pub(super) fn begin_decoding(&mut self, nodes: &mut Nodes) {
        if let Some(node) = nodes.get_mut(self.node).filter(|_| !self.decodes) {
            node.load.own_decodes += 1;
            self.decodes = true;
        }
    }

    /// This node decodes what the leg prefills, and has nothing to do for it until then.
    pub(super) fn await_at(&mut self, nodes: &mut Nodes, decode: NodeId) {
        if let Some(node) = nodes.get_mut(decode) {
            node.load.own_awaited += 1;
            self.awaited_by = Some(decode);
        }
    }

    fn await_no_more(&mut self, nodes: &mut Nodes) {
        if let Some(node) = self.awaited_by.take().and_then(|decode| nodes.get_mut(decode)) {
            node.load.own_awaited -= 1;
        }
    }

    /// Its answer says nothing of what a first token takes.
    pub fn learn_nothing(&mut self) {
        (self.asked, self.handing) = (None, None);
    }

    /// So many more tokens have come.
    pub fn generated(&mut self, tokens: u64) {
        self.generated += tokens;
    }

    /// How many requests there were beside it, on average, and how long it waited for each further token; None where that was not
    /// counted, or is too little to tell.
    pub(super) fn further(&self, requests_now: u64, now: Instant) -> Option<(u64, Duration)> {
        let (begun, requests_then) = self.begun.filter(|_| self.streams && self.leg != Leg::Prefill)?;
        let behind =
            u32::try_from(self.generated).ok()?.checked_sub(1).filter(|behind| *behind >= FURTHER_MIN)?;
        Some((requests_then.midpoint(requests_now), now.saturating_duration_since(begun) / behind))
    }

    /// The first byte has come: nothing is left to prefill.
    pub(super) fn prefilled(&mut self, nodes: &mut Nodes, now: Instant) {
        self.await_no_more(nodes);
        if self.leg == Leg::Whole {
            self.begin_decoding(nodes);
        }
        let (tokens, unseen) = (std::mem::take(&mut self.tokens), std::mem::take(&mut self.unseen));
        if let Some(node) = nodes.get_mut(self.node) {
            node.load.own_tokens -= tokens;
            node.load.own_unseen -= unseen;
            self.begun.get_or_insert((now, node.load.batch()));
        }
    }

    /// The leg is over. A node that has gone meanwhile took its load with it.
    pub(super) fn give_back(mut self, nodes: &mut Nodes) {
        self.await_no_more(nodes);
        if let Some(node) = nodes.get_mut(self.node) {
            node.load.own_tokens -= self.tokens;
            node.load.own_unseen -= self.unseen;
            node.load.own_requests -= 1;
            node.load.own_decodes -= u64::from(self.decodes);
        }
    }
}
