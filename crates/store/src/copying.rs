//! A copy's way through the index: listed when it is claimed, hit, and an own block at its second hit. copies.rs has the list.

use crate::entries::{CopyState, NONE};
use crate::index::Index;

impl Index {
    /// Makes a claimed block a copy. The policy does not contain it.
    pub(crate) fn add_copy(&mut self, slot: u32) {
        let entry = self.entries.at_mut(slot);
        entry.copy = CopyState::Unhit;
        let (space, parent) = (entry.space, entry.parent);
        self.copies.order.insert_run([slot], (parent != NONE).then_some(parent));
        self.copies.bytes += self.spaces[space].room_bytes();
    }

    /// Takes a copy off the list, because it died or becomes an own block.
    pub(crate) fn remove_copy(&mut self, slot: u32) {
        let entry = self.entries.at_mut(slot);
        entry.copy = CopyState::Own;
        let space = entry.space;
        self.copies.order.remove(slot);
        self.copies.bytes -= self.spaces[space].room_bytes();
    }

    /// Corrects what the claim took the block for, if another source brought it than the one that was asked first.
    pub(crate) fn correct_copy(&mut self, slot: u32, is_copy: bool) {
        let entry = self.entries.at(slot);
        if is_copy == (entry.copy != CopyState::Own) {
            return;
        }
        if is_copy {
            self.policy.remove(slot);
            self.add_copy(slot);
        } else {
            self.remove_copy(slot);
            let parent = self.entries.at(slot).parent;
            self.policy.insert(&[slot], (parent != NONE).then_some(parent), &self.entries);
        }
    }

    /// Called when a lookup has hit these blocks, given from the head of its prompt, and before the policy is. Copies that
    /// were hit before become own blocks.
    pub(crate) fn hit_copies(&mut self, slots: &[u32], is_chained: bool) {
        if self.copies.is_empty() {
            return;
        }
        for &slot in slots {
            let entry = self.entries.at_mut(slot);
            match entry.copy {
                CopyState::Own => {}
                CopyState::Unhit => entry.copy = CopyState::HitOnce,
                CopyState::HitOnce => {
                    self.remove_copy(slot);
                    self.add_to_run(slot, is_chained);
                    self.queue_spill(self.entries.block(slot));
                    self.counters.adopted_copies += 1;
                }
            }
        }
        self.end_run(is_chained);
        self.copies.order.touch_prefix(slots);
    }
}
