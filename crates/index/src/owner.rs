//! The index's record of one owner: its epoch, its signs of life, and how far its changes were applied.
//!
//! ```text
//!                          request                first part        all parts and deltas
//!   join ------> Lost ----------------> Asked ----------------> Receiving ------> Following
//!                 ^                       |  deltas only wait      |  deltas apply    |
//!                 '--- no part in time <--'                        |                  |
//!                 ^--- no part in time, or a delta is missing <----'                  |
//!                 ^--- a delta is missing, or count or digest differ <----------------'
//! ```
//! Lost and Asked leave the entries as they are: what a lost delta withdrew costs a reader a miss. The next snapshot
//! corrects them.

use std::sync::Arc;
use std::time::Duration;

use crate::deltas::Waiting;
use crate::limits::Timing;
use crate::messages::Heartbeat;
use crate::slots::{Slot, Slots};
use crate::snapshot::Snapshot;

/// A snapshot moves entries to a new slot. An owner whose snapshots fail one after the other keeps the entries of the
/// first and of the last; those of the others are dropped.
const SLOTS_MOST: usize = 3;

/// How the index keeps up with an owner.
#[derive(Debug)]
pub(crate) enum Phase {
    /// It needs a snapshot since then.
    Lost { since: Duration },
    /// It has requested one at that time.
    Asked { ticket: u64, at: Duration },
    /// Parts of it arrive.
    Receiving(Snapshot),
    /// The newest slot holds what the owner had after change `applied`.
    Following,
}

/// Why an owner needs a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// A delta did not come in time.
    Gap,
    /// A heartbeat differs at the same number.
    Differs,
    /// Keys were refused, and now there is room for them.
    Room,
    /// Parts of the snapshot stopped coming, or came too late.
    SnapshotFailed,
}

#[derive(Debug)]
pub(crate) struct Owner {
    pub(crate) name: Arc<str>,
    pub(crate) address: Arc<str>,
    pub(crate) epoch: u64,
    /// Latest sign of life, or the goodbye.
    pub(crate) heard: Duration,
    /// The epoch has ended by a goodbye, and is remembered so that late messages do not bring it back.
    pub(crate) is_gone: bool,
    /// Slots of its entries, oldest first. Announcements go into the last.
    pub(crate) slots: Vec<Slot>,
    pub(crate) phase: Phase,
    /// Number of the latest change that was applied.
    pub(crate) applied: u64,
    pub(crate) waiting: Waiting,
    /// The one with the greatest number.
    pub(crate) heartbeat: Option<Heartbeat>,
    /// Since when the next change is missing though later ones are known.
    pub(crate) gap_since: Option<Duration>,
    /// Keys that did not fit since the newest slot was opened.
    pub(crate) refused: u64,
    /// No snapshot is requested before.
    pub(crate) next_request: Duration,
    /// Snapshots requested since a heartbeat last agreed.
    pub(crate) requests: u32,
}

impl Owner {
    pub(crate) fn new(name: Arc<str>, epoch: u64, address: &str, now: Duration) -> Self {
        Self {
            name,
            address: address.into(),
            epoch,
            heard: now,
            is_gone: false,
            slots: Vec::new(),
            phase: Phase::Lost { since: now },
            applied: 0,
            waiting: Waiting::default(),
            heartbeat: None,
            gap_since: None,
            refused: 0,
            next_request: now,
            requests: 0,
        }
    }

    /// Time since its latest sign of life.
    pub(crate) fn age(&self, now: Duration) -> Duration {
        now.saturating_sub(self.heard)
    }

    /// Questions find its keys.
    pub(crate) fn is_visible(&self, now: Duration, timing: &Timing) -> bool {
        !self.is_gone && self.age(now) <= timing.heartbeat * Timing::MISSED
    }

    /// Deltas only wait, because a snapshot will begin after some of them.
    pub(crate) fn is_frozen(&self) -> bool {
        matches!(self.phase, Phase::Lost { .. } | Phase::Asked { .. })
    }

    /// Begins to measure a gap if there is one. `advanced`: a change was applied just now.
    pub(crate) fn note_gap(&mut self, advanced: bool, now: Duration) {
        let heard_of = self.heartbeat.map_or(0, |heartbeat| heartbeat.number).max(match &self.phase {
            Phase::Receiving(snapshot) => snapshot.read_at(),
            _ => 0,
        });
        let is_behind = !self.waiting.is_empty() || heard_of > self.applied;
        self.gap_since = match self.gap_since {
            _ if self.is_frozen() || !is_behind => None,
            Some(since) if !advanced => Some(since),
            _ => Some(now),
        };
    }

    /// Opens a slot for a snapshot. False if none is free.
    pub(crate) fn open_slot(&mut self, number: u16, slots: &mut Slots) -> bool {
        let Some(slot) = slots.open(number) else { return false };
        if self.slots.len() == SLOTS_MOST {
            slots.close(self.slots.remove(SLOTS_MOST - 2));
        }
        self.slots.push(slot);
        self.refused = 0;
        true
    }

    /// Ends a snapshot that is complete: hides what neither its parts nor later deltas have named.
    pub(crate) fn end_snapshot(&mut self, slots: &mut Slots) {
        if let Phase::Receiving(snapshot) = &self.phase
            && snapshot.is_complete(self.applied)
        {
            let newest = self.slots.len().saturating_sub(1);
            self.slots.drain(..newest).for_each(|slot| slots.close(slot));
            self.phase = Phase::Following;
        }
    }

    /// Hides all of its entries.
    pub(crate) fn close_slots(&mut self, slots: &mut Slots) {
        self.slots.drain(..).for_each(|slot| slots.close(slot));
    }
}
