//! The journal: which blocks became visible and which went, the last ones of all spaces, for readers that keep an account of
//! their own.
//!
//! ```text
//!   cursor of a reader          newest
//!        v                        v
//!  ...|  7 |  8 |  9 | 10 | 11 | 12 |      a ring of `ENTRIES`; nothing is kept before the first reader comes
//!           <-- what it has not read -->
//! ```
//! A cursor is the number of the last entry that its reader has seen. A reader whose next entry was overwritten, a new one, and
//! one that brings another journal's cursor are told to start again: they forget all they know of and read on from now.
//! "Gone" is told of every block that ends, also of one that never became visible: who was told that a block is saved hears so
//! that it is not.

use std::ops::Range;

use kvlane_block::BlockHash;

use crate::api::SpaceId;

/// Entries that are kept: of a pool that is filled anew at 10 GB/s by blocks of 2 MiB, those of the last six seconds.
const ENTRIES: usize = 1 << 16;
/// Entries that one read looks at, so that it is over in some microseconds whatever it looks for.
const LOOKED_AT_ONCE: u64 = 1 << 13;

/// What became of a block in the pool. The tier below forgets whole segments and tells nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Lookups find it from now on.
    Visible,
    /// They do not.
    Gone,
}

/// One line of the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalEntry {
    /// What became of the block.
    pub change: Change,
    /// Which space it is of.
    pub space: SpaceId,
    /// Which block it is.
    pub hash: BlockHash,
}

/// What a reader is told beside its entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalRead {
    /// To be given at the next read.
    pub cursor: u64,
    /// The reader has missed entries, and has none of this read: it forgets all it knows of.
    pub start_again: bool,
    /// There is more to read already.
    pub has_more: bool,
}

/// The last entries, by number.
#[derive(Debug)]
pub struct Journal {
    /// Entry `n` at `n % capacity`. Empty before there is a reader; it grows up to the capacity.
    ring: Vec<JournalEntry>,
    capacity: usize,
    /// Somebody has read.
    is_open: bool,
    /// Number of the newest entry. It is never 0, the cursor of new readers.
    newest: u64,
}

impl Journal {
    /// One that keeps so many entries, once there is a reader.
    pub fn new(capacity: usize) -> Self {
        assert!(capacity > 0, "a journal without entries");
        // The first entry has the ring's first place.
        Self { ring: Vec::new(), capacity, is_open: false, newest: capacity as u64 * 2 - 1 }
    }

    /// Writes, if anybody reads. True if it did.
    pub fn note(&mut self, entry: JournalEntry) -> bool {
        if !self.is_open {
            return false;
        }
        self.newest += 1;
        let at = (self.newest % self.capacity as u64) as usize;
        if at < self.ring.len() {
            self.ring[at] = entry;
        } else {
            self.ring.push(entry);
        }
        true
    }

    /// Adds what `wanted` takes of the entries after `cursor` to `out`, `most` or a few more, in their order. `wanted` may add
    /// several for one entry.
    pub fn read<T>(
        &mut self,
        cursor: u64,
        most: usize,
        out: &mut Vec<T>,
        mut wanted: impl FnMut(&JournalEntry, &mut Vec<T>),
    ) -> JournalRead {
        if !self.is_open {
            self.is_open = true;
            // All at once: it does not grow under the lock of whoever writes.
            self.ring.reserve_exact(self.capacity);
        }
        let Range { start: oldest, end } = self.kept();
        if cursor > self.newest || cursor + 1 < oldest {
            return JournalRead { cursor: self.newest, start_again: true, has_more: false };
        }
        let enough = out.len().saturating_add(most);
        let mut at = cursor;
        for number in (cursor + 1..end).take(LOOKED_AT_ONCE as usize) {
            if out.len() >= enough {
                break;
            }
            at = number;
            wanted(&self.ring[(number % self.capacity as u64) as usize], out);
        }
        JournalRead { cursor: at, start_again: false, has_more: at < self.newest }
    }

    /// Numbers of the entries that are there.
    fn kept(&self) -> Range<u64> {
        self.newest + 1 - self.ring.len() as u64..self.newest + 1
    }
}

impl Default for Journal {
    fn default() -> Self {
        Self::new(ENTRIES)
    }
}
