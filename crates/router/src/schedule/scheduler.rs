//! What the scheduler knows: nodes, loads, prefixes.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    doubts::Doubt,
    hand_offs::Pairing,
    hand_over::Ways,
    index::Index,
    known::Known,
    nodes::{Node, NodeId, Nodes},
    prediction::Prediction,
    reservation::{Leg, LegEnd, Reservation},
    settings::Settings,
};
use crate::body::Mark;

/// Nodes, their loads and prefixes.
#[derive(Debug)]
pub struct Scheduler {
    pub(super) settings: Settings,
    pub(super) nodes: Nodes,
    pub(super) index: Index,
    pub(super) choices: u64,
    /// The number of the choice that took a prefill and a decode node together last. Without it two roles that are both taken
    /// in turn would meet in the same pairs for ever.
    /// By prefill node, and the decode node's slot; 0 where there was none.
    pub(super) pairs: HashMap<NodeId, Vec<u64>>,
    pub(super) chance: u64,
    /// By class of nodes.
    pub(super) predictions: HashMap<Arc<str>, Prediction>,
    /// What hand-overs take.
    pub(super) ways: Ways,
    /// Reused: bytes of the prompt that each node has.
    pub(super) matched: Vec<u32>,
    /// Of the prompt that is looked at.
    pub(super) known: Known,
    /// A prompt that would wait longer at prefill nodes may be prefilled by a decode node.
    pub(super) relief: Option<Duration>,
    /// Tokens are to come within this time, one after the other.
    pub(super) tpot: Option<Duration>,
}

/// A node's requests go elsewhere from now on, or no longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// It gets no requests for this time.
    Ejected {
        /// Until a request tries it.
        pause: Duration,
        /// In a row.
        failures: u32,
    },
    /// It has served a request after this time.
    Returned {
        /// Since it was ejected first.
        after: Duration,
    },
}

impl Scheduler {
    /// One without nodes.
    pub fn new(settings: Settings) -> Self {
        Self {
            index: Index::new(settings.marks_max),
            nodes: Nodes::default(),
            choices: 0,
            pairs: HashMap::new(),
            chance: settings.seed,
            predictions: HashMap::new(),
            ways: Ways::default(),
            matched: Vec::new(),
            known: Known::default(),
            relief: None,
            tpot: None,
            settings: Settings { bytes_per_token: settings.bytes_per_token.max(1), ..settings },
        }
    }

    /// A node joins.
    pub fn add(&mut self, node: Node) -> NodeId {
        let id = self.nodes.add(node);
        self.index.forget(id.slot as usize);
        id
    }

    /// A node goes, with all that was known of it.
    pub fn remove(&mut self, id: NodeId) -> Option<Node> {
        self.pairs.remove(&id);
        self.pairs.values_mut().filter_map(|of| of.get_mut(id.slot())).for_each(|choice| *choice = 0);
        self.nodes.remove(id)
    }

    /// A node's engine has started anew: it has no prefix any more.
    pub fn forget_prefixes(&mut self, id: NodeId) {
        if self.nodes.get(id).is_some() {
            self.index.forget(id.slot as usize);
        }
    }

    /// A node, if it is still there.
    pub fn node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(id)
    }

    /// The same, to change it.
    pub fn node_mut(&mut self, id: NodeId) -> Option<&mut Node> {
        self.nodes.get_mut(id)
    }

    /// All nodes.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        self.nodes.all()
    }

    /// A prompt that would wait longer than this at prefill nodes is prefilled by a decode node that has time and room for it;
    /// None: it waits.
    pub fn set_relief(&mut self, relief: Option<Duration>) {
        self.relief = relief;
    }

    /// Tokens are to come within this time, one after the other; None: no limit is set.
    pub fn set_tpot(&mut self, limit: Option<Duration>) {
        self.tpot = limit;
    }

    /// What is known of the nodes of a class, if a first token has come from one.
    pub fn prediction(&self, class: &str) -> Option<&Prediction> {
        self.predictions.get(class)
    }

    /// Bytes of memory that prefixes take.
    pub fn index_bytes(&self) -> usize {
        self.index.bytes()
    }

    /// A leg's first byte has come: its node has the prompt, which these are the marks of.
    pub fn prefilled(&mut self, reservation: &mut Reservation, marks: &[Mark], now: Instant) {
        reservation.prefilled(&mut self.nodes, now);
        if let (Some((terms, since)), Some(node)) =
            (reservation.asked.take(), self.nodes.get(reservation.node))
        {
            let prediction = self.predictions.entry(Arc::clone(&node.class)).or_default();
            prediction.observe(terms, now.saturating_duration_since(since));
        }
        match (reservation.leg, reservation.handing.take()) {
            (Leg::Decode, Some(handing)) => self.ways.observe(&handing, now),
            (_, handing) => handing.iter().for_each(|handing| handing.begin(now)),
        }
        if reservation.leg == Leg::Decode && self.nodes.get(reservation.node).is_some() {
            self.note_prefix(marks, reservation.node);
        }
    }

    /// A leg has ended, well or by its client.
    pub fn end(&mut self, reservation: Reservation, end: LegEnd, now: Instant) -> Option<Turn> {
        let mut turn = None;
        if let Some(node) = self.nodes.get_mut(reservation.node) {
            let further = reservation.further(node.load.batch(), now);
            if let Some((requests, took)) = further.filter(|_| end == LegEnd::Served) {
                let prediction = self.predictions.entry(Arc::clone(&node.class)).or_default();
                prediction.observe_further(requests, took);
            }
            match end {
                LegEnd::Served => {
                    node.doubts.clear();
                    node.last_failure = None;
                    turn = node.breaker.served(now).map(|after| Turn::Returned { after });
                }
                LegEnd::Failed => turn = failed(node, now),
                LegEnd::InDoubt | LegEnd::Left => node.breaker.left(),
            }
        }
        reservation.give_back(&mut self.nodes);
        turn
    }

    /// Says what a node failed of, for operators.
    pub fn note_failure(&mut self, id: NodeId, why: &str) {
        if let Some(node) = self.nodes.get_mut(id) {
            node.last_failure = Some(why.into());
        }
    }

    /// What a node failed of last; None if it has served a request since.
    pub fn last_failure(&self, id: NodeId) -> Option<Arc<str>> {
        self.nodes.get(id)?.last_failure.clone()
    }

    /// A node has answered a request with 500.
    pub fn doubt(&mut self, id: NodeId, doubt: Doubt, now: Instant) -> Option<Turn> {
        let node = self.nodes.get_mut(id)?;
        let failures = node.doubts.raise(doubt, now);
        (0..failures).filter_map(|_| failed(node, now)).last()
    }

    /// Another node has served a request that this one answered with 500.
    pub fn convict(&mut self, id: NodeId, doubt: Doubt, now: Instant) -> Option<Turn> {
        let node = self.nodes.get_mut(id)?;
        if node.doubts.confirm(doubt) { failed(node, now) } else { None }
    }

    /// A prefill node has answered: with a hand-off, or without one.
    pub fn prefill_answered(&mut self, id: NodeId, handed_over: bool, now: Instant) -> Pairing {
        self.nodes.get_mut(id).map_or(Pairing::Same, |node| node.hand_offs.answered(handed_over, now))
    }

    pub(super) fn note_prefix(&mut self, marks: &[Mark], id: NodeId) {
        if self.settings.policy.needs_prefixes() || self.settings.decode_policy.needs_prefixes() {
            self.index.insert(marks, id.slot as usize);
        }
    }
}

fn failed(node: &mut Node, now: Instant) -> Option<Turn> {
    let pause = node.breaker.failed(now)?;
    Some(Turn::Ejected { pause, failures: node.breaker.failures() })
}
