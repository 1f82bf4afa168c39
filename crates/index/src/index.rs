//! The index: owners come, show that they live, and go.

use std::sync::Arc;
use std::time::Duration;

use crate::counters::Counters;
use crate::entries::Entries;
use crate::limits::{Limits, Timing};
use crate::messages::Heartbeat;
use crate::owner::{Owner, Phase, Why};
use crate::owners::Owners;
use crate::refused::Refused;

/// Which owner has which keys, as the owners announce it.
///
/// Times are durations since one fixed moment of the caller's choice, and must not fall.
#[derive(Debug)]
pub struct Index {
    pub(crate) limits: Limits,
    pub(crate) timing: Timing,
    pub(crate) entries: Entries,
    pub(crate) owners: Owners,
    pub(crate) counters: Counters,
    /// Ticket of the latest request for a snapshot.
    ticket: u64,
}

/// How the index keeps up with an owner, after one of its messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// All changes that the index has heard of are applied.
    Following,
    /// Earlier deltas, or more parts of a snapshot, have yet to come.
    Waiting,
    /// It needs a snapshot: call [`Index::tick`] now.
    NeedsSnapshot,
}

/// Ask this owner for a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotRequest {
    /// The owner's name.
    pub owner: Arc<str>,
    /// The epoch that the snapshot must be of.
    pub epoch: u64,
    /// Where to send the request.
    pub address: Arc<str>,
    /// The parts must carry it.
    pub ticket: u64,
}

impl Index {
    /// An empty index. The seed must be random, and unknown to clients that choose prompts.
    pub fn new(seed: [u64; 2], limits: Limits, timing: Timing) -> Self {
        let entries = Entries::new(seed);
        // Parts for an earlier run of this index must not fit a request of this one.
        let ticket = entries.fingerprints.public_number();
        let limits = Limits { owners: limits.owners.min(Limits::OWNERS_MOST), ..limits };
        let (owners, counters) = (Owners::default(), Counters::default());
        Self { limits, timing, entries, owners, counters, ticket }
    }

    /// An owner has started. A greater epoch than before replaces it and hides its entries; a message that is repeated
    /// changes nothing. The index then needs a snapshot, also of an empty owner.
    ///
    /// # Errors
    /// A lower epoch, one that has said goodbye, a bad name or address, or too many owners.
    pub fn join(
        &mut self,
        name: &str,
        epoch: u64,
        address: &str,
        now: Duration,
    ) -> Result<Progress, Refused> {
        for bytes in [name.len(), address.len()] {
            let most = self.limits.name_bytes;
            if bytes == 0 || bytes > most {
                return Err(Refused::NameLength { bytes, most });
            }
        }
        if let Some((_, owner)) = self.owners.named(name) {
            if epoch > owner.epoch {
                owner.close_slots(&mut self.entries.slots);
                *owner = Owner::new(owner.name.clone(), epoch, address, now);
            }
            let (_, owner) = self.owners.current(name, epoch)?;
            return Ok(progress(owner));
        }
        if self.owners.len() >= self.limits.owners {
            return Err(Refused::TooManyOwners(self.limits.owners));
        }
        self.owners.add(Owner::new(name.into(), epoch, address, now));
        Ok(Progress::NeedsSnapshot)
    }

    /// An owner lives. One with a lower number than an earlier heartbeat is late, and changes nothing.
    ///
    /// # Errors
    /// The owner has not joined in this epoch, or has left.
    pub fn heartbeat(
        &mut self,
        name: &str,
        epoch: u64,
        heartbeat: Heartbeat,
        now: Duration,
    ) -> Result<Progress, Refused> {
        let (number, owner) = self.owners.current(name, epoch)?;
        if owner.heartbeat.is_none_or(|earlier| heartbeat.number >= earlier.number) {
            owner.heard = owner.heard.max(now);
            owner.heartbeat = Some(heartbeat);
            owner.note_gap(false, now);
        }
        Ok(self.compare(number, now))
    }

    /// An owner leaves. Its entries are hidden at once. Its epoch is remembered for a while and cannot join again.
    ///
    /// # Errors
    /// The owner is unknown or in a later epoch.
    pub fn bye(&mut self, name: &str, epoch: u64, now: Duration) -> Result<(), Refused> {
        let (_, owner) = self.owners.named(name).ok_or(Refused::Unknown)?;
        if epoch < owner.epoch {
            return Err(Refused::OldEpoch { epoch, current: owner.epoch });
        }
        owner.close_slots(&mut self.entries.slots);
        let address = owner.address.clone();
        *owner = Owner { is_gone: true, ..Owner::new(owner.name.clone(), epoch, &address, now) };
        Ok(())
    }

    /// Forgets owners that were silent for long, gives up on deltas and parts that do not come, and returns the requests
    /// for snapshots that are due. Call it often (every 100 ms), and when an owner needs a snapshot.
    pub fn tick(&mut self, now: Duration) -> Vec<SnapshotRequest> {
        let mut numbers: Vec<u16> = self.owners.iter().map(|(number, _)| number).collect();
        numbers.retain(|number| !self.forget_silent(*number, now));
        for owner in self.owners.iter_mut() {
            let why = match &owner.phase {
                Phase::Asked { at, .. } => overdue(*at, self.timing.snapshot, now, Why::SnapshotFailed),
                Phase::Receiving(snapshot) => {
                    overdue(snapshot.heard, self.timing.snapshot, now, Why::SnapshotFailed)
                }
                Phase::Lost { .. } | Phase::Following => None,
            };
            let gap = owner.gap_since.and_then(|since| overdue(since, self.timing.gap, now, Why::Gap));
            if let Some(why) = why.or(gap) {
                lose(owner, &mut self.counters, why, now);
            }
        }
        self.due_requests(now)
    }

    /// Removes hidden entries: those of ended epochs, and those that a snapshot no longer names. It looks at about `budget`
    /// entries, and at no more than one small table beyond. Returns how many are left.
    pub fn sweep(&mut self, budget: usize) -> usize {
        self.entries.sweep(budget)
    }

    /// Compares the owner's latest heartbeat with what was applied, if both are at the same number.
    pub(crate) fn compare(&mut self, number: u16, now: Duration) -> Progress {
        let Some(owner) = self.owners.numbered_mut(number) else { return Progress::Waiting };
        if let (Phase::Following, Some(newest), Some(heartbeat)) =
            (&owner.phase, owner.slots.last(), owner.heartbeat)
            && heartbeat.number == owner.applied
        {
            let (ours, theirs) = (self.entries.slots.keys(*newest), heartbeat.keys);
            let others = (self.entries.tables.len() as u64).saturating_sub(ours.count);
            let has_room = theirs.count <= self.limits.entries_an_owner
                && others.saturating_add(theirs.count) <= self.limits.entries as u64;
            match (owner.refused > 0, ours == theirs) {
                (_, true) => owner.requests = 0,
                (false, false) => lose(owner, &mut self.counters, Why::Differs, now),
                (true, false) if has_room => lose(owner, &mut self.counters, Why::Room, now),
                (true, false) => {}
            }
        }
        progress(owner)
    }

    /// True if it has removed the owner.
    fn forget_silent(&mut self, number: u16, now: Duration) -> bool {
        if self.owners.numbered(number).is_none_or(|owner| owner.age(now) < self.timing.forget) {
            return false;
        }
        if let Some(mut owner) = self.owners.remove(number) {
            owner.close_slots(&mut self.entries.slots);
            self.counters.owners_forgotten += 1;
        }
        true
    }

    /// Requests to the visible owners that have waited longest, as many as may be in flight.
    fn due_requests(&mut self, now: Duration) -> Vec<SnapshotRequest> {
        let under_way = |owner: &Owner| matches!(owner.phase, Phase::Asked { .. } | Phase::Receiving(_));
        let in_flight = self.owners.iter().filter(|(_, owner)| under_way(owner)).count();
        let room = self.limits.snapshots.saturating_sub(in_flight);
        let timing = self.timing;
        let is_due = |owner: &Owner| owner.next_request <= now && owner.is_visible(now, &timing);
        let mut due: Vec<(Duration, &mut Owner)> = self
            .owners
            .iter_mut()
            .filter_map(|owner| match owner.phase {
                Phase::Lost { since } if is_due(owner) => Some((since, owner)),
                _ => None,
            })
            .collect();
        due.sort_by_key(|(since, _)| *since);
        let mut requests = Vec::new();
        for (_, owner) in due.into_iter().take(room) {
            self.ticket = self.ticket.wrapping_add(1);
            owner.phase = Phase::Asked { ticket: self.ticket, at: now };
            owner.next_request = now + timing.pause * (1 << owner.requests.min(PAUSE_DOUBLINGS));
            owner.requests += 1;
            self.counters.snapshots_requested += 1;
            let (name, address) = (owner.name.clone(), owner.address.clone());
            requests.push(SnapshotRequest { owner: name, epoch: owner.epoch, address, ticket: self.ticket });
        }
        requests
    }
}

/// The pause between an owner's snapshots doubles this often at most.
const PAUSE_DOUBLINGS: u32 = 6;

/// The owner needs a snapshot.
pub(crate) fn lose(owner: &mut Owner, counters: &mut Counters, why: Why, now: Duration) {
    owner.phase = Phase::Lost { since: now };
    owner.gap_since = None;
    *counters.lost(why) += 1;
}

fn progress(owner: &Owner) -> Progress {
    match owner.phase {
        Phase::Lost { .. } => Progress::NeedsSnapshot,
        Phase::Following if owner.gap_since.is_none() => Progress::Following,
        _ => Progress::Waiting,
    }
}

fn overdue(since: Duration, most: Duration, now: Duration, why: Why) -> Option<Why> {
    (now.saturating_sub(since) > most).then_some(why)
}
