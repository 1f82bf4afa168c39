//! The scheduler's state: nodes with their loads, prefixes and predictions; and the events that change it, from a node's join
//! to a leg's end. [`choose`](super::choose) reads it.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    cached::CachedPrefixes,
    doubts::Doubt,
    index::Index,
    nodes::{Node, NodeId, Nodes},
    pairing::Pairing,
    pools::{LOAD_SHARE, NodePool, Pools},
    prediction::Prediction,
    reservation::{Leg, LegEnd, Reservation},
    settings::SchedulerSettings,
    transfer_cost::TransferCosts,
};
use crate::body::Mark;

/// Chooses nodes for requests and keeps the load that its choices cause. Callers hold it behind one lock.
#[derive(Debug)]
pub struct Scheduler {
    pub(super) settings: SchedulerSettings,
    pub(super) nodes: Nodes,
    pub(super) index: Index,
    /// Prompts that nodes can load from a pool, whichever node prefilled them.
    pub(super) pools: Pools,
    pub(super) choices: u64,
    /// By prefill node and the decode node's slot: number of the choice that last paired them; 0 if none did. Without it, two
    /// roles that both go round-robin would meet in the same pairs for ever.
    pub(super) pairs: HashMap<NodeId, Vec<u64>>,
    /// State of SplitMix64.
    pub(super) rng: u64,
    /// By class of nodes.
    pub(super) predictions: HashMap<Arc<str>, Prediction>,
    pub(super) transfer_costs: TransferCosts,
    /// By slot: leading bytes of the current request's prompt that each node has. Kept to reuse its memory.
    pub(super) matched: Vec<u32>,
    /// Cached tokens of the current request's prompt.
    pub(super) cached: CachedPrefixes,
    /// Longest wait at prefill nodes; beyond it a decode node may prefill.
    pub(super) relief: Option<Duration>,
    /// Limit on the time between two tokens.
    pub(super) tpot: Option<Duration>,
}

/// A change of a node's [breaker](super::Breaker), for the log.
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
    /// A scheduler without nodes.
    pub fn new(settings: SchedulerSettings) -> Self {
        Self {
            index: Index::new(settings.marks_max),
            pools: Pools::new(settings.marks_max),
            nodes: Nodes::default(),
            choices: 0,
            pairs: HashMap::new(),
            rng: settings.seed,
            predictions: HashMap::new(),
            transfer_costs: TransferCosts::default(),
            matched: Vec::new(),
            cached: CachedPrefixes::default(),
            relief: None,
            tpot: None,
            settings: SchedulerSettings { bytes_per_token: settings.bytes_per_token.max(1), ..settings },
        }
    }

    /// Adds a node. Its slot may have been another node's, so prefixes of that slot are forgotten.
    pub fn add(&mut self, node: Node) -> NodeId {
        let id = self.nodes.add(node);
        self.index.forget(id.slot as usize);
        id
    }

    /// Removes a node with its load and its pool. Reservations at it stay valid, and release nothing when they end.
    pub fn remove(&mut self, id: NodeId) -> Option<Node> {
        self.leave_pool(id);
        self.pairs.remove(&id);
        self.pairs.values_mut().filter_map(|of| of.get_mut(id.slot())).for_each(|choice| *choice = 0);
        self.nodes.remove(id)
    }

    /// Puts a node into the pool of this name; None: into no pool. If the router's file named the node's pool, a name from the
    /// engine's metrics (`is_configured` false) does not replace it. Returns the slot of the pool that counts.
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
        node.pool = Some(NodePool { name: Arc::clone(name), slot, is_configured });
        Some(slot)
    }

    /// The slot of a pool that has nodes.
    pub fn pool_slot(&self, name: &str) -> Option<usize> {
        self.pools.slot_of(name)
    }

    fn leave_pool(&mut self, id: NodeId) {
        if let Some(pool) = self.nodes.get_mut(id).and_then(|node| node.pool.take()) {
            self.pools.leave(pool.slot);
        }
    }

    /// Time to load a token at a node of this class, divided by the time to compute one; and whether it was learned. If not, it
    /// is a default.
    pub fn load_share(&self, class: &str) -> (f64, bool) {
        let learned = self.predictions.get(class).and_then(Prediction::load_share);
        (learned.unwrap_or(LOAD_SHARE), learned.is_some())
    }

    /// Drops all prefixes of a node, because its engine has restarted.
    pub fn forget_prefixes(&mut self, id: NodeId) {
        if self.nodes.get(id).is_some() {
            self.index.forget(id.slot as usize);
        }
    }

    /// None once the node has been removed.
    pub fn node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(id)
    }

    /// As [`Self::node`].
    pub fn node_mut(&mut self, id: NodeId) -> Option<&mut Node> {
        self.nodes.get_mut(id)
    }

    /// All nodes, by slot.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        self.nodes.all()
    }

    /// Sets the longest wait at prefill nodes. If a prompt would wait longer, a decode node with time and room prefills it.
    /// None: the prompt waits.
    pub fn set_relief(&mut self, relief: Option<Duration>) {
        self.relief = relief;
    }

    /// Sets the limit on the time between two tokens, for [`Policy::LeastDelay`](super::Policy); None: no limit.
    pub fn set_tpot(&mut self, limit: Option<Duration>) {
        self.tpot = limit;
    }

    /// The learned times of a class of nodes. None before its first token.
    pub fn prediction(&self, class: &str) -> Option<&Prediction> {
        self.predictions.get(class)
    }

    /// Memory of all prefixes, in bytes.
    pub fn index_bytes(&self) -> usize {
        self.index.bytes() + self.pools.bytes()
    }

    /// The first byte of a leg's answer has come, so its node has prefilled the prompt with these marks. Releases the leg's
    /// tokens and learns from the time that they took.
    pub fn prefilled(&mut self, reservation: &mut Reservation, marks: &[Mark], now: Instant) {
        reservation.prefilled(&mut self.nodes, now);
        if let (Some((terms, since)), Some(node)) =
            (reservation.first_token.take(), self.nodes.get(reservation.node))
        {
            let prediction = self.predictions.entry(Arc::clone(&node.class)).or_default();
            prediction.observe(terms, now.saturating_duration_since(since));
        }
        match (reservation.leg, reservation.transfer.take()) {
            (Leg::Decode, Some(transfer)) => self.transfer_costs.observe(&transfer, now),
            (_, transfer) => transfer.iter().for_each(|transfer| transfer.start(now)),
        }
        let pool = self.nodes.get(reservation.node).and_then(|node| node.pool.as_ref());
        if let Some(slot) = pool.map(|pool| pool.slot).filter(|_| self.needs_prefixes()) {
            self.pools.insert(marks, slot);
        }
        if reservation.leg == Leg::Decode && self.nodes.get(reservation.node).is_some() {
            self.record_prefix(marks, reservation.node);
        }
    }

    /// A leg has ended: releases what is left of its reservation, and counts the end for or against the node. Returns what that
    /// changed about the node's breaker.
    pub fn end(&mut self, reservation: Reservation, end: LegEnd, now: Instant) -> Option<Turn> {
        let mut turn = None;
        if let Some(node) = self.nodes.get_mut(reservation.node) {
            let further = reservation.further_token(node.load.batch(), now);
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
        reservation.release(&mut self.nodes);
        turn
    }

    /// Records the reason of a node's failure, for `/nodes` and logs.
    pub fn note_failure(&mut self, id: NodeId, why: &str) {
        if let Some(node) = self.nodes.get_mut(id) {
            node.last_failure = Some(why.into());
        }
    }

    /// Reason of a node's last failure; None if it has served a request since.
    pub fn last_failure(&self, id: NodeId) -> Option<Arc<str>> {
        self.nodes.get(id)?.last_failure.clone()
    }

    /// A node has answered a request with 500: counts the failures that [`Doubt`] says follow from it.
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

    /// A prefill node has answered, with a hand-off or without one. Returns what that changed about its pairs.
    pub fn prefill_answered(&mut self, id: NodeId, handed_over: bool, now: Instant) -> Pairing {
        self.nodes.get_mut(id).map_or(Pairing::Same, |node| node.pairing.answered(handed_over, now))
    }

    pub(super) fn record_prefix(&mut self, marks: &[Mark], id: NodeId) {
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
