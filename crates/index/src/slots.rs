//! Slots: which entries count, by 12 bits in each.
//!
//! A slot stands for one generation of an owner's announcements. The owner gets a new one with each epoch and with each
//! snapshot. An entry is visible as long as its slot is open, so closing a slot hides all of its entries at once.
//!
//! ```text
//!            open(owner)              close                last entry swept
//!   free ------------------> open ------------> closed ---------------------> free
//!                             |  entries come and go   entries only go          ^
//!                             '------------- close, without entries ------------'
//! ```
//! A slot is given out again only when no entry names it. So an old entry never becomes a new owner's.

use crate::keys::KeySet;

/// A slot that entries name. Never 0, so that no word of a table is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot(u16);

impl Slot {
    /// Bits that a slot takes of a word.
    pub(crate) const BITS: u32 = 12;
    /// Slots that exist.
    pub(crate) const MOST: usize = (1 << Self::BITS) - 1;

    /// The slot in the lower bits of a word.
    pub(crate) fn of_word(word: u64) -> Self {
        Self((word & ((1 << Self::BITS) - 1)) as u16)
    }

    pub(crate) fn bits(self) -> u64 {
        u64::from(self.0)
    }

    /// For arrays with an element a slot: below [`Slots::end`].
    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Record {
    /// The owner's number. `None` if the slot is closed or free.
    owner: Option<u16>,
    /// The entries that name this slot. The digest means nothing once it is closed.
    keys: KeySet,
}

/// All slots, by number.
#[derive(Debug)]
pub(crate) struct Slots {
    /// Element 0 is never given out.
    records: Vec<Record>,
    free: Vec<Slot>,
    closed_entries: usize,
}

impl Slots {
    pub(crate) fn new() -> Self {
        Self { records: vec![Record::default()], free: Vec::new(), closed_entries: 0 }
    }

    /// A slot for this owner. `None` if all are open or wait for the sweep.
    pub(crate) fn open(&mut self, owner: u16) -> Option<Slot> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.records.len() <= Slot::MOST => {
                self.records.push(Record::default());
                Slot((self.records.len() - 1) as u16)
            }
            None => return None,
        };
        self.records[slot.index()] = Record { owner: Some(owner), keys: KeySet::default() };
        Some(slot)
    }

    /// Hides the slot's entries.
    pub(crate) fn close(&mut self, slot: Slot) {
        let record = &mut self.records[slot.index()];
        record.owner = None;
        self.closed_entries += record.keys.count as usize;
        if record.keys.count == 0 {
            self.free.push(slot);
        }
    }

    /// The owner whose open slot this is.
    pub(crate) fn owner(&self, slot: Slot) -> Option<u16> {
        self.records[slot.index()].owner
    }

    /// The keys that name this slot.
    pub(crate) fn keys(&self, slot: Slot) -> KeySet {
        self.records[slot.index()].keys
    }

    pub(crate) fn keys_mut(&mut self, slot: Slot) -> &mut KeySet {
        &mut self.records[slot.index()].keys
    }

    /// An entry of a closed slot was removed.
    pub(crate) fn note_swept(&mut self, slot: Slot) {
        let record = &mut self.records[slot.index()];
        record.keys.count -= 1;
        self.closed_entries -= 1;
        if record.keys.count == 0 {
            self.free.push(slot);
        }
    }

    /// Entries that wait for the sweep.
    pub(crate) fn closed_entries(&self) -> usize {
        self.closed_entries
    }

    /// All slots given out so far have an index below this.
    pub(crate) fn end(&self) -> usize {
        self.records.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_returns_only_after_its_last_entry() {
        let mut slots = Slots::new();
        let slot = slots.open(7).unwrap();
        slots.keys_mut(slot).count = 2;
        slots.close(slot);
        assert_eq!((slots.owner(slot), slots.closed_entries()), (None, 2));
        slots.note_swept(slot);
        assert_ne!(slots.open(8), Some(slot), "one entry still names it");
        slots.note_swept(slot);
        assert_eq!(slots.open(9), Some(slot));
        assert_eq!((slots.owner(slot), slots.keys(slot).count), (Some(9), 0));
    }

    #[test]
    fn slots_end() {
        let mut slots = Slots::new();
        let all: Vec<Slot> = std::iter::from_fn(|| slots.open(1)).collect();
        assert_eq!((all.len(), slots.end()), (Slot::MOST, Slot::MOST + 1));
        assert!(all.iter().all(|slot| slot.bits() != 0));
        slots.close(all[0]);
        assert_eq!(slots.open(2), Some(all[0]));
    }
}
