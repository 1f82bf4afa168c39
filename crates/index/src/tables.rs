//! All entries: 4,096 small tables, so that a table that grows stalls its caller for microseconds.
//!
//! ```text
//!   fingerprint:  63        52 51                      0
//!                |   table    |          tag            |
//! ```
//! An entry is a word of 8 bytes (see `table`). Its table and its tag are the whole fingerprint.

use crate::slots::Slot;
use crate::table::{TAG_BITS, Table};

const TABLES: usize = 1 << (64 - TAG_BITS);

/// Entries (fingerprint, slot).
#[derive(Debug)]
pub(crate) struct Tables {
    tables: Box<[Table]>,
    len: usize,
    /// The table that the sweep visits next.
    sweep_at: usize,
}

impl Tables {
    pub(crate) fn new() -> Self {
        Self { tables: (0..TABLES).map(|_| Table::default()).collect(), len: 0, sweep_at: 0 }
    }

    /// Entries, those of closed slots included.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Bytes of memory.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.tables) + self.tables.iter().map(Table::bytes).sum::<usize>()
    }

    /// Reads the places where searches for these fingerprints begin, all at once.
    pub(crate) fn touch(&self, fingerprints: &[u64]) {
        let words = fingerprints.iter().fold(0, |all, fingerprint| {
            let (table, tag) = split(*fingerprint);
            all ^ self.tables[table].touch(tag)
        });
        std::hint::black_box(words);
    }

    /// Slots of the entries with this fingerprint.
    pub(crate) fn slots(&self, fingerprint: u64) -> impl Iterator<Item = Slot> {
        let (table, tag) = split(fingerprint);
        self.tables[table].slots(tag)
    }

    /// Adds an entry. The caller has checked that it is not there.
    pub(crate) fn insert(&mut self, fingerprint: u64, slot: Slot) {
        let (table, tag) = split(fingerprint);
        self.tables[table].insert(tag, slot);
        self.len += 1;
    }

    /// Moves an entry to another slot. False if it is not there.
    pub(crate) fn replace(&mut self, fingerprint: u64, from: Slot, to: Slot) -> bool {
        let (table, tag) = split(fingerprint);
        self.tables[table].replace(tag, from, to)
    }

    /// Removes an entry. False if it is not there.
    pub(crate) fn remove(&mut self, fingerprint: u64, slot: Slot) -> bool {
        let (table, tag) = split(fingerprint);
        let removed = self.tables[table].remove(tag, slot);
        self.len -= usize::from(removed);
        removed
    }

    /// Removes the next table's entries in closed slots, and adds these slots to `removed`. Returns how many entries it
    /// looked at.
    pub(crate) fn sweep_table(&mut self, is_closed: impl Fn(Slot) -> bool, removed: &mut Vec<Slot>) -> usize {
        let table = &mut self.tables[self.sweep_at];
        self.sweep_at = (self.sweep_at + 1) % TABLES;
        let before = table.len();
        table.sweep(is_closed, removed);
        self.len -= before - table.len();
        before
    }
}

fn split(fingerprint: u64) -> (usize, u64) {
    ((fingerprint >> TAG_BITS) as usize, fingerprint & ((1 << TAG_BITS) - 1))
}
