//! Remembers the last 4,096 hand-offs that are over, so that late messages for them are ignored or refused.

use std::collections::{HashSet, VecDeque};

use crate::message::HandoffId;

const MOST: usize = 4096;

#[derive(Debug, Default)]
pub(crate) struct Remembered {
    ids: HashSet<HandoffId>,
    order: VecDeque<HandoffId>,
}

impl Remembered {
    /// Forgets the oldest id beyond [`MOST`].
    pub(crate) fn add(&mut self, id: HandoffId) {
        if !self.ids.insert(id) {
            return;
        }
        self.order.push_back(id);
        if self.order.len() > MOST
            && let Some(oldest) = self.order.pop_front()
        {
            self.ids.remove(&oldest);
        }
    }

    pub(crate) fn has(&self, id: HandoffId) -> bool {
        self.ids.contains(&id)
    }
}
