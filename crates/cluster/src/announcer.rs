//! Announces this pool's blocks to the replicas of an index, to each in a thread of its own.
//!
//! ```text
//!   begin an epoch: read which blocks there are
//!     Join, again and again --Owners--> Count every second
//!     the store's journal ------------> Announce: what changed, a few milliseconds of changes together
//!     SnapshotWanted -----------------> Part, Part, .. with the changes between two parts
//!     the journal was too fast, or Unknown --> a new epoch
//! ```
//! Each message is acknowledged before the next is sent. So a replica sees the changes in their order, and one that is slow
//! holds up nobody else. Changes have the journal's numbers, counted from the epoch's start.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use kvlane_block::{BlockHash, CutDigest, Namespace, Space};
use kvlane_fabric::{Engine, FabricError, PeerId, SendOptions};
use kvlane_index::{Delta, Heartbeat, Part};
use kvlane_store::{Changes, JournalEntry, SnapshotPosition, SpaceId, Store};
use parking_lot::{Condvar, Mutex};

use crate::announced::Announced;
use crate::index_messages::{KEYS_MAX, ToReplica};
use crate::members::{Member, MemberNumber, acknowledged};
use crate::messages::Message;

/// How long a message may take before the replica counts as lost.
pub(crate) const PATIENCE: Duration = Duration::from_secs(3);
pub(crate) const COUNT_EVERY: Duration = Duration::from_secs(1);
/// Pause after the first attempt to join. It doubles, up to `COUNT_EVERY`.
pub(crate) const JOIN_PAUSE: Duration = Duration::from_millis(50);
/// A replica that does not know this daemon after this time cannot reach it.
const JOIN_PATIENCE: Duration = Duration::from_secs(5);
/// Changes of this time go together: a message costs a daemon 90 us of processor time, and a replica 40 us for each daemon.
pub(crate) const TOGETHER: Duration = Duration::from_millis(5);
/// Least time between the starts of two epochs.
const EPOCH_PAUSE: Duration = Duration::from_secs(1);
/// How long a replica knows this daemon after it has said so. It does with each count.
const KNOWN_LASTS: Duration = Duration::from_secs(4);
const DAY_US: u64 = 86_400_000_000;
/// How long the end of this daemon waits for its goodbyes.
const GOODBYE: Duration = Duration::from_millis(200);

/// Announces to all replicas.
pub(crate) struct Announcer {
    engine: Arc<Engine>,
    store: Arc<Store>,
    /// This daemon's name in the index: where the others reach it.
    own: SocketAddr,
    /// Greater than all epochs of earlier runs, unless the clock went back.
    epoch: AtomicU64,
    /// The replicas that are attended.
    attended: Mutex<HashMap<MemberNumber, Arc<Attended>>>,
    /// A replica is attended no more, or all are to end.
    ends: Condvar,
    stopped: AtomicBool,
    /// Blocks that a replica knew at its last count.
    pub(crate) blocks: AtomicU64,
}

/// The requests of a replica.
#[derive(Default)]
struct Attended {
    wanted: Mutex<Wanted>,
    /// For its thread: look at `wanted`.
    is_called: AtomicBool,
}

/// The latest words of a replica to this daemon.
#[derive(Default)]
pub(crate) struct Wanted {
    /// The epoch that the replica follows, and when it said so last.
    pub(crate) known: Option<(u64, Instant)>,
    /// Epoch and ticket of the snapshot that it wants.
    pub(crate) snapshot: Option<(u64, u64)>,
    /// The epoch that the replica follows instead of what this daemon sends.
    pub(crate) refused: Option<u64>,
}

impl Wanted {
    /// Whether the replica follows this epoch, and the ticket of a snapshot that it wants.
    ///
    /// # Errors
    /// The replica refuses this epoch. The next one must be above the one that the error names.
    pub(crate) fn take(&mut self, epoch: u64, now: Instant) -> Result<(bool, Option<u64>), u64> {
        let is_known = self.known.is_some_and(|(of, at)| of == epoch && now < at + KNOWN_LASTS);
        match self.refused.take() {
            // Refusals of earlier epochs come late.
            Some(refused) if is_known || refused >= epoch => {
                *self = Self::default();
                Err(refused)
            }
            _ => {
                let snapshot = self.snapshot.take().filter(|(of, _)| *of == epoch);
                Ok((is_known, snapshot.map(|(_, ticket)| ticket)))
            }
        }
    }
}

/// Why an epoch has ended.
enum Ended {
    /// The replica is lost, for this reason.
    Lost(String),
    Stopped,
    /// A new epoch begins, above this one.
    Again(u64),
}

/// A snapshot that is being sent.
struct Sending {
    ticket: u64,
    position: SnapshotPosition,
    base: u64,
    /// The number of the next part.
    number: u32,
}

impl Announcer {
    pub(crate) fn new(engine: Arc<Engine>, store: Arc<Store>, own: SocketAddr) -> Self {
        Self {
            engine,
            store,
            own,
            epoch: AtomicU64::new(now_us()),
            attended: Mutex::default(),
            ends: Condvar::new(),
            stopped: AtomicBool::new(false),
            blocks: AtomicU64::new(0),
        }
    }

    /// A replica follows this epoch.
    pub(crate) fn known(&self, replica: MemberNumber, epoch: u64) {
        let known = (epoch, Instant::now());
        self.ask(replica, |wanted| wanted.known.replace(known).is_none_or(|(before, _)| before != epoch));
    }

    /// A replica wants a snapshot.
    pub(crate) fn snapshot_wanted(&self, replica: MemberNumber, epoch: u64, ticket: u64) {
        self.ask(replica, |wanted| wanted.snapshot.replace((epoch, ticket)).is_none());
    }

    /// A replica refuses this daemon's messages, because it follows this epoch.
    pub(crate) fn refused(&self, replica: MemberNumber, epoch: u64) {
        self.ask(replica, |wanted| wanted.refused.replace(epoch).is_none());
    }

    /// `note` returns whether that is news.
    fn ask(&self, replica: MemberNumber, note: impl FnOnce(&mut Wanted) -> bool) {
        let Some(attended) = self.attended.lock().get(&replica).cloned() else { return };
        if note(&mut attended.wanted.lock()) {
            attended.is_called.store(true, Ordering::Release);
            self.store.wake_journal_readers();
        }
    }

    /// Tells all replicas that this daemon ends, for which it waits a moment.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        let mut attended = self.attended.lock();
        attended.values().for_each(|each| each.is_called.store(true, Ordering::Release));
        self.store.wake_journal_readers();
        self.ends.notify_all();
        let until = Instant::now() + GOODBYE;
        self.ends.wait_while_until(&mut attended, |attended| !attended.is_empty(), until);
    }

    /// Announces to a replica until it is lost, and returns why. None: this daemon stops.
    pub(crate) fn attend(&self, replica: &Member, peer: PeerId) -> Option<String> {
        let attended = Arc::new(Attended::default());
        self.attended.lock().insert(replica.number, Arc::clone(&attended));
        let ended = loop {
            let next = Instant::now() + EPOCH_PAUSE;
            match self.run_epoch(replica, &attended, peer) {
                Ended::Lost(why) => break Some(why),
                Ended::Stopped => break None,
                Ended::Again(epoch) => {
                    // No replica follows an epoch of the day after tomorrow.
                    self.epoch.fetch_max(epoch.min(now_us() + DAY_US), Ordering::Relaxed);
                }
            }
            let mut all = self.attended.lock();
            // Others' ends wake it, too.
            self.ends.wait_while_until(&mut all, |_| !self.stopped.load(Ordering::Acquire), next);
        };
        self.attended.lock().remove(&replica.number);
        self.ends.notify_all();
        ended
    }

    fn run_epoch(&self, replica: &Member, attended: &Attended, peer: PeerId) -> Ended {
        let Some((announced, cursor)) = self.begin(attended) else { return Ended::Again(0) };
        let epoch = self.epoch.fetch_add(1, Ordering::Relaxed) + 1;
        let mut running =
            Epoch { of: self, replica, attended, peer, epoch, announced, start: cursor, cursor };
        running.run().err().unwrap_or(Ended::Stopped)
    }

    /// Which blocks there are, and the journal's cursor after them. None: the journal was too fast.
    fn begin(&self, attended: &Attended) -> Option<(Announced, u64)> {
        let mut announced = Announced::default();
        let now = Instant::now();
        let is_called = &attended.is_called;
        let mut cursor = self.store.wait_journal(0, now, 1, is_called, &mut Changes::default()).cursor;
        let mut position = SnapshotPosition::default();
        loop {
            // New for each read, because a space's description may change.
            let mut changes = Changes::default();
            let (has_more, upto) = self.store.read_snapshot(&mut position, usize::MAX, &mut changes);
            announced.apply(&changes);
            while cursor < upto {
                let mut changes = Changes::default();
                let most = usize::try_from(upto - cursor).unwrap_or(usize::MAX);
                let read = self.store.wait_journal(cursor, now, most, is_called, &mut changes);
                if read.start_again {
                    return None;
                }
                announced.apply(&changes);
                cursor = read.cursor;
            }
            if !has_more {
                return Some((announced, cursor));
            }
        }
    }
}

/// Microseconds since 1970.
fn now_us() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_micros() as u64
}

/// One epoch of the announcements to one replica.
struct Epoch<'a> {
    of: &'a Announcer,
    replica: &'a Member,
    attended: &'a Attended,
    peer: PeerId,
    epoch: u64,
    announced: Announced,
    /// The journal's cursor before change 1.
    start: u64,
    cursor: u64,
}

impl Epoch<'_> {
    /// Until it ends, which is its error.
    fn run(&mut self) -> Result<(), Ended> {
        let mut next_beat = Instant::now();
        let mut join_pause = JOIN_PAUSE;
        let mut unknown_until = next_beat + JOIN_PATIENCE;
        let mut sending: Option<Sending> = None;
        let mut was_known = false;
        loop {
            self.attended.is_called.store(false, Ordering::Release);
            if self.of.stopped.load(Ordering::Acquire) {
                return self.send(ToReplica::Leave { epoch: self.epoch });
            }
            let wanted = self.attended.wanted.lock().take(self.epoch, Instant::now());
            let (is_known, snapshot) = wanted.map_err(Ended::Again)?;
            if let Some(ticket) = snapshot {
                let position = SnapshotPosition::default();
                sending = Some(Sending { ticket, position, base: self.number(), number: 0 });
            }
            if is_known && !was_known {
                // The replica compares from the beginning.
                next_beat = Instant::now();
                self.replica.state.lock().trouble = None;
            }
            let now = Instant::now();
            if was_known && !is_known {
                // The replica reaches this daemon no more, or has forgotten it.
                (next_beat, join_pause, unknown_until) = (now, JOIN_PAUSE, now + JOIN_PATIENCE);
            }
            was_known = is_known;
            if now >= next_beat {
                if is_known {
                    let keys = self.announced.keys();
                    self.of.blocks.store(keys.count, Ordering::Relaxed);
                    let heartbeat = Heartbeat { number: self.number(), keys };
                    self.send(ToReplica::Count { epoch: self.epoch, heartbeat })?;
                    next_beat = now + COUNT_EVERY;
                } else {
                    self.send(ToReplica::Join { epoch: self.epoch, address: self.of.own })?;
                    next_beat = now + join_pause;
                    join_pause = (2 * join_pause).min(COUNT_EVERY);
                    if now >= unknown_until {
                        self.note_not_known();
                    }
                }
            }
            if let Some(unfinished) = &mut sending
                && self.send_part(unfinished)?
            {
                sending = None;
                // The replica compares now.
                next_beat = now;
            }
            let until = if sending.is_some() { now } else { next_beat };
            let has_more = self.announce(is_known, until, KEYS_MAX)?;
            if sending.is_none() && has_more == Some(false) {
                std::thread::sleep(TOGETHER);
            }
        }
    }

    /// The replica takes messages, and does not answer, because it reaches no daemon at the address that this one names.
    fn note_not_known(&self) {
        let mut state = self.replica.state.lock();
        if state.trouble.is_none() {
            let own = self.of.own;
            // Log: the index finds none of this daemon's blocks, because it cannot reach this daemon. Do: let the replica
            // reach the address, or write another in `--cluster-advertise`; no other daemon may have it.
            tracing::warn!(replica = %self.replica.address, %own, "replica does not reach this daemon");
            state.trouble = Some(format!("it does not reach this daemon at {own}"));
        }
    }

    /// The latest change.
    fn number(&self) -> u64 {
        self.cursor - self.start
    }

    /// Announces up to `most` changes, for which it waits until then. Returns whether there are more; None: there was none. A
    /// replica that does not follow this epoch is told nothing: its snapshot begins later, or it notices the gap.
    fn announce(&mut self, is_known: bool, until: Instant, most: usize) -> Result<Option<bool>, Ended> {
        let mut changes = Changes::default();
        let (store, is_called) = (&self.of.store, &self.attended.is_called);
        let read = store.wait_journal(self.cursor, until, most.min(KEYS_MAX), is_called, &mut changes);
        if read.start_again {
            return Err(Ended::Again(self.epoch));
        }
        if read.cursor == self.cursor {
            return Ok(None);
        }
        let first = self.number() + 1;
        self.cursor = read.cursor;
        let delta = Delta { first, last: self.number(), changes: self.announced.apply(&changes) };
        if is_known {
            self.send(ToReplica::Announce { epoch: self.epoch, delta })?;
        }
        Ok(Some(read.has_more))
    }

    /// Sends the next part of a snapshot, after all changes before it. True: it is complete.
    fn send_part(&mut self, sending: &mut Sending) -> Result<bool, Ended> {
        let mut found = Changes::default();
        let (has_more, upto) = self.of.store.read_snapshot(&mut sending.position, KEYS_MAX, &mut found);
        while self.cursor < upto {
            let most = usize::try_from(upto - self.cursor).unwrap_or(usize::MAX);
            self.announce(true, Instant::now(), most)?;
        }
        let mut hashes: HashMap<SpaceId, Vec<BlockHash>> = HashMap::new();
        for JournalEntry { space, hash, .. } in found.entries {
            hashes.entry(space).or_default().push(hash);
        }
        for (id, hashes) in hashes {
            let description = found.spaces.get(&id).filter(|description| description.crosses_hosts);
            if let Some(description) = description {
                self.send_hashes(sending, description.space, hashes, false)?;
            }
        }
        if !has_more {
            // The last part may be empty, and then of any space.
            let space = Space { namespace: Namespace([0; 16]), cut: CutDigest([0; 16]) };
            self.send_hashes(sending, space, Vec::new(), true)?;
        }
        Ok(!has_more)
    }

    fn send_hashes(
        &self,
        sending: &mut Sending,
        space: Space,
        hashes: Vec<BlockHash>,
        is_last: bool,
    ) -> Result<(), Ended> {
        let Sending { ticket, base, number, .. } = *sending;
        sending.number += 1;
        let part = Part { ticket, number, is_last, base, read_at: self.number(), space, hashes };
        self.send(ToReplica::Part { epoch: self.epoch, part })
    }

    /// Sends a message and waits for its acknowledgement.
    fn send(&self, message: ToReplica) -> Result<(), Ended> {
        let bytes: Arc<[u8]> = Message::ToReplica(message).encode().into();
        let (engine, peer) = (&self.of.engine, self.peer);
        let until = Instant::now() + PATIENCE;
        loop {
            let options = SendOptions { timeout: PATIENCE, ..SendOptions::default() };
            let sent = engine.send(peer, Arc::clone(&bytes), options);
            return match sent.map(|sent| acknowledged(engine, peer, &sent)) {
                Ok(Some(Ok(()))) => Ok(()),
                Ok(Some(Err(why))) => Err(Ended::Lost(why)),
                Ok(None) => Err(Ended::Stopped),
                // This daemon's other messages fill what there is: that says nothing about the replica.
                Err(FabricError::Full(_) | FabricError::MessagesFull(_)) if Instant::now() < until => {
                    std::thread::sleep(TOGETHER);
                    continue;
                }
                Err(error) => Err(Ended::Lost(error.to_string())),
            };
        }
    }
}
