//! A snapshot that is being received: mark and sweep, between deltas.
//!
//! ```text
//!   slot of before:   a b c d e        its entries stay visible meanwhile
//!   parts, deltas:    | | . | .        announce: the entry moves to the new slot
//!                     v v   v
//!   new slot:         a b   d f        last part: the slot of before closes; c and e are hidden, then swept
//! ```
//! Deltas are applied as they come. A part may come after deltas that are later than its keys. Then it must not bring back
//! what these have withdrawn, so the snapshot remembers the latest withdrawals. A part may also come before deltas that are
//! earlier than its keys. So the snapshot ends only when these are applied, too.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use crate::messages::Part;
use crate::refused::Refused;

/// The progress of one snapshot.
#[derive(Debug)]
pub(crate) struct Snapshot {
    pub(crate) ticket: u64,
    /// When its latest part came.
    pub(crate) heard: Duration,
    base: u64,
    /// Whether each part came, by number.
    came: Vec<bool>,
    /// How many different ones came.
    parts: u32,
    /// How many there are. Known from the last part.
    total: Option<u32>,
    /// Number of the owner's latest change when it read the latest part that came.
    read_at: u64,
    /// Last change of a delta, and the fingerprint of a key that it withdrew. In the order of deltas.
    withdrawn: VecDeque<(u64, u64)>,
    /// Withdrawals up to this change are not remembered.
    forgotten: u64,
}

impl Snapshot {
    pub(crate) fn new(part: &Part, now: Duration) -> Self {
        Self {
            ticket: part.ticket,
            heard: now,
            base: part.base,
            came: Vec::new(),
            parts: 0,
            total: None,
            read_at: part.base,
            withdrawn: VecDeque::new(),
            forgotten: part.base,
        }
    }

    /// Notes that a part came. False if it had come before.
    pub(crate) fn note_part(&mut self, part: &Part, now: Duration) -> Result<bool, Refused> {
        let number = part.number as usize;
        let is_beyond = self.total.is_some_and(|total| part.number >= total);
        let ends_early = part.is_last && self.came.len() > number + 1;
        if part.base != self.base || is_beyond || ends_early {
            return Err(Refused::BadNumbers);
        }
        if self.came.len() <= number {
            self.came.resize(number + 1, false);
        }
        if std::mem::replace(&mut self.came[number], true) {
            return Ok(false);
        }
        self.parts += 1;
        self.heard = now;
        self.read_at = self.read_at.max(part.read_at);
        if part.is_last {
            self.total = Some(part.number + 1);
        }
        Ok(true)
    }

    /// All parts have come, and no part is ahead of the deltas.
    pub(crate) fn is_complete(&self, applied: u64) -> bool {
        self.total == Some(self.parts) && applied >= self.read_at
    }

    /// Deltas up to this change are needed to complete it.
    pub(crate) fn read_at(&self) -> u64 {
        self.read_at
    }

    /// Remembers a withdrawal, and forgets the earliest above `most`.
    pub(crate) fn note_withdrawal(&mut self, number: u64, fingerprint: u64, most: usize) {
        self.withdrawn.push_back((number, fingerprint));
        if self.withdrawn.len() > most
            && let Some((earliest, _)) = self.withdrawn.pop_front()
        {
            self.forgotten = earliest;
        }
    }

    /// Fingerprints of keys that were withdrawn after this change. `None` if some of them are forgotten.
    pub(crate) fn withdrawn_after(&self, number: u64) -> Option<HashSet<u64>> {
        let later = self.withdrawn.iter().rev().take_while(|(at, _)| *at > number);
        (number >= self.forgotten).then(|| later.map(|(_, fingerprint)| *fingerprint).collect())
    }
}
