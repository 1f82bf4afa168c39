//! [`Replica`]: a process that knows which daemon has which blocks, because they announce them.
//!
//! ```text
//!   Join of a stranger --> it is dialled at the address that it names --> reached: its messages count
//!   Announce, Count, Part --> crates/index          Question --> Located
//!   every 0.1 s: silent daemons are hidden, snapshots are requested, hidden entries are swept
//! ```
//! A replica starts empty, keeps nothing, and knows no other replica. A daemon can only announce what is its own: its name in
//! the index is the address where this replica has reached it.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvlane_fabric::{Engine, EngineId, EngineOptions, FabricError, SendOptions, Tls};
use kvlane_index::{Counters, Index, Limits, OwnerRuns, OwnerStatus, Progress, Question, Refused, Timing};
use parking_lot::Mutex;

use crate::cluster::ClusterError;
use crate::index_messages::{FromReplica, ToReplica};
use crate::lender::SEND_PATIENCE;
use crate::members::{Dialling, Member, Members, own_beat};
use crate::messages::Message;

const TICK: Duration = Duration::from_millis(100);
/// Entries that are swept after a tick, and after a message while there are hidden ones.
const SWEPT_A_TICK: usize = 200_000;
const SWEPT_A_MESSAGE: usize = 500;
/// A daemon that has not joined again for this long is dialled no more, unless it is reached.
const JOIN_LASTS: Duration = Duration::from_secs(10);
/// Daemons that want to join. Further ones wait for a place.
const JOINING_MAX: usize = 256;
/// Runs in one answer: a run takes 5 bytes at most.
const RUNS_MAX: usize = 10_000;
/// Senders that were not understood and that are remembered, so that each is logged once.
const LOGGED_MAX: usize = 256;

/// How a replica takes part in a cluster.
#[derive(Debug, Clone)]
pub struct ReplicaOptions {
    /// Where the daemons reach this replica.
    pub listen: Vec<SocketAddr>,
    /// The addresses under which they reach it, if others than `listen`.
    pub advertise: Vec<SocketAddr>,
    /// The secret that all of the cluster share.
    pub token: String,
    /// Encrypts all that goes between daemons and replicas.
    pub tls: Option<Tls>,
    /// This replica's name, for people.
    pub name: String,
    /// A number that clients cannot know.
    pub seed: [u64; 2],
}

/// A replica of a cluster's index.
pub struct Replica {
    engine: Arc<Engine>,
    members: Arc<Members>,
    dialling: Arc<Dialling>,
    index: Mutex<Index>,
    joining: Mutex<HashMap<SocketAddr, Instant>>,
    started: Instant,
    counts: Mutex<Counts>,
    /// Senders that were not understood.
    logged: Mutex<HashSet<EngineId>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Counters only grow.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    questions: u64,
    refused: u64,
    strangers: u64,
}

/// The state of a replica.
#[derive(Debug, Clone)]
pub struct ReplicaStatus {
    /// The daemons that it follows.
    pub owners: Vec<OwnerStatus>,
    /// Entries: one for each block of each daemon, hidden ones included.
    pub entries: u64,
    /// Hidden entries that wait for the sweep.
    pub unswept: u64,
    /// Bytes of all entries.
    pub entry_bytes: u64,
    /// Questions that were answered.
    pub questions: u64,
    /// Messages that were refused.
    pub refused: u64,
    /// Messages of engines that this replica has not reached.
    pub strangers: u64,
    /// Counters of the index.
    pub counters: Counters,
}

impl Replica {
    /// Listens for daemons, and answers them until [`stop`](Self::stop).
    ///
    /// # Errors
    /// [`ClusterError`]
    pub fn start(options: ReplicaOptions) -> Result<Arc<Self>, ClusterError> {
        let engine = Arc::new(Engine::new(EngineOptions {
            listen: options.listen,
            advertise: options.advertise,
            token: options.token,
            tls: options.tls,
            ..EngineOptions::default()
        })?);
        let members = Members::new();
        let (beaten, beat, beating) =
            (Arc::downgrade(&members), own_beat(&options.name), Arc::clone(&engine));
        let attend = move |member: &Member, peer| beaten.upgrade()?.beat(member, &beating, &beat, peer);
        let dialling = Dialling {
            engine: Arc::clone(&engine),
            names: Vec::new(),
            kind: "daemon",
            attend: Box::new(attend),
            when_lost: Box::new(|_| ()),
        };
        let replica = Arc::new(Self {
            engine,
            members,
            dialling: Arc::new(dialling),
            index: Mutex::new(Index::new(options.seed, Limits::default(), Timing::default())),
            joining: Mutex::default(),
            started: Instant::now(),
            counts: Mutex::default(),
            logged: Mutex::default(),
            thread: Mutex::default(),
        });
        let running = Arc::clone(&replica);
        let run = move || running.run();
        let thread = std::thread::Builder::new().name("kvlane-index".into()).spawn(run)?;
        *replica.thread.lock() = Some(thread);
        Ok(replica)
    }

    /// Addresses at which it listens.
    ///
    /// # Errors
    /// [`FabricError::Closed`]
    pub fn addresses(&self) -> Result<Vec<SocketAddr>, FabricError> {
        Ok(self.engine.describe()?.socket_addresses().collect())
    }

    /// Ends it, and waits for its thread.
    pub fn stop(&self) {
        self.members.stop();
        self.engine.close();
        if let Some(thread) = self.thread.lock().take()
            && thread.join().is_err()
        {
            // Log: a bug. Do: report it, with the log.
            tracing::error!("the index panicked");
        }
    }

    /// The state for status pages and metrics.
    pub fn status(&self) -> ReplicaStatus {
        let index = self.index.lock();
        let Counts { questions, refused, strangers } = *self.counts.lock();
        ReplicaStatus {
            owners: index.owners(self.now()),
            entries: index.entries() as u64,
            unswept: index.unswept() as u64,
            entry_bytes: index.entry_bytes() as u64,
            questions,
            refused,
            strangers,
            counters: index.counters(),
        }
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn run(&self) {
        let mut next_tick = Instant::now() + TICK;
        while !self.engine.is_closed() {
            let left = next_tick.saturating_duration_since(Instant::now());
            if left.is_zero() {
                self.tick();
                next_tick = Instant::now() + TICK;
            } else if let Some(message) = self.engine.receive(Some(left)) {
                match Message::decode(&message.bytes) {
                    Ok(read) => self.take(message.from, read),
                    Err(why) => self.refuse(message.from, &why.to_string()),
                }
            }
        }
    }

    fn tick(&self) {
        let now = Instant::now();
        let mut joining = self.joining.lock();
        joining.retain(|_, at| now < *at + JOIN_LASTS);
        let mut dialled: BTreeSet<SocketAddr> = joining.keys().copied().collect();
        drop(joining);
        let reached = self.members.all().into_iter().filter(|member| member.peer().is_some());
        dialled.extend(reached.map(|member| member.address));
        self.members.dial_only(dialled, &self.dialling);
        self.request_snapshots();
        self.index.lock().sweep(SWEPT_A_TICK);
    }

    fn request_snapshots(&self) {
        let requests = self.index.lock().tick(self.now());
        for request in requests {
            let address: Option<SocketAddr> = request.owner.parse().ok();
            let Some(member) = address.and_then(|address| self.members.reached_at(address)) else { continue };
            let wanted = FromReplica::SnapshotWanted { epoch: request.epoch, ticket: request.ticket };
            self.send(&member, wanted);
        }
    }

    fn take(&self, from: EngineId, message: Message) {
        let Some(member) = self.members.of(from) else {
            self.counts.lock().strangers += 1;
            if let Message::ToReplica(ToReplica::Join { address, .. }) = message {
                self.dial(address);
            }
            return;
        };
        match message {
            Message::ToReplica(message) => self.follow(&member, message),
            Message::Question { number, first, blocks, only_prefix } => {
                let own = member.address.to_string();
                let question = Question {
                    space: &blocks.space,
                    hashes: &blocks.hashes,
                    only_prefix,
                    except: Some(&own),
                    turn: number as u32,
                };
                let found = self.index.lock().find(&question, self.now());
                self.counts.lock().questions += 1;
                let owners = that_fit(found.unwrap_or_default());
                self.send(&member, FromReplica::Located { number, first, owners });
            }
            Message::Beat { name, software } => {
                let mut state = member.state.lock();
                (state.name, state.software) = (name, software);
            }
            _ => self.refuse(from, "a message that only daemons take"),
        }
    }

    /// A daemon that is not reached wants to join.
    fn dial(&self, address: SocketAddr) {
        let mut joining = self.joining.lock();
        let is_new = !joining.contains_key(&address);
        if is_new && joining.len() >= JOINING_MAX {
            return;
        }
        joining.insert(address, Instant::now());
        let mut dialled: BTreeSet<SocketAddr> = joining.keys().copied().collect();
        drop(joining);
        if is_new {
            dialled.extend(self.members.all().iter().map(|member| member.address));
            self.members.dial_only(dialled, &self.dialling);
        }
    }

    fn follow(&self, member: &Member, message: ToReplica) {
        let (name, now) = (member.address.to_string(), self.now());
        let mut index = self.index.lock();
        let (epoch, result) = match message {
            ToReplica::Join { epoch, address } if address == member.address => {
                let was_empty =
                    !index.owners(now).iter().any(|owner| *owner.name == name && owner.is_visible);
                let result = index.join(&name, epoch, &name, now);
                if result.is_ok() {
                    let addresses = self.visible(&index, now);
                    drop(index);
                    if was_empty {
                        self.tell_all(&addresses);
                    }
                    self.send(member, FromReplica::Owners { epoch, addresses });
                    self.request_snapshots();
                    return;
                }
                (epoch, result)
            }
            ToReplica::Join { .. } => {
                drop(index);
                return self.note_refused(member, "it joins under the address of another");
            }
            ToReplica::Announce { epoch, delta } => (epoch, index.delta(&name, epoch, delta, now)),
            ToReplica::Count { epoch, heartbeat } => {
                let result = index.heartbeat(&name, epoch, heartbeat, now);
                if result.is_ok() {
                    let addresses = self.visible(&index, now);
                    self.send(member, FromReplica::Owners { epoch, addresses });
                }
                (epoch, result)
            }
            ToReplica::Part { epoch, part } => (epoch, index.part(&name, epoch, &part, now)),
            ToReplica::Leave { epoch } => (epoch, index.bye(&name, epoch, now).map(|()| Progress::Following)),
        };
        index.sweep(SWEPT_A_MESSAGE);
        drop(index);
        match result {
            Ok(Progress::NeedsSnapshot) => self.request_snapshots(),
            Ok(Progress::Following | Progress::Waiting) => {}
            Err(refused) => {
                let follows = match refused {
                    Refused::Unknown => Some(0),
                    Refused::OldEpoch { current, .. } => Some(current),
                    Refused::NotJoined { .. } | Refused::Gone { .. } => Some(epoch),
                    _ => None,
                };
                self.note_refused(member, &refused.to_string());
                if let Some(epoch) = follows {
                    self.send(member, FromReplica::Unknown { epoch, why: refused.to_string() });
                }
            }
        }
    }

    /// The daemons whose blocks questions find.
    fn visible(&self, index: &Index, now: Duration) -> Vec<SocketAddr> {
        let owners = index.owners(now).into_iter().filter(|owner| owner.is_visible);
        owners.filter_map(|owner| owner.name.parse().ok()).collect()
    }

    /// Tells each daemon that one has come, so that it does not wait for its next count.
    fn tell_all(&self, addresses: &[SocketAddr]) {
        let owners: HashMap<_, _> =
            self.index.lock().owners(self.now()).into_iter().map(|owner| (owner.name, owner.epoch)).collect();
        for member in self.members.all() {
            if let Some(epoch) = owners.get(&*member.address.to_string()) {
                self.send(&member, FromReplica::Owners { epoch: *epoch, addresses: addresses.to_vec() });
            }
        }
    }

    /// If it does not arrive, the daemon sends its message again.
    fn send(&self, member: &Member, message: FromReplica) {
        let Some(peer) = member.peer() else { return };
        let options = SendOptions { timeout: SEND_PATIENCE, ..SendOptions::default() };
        drop(self.engine.send(peer, Message::FromReplica(message).encode(), options));
    }

    fn note_refused(&self, member: &Member, why: &str) {
        self.counts.lock().refused += 1;
        tracing::debug!(member = %member.address, "message refused: {why}");
    }

    fn refuse(&self, from: EngineId, why: &str) {
        self.counts.lock().refused += 1;
        let mut logged = self.logged.lock();
        if logged.len() >= LOGGED_MAX || !logged.insert(from) {
            return;
        }
        // Log: a daemon of another version of kvlane, or a bug. Do: run one version of kvlane in the cluster.
        tracing::warn!(
            engine = format!("{:032x}", from.engine_id),
            once = true,
            "message not understood: {why}"
        );
    }
}

/// The owners of most positions, as many as one message can name.
fn that_fit(mut found: Vec<OwnerRuns>) -> Vec<(SocketAddr, Vec<Range<u32>>)> {
    let positions = |owner: &OwnerRuns| owner.positions.iter().map(|run| run.end - run.start).sum::<u32>();
    found.sort_by_key(|owner| std::cmp::Reverse(positions(owner)));
    let mut runs = 0;
    let fitting = found.into_iter().take_while(|owner| {
        runs += owner.positions.len();
        runs <= RUNS_MAX
    });
    fitting.filter_map(|owner| Some((owner.address.parse().ok()?, owner.positions))).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kvlane_fabric::MESSAGE_BYTES_MAX;

    use super::*;
    use crate::messages::BLOCKS_MAX;

    /// Eight owners at each position, and none at the next one too.
    #[test]
    fn the_longest_answer_fits_a_message() {
        let owner = |number: u32| OwnerRuns {
            owner: Arc::from(""),
            epoch: 1,
            address: format!("[ffff:ffff:ffff:ffff:ffff:ffff:ffff:{number:x}]:65535").into(),
            age: Duration::ZERO,
            positions: (0..BLOCKS_MAX as u32)
                .filter(|at| (at + number).is_multiple_of(8))
                .map(|at| at..at + 1)
                .collect(),
        };
        let owners = that_fit((0x1000..0x1040).map(owner).collect());
        assert!(owners.len() > 20);
        let located = FromReplica::Located { number: u64::MAX, first: u32::MAX, owners };
        assert!(Message::FromReplica(located).encode().len() <= MESSAGE_BYTES_MAX);
    }
}
