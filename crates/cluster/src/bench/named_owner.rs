//! [`NamedOwner`]: an owner that announces blocks that it has in name only, so that a benchmark's owners need no pools.
//!
//! To a replica it is a daemon: it is dialled back, answers each wish for a snapshot, and sends what changed within 5 ms, as
//! announcer.rs does. Nothing can be read from it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use kvlane_block::BlockHash;
use kvlane_fabric::{Engine, EngineId, PeerId, SendOptions};
use kvlane_index::{Delta, Heartbeat, KeySet, Part};
use parking_lot::{Condvar, Mutex};

use super::loopback;
use super::named_blocks::{NamedBlocks, SPACE};
use crate::announcer::{COUNT_EVERY, JOIN_PAUSE, PATIENCE, TOGETHER, Wanted};
use crate::cluster::ClusterError;
use crate::index_messages::{FromReplica, KEYS_MAX, ToReplica};
use crate::members::{Dialling, Member, MemberNumber, Members, acknowledged};
use crate::messages::Message;

/// Multiples of it, without their whole parts, are spread evenly over 0 to 1.
const TURN: f64 = 0.618_033_988_749_895;

/// An owner of blocks in name only.
pub struct NamedOwner {
    shared: Arc<Shared>,
    replicas: Arc<Members>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    engine: Arc<Engine>,
    own: SocketAddr,
    blocks: NamedBlocks,
    /// Greater than all epochs of earlier processes at this address, unless the clock went back.
    epoch: AtomicU64,
    pace: Mutex<Pace>,
    attended: Mutex<HashMap<MemberNumber, Arc<Attended>>>,
    is_stopped: AtomicBool,
    /// Changes that a replica has acknowledged, summed over replicas.
    acknowledged: AtomicU64,
}

/// The changes that the owner makes: so many at a time.
struct Pace {
    /// Changes before `since`.
    made: u64,
    since: Instant,
    at_a_time: u64,
    /// From one time to the next. None: it makes no more.
    every: Option<Duration>,
}

impl Pace {
    fn made(&self, now: Instant) -> u64 {
        let Some(every) = self.every else { return self.made };
        let times = now.saturating_duration_since(self.since).as_nanos() / every.as_nanos().max(1);
        self.made + self.at_a_time * times as u64
    }

    /// When it has made more than `changes`, if ever.
    fn next(&self, changes: u64) -> Option<Instant> {
        let times = changes.saturating_sub(self.made) / self.at_a_time.max(1) + 1;
        self.since.checked_add(self.every?.checked_mul(u32::try_from(times).ok()?)?)
    }
}

/// A replica that is announced to.
#[derive(Default)]
struct Attended {
    wanted: Mutex<Wanted>,
    /// For its thread: there is something to do.
    is_called: Mutex<bool>,
    called: Condvar,
}

impl Attended {
    fn call(&self) {
        *self.is_called.lock() = true;
        self.called.notify_one();
    }

    fn wait_until(&self, until: Instant) {
        let mut is_called = self.is_called.lock();
        self.called.wait_while_until(&mut is_called, |is_called| !*is_called, until);
        *is_called = false;
    }
}

impl NamedOwner {
    /// Listens on loopback, and joins these replicas (HOST:PORT), again and again. All goes by TCP.
    ///
    /// # Errors
    /// [`ClusterError`]
    pub fn start(blocks: NamedBlocks, replicas: Vec<String>) -> Result<Self, ClusterError> {
        let engine = Arc::new(loopback::engine()?);
        let own = loopback::address(&engine)?;
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let shared = Arc::new(Shared {
            engine: Arc::clone(&engine),
            own,
            blocks,
            epoch: AtomicU64::new(since.as_micros() as u64),
            pace: Mutex::new(Pace { made: 0, since: Instant::now(), at_a_time: 1, every: None }),
            attended: Mutex::default(),
            is_stopped: AtomicBool::new(false),
            acknowledged: AtomicU64::new(0),
        });
        let members = Members::new();
        let (attending, taking, of) = (Arc::clone(&shared), Arc::clone(&shared), Arc::clone(&members));
        let run = move || {
            while let Some(message) = taking.engine.receive(None) {
                taking.take(&of, message.from, &message.bytes);
            }
        };
        let thread = std::thread::Builder::new().name("kvlane-named".into()).spawn(run)?;
        let owner = Self { shared, replicas: members, thread: Some(thread) };
        owner.replicas.start(Arc::new(Dialling {
            engine,
            names: replicas,
            kind: "replica",
            attend: Box::new(move |replica, peer| attending.attend(replica, peer)),
            when_lost: Box::new(|_| ()),
        }))?;
        Ok(owner)
    }

    /// Where replicas and daemons reach it: its name in the index.
    pub fn address(&self) -> SocketAddr {
        self.shared.own
    }

    /// Makes so many changes a second from now on, `at_a_time` together. 0: none. Owners take turns.
    pub fn change(&self, a_second: f64, at_a_time: u64) {
        let now = Instant::now();
        let every = Duration::try_from_secs_f64(at_a_time as f64 / a_second).ok();
        let share = (self.shared.blocks.owner as f64 * TURN).fract();
        let since = every.and_then(|every| now.checked_add(every.mul_f64(share))).unwrap_or(now);
        let mut pace = self.shared.pace.lock();
        *pace = Pace { made: pace.made(now), since, at_a_time, every };
        drop(pace);
        self.shared.call_all();
    }

    /// Changes that replicas have acknowledged, summed over replicas.
    pub fn acknowledged(&self) -> u64 {
        self.shared.acknowledged.load(Ordering::Relaxed)
    }
}

impl Drop for NamedOwner {
    fn drop(&mut self) {
        self.shared.is_stopped.store(true, Ordering::Release);
        self.replicas.stop();
        self.shared.engine.close();
        self.shared.call_all();
        if let Some(thread) = self.thread.take() {
            // If it panicked, its message is on stderr.
            drop(thread.join());
        }
    }
}

impl Shared {
    /// Takes a replica's message. Beats, and those of others, ask for nothing.
    fn take(&self, replicas: &Members, from: EngineId, bytes: &[u8]) {
        let (Some(replica), Ok(Message::FromReplica(message))) = (replicas.of(from), Message::decode(bytes))
        else {
            return;
        };
        let Some(attended) = self.attended.lock().get(&replica.number).cloned() else { return };
        let mut wanted = attended.wanted.lock();
        match message {
            FromReplica::Owners { epoch, .. } => wanted.known = Some((epoch, Instant::now())),
            FromReplica::SnapshotWanted { epoch, ticket } => wanted.snapshot = Some((epoch, ticket)),
            FromReplica::Unknown { epoch, .. } => wanted.refused = Some(epoch),
            FromReplica::Located { .. } => {}
        }
        drop(wanted);
        attended.call();
    }

    fn call_all(&self) {
        self.attended.lock().values().for_each(|attended| attended.call());
    }

    /// Announces to a replica until it is lost, and returns why. None: this owner stops.
    fn attend(&self, replica: &Member, peer: PeerId) -> Option<String> {
        let attended = Arc::new(Attended::default());
        self.attended.lock().insert(replica.number, Arc::clone(&attended));
        let start = self.made();
        let mut running = Epoch {
            of: self,
            attended: &attended,
            peer,
            epoch: self.epoch.fetch_add(1, Ordering::Relaxed) + 1,
            start,
            changes: start,
            keys: self.blocks.keys_after(start),
        };
        let ended = running.run().err().unwrap_or(Ended::Stopped);
        self.attended.lock().remove(&replica.number);
        match ended {
            Ended::Lost(why) => Some(why),
            Ended::Stopped => None,
            Ended::Refused(epoch) => {
                self.epoch.fetch_max(epoch, Ordering::Relaxed);
                Some("it follows another epoch".to_owned())
            }
        }
    }

    fn made(&self) -> u64 {
        self.pace.lock().made(Instant::now())
    }
}

/// Why an epoch has ended.
enum Ended {
    /// The replica is lost, for this reason.
    Lost(String),
    Stopped,
    /// The replica follows this epoch, and refuses what is sent.
    Refused(u64),
}

/// One epoch of the announcements to one replica.
struct Epoch<'a> {
    of: &'a Shared,
    attended: &'a Attended,
    peer: PeerId,
    epoch: u64,
    /// Changes before this epoch.
    start: u64,
    /// Changes of which the replica was told, those before this epoch included.
    changes: u64,
    keys: KeySet,
}

/// A snapshot that is being sent.
struct Sending {
    ticket: u64,
    /// The number of the latest change when it began.
    base: u64,
    /// The number of the next part.
    part: u32,
    /// Blocks that it has still to name, by number. Later ones are announced.
    blocks: Range<u64>,
}

impl Epoch<'_> {
    /// Until it ends, which is its error if it does not stop.
    fn run(&mut self) -> Result<(), Ended> {
        let mut next_beat = Instant::now();
        let mut sending: Option<Sending> = None;
        let mut was_known = false;
        loop {
            if self.of.is_stopped.load(Ordering::Acquire) {
                return Ok(());
            }
            let wanted = self.attended.wanted.lock().take(self.epoch, Instant::now());
            let (is_known, snapshot) = wanted.map_err(Ended::Refused)?;
            if let Some(ticket) = snapshot {
                let blocks = 0..self.of.blocks.turning_after(self.changes).end;
                sending = Some(Sending { ticket, base: self.number(), part: 0, blocks });
            }
            let now = Instant::now();
            if now >= next_beat || is_known && !was_known {
                was_known = is_known;
                next_beat = now + self.beat(is_known)?;
            }
            if let Some(unfinished) = &mut sending
                && self.send_part(unfinished)?
            {
                sending = None;
                // The replica compares now.
                next_beat = now;
            }
            let is_all = self.send_changes()?;
            if sending.is_none() && is_all {
                self.pause(next_beat);
            }
        }
    }

    /// The latest change that the replica was told of.
    fn number(&self) -> u64 {
        self.changes - self.start
    }

    /// Sends a sign of life, and returns when the next one is due.
    fn beat(&self, is_known: bool) -> Result<Duration, Ended> {
        let epoch = self.epoch;
        if is_known {
            let heartbeat = Heartbeat { number: self.number(), keys: self.keys };
            self.send(ToReplica::Count { epoch, heartbeat })?;
            Ok(COUNT_EVERY)
        } else {
            self.send(ToReplica::Join { epoch, address: self.of.own })?;
            Ok(JOIN_PAUSE)
        }
    }

    /// Sends the next part of a snapshot. True: it is complete.
    fn send_part(&self, sending: &mut Sending) -> Result<bool, Ended> {
        let blocks = &self.of.blocks;
        let turning = blocks.turning_after(self.changes);
        let mut hashes: Vec<BlockHash> = Vec::with_capacity(KEYS_MAX);
        for live in [0..blocks.kept, turning.start..sending.blocks.end] {
            let from = sending.blocks.start.max(live.start);
            let to = live.end.min(from + (KEYS_MAX - hashes.len()) as u64);
            if from < to {
                hashes.extend(blocks.hashes(from..to));
                sending.blocks.start = to;
            }
        }
        // Blocks that were withdrawn meanwhile are left out.
        let is_last = sending.blocks.start >= blocks.kept
            && sending.blocks.start.max(turning.start) >= sending.blocks.end;
        let Sending { ticket, base, part, .. } = *sending;
        let part = Part { ticket, number: part, is_last, base, read_at: self.number(), space: SPACE, hashes };
        sending.part += 1;
        self.send(ToReplica::Part { epoch: self.epoch, part })?;
        Ok(is_last)
    }

    /// Announces what has changed, up to [`KEYS_MAX`]. True: that was all.
    fn send_changes(&mut self) -> Result<bool, Ended> {
        let made = self.of.made();
        let upto = made.min(self.changes + KEYS_MAX as u64);
        if upto > self.changes {
            let first = self.number() + 1;
            let changes = self.of.blocks.change(self.changes..upto, &mut self.keys);
            let count = upto - self.changes;
            self.changes = upto;
            let delta = Delta { first, last: self.number(), changes: vec![changes] };
            self.send(ToReplica::Announce { epoch: self.epoch, delta })?;
            self.of.acknowledged.fetch_add(count, Ordering::Relaxed);
        }
        Ok(upto == made)
    }

    /// Waits for a request of the replica, and for changes.
    fn pause(&self, next_beat: Instant) {
        let soon = Instant::now() + TOGETHER;
        let next_change = self.of.pace.lock().next(self.changes).map(|at| at.max(soon));
        let until = next_change.map_or(next_beat, |at| at.min(next_beat));
        self.attended.wait_until(until);
    }

    /// Sends a message and waits for its acknowledgement.
    fn send(&self, message: ToReplica) -> Result<(), Ended> {
        let options = SendOptions { timeout: PATIENCE, ..SendOptions::default() };
        let (engine, peer) = (&self.of.engine, self.peer);
        let sent = engine.send(peer, Message::ToReplica(message).encode(), options);
        match sent.map(|sent| acknowledged(engine, peer, &sent)) {
            Ok(Some(Ok(()))) => Ok(()),
            Ok(Some(Err(why))) => Err(Ended::Lost(why)),
            Ok(None) => Err(Ended::Stopped),
            Err(error) => Err(Ended::Lost(error.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_come_at_their_times() {
        let since = Instant::now();
        let at = |ms| since + Duration::from_millis(ms);
        let pace = Pace { made: 7, since, at_a_time: 4, every: Some(Duration::from_millis(10)) };
        for (changes, next) in [(0, 10), (7, 10), (10, 10), (11, 20), (14, 20), (15, 30)] {
            assert_eq!(pace.next(changes), Some(at(next)));
            assert!(pace.made(at(next)) > changes && pace.made(at(next - 10)) <= changes.max(7));
        }
        let ended = Pace { every: None, ..pace };
        assert_eq!((ended.made(at(500)), ended.next(7)), (7, None));
    }
}
