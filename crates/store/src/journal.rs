//! The journal: the latest changes of all spaces (a block became visible, a block died), for readers that keep a list of
//! the pool's blocks.
//!
//! ```text
//!   cursor of a reader          newest
//!        v                        v
//!  ...|  7 |  8 |  9 | 10 | 11 | 12 |      a circular buffer of `ENTRIES`; nothing is kept before the first read
//!           <---- not read yet ---->
//! ```
//! A cursor is the number of the last entry that its reader has seen. A reader must start again if it is new, if its next
//! entry was overwritten, or if its cursor is another journal's. It then forgets all blocks, and reads on from now. A reader
//! that must know the blocks of before takes a snapshot (changes.rs).
//!
//! `Gone` is written for every block that dies, also for one that never became visible. So a reader that counted on a
//! save learns that its block will not come.

use std::ops::Range;
use std::sync::Arc;

use kvlane_block::BlockHash;
use parking_lot::Condvar;

use crate::api::SpaceId;

/// Entries that are kept: the last six seconds of a pool that is refilled at 10 GB/s with blocks of 2 MiB.
const ENTRIES: usize = 1 << 16;
/// Most entries that one read scans, so that it takes microseconds whatever its reader wants.
const SCANNED_A_READ: u64 = 1 << 13;

/// A change of a block in the pool. The tier below is not covered, because it forgets whole segments without a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Lookups find it from now on.
    Visible,
    /// Lookups do not find it, or no longer.
    Gone,
}

/// One line of the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalEntry {
    /// The new state of the block.
    pub change: Change,
    /// The block's space.
    pub space: SpaceId,
    /// The engine's hash of the block.
    pub hash: BlockHash,
}

/// The result of a read, beside its entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalRead {
    /// Pass it to the next read.
    pub cursor: u64,
    /// The reader has missed entries and must forget all blocks. This read gave it no entry.
    pub start_again: bool,
    /// The next read will find entries already.
    pub has_more: bool,
}

/// The last entries, by number.
#[derive(Debug)]
pub struct Journal {
    /// Entry `n` at `n % capacity`. Empty before the first read; grows up to the capacity.
    entries: Vec<JournalEntry>,
    capacity: usize,
    /// Set by the first read. Nothing is kept before.
    is_open: bool,
    /// Number of the newest entry. It is never 0, the cursor of new readers.
    newest: u64,
    /// Notified at each entry, which costs one load while nobody waits. Waiters hold the store's lock.
    pub(crate) changed: Arc<Condvar>,
}

impl Journal {
    /// A journal that keeps `capacity` entries, from its first read on.
    pub fn new(capacity: usize) -> Self {
        assert!(capacity > 0, "a journal without entries");
        // The first entry gets index 0.
        Self {
            entries: Vec::new(),
            capacity,
            is_open: false,
            newest: capacity as u64 * 2 - 1,
            changed: Arc::default(),
        }
    }

    /// Appends an entry if the journal has been read. True if it did.
    pub fn note(&mut self, entry: JournalEntry) -> bool {
        if !self.is_open {
            return false;
        }
        self.newest += 1;
        let at = (self.newest % self.capacity as u64) as usize;
        if at < self.entries.len() {
            self.entries[at] = entry;
        } else {
            self.entries.push(entry);
        }
        self.changed.notify_all();
        true
    }

    /// Calls `wanted` with each entry after `cursor`, in order, until `most` items are in `out` or `SCANNED_A_READ` entries
    /// were scanned. `wanted` adds its items to `out`. Since it may add several for one entry, `out` may get a few more.
    pub fn read<T>(
        &mut self,
        cursor: u64,
        most: usize,
        out: &mut Vec<T>,
        mut wanted: impl FnMut(&JournalEntry, &mut Vec<T>),
    ) -> JournalRead {
        if !self.is_open {
            self.is_open = true;
            // Reserved at once, so that no writer grows it under the store's lock.
            self.entries.reserve_exact(self.capacity);
        }
        let Range { start: oldest, end } = self.kept();
        if cursor > self.newest || cursor + 1 < oldest {
            return JournalRead { cursor: self.newest, start_again: true, has_more: false };
        }
        let enough = out.len().saturating_add(most);
        let mut at = cursor;
        for number in (cursor + 1..end).take(SCANNED_A_READ as usize) {
            if out.len() >= enough {
                break;
            }
            at = number;
            wanted(&self.entries[(number % self.capacity as u64) as usize], out);
        }
        JournalRead { cursor: at, start_again: false, has_more: at < self.newest }
    }

    /// Makes all readers start again.
    pub(crate) fn restart(&mut self) {
        self.entries.clear();
        // Beyond all cursors, and the next entry gets index 0 again.
        let capacity = self.capacity as u64;
        self.newest = (self.newest / capacity + 2) * capacity - 1;
        self.changed.notify_all();
    }

    /// Number of the newest entry.
    pub(crate) fn newest(&self) -> u64 {
        self.newest
    }

    /// Number of the oldest entry that is kept.
    pub(crate) fn oldest(&self) -> u64 {
        self.kept().start
    }

    /// Numbers of the entries that are kept.
    fn kept(&self) -> Range<u64> {
        self.newest + 1 - self.entries.len() as u64..self.newest + 1
    }
}

impl Default for Journal {
    fn default() -> Self {
        Self::new(ENTRIES)
    }
}
