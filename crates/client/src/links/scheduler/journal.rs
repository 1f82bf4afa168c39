//! Which blocks came and went, as the daemon's journal tells it: asked for every 100 ms where the engine wants to hear of it.
//!
//! One question at a time, and none before the engine has taken what came: so no more than one answer is held.

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

/// How often the daemon is asked.
pub(super) const INTERVAL: Duration = Duration::from_millis(100);
/// After a refusal it is left alone for so long.
const AFTER_REFUSAL: Duration = Duration::from_secs(1);
/// Entries that are asked for.
const MOST: u32 = 4096;

/// A block came or went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockChange {
    /// Index of the group among the engine's.
    pub group: u32,
    /// As it was saved.
    pub hash: [u8; 16],
    /// Lookups find it in RAM; else they do not any more.
    pub is_visible: bool,
}

/// What happened since the engine last asked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BlockChanges {
    /// What is known of the daemon's blocks from before is worth nothing: something was missed, or it is another run.
    pub start_again: bool,
    /// What happened since, in order.
    pub changes: Vec<BlockChange>,
}

/// What the link knows of the journal of the daemon's present run.
#[derive(Debug)]
pub(super) struct Following {
    /// The engine wants to hear of it.
    is_wanted: bool,
    /// The present connection's daemon has one.
    is_there: bool,
    /// The run that the cursor is of.
    run: Option<BootId>,
    cursor: u64,
    asked: Option<u64>,
    due: Instant,
    untaken: BlockChanges,
    /// The user knows that a daemon does not tell.
    has_told: bool,
}

impl Following {
    pub(super) fn new(is_wanted: bool, now: Instant) -> Self {
        Self {
            is_wanted,
            is_there: false,
            run: None,
            cursor: 0,
            asked: None,
            due: now,
            untaken: BlockChanges::default(),
            has_told: false,
        }
    }

    /// A daemon has greeted. What it has to say of a former connection to the same run goes on where that ended.
    pub(super) fn greeted(&mut self, run: BootId, wire: u32, daemon: &str, now: Instant) -> Option<Notice> {
        self.is_there = wire >= WIRE_OF_JOURNAL;
        self.due = now;
        if self.run != Some(run) {
            // What was said of another run's blocks means nothing any more. The first answer of this one is to start again.
            (self.run, self.cursor, self.untaken) = (Some(run), 0, BlockChanges::default());
        }
        if !self.is_wanted || self.is_there || self.has_told {
            return None;
        }
        self.has_told = true;
        let sentence = format!(
            "kvlane: this daemon ({daemon}) is older than the engine and does not tell which blocks it evicts, so KV events \
             tell of blocks that come and not of those that go; install the engine's version of kvlane for the daemon"
        );
        Some(Notice { urgency: Urgency::Warning, sentence })
    }

    /// The connection is over.
    pub(super) fn left(&mut self) {
        (self.is_there, self.asked) = (false, None);
    }

    /// When the daemon is to be asked. None while it cannot be, or has yet to answer, or the engine has yet to take what it said.
    pub(super) fn due(&self) -> Option<Instant> {
        let waits = self.asked.is_some() || self.untaken != BlockChanges::default();
        (self.is_wanted && self.is_there && !waits).then_some(self.due)
    }

    /// Asks, if it is time.
    pub(super) fn ask(
        &mut self,
        connection: ConnectionId,
        last_request: &mut u64,
        now: Instant,
        actions: &mut VecDeque<SchedulerAction>,
    ) {
        if self.due().is_some_and(|due| now >= due) {
            let read = v1::ReadJournal { cursor: self.cursor, max: MOST };
            self.asked = Some(send(last_request, connection, Ask::ReadJournal(read), actions));
            self.due = now + INTERVAL;
        }
    }

    /// Under this id, of the present connection.
    pub(super) fn is_asked(&self, id: u64) -> bool {
        self.asked == Some(id)
    }

    /// The daemon has answered.
    ///
    /// # Errors
    /// What does not fit the question.
    pub(super) fn answered(
        &mut self,
        told: v1::JournalEntries,
        groups: usize,
        now: Instant,
    ) -> Result<(), &'static str> {
        self.asked = None;
        let count = told.entries.len() / CHANGE_BYTES;
        if told.cursor == 0 || told.start_again && count > 0 {
            return Err("a journal without a place to go on from");
        }
        if count > MOST as usize + groups {
            return Err("more entries of the journal than were asked for");
        }
        let changes = parse_changes(&told.entries).map_err(|_| "entries of the journal that are cut off")?;
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
        self.cursor = told.cursor;
        self.untaken = BlockChanges { start_again: told.start_again, changes: kept };
        if told.has_more {
            self.due = now;
        }
        Ok(())
    }

    /// The daemon has refused the request with this id, which may be another.
    pub(super) fn refused(&mut self, id: u64, now: Instant) {
        if self.is_asked(id) {
            (self.asked, self.due) = (None, now + AFTER_REFUSAL);
        }
    }

    /// What came since the last call.
    pub(super) fn take(&mut self) -> BlockChanges {
        std::mem::take(&mut self.untaken)
    }
}
