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
    pools::{LOAD_SHARE, PoolOf, Pools},
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
    /// Prompts that nodes can load, whichever node has prefilled them.
    pub(super) pools: Pools,
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

/// A node was ejected, or has returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// The node gets no requests for this time.
    Ejected {
        /// Time until the router tries the node.
        pause: Duration,
        /// Failures in a row.
        failures: u32,
    },
    /// The node has served a request again.
    Returned {
        /// Time since it was ejected first.
        after: Duration,
    },
}

impl Scheduler {
    /// One without nodes.
    pub fn new(settings: Settings) -> Self {
        Self {
            index: Index::new(settings.marks_max),
            pools: Pools::new(settings.marks_max),
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
        self.leave_pool(id);
        self.pairs.remove(&id);
        self.pairs.values_mut().filter_map(|of| of.get_mut(id.slot())).for_each(|choice| *choice = 0);
        self.nodes.remove(id)
    }

    /// Sets the pool that a node shares with all nodes of that pool's name; None: it shares none. A configured pool stays,
    /// whatever the engine's metrics name. Returns the pool's slot.
    pub fn set_pool(&mut self, id: NodeId, name: Option<&Arc<str>>, is_configured: bool) -> Option<usize> {
        let node = self.nodes.get(id)?;
        let present = node.pool.as_ref();
        let stays = present.map(|pool| &pool.name) == name
            || !is_configured && present.is_some_and(|pool| pool.is_configured);
        if stays {
            return present.map(|pool| pool.slot);
        }
        self.leave_pool(id);
        let (name, node) = (name?, self.nodes.get_mut(id)?);
        let slot = self.pools.join(name);
        node.pool = Some(PoolOf { name: Arc::clone(name), slot, is_configured });
        Some(slot)
    }

    /// The slot of a pool that nodes are of.
    pub fn pool_slot(&self, name: &str) -> Option<usize> {
        self.pools.slot_of(name)
    }

    fn leave_pool(&mut self, id: NodeId) {
        if let Some(pool) = self.nodes.get_mut(id).and_then(|node| node.pool.take()) {
            self.pools.leave(pool.slot);
        }
    }

    /// Time to load a token at a node of this class, divided by the time to compute one; and whether first tokens have shown it.
    pub fn load_share(&self, class: &str) -> (f64, bool) {
        let learned = self.predictions.get(class).and_then(Prediction::load_share);
        (learned.unwrap_or(LOAD_SHARE), learned.is_some())
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
        self.index.bytes() + self.pools.bytes()
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
        let pool = self.nodes.get(reservation.node).and_then(|node| node.pool.as_ref());
        if let Some(slot) = pool.map(|pool| pool.slot).filter(|_| self.needs_prefixes()) {
            self.pools.insert(marks, slot);
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

    /// Records the reason of a node's failure, for operators.
    pub fn note_failure(&mut self, id: NodeId, why: &str) {
        if let Some(node) = self.nodes.get_mut(id) {
            node.last_failure = Some(why.into());
        }
    }

    /// Reason of a node's last failure; None if it has served a request since.
    pub fn last_failure(&self, id: NodeId) -> Option<Arc<str>> {
        self.nodes.get(id)?.last_failure.clone()
    }

    /// A node has answered a request with 500.
    pub fn doubt(&mut self, id: NodeId, doubt: Doubt, now: Instant) -> Option<Turn> {
        let node = self.nodes.get_mut(id)?;
        let failures = node.doubts.raise(doubt, now);
        (0..failures).filter_map(|_| failed(node, now)).last()
    }

    /// Another node has served a request that this one answered with 500. Counts a failure of this one.
    pub fn convict(&mut self, id: NodeId, doubt: Doubt, now: Instant) -> Option<Turn> {
        let node = self.nodes.get_mut(id)?;
        if node.doubts.confirm(doubt) { failed(node, now) } else { None }
    }

    /// A prefill node has answered: with a hand-off, or without one.
    pub fn prefill_answered(&mut self, id: NodeId, handed_over: bool, now: Instant) -> Pairing {
        self.nodes.get_mut(id).map_or(Pairing::Same, |node| node.hand_offs.answered(handed_over, now))
    }

    pub(super) fn note_prefix(&mut self, marks: &[Mark], id: NodeId) {
        if self.needs_prefixes() {
            self.index.insert(marks, id.slot as usize);
        }
    }

    pub(super) fn needs_prefixes(&self) -> bool {
        self.settings.policy.needs_prefixes() || self.settings.decode_policy.needs_prefixes()
    }
}

fn failed(node: &mut Node, now: Instant) -> Option<Turn> {
    let pause = node.breaker.failed(now)?;
    Some(Turn::Ejected { pause, failures: node.breaker.failures() })
}
