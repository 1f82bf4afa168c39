//! Deltas and parts of snapshots.

use std::collections::HashSet;
use std::time::Duration;

use crate::counters::Counters;
use crate::entries::Entries;
use crate::index::{Index, Progress, lose};
use crate::limits::Limits;
use crate::messages::{Delta, Part};
use crate::owner::{Owner, Phase, Why};
use crate::refused::Refused;
use crate::snapshot::Snapshot;

impl Index {
    /// Changes of an owner's keys. The index applies them in order: one that is early waits, one that is repeated is
    /// dropped.
    ///
    /// # Errors
    /// The owner has not joined in this epoch, or has left; or the delta is too long or contradicts itself.
    pub fn delta(
        &mut self,
        name: &str,
        epoch: u64,
        delta: Delta,
        now: Duration,
    ) -> Result<Progress, Refused> {
        check_keys(delta.size(), &self.limits)?;
        let numbers = delta.last.checked_sub(delta.first).ok_or(Refused::BadNumbers)?;
        if delta.first == 0 || delta.keys() as u64 > numbers.saturating_add(1) {
            return Err(Refused::BadNumbers);
        }
        let (number, owner) = self.owners.current(name, epoch)?;
        if delta.last <= owner.applied {
            self.counters.deltas_repeated += 1;
            return Ok(self.compare(number, now));
        }
        let before = owner.applied;
        if owner.is_frozen() || delta.first > owner.applied.saturating_add(1) {
            let Limits { waiting_deltas, waiting_keys, .. } = self.limits;
            let dropped = owner.waiting.push(delta, waiting_deltas, waiting_keys);
            self.counters.deltas_dropped += dropped;
            if dropped > 0 && !owner.is_frozen() {
                lose(owner, &mut self.counters, Why::Gap, now);
            }
        } else {
            apply(owner, &mut self.entries, &delta, &self.limits, &mut self.counters);
            apply_waiting(owner, &mut self.entries, &self.limits, &mut self.counters);
            owner.end_snapshot(&mut self.entries.slots);
        }
        owner.note_gap(owner.applied > before, now);
        Ok(self.compare(number, now))
    }

    /// A part of a snapshot that was requested. In the end, entries that neither a part nor a later delta has named
    /// are hidden; [`Index::sweep`] removes them.
    ///
    /// # Errors
    /// The owner has not joined in this epoch, or has left; the snapshot is not the one that was requested; or the part
    /// is too long or contradicts the others.
    pub fn part(&mut self, name: &str, epoch: u64, part: &Part, now: Duration) -> Result<Progress, Refused> {
        check_keys(part.hashes.len(), &self.limits)?;
        if part.number >= self.limits.snapshot_parts || part.read_at < part.base {
            return Err(Refused::BadNumbers);
        }
        let (number, owner) = self.owners.current(name, epoch)?;
        match &owner.phase {
            Phase::Asked { ticket, .. } if *ticket == part.ticket => self.begin(number, part, now)?,
            Phase::Receiving(snapshot) if snapshot.ticket == part.ticket => {}
            _ => return Err(Refused::OtherSnapshot),
        }
        let (_, owner) = self.owners.current(name, epoch)?;
        let Phase::Receiving(snapshot) = &mut owner.phase else { return Err(Refused::OtherSnapshot) };
        if !snapshot.note_part(part, now)? {
            self.counters.parts_repeated += 1;
            return Ok(Progress::Waiting);
        }
        let Some(withdrawn) = snapshot.withdrawn_after(part.read_at) else {
            lose(owner, &mut self.counters, Why::SnapshotFailed, now);
            return Ok(Progress::NeedsSnapshot);
        };
        let most = (self.limits.entries, self.limits.entries_an_owner);
        let refused = self.entries.announce(&owner.slots, &part.space, &part.hashes, &withdrawn, most);
        note_refused(owner, refused, &mut self.counters);
        let before = owner.applied;
        apply_waiting(owner, &mut self.entries, &self.limits, &mut self.counters);
        owner.end_snapshot(&mut self.entries.slots);
        owner.note_gap(owner.applied > before, now);
        Ok(self.compare(number, now))
    }

    /// The first part of a snapshot has come, whichever it is. Changes up to its base are covered by the snapshot.
    fn begin(&mut self, number: u16, part: &Part, now: Duration) -> Result<(), Refused> {
        let Some(owner) = self.owners.numbered_mut(number) else { return Err(Refused::Unknown) };
        if part.base < owner.applied {
            return Err(Refused::OldSnapshot { base: part.base, applied: owner.applied });
        }
        if !owner.open_slot(number, &mut self.entries.slots) {
            return Err(Refused::NoSlot);
        }
        owner.applied = part.base;
        owner.phase = Phase::Receiving(Snapshot::new(part, now));
        Ok(())
    }
}

/// Applies the waiting deltas that are next.
fn apply_waiting(owner: &mut Owner, entries: &mut Entries, limits: &Limits, counters: &mut Counters) {
    while let Some(delta) = owner.waiting.pop(owner.applied) {
        if delta.last > owner.applied {
            apply(owner, entries, &delta, limits, counters);
        } else {
            counters.deltas_repeated += 1;
        }
    }
}

fn apply(owner: &mut Owner, entries: &mut Entries, delta: &Delta, limits: &Limits, counters: &mut Counters) {
    let most = (limits.entries, limits.entries_an_owner);
    let mut refused = 0;
    for changes in &delta.changes {
        entries.withdraw(&owner.slots, &changes.space, &changes.withdrawn, |fingerprint| {
            if let Phase::Receiving(snapshot) = &mut owner.phase {
                snapshot.note_withdrawal(delta.last, fingerprint, limits.late_withdrawals);
            }
        });
        let none = HashSet::new();
        refused += entries.announce(&owner.slots, &changes.space, &changes.announced, &none, most);
    }
    owner.applied = delta.last;
    note_refused(owner, refused, counters);
}

fn note_refused(owner: &mut Owner, refused: u64, counters: &mut Counters) {
    owner.refused += refused;
    counters.keys_refused += refused;
}

fn check_keys(keys: usize, limits: &Limits) -> Result<(), Refused> {
    let most = limits.keys_a_message;
    if keys <= most { Ok(()) } else { Err(Refused::TooManyKeys { keys, most }) }
}
