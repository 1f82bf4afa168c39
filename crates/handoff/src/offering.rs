//! Offers computed blocks to one reader: a rank of the prefill engine. No I/O.
//!
//! ```text
//!  computed: blocks that can be read  --+                          Close
//!                                       +--> a window, an Offer   -------> windows closed, then Closed
//!  Serve: the reader, its blocks      --+
//! ```
//! `computed` and Serve come in any order; computed blocks wait for Serve. Both are ignored after Close.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use crate::message::{Endpoint, HandoffId, Message};
use crate::remembered::Remembered;

/// Consecutive blocks of a prompt of which some regions (layers) are computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Computed {
    /// First block, counted by place.
    pub first_block: u32,
    /// Block ids of the engine's cache.
    pub blocks: Vec<u32>,
    /// Regions that are computed, of each of these blocks.
    pub regions: std::ops::Range<u32>,
    /// Hash of the last block; None for a block that is not full.
    pub hash: Option<[u8; 16]>,
}

/// An action for the agent, in the order of [`Offering::next_action`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OfferingAction {
    /// Open windows over these blocks for that reader, and offer them.
    Offer(HandoffId, Endpoint, Computed),
    /// Close all windows of a hand-off, then call [`Offering::closed`].
    CloseWindows(HandoffId),
    /// Send this to the own scheduler.
    Answer(Message),
}

#[derive(Debug, Default)]
struct Offered {
    /// From Serve: the reader, and the prompt's blocks that it wants.
    reader: Option<(Endpoint, Range<u32>)>,
    /// Computed before Serve came.
    waiting: Vec<Computed>,
    is_closing: bool,
}

/// All hand-offs that a rank offers blocks for.
#[derive(Debug, Default)]
pub struct Offering {
    offered: BTreeMap<HandoffId, Offered>,
    over: Remembered,
    actions: VecDeque<OfferingAction>,
}

impl Offering {
    /// These regions of these blocks are computed, and keep their bytes until the hand-off is closed.
    pub fn computed(&mut self, id: HandoffId, computed: Computed) {
        if self.over.has(id) || computed.blocks.is_empty() {
            return;
        }
        let offered = self.offered.entry(id).or_default();
        match &offered.reader {
            _ if offered.is_closing => {}
            None => offered.waiting.push(computed),
            Some((reader, wanted)) => {
                let action = offer(id, reader, wanted, computed);
                self.actions.extend(action);
            }
        }
    }

    /// Handles a message from the own scheduler.
    pub fn scheduler_said(&mut self, message: Message) {
        match message {
            Message::Serve { id, first_block, end_block, reader } if !self.over.has(id) => {
                let offered = self.offered.entry(id).or_default();
                if offered.is_closing || offered.reader.is_some() {
                    return;
                }
                let wanted = first_block..end_block;
                for computed in std::mem::take(&mut offered.waiting) {
                    self.actions.extend(offer(id, &reader, &wanted, computed));
                }
                offered.reader = Some((reader, wanted));
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

    /// Reports that all windows of a hand-off are closed; answers Closed.
    pub fn closed(&mut self, id: HandoffId) {
        self.offered.remove(&id);
        self.over.add(id);
        self.actions.push_back(OfferingAction::Answer(Message::Closed(id)));
    }

    /// Number of hand-offs with blocks that are offered or wait for Serve.
    pub fn live(&self) -> usize {
        self.offered.len()
    }

    /// Whether windows may still be opened for it.
    pub fn is_open(&self, id: HandoffId) -> bool {
        self.offered.get(&id).is_some_and(|offered| !offered.is_closing)
    }

    /// The next action for the agent to carry out.
    pub fn next_action(&mut self) -> Option<OfferingAction> {
        self.actions.pop_front()
    }
}

/// Offers the wanted ones among these blocks, because the reader has room for no others. None if there are none.
fn offer(
    id: HandoffId,
    reader: &Endpoint,
    wanted: &Range<u32>,
    mut computed: Computed,
) -> Option<OfferingAction> {
    let past = |block: u32| block.saturating_sub(computed.first_block) as usize;
    let (before, end) = (past(wanted.start), past(wanted.end));
    if end < computed.blocks.len() {
        // The hash is that of the last computed block, which is not offered.
        computed.blocks.truncate(end);
        computed.hash = None;
    }
    if before >= computed.blocks.len() {
        return None;
    }
    computed.blocks.drain(..before);
    computed.first_block += before as u32;
    Some(OfferingAction::Offer(id, reader.clone(), computed))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: HandoffId = HandoffId([1; 16]);

    fn offered(offering: &mut Offering) -> Vec<Computed> {
        let actions = std::iter::from_fn(|| offering.next_action());
        let offered = |action| match action {
            OfferingAction::Offer(_, _, computed) => Some(computed),
            _ => None,
        };
        actions.filter_map(offered).collect()
    }

    fn computed(first_block: u32, blocks: &[u32]) -> Computed {
        let hash = Some([first_block as u8; 16]);
        Computed { first_block, blocks: blocks.to_vec(), regions: 0..1, hash }
    }

    /// Found by the simulation: the step that computed the last wanted block computed the next one, too. One offer named both,
    /// the reader had no room for the second, and waited until it gave up.
    #[test]
    fn what_is_computed_beside_wanted_blocks_is_not_offered_with_them() {
        let mut offering = Offering::default();
        offering.computed(ID, computed(0, &[10, 11, 12]));
        let serve = Message::Serve { id: ID, first_block: 2, end_block: 5, reader: Vec::new() };
        offering.scheduler_said(serve);
        offering.computed(ID, computed(3, &[13]));
        offering.computed(ID, computed(4, &[14, 15]));
        offering.computed(ID, computed(6, &[16]));
        let last = Computed { hash: None, ..computed(4, &[14]) };
        let first = Computed { first_block: 2, ..computed(0, &[12]) };
        assert_eq!(offered(&mut offering), [first, computed(3, &[13]), last]);
    }
}
