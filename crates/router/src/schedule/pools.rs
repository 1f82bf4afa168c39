//! Pools of blocks that several nodes share, as the engines of one host share their daemon's memory.
//!
//! ```text
//!   first token at a node --> its pool has the prompt --> each node of the pool: loads what it lacks
//!   choice at a node      --> the node will have it            cost of a load = grain + LOAD_WEIGHT * share * tokens
//! ```
//! A pool has a prompt once one of its nodes has prefilled it. A node that was only given a prompt has not saved it yet.
//! So equal new prompts that come together still meet at one node.
//!
//! The grain is one block, or 256 bytes of text. A load costs at most what computing the same tokens would.

use std::{collections::HashMap, sync::Arc};

use super::{index::Index, prediction::Prediction};
use crate::body::Mark;

/// Load share until first tokens of the class have shown the real one. It is low, because only loads that are tried can show
/// it.
pub(super) const LOAD_SHARE: f64 = 0.01;
/// Weight of a load's time in its cost, which is that plus one grain of tokens. A load delays its own request, while one
/// request less at the node gains little. A lower weight moves prompts away from nodes that have them and a single request,
/// and first tokens come later at 30 % load. A higher weight keeps bursts of one prompt at one node.
const LOAD_WEIGHT: f64 = 2.0;

/// A node's membership in a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NodePool {
    pub(super) name: Arc<str>,
    pub(super) slot: usize,
    /// Whether the router's file names the pool. The file takes precedence over the engine's metrics.
    pub(super) is_configured: bool,
}

/// All pools of nodes, in numbered slots.
#[derive(Debug)]
pub(super) struct Pools {
    /// Name and number of nodes of each pool.
    slots: Vec<Option<(Arc<str>, usize)>>,
    index: Index,
    /// Leading bytes of the matched prompt that each pool has. Kept to reuse its memory.
    matched: Vec<u32>,
}

impl Pools {
    /// Room for that many marks for each 64 pools. Memory is allocated with the first prompt of a pool.
    pub(super) fn new(marks_max: usize) -> Self {
        Self { slots: Vec::new(), index: Index::new(marks_max), matched: Vec::new() }
    }

    /// A node joins the pool. Returns the pool's slot.
    pub(super) fn join(&mut self, name: &Arc<str>) -> usize {
        if let Some(slot) = self.slot_of(name) {
            self.slots[slot].iter_mut().for_each(|(_, nodes)| *nodes += 1);
            return slot;
        }
        let pool = Some((Arc::clone(name), 1));
        if let Some(slot) = self.slots.iter().position(Option::is_none) {
            self.slots[slot] = pool;
            return slot;
        }
        self.slots.push(pool);
        self.slots.len() - 1
    }

    pub(super) fn slot_of(&self, name: &str) -> Option<usize> {
        self.slots.iter().position(|slot| slot.as_ref().is_some_and(|(own, _)| &**own == name))
    }

    /// A node leaves the pool. After the last one, the pool's prompts are forgotten.
    pub(super) fn leave(&mut self, slot: usize) {
        let Some(pool) = self.slots.get_mut(slot) else { return };
        if let Some((_, nodes)) = pool {
            *nodes -= 1;
        }
        if pool.take_if(|(_, nodes)| *nodes == 0).is_some() {
            self.index.forget(slot);
        }
    }

    /// Records that the pool has this prompt.
    pub(super) fn insert(&mut self, marks: &[Mark], slot: usize) {
        self.index.insert(marks, slot);
    }

    /// Matches a prompt against all pools; [`Pools::bytes_of`] then answers for each.
    pub(super) fn match_prompt(&mut self, marks: &[Mark]) {
        if !self.slots.is_empty() {
            self.index.matched(marks, &mut self.matched);
        }
    }

    /// Leading bytes of the last matched prompt that a pool has.
    pub(super) fn bytes_of(&self, slot: usize) -> u32 {
        self.matched.get(slot).copied().unwrap_or(0)
    }

    /// Memory of all prefixes, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.index.bytes()
    }
}

/// Costs of loads at nodes, in tokens that the nodes could compute meanwhile.
pub(super) struct LoadCosts<'a> {
    predictions: &'a HashMap<Arc<str>, Prediction>,
    /// The last class and its share, because most neighbours are of one class.
    last: Option<(&'a Arc<str>, f64)>,
}

impl<'a> LoadCosts<'a> {
    pub(super) fn new(predictions: &'a HashMap<Arc<str>, Prediction>) -> Self {
        Self { predictions, last: None }
    }

    /// Cost of loading this many tokens at a node of this class, at most that of computing them.
    pub(super) fn of(&mut self, class: &'a Arc<str>, tokens: u64, grain: u64) -> u64 {
        if tokens == 0 {
            return 0;
        }
        let share = match self.last {
            Some((last, share)) if *last == *class => share,
            _ => {
                let learned = self.predictions.get(class).and_then(Prediction::load_share);
                learned.unwrap_or(LOAD_SHARE)
            }
        };
        self.last = Some((class, share));
        (grain + (tokens as f64 * share * LOAD_WEIGHT).ceil() as u64).min(tokens)
    }
}
