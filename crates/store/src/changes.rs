//! The visible blocks of all spaces and their changes, for a reader that announces them to others.
//!
//! ```text
//!   wait_journal(0)    --> start again from cursor n
//!   read_snapshot      --> the visible blocks, in parts   \  applied to one set of blocks, in the order in which they
//!   wait_journal(n...) --> the changes after n            /  were read; both may alternate
//! ```
//! **Invariant: a set that has all parts, and all changes after a cursor from before the first part, is the set of visible
//! blocks.** A block stays in its slot, and the snapshot passes each slot once. So the snapshot has each block that was
//! visible all the time. Each other block has changed after the cursor, and its last entry says what it is now. A part
//! that is applied late would bring back what died after it was read; therefore the order.
//!
//! A snapshot of a large pool takes longer than the journal is kept under load, so its reader should read the journal
//! between two parts. If that read says to start again, the snapshot is void too.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::api::SpaceId;
use crate::described::SpaceDescription;
use crate::entries::State;
use crate::index::Index;
use crate::journal::{Change, JournalEntry, JournalRead};
use crate::store::Store;

/// Slots that one part of a snapshot passes, so that it holds the lock for microseconds.
const SLOTS_A_PART: u32 = 4096;

/// Changes in any space.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// In the order in which they happened; a snapshot's are all [`Change::Visible`]. A block may be reported as gone that
    /// was never visible.
    pub entries: Vec<JournalEntry>,
    /// Describes each space that an entry names. The space itself may have been forgotten since.
    pub spaces: BTreeMap<SpaceId, SpaceDescription>,
}

/// How far a snapshot has come. The default is its beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SnapshotPosition {
    next_slot: u32,
}

impl Index {
    /// Appends up to `most` changes after `cursor` to `out`, of all spaces. A new reader passes the cursor 0. See [`Journal::read`](crate::Journal::read).
    pub fn read_changes(&mut self, cursor: u64, most: usize, out: &mut Changes) -> JournalRead {
        let first = out.entries.len();
        let read = self.journal.read(cursor, most, &mut out.entries, |entry, out| out.push(*entry));
        self.counters.journal_restarts += u64::from(read.start_again && cursor != 0);
        self.describe_from(first, out);
        read
    }

    /// Appends the next visible blocks to `out`: `most`, but one at least, or fewer if the part has passed enough slots.
    /// False once the snapshot is complete; and the cursor of a reader that knows all changes before this part was read.
    pub fn read_snapshot(
        &self,
        position: &mut SnapshotPosition,
        most: usize,
        out: &mut Changes,
    ) -> (bool, u64) {
        let first = out.entries.len();
        let slots = self.entries.slots();
        let end = slots.min(position.next_slot.saturating_add(SLOTS_A_PART));
        while position.next_slot < end && out.entries.len() - first < most.max(1) {
            let entry = self.entries.at(position.next_slot);
            if entry.state == State::Sealed {
                out.entries.push(JournalEntry {
                    change: Change::Visible,
                    space: entry.space,
                    hash: entry.hash,
                });
            }
            position.next_slot += 1;
        }
        self.describe_from(first, out);
        (position.next_slot < slots, self.journal.newest())
    }

    /// Describes the spaces of the entries from `first` on.
    fn describe_from(&self, first: usize, out: &mut Changes) {
        let Changes { entries, spaces } = out;
        for of_space in entries[first..].chunk_by(|a, b| a.space == b.space) {
            let id = of_space[0].space;
            if !spaces.contains_key(&id)
                && let Some(description) = self.description(id)
            {
                spaces.insert(id, description);
            }
        }
    }

    /// The description of a space that lives, or that the journal still names.
    fn description(&self, id: SpaceId) -> Option<SpaceDescription> {
        let living = self.spaces.get(id).map(crate::space::Space::description);
        living.or_else(|| self.forgotten.get(id).cloned())
    }
}

impl Store {
    /// See [`Index::read_changes`]. If there is no change after `cursor` yet, the call waits for the next one, until `until` at
    /// most and without the store's lock. Each wake-up costs the writer some microseconds, so a reader that wants batches
    /// sleeps between two calls. `is_called` ends the wait, too: set it, then call [`Store::wake_journal_readers`].
    pub fn wait_journal(
        &self,
        cursor: u64,
        until: Instant,
        most: usize,
        is_called: &AtomicBool,
        out: &mut Changes,
    ) -> JournalRead {
        let mut index = self.index.lock();
        loop {
            let read = index.read_changes(cursor, most, out);
            let is_news = read.start_again || read.has_more || read.cursor != cursor;
            let is_news = is_news || is_called.load(Ordering::Acquire);
            let changed = Arc::clone(&index.journal.changed);
            if is_news || changed.wait_until(&mut index, until).timed_out() {
                return read;
            }
        }
    }

    /// Lets each reader that waits look at its `is_called`.
    pub fn wake_journal_readers(&self) {
        self.index.lock().journal.changed.notify_all();
    }

    /// See [`Index::read_snapshot`]: one part under one hold of the lock.
    pub fn read_snapshot(
        &self,
        position: &mut SnapshotPosition,
        most: usize,
        out: &mut Changes,
    ) -> (bool, u64) {
        self.index.lock().read_snapshot(position, most, out)
    }
}
