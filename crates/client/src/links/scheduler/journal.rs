//! Reads the daemon's journal, every 100 ms, if the engine wants to know which blocks become visible and which go.
//!
//! One read is in flight at a time, and none is sent before the engine has taken the last answer. So at most one answer is
//! held.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use kvlane_proto::{
    WIRE_OF_JOURNAL,
    packed::{CHANGE_BYTES, ChangeKind, parse_changes},
    v1,
    v1::request::Body as Ask,
};

use super::{event::SchedulerAction, up::send};
use crate::{
    boot::BootId,
    links::{
        ids::ConnectionId,
        standing::{Notice, Urgency},
    },
};

/// Pause between two reads.
pub(super) const INTERVAL: Duration = Duration::from_millis(100);
/// Pause after a read that the daemon refused.
const AFTER_REFUSAL: Duration = Duration::from_secs(1);
/// Most entries of one read.
const MOST: u32 = 4096;

/// A block became visible, or went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockChange {
    /// Index of the group among the engine's.
    pub group: u32,
    /// The block's hash, as the engine saved it.
    pub hash: [u8; 16],
    /// True: lookups find the block in RAM from now on. False: they do not any more.
    pub is_visible: bool,
}

/// Changes since the engine last took them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BlockChanges {
    /// The engine must forget the blocks that it knew of, because entries were missed or the daemon was restarted.
    pub start_again: bool,
    /// Changes after that, in order.
    pub changes: Vec<BlockChange>,
}

/// Reads the journal of the daemon's present run.
#[derive(Debug)]
pub(super) struct JournalReader {
    /// The engine wants changes.
    is_wanted: bool,
    /// The daemon of the present connection has a journal.
    is_there: bool,
    /// The run that the cursor belongs to.
    run: Option<BootId>,
    /// Number of the last entry read; 0 before the first answer of a run.
    cursor: u64,
    request: Option<u64>,
    due: Instant,
    untaken: BlockChanges,
    /// The log has the warning about a daemon without a journal.
    has_warned: bool,
}

impl JournalReader {
    pub(super) fn new(is_wanted: bool, now: Instant) -> Self {
        Self {
            is_wanted,
            is_there: false,
            run: None,
            cursor: 0,
            request: None,
            due: now,
            untaken: BlockChanges::default(),
            has_warned: false,
        }
    }

    /// A daemon has welcomed the engine. If it is the run of the former connection, the next read continues at the cursor.
    pub(super) fn greeted(&mut self, run: BootId, wire: u32, daemon: &str, now: Instant) -> Option<Notice> {
        self.is_there = wire >= WIRE_OF_JOURNAL;
        self.due = now;
        if self.run != Some(run) {
            // Changes of another run are void. The first answer of this run says `start_again`.
            (self.run, self.cursor, self.untaken) = (Some(run), 0, BlockChanges::default());
        }
        if !self.is_wanted || self.is_there || self.has_warned {
            return None;
        }
        self.has_warned = true;
        let sentence = format!(
            "kvlane: this daemon ({daemon}) is older than the engine and does not tell which blocks it evicts, so KV events \
             tell of blocks that come and not of those that go; install the engine's version of kvlane for the daemon"
        );
        Some(Notice { urgency: Urgency::Warning, sentence })
    }

    /// The connection has ended.
    pub(super) fn left(&mut self) {
        (self.is_there, self.request) = (false, None);
    }

    /// When the next read is due. None without a journal, while a read is in flight, or until the engine has taken the answer.
    pub(super) fn due(&self) -> Option<Instant> {
        let waits = self.request.is_some() || self.untaken != BlockChanges::default();
        (self.is_wanted && self.is_there && !waits).then_some(self.due)
    }

    /// Sends a read if one is due.
    pub(super) fn poll(
        &mut self,
        connection: ConnectionId,
        last_request: &mut u64,
        now: Instant,
        actions: &mut VecDeque<SchedulerAction>,
    ) {
        if self.due().is_some_and(|due| now >= due) {
            let read = v1::ReadJournal { cursor: self.cursor, max: MOST };
            self.request = Some(send(last_request, connection, Ask::ReadJournal(read), actions));
            self.due = now + INTERVAL;
        }
    }

    /// Whether the read in flight has this id.
    pub(super) fn is_request(&self, id: u64) -> bool {
        self.request == Some(id)
    }

    /// Takes the daemon's answer.
    ///
    /// # Errors
    /// The first thing in the answer that does not fit the read.
    pub(super) fn answered(
        &mut self,
        answer: v1::JournalEntries,
        groups: usize,
        now: Instant,
    ) -> Result<(), &'static str> {
        self.request = None;
        let count = answer.entries.len() / CHANGE_BYTES;
        if answer.cursor == 0 || answer.start_again && count > 0 {
            return Err("a journal without a place to go on from");
        }
        if count > MOST as usize + groups {
            return Err("more entries of the journal than were asked for");
        }
        let changes =
            parse_changes(&answer.entries).map_err(|_| "entries of the journal that are cut off")?;
        let mut kept = Vec::with_capacity(count);
        for change in changes {
            if usize::from(change.group) >= groups {
                return Err("an entry of the journal of a group that the engine does not have");
            }
            let is_visible = match change.kind {
                ChangeKind::Visible => true,
                ChangeKind::Gone => false,
                ChangeKind::VisibleOnSsd | ChangeKind::GoneFromSsd => continue,
            };
            kept.push(BlockChange { group: change.group.into(), hash: change.hash, is_visible });
        }
        self.cursor = answer.cursor;
        self.untaken = BlockChanges { start_again: answer.start_again, changes: kept };
        if answer.has_more {
            self.due = now;
        }
        Ok(())
    }

    /// Delays the next read, if the daemon refused the one in flight.
    pub(super) fn refused(&mut self, id: u64, now: Instant) {
        if self.is_request(id) {
            (self.request, self.due) = (None, now + AFTER_REFUSAL);
        }
    }

    /// Changes since the last call.
    pub(super) fn take(&mut self) -> BlockChanges {
        std::mem::take(&mut self.untaken)
    }
}
