//! A rank of the engine that computes: which blocks it offers to whom, and when its windows are closed. No I/O.
//!
//! ```text
//!  computed: blocks that can be read  --+                          Close
//!                                       +--> a window, an Offer   -------> windows closed, then Closed
//!  Serve: who reads, from where on    --+
//! ```
//! Both come in any order. What comes after Close is for nothing.

use std::collections::{BTreeMap, VecDeque};

use crate::message::{Endpoint, HandoffId, Message};
use crate::remembered::Remembered;

/// Blocks of a hand-off of which some regions (layers) are computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Computed {
    /// The first of them, counted from the prompt's start.
    pub first_block: u32,
    /// Ids of the engine's blocks.
    pub blocks: Vec<u32>,
    /// Which regions.
    pub regions: std::ops::Range<u32>,
    /// The hash of the last of them; None for one that is not full.
    pub hash: Option<[u8; 16]>,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OfferingAction {
    /// Open windows over these blocks for that reader, and offer them.
    Offer(HandoffId, Endpoint, Computed),
    /// Close all windows of a hand-off; [`Offering::closed`] is to be told when they are.
    CloseWindows(HandoffId),
    /// Say this to the own scheduler.
    Answer(Message),
}

#[derive(Debug, Default)]
struct Offered {
    reader: Option<(Endpoint, u32)>,
    waiting: Vec<Computed>,
    is_closing: bool,
}

/// All that a rank offers.
#[derive(Debug, Default)]
pub struct Offering {
    offered: BTreeMap<HandoffId, Offered>,
    over: Remembered,
    actions: VecDeque<OfferingAction>,
}

impl Offering {
    /// These blocks can be read from now on.
    pub fn computed(&mut self, id: HandoffId, computed: Computed) {
        if self.over.has(id) || computed.blocks.is_empty() {
            return;
        }
        let offered = self.offered.entry(id).or_default();
        match &offered.reader {
            _ if offered.is_closing => {}
            None => offered.waiting.push(computed),
            Some((reader, first)) => {
                let action = offer(id, reader, *first, computed);
                self.actions.extend(action);
            }
        }
    }

    /// The own scheduler has said something.
    pub fn told(&mut self, message: Message) {
        match message {
            Message::Serve { id, first_block, reader } if !self.over.has(id) => {
                let offered = self.offered.entry(id).or_default();
                if offered.is_closing || offered.reader.is_some() {
                    return;
                }
                for computed in std::mem::take(&mut offered.waiting) {
                    self.actions.extend(offer(id, &reader, first_block, computed));
                }
                offered.reader = Some((reader, first_block));
            }
            Message::Close(id) => {
                if self.over.has(id) {
                    return self.actions.push_back(OfferingAction::Answer(Message::Closed(id)));
                }
                let offered = self.offered.entry(id).or_default();
                if !std::mem::replace(&mut offered.is_closing, true) {
                    offered.waiting.clear();
                    self.actions.push_back(OfferingAction::CloseWindows(id));
                }
            }
            _ => {}
        }
    }

    /// All windows of a hand-off are closed.
    pub fn closed(&mut self, id: HandoffId) {
        self.offered.remove(&id);
        self.over.add(id);
        self.actions.push_back(OfferingAction::Answer(Message::Closed(id)));
    }

    /// Whether windows may still be opened for it.
    pub fn is_open(&self, id: HandoffId) -> bool {
        self.offered.get(&id).is_some_and(|offered| !offered.is_closing)
    }

    /// What is to be done next.
    pub fn next_action(&mut self) -> Option<OfferingAction> {
        self.actions.pop_front()
    }
}

/// An offer of those blocks that are wanted.
fn offer(id: HandoffId, reader: &Endpoint, first: u32, mut computed: Computed) -> Option<OfferingAction> {
    let unwanted = first.saturating_sub(computed.first_block) as usize;
    if unwanted >= computed.blocks.len() {
        return None;
    }
    computed.blocks.drain(..unwanted);
    computed.first_block += unwanted as u32;
    Some(OfferingAction::Offer(id, reader.clone(), computed))
}
