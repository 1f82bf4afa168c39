//! [`Cluster`]: this daemon's part in the cluster, and the thread that takes the messages of the others.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvlane_fabric::{Access, Engine, EngineId, EngineOptions, FabricError, SendOptions, Tls, Transport};
use kvlane_memory::Arena;
use kvlane_store::{Source, Store};
use parking_lot::Mutex;
use thiserror::Error;

use crate::announcer::Announcer;
use crate::borrowing::Borrowing;
use crate::fields::BadMessage;
use crate::index_messages::FromReplica;
use crate::lender::{Lender, LentCounts, SEND_PATIENCE, Wish};
use crate::members::{Dialling, Member, MemberNumber, Members, own_beat};
use crate::messages::{Lease, Message};
use crate::parked;
use crate::source::{Asker, ClusterSource};

/// Share of the pool that is lent at a time, at most.
const LENT_SHARE: f64 = 0.5;
/// Strangers that are remembered, so that each has an effect once.
const STRANGERS_MAX: usize = 256;

/// How this daemon takes part in a cluster.
#[derive(Debug, Clone)]
pub struct ClusterOptions {
    /// Where the other daemons reach this one.
    pub listen: Vec<SocketAddr>,
    /// The addresses under which they reach it, if others than `listen`.
    pub advertise: Vec<SocketAddr>,
    /// The secret that all daemons of the cluster share.
    pub token: String,
    /// Encrypts all that goes between daemons.
    pub tls: Option<Tls>,
    /// The transport of bytes; None: the best that both sides have.
    pub transport: Option<Transport>,
    /// Threads that read and write sockets, and connections to each other daemon.
    pub socket_threads: usize,
    /// How this daemon learns which other one has a block.
    pub directory: Directory,
    /// How long a lookup waits for the others' answers.
    pub answer_within: Duration,
    /// This daemon's name, for people.
    pub name: String,
}

/// How a daemon learns which other one has a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Directory {
    /// The daemons themselves, each HOST:PORT. A name may have several addresses, one of them this daemon's own.
    Peers(Vec<String>),
    /// Replicas of an index, each HOST:PORT. They also say which daemons there are.
    Index(Vec<String>),
}

/// Why a daemon cannot take part.
#[derive(Debug, Error)]
pub enum ClusterError {
    /// The fabric's engine cannot be made.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// The system gives no thread.
    #[error("cannot start a thread: {0}")]
    Io(#[from] std::io::Error),
}

/// A daemon's part in its cluster.
pub struct Cluster {
    engine: Arc<Engine>,
    members: Arc<Members>,
    /// The index's replicas, if there is one.
    replicas: Option<Arc<Members>>,
    asker: Arc<Asker>,
    pool: u32,
    options: ClusterOptions,
    running: Mutex<Option<Running>>,
    lent: Arc<LentCounts>,
    strangers: Arc<Strangers>,
    /// The engine's memory. Dropped after the engine.
    arena: Arc<Arena>,
}

struct Running {
    lender: Arc<Mutex<Lender>>,
    announcer: Option<Arc<Announcer>>,
    threads: Vec<JoinHandle<()>>,
}

/// Senders that are no member.
#[derive(Default)]
struct Strangers {
    messages: AtomicU64,
    seen: Mutex<HashSet<EngineId>>,
}

impl Cluster {
    /// Listens for the other daemons. The pool is registered, but nothing is lent before [`start`](Self::start).
    ///
    /// # Errors
    /// [`ClusterError::Fabric`]: an address is taken or open to other hosts without a token, or a file of the certificate is
    /// not usable.
    #[allow(unsafe_code, reason = "registers the pool")]
    pub fn open(options: ClusterOptions, arena: &Arc<Arena>) -> Result<Arc<Self>, ClusterError> {
        let engine = Engine::new(EngineOptions {
            listen: options.listen.clone(),
            advertise: options.advertise.clone(),
            token: options.token.clone(),
            tls: options.tls.clone(),
            transport: options.transport,
            socket_threads: options.socket_threads,
            connections: options.socket_threads,
            // A borrower compares each block with its owner's checksum, and a message that was changed names blocks that
            // nobody has. So frames carry no second checksum.
            checksums: false,
            ..EngineOptions::default()
        })?;
        // SAFETY: The arena is mapped until it is dropped. `Cluster` holds it, and closes the engine before it drops it. Peers
        // get access to ranges through windows, to read; this process writes into extents that its store has claimed.
        let pool = unsafe { engine.register(arena.base(), arena.bytes(), Access::Windows) }?;
        let engine = Arc::new(engine);
        let members = Members::new();
        let replicas = matches!(options.directory, Directory::Index(_)).then(Members::new);
        let borrowing = Arc::new(Borrowing::new(Arc::clone(&engine), Arc::clone(arena), pool));
        let asker = Arc::new(Asker::new(
            Arc::clone(&engine),
            Arc::clone(&members),
            replicas.clone(),
            borrowing,
            options.answer_within,
        ));
        Ok(Arc::new(Self {
            engine,
            members,
            replicas,
            asker,
            pool,
            options,
            running: Mutex::new(None),
            lent: Arc::default(),
            strangers: Arc::default(),
            arena: Arc::clone(arena),
        }))
    }

    /// The source that brings the other daemons' blocks into the store.
    pub fn source(&self) -> Arc<dyn Source> {
        Arc::new(ClusterSource(Arc::clone(&self.asker)))
    }

    /// Addresses at which this daemon listens for the others.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.engine.describe().map(|own| own.socket_addresses().collect()).unwrap_or_default()
    }

    /// Dials the others, answers them, and lends them blocks of the store. If it fails, [`stop`](Self::stop) ends what has
    /// started.
    ///
    /// # Errors
    /// [`ClusterError::Io`]
    pub fn start(&self, store: &Arc<Store>) -> Result<(), ClusterError> {
        let most_lent = (self.arena.bytes() as f64 * LENT_SHARE) as u64;
        let (engine, counts) = (Arc::clone(&self.engine), Arc::clone(&self.lent));
        let lender = Lender::start(engine, Arc::clone(store), self.pool, most_lent, counts)?;
        let lender = Arc::new(Mutex::new(lender));
        let index = match (&self.options.directory, &self.replicas) {
            (Directory::Index(names), Some(replicas)) => Some(self.announce_to(replicas, names, store)?),
            _ => None,
        };
        let announcer = index.as_ref().map(|index| Arc::clone(&index.announcer));
        let mut running = self.running.lock();
        let threads = &mut running
            .insert(Running { lender: Arc::clone(&lender), announcer, threads: Vec::new() })
            .threads;
        let asker = Arc::clone(&self.asker);
        threads.push(spawn("kvlane-asker", move || asker.watch_deadlines())?);
        let taking = Taking {
            engine: Arc::clone(&self.engine),
            members: Arc::clone(&self.members),
            asker: Arc::clone(&self.asker),
            store: Arc::clone(store),
            lender,
            strangers: Arc::clone(&self.strangers),
            index,
        };
        threads.push(spawn("kvlane-cluster", move || taking.take_messages())?);
        // Not among the threads that `stop` waits for: it may wait for a name's address, and touches no memory of the pool.
        if let Directory::Peers(names) = &self.options.directory {
            self.members.start(self.dialling(names))?;
        }
        Ok(())
    }

    /// How this daemon dials the other daemons.
    fn dialling(&self, names: &[String]) -> Arc<Dialling> {
        let (members, beat) = (Arc::downgrade(&self.members), own_beat(&self.options.name));
        let engine = Arc::clone(&self.engine);
        let attend = move |member: &Member, peer| members.upgrade()?.beat(member, &engine, &beat, peer);
        let leases = Arc::clone(&self.asker.borrowing.leases);
        Arc::new(Dialling {
            engine: Arc::clone(&self.engine),
            names: names.to_vec(),
            kind: "daemon",
            attend: Box::new(attend),
            when_lost: Box::new(move |member| leases.lost(member)),
        })
    }

    /// Dials the replicas of the index, and announces the store's blocks to them.
    fn announce_to(
        &self,
        replicas: &Arc<Members>,
        names: &[String],
        store: &Arc<Store>,
    ) -> Result<OfIndex, ClusterError> {
        let own = self.addresses().into_iter().next().ok_or(FabricError::Closed)?;
        let announcer = Arc::new(Announcer::new(Arc::clone(&self.engine), Arc::clone(store), own));
        let attending = Arc::clone(&announcer);
        replicas.start(Arc::new(Dialling {
            engine: Arc::clone(&self.engine),
            names: names.to_vec(),
            kind: "replica",
            attend: Box::new(move |replica, peer| attending.attend(replica, peer)),
            when_lost: Box::new(|_| ()),
        }))?;
        let (lists, dialling) = (Mutex::default(), self.dialling(&[]));
        Ok(OfIndex { replicas: Arc::clone(replicas), announcer, own, lists, dialling })
    }

    /// Takes no more part: windows are closed, reads fail, and nothing touches the pool any more when this returns.
    pub fn stop(&self) {
        let Some(Running { lender, announcer, mut threads }) = self.running.lock().take() else { return };
        if let Some(announcer) = announcer {
            announcer.stop();
        }
        self.members.stop();
        self.replicas.iter().for_each(|replicas| replicas.stop());
        self.asker.stop();
        threads.extend(self.asker.borrowing.stop());
        lender.lock().stop();
        self.engine.close();
        for thread in threads {
            if thread.join().is_err() {
                // Log: a bug. Do: report it, with the daemon's log.
                tracing::error!("a thread of the cluster panicked");
            }
        }
    }

    /// The state for `kvlane status`, and the counters.
    pub fn status(&self) -> ClusterStatus {
        let status = |member: Arc<Member>| {
            let state = member.state.lock();
            let left_out = state.left_out().map(str::to_owned);
            MemberStatus {
                address: member.address,
                name: state.name.clone(),
                software: state.software.clone(),
                is_reached: state.reached.is_some(),
                round_trip: state.breaker.round_trip(),
                trouble: state.trouble.clone().or(left_out),
            }
        };
        let others = self.members.all().into_iter().filter(|member| member.is_other());
        let replicas = self.replicas.iter().flat_map(|replicas| replicas.all());
        let asked = self.replicas.as_ref().unwrap_or(&self.members);
        let announced = self.running.lock().as_ref().and_then(|running| running.announcer.clone());
        let borrowed = &self.asker.borrowing.counts;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        ClusterStatus {
            members: others.map(status).collect(),
            replicas: replicas.map(status).collect(),
            announced_blocks: announced.map_or(0, |announcer| read(&announcer.blocks)),
            unresolved: asked.unresolved.lock().clone(),
            strangers: read(&self.strangers.messages),
            fetched_blocks: read(&borrowed.blocks),
            fetched_bytes: read(&borrowed.bytes),
            failed_blocks: read(&borrowed.failed),
            damaged_blocks: read(&borrowed.damaged),
            lent_blocks: read(&self.lent.blocks),
            lent_bytes: read(&self.lent.bytes),
            lent_bytes_now: read(&self.lent.bytes_now),
            refused_loans: read(&self.lent.refused),
            expired_loans: read(&self.lent.expired),
        }
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).spawn(run)
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.stop();
        self.engine.close();
    }
}

/// The state of a daemon's part in its cluster. Counters only grow.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ClusterStatus {
    /// The other daemons.
    pub members: Vec<MemberStatus>,
    /// The replicas of the index.
    pub replicas: Vec<MemberStatus>,
    /// Blocks that a replica knew of this daemon at its last count.
    pub announced_blocks: u64,
    /// Names of `--peers` or `--index` that lead nowhere, and why.
    pub unresolved: Vec<(String, String)>,
    /// Messages of daemons that this one does not dial. They are not answered.
    pub strangers: u64,
    /// Blocks and bytes read from others.
    pub fetched_blocks: u64,
    /// Bytes of those blocks.
    pub fetched_bytes: u64,
    /// Blocks that were not lent, came too late, or whose daemon was lost.
    pub failed_blocks: u64,
    /// Blocks whose bytes differed from their checksums.
    pub damaged_blocks: u64,
    /// Blocks lent to others.
    pub lent_blocks: u64,
    /// Bytes of those blocks.
    pub lent_bytes: u64,
    /// Bytes that are lent now.
    pub lent_bytes_now: u64,
    /// Requests of others that were refused whole.
    pub refused_loans: u64,
    /// Loans that their borrower did not return in time.
    pub expired_loans: u64,
}

/// The state of another daemon, or of a replica, as this daemon sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct MemberStatus {
    /// Where it listens.
    pub address: SocketAddr,
    /// As it calls itself; empty before its first message.
    pub name: String,
    /// Its version of kvlane.
    pub software: String,
    /// Whether it is connected.
    pub is_reached: bool,
    /// Mean time to an answer.
    pub round_trip: Duration,
    /// Why it is not asked.
    pub trouble: Option<String>,
}

/// Takes the messages of the other daemons, in a thread of its own.
struct Taking {
    engine: Arc<Engine>,
    members: Arc<Members>,
    asker: Arc<Asker>,
    store: Arc<Store>,
    lender: Arc<Mutex<Lender>>,
    strangers: Arc<Strangers>,
    index: Option<OfIndex>,
}

/// This daemon's dealings with the replicas of its index.
struct OfIndex {
    replicas: Arc<Members>,
    announcer: Arc<Announcer>,
    /// This daemon's address in the index.
    own: SocketAddr,
    /// The daemons that each replica named last.
    lists: Mutex<HashMap<MemberNumber, Vec<SocketAddr>>>,
    dialling: Arc<Dialling>,
}

impl Taking {
    /// Until the engine is closed.
    fn take_messages(&self) {
        let mut messages = self.engine.receiving();
        while let Some(message) = parked::wait(&mut messages) {
            let replica = self.index.as_ref().and_then(|index| index.replicas.of(message.from));
            let Some(member) = replica.clone().or_else(|| self.members.of(message.from)) else {
                self.note_stranger(message.from);
                continue;
            };
            match Message::decode(&message.bytes) {
                Ok(Message::FromReplica(read)) if replica.is_some() => self.take_from_replica(&member, read),
                // A replica borrows nothing, and its number is not that of a daemon.
                Ok(read) if replica.is_some() && !matches!(read, Message::Beat { .. }) => {
                    tracing::debug!(replica = %member.address, ?read, "a message that only daemons send");
                }
                Ok(read) => self.take(&member, message.from, read),
                Err(why) => note_bad(&member, &why),
            }
        }
    }

    fn take(&self, member: &Member, from: EngineId, message: Message) {
        let Some(peer) = member.peer() else { return };
        match message {
            Message::Beat { name, software } => {
                let mut state = member.state.lock();
                (state.name, state.software) = (name, software);
            }
            Message::Question { number, first, blocks, only_prefix } => {
                let runs =
                    self.store.visible_runs(blocks.space, &blocks.shard_bytes, &blocks.hashes, only_prefix);
                let answer = Message::Answer { number, first, runs };
                // If it does not arrive, the other daemon gives the question up.
                drop(self.engine.send(peer, answer.encode(), soon()));
            }
            // With an index no daemon is asked, and replicas have other numbers.
            Message::Answer { .. } if self.index.is_some() => {
                tracing::debug!(member = %member.address, "an answer that nobody waits for");
            }
            Message::Answer { number, first, runs } => {
                self.asker.answered(member, number, first, vec![(member.number, runs)], Instant::now());
            }
            Message::Borrow { number, blocks, lasts_ms } => {
                let lasts = Duration::from_millis(u64::from(lasts_ms));
                if !self.lender.lock().wish(Wish::Borrow { from, peer, number, blocks, lasts }) {
                    let lease = Lease::refused("this daemon has too many requests");
                    let refusal = Message::Lease { number, lease };
                    drop(self.engine.send(peer, refusal.encode(), soon()));
                }
            }
            Message::Lease { number, lease } => {
                if !lease.refused.is_empty() {
                    tracing::debug!(member = %member.address, why = lease.refused, "nothing is lent");
                }
                if !self.asker.borrowing.leases.came(member.number, number, lease) {
                    tracing::debug!(member = %member.address, "a lease that nobody waits for");
                }
            }
            // If the queue is full, the loan ends by its time.
            Message::Return { number } => drop(self.lender.lock().wish(Wish::Return { from, number })),
            Message::ToReplica(_) | Message::FromReplica(_) => {
                tracing::debug!(member = %member.address, "a message about an index that is not there");
            }
        }
    }

    fn take_from_replica(&self, replica: &Member, message: FromReplica) {
        let Some(index) = &self.index else { return };
        let OfIndex { announcer, own, lists, dialling, .. } = index;
        match message {
            FromReplica::Owners { epoch, addresses } => {
                announcer.known(replica.number, epoch);
                let mut lists = lists.lock();
                lists.insert(replica.number, addresses);
                // A replica that was removed has no list. One that is lost keeps the last.
                lists.retain(|number, _| index.replicas.get(*number).is_some());
                let all: BTreeSet<_> = lists.values().flatten().copied().filter(|each| each != own).collect();
                self.members.dial_only(all, dialling);
            }
            FromReplica::SnapshotWanted { epoch, ticket } => {
                announcer.snapshot_wanted(replica.number, epoch, ticket);
            }
            FromReplica::Unknown { epoch, why } => {
                tracing::debug!(replica = %replica.address, why, "a replica refuses announcements");
                announcer.refused(replica.number, epoch);
            }
            FromReplica::Located { number, first, owners } => {
                let now = Instant::now();
                let member = |(address, runs)| {
                    let member = self.members.reached_at(address)?;
                    // One whose blocks come late or damaged is left out for a while.
                    member.to_ask(now).map(|_| (member.number, runs))
                };
                let found = owners.into_iter().filter_map(member).collect();
                self.asker.answered(replica, number, first, found, Instant::now());
            }
        }
    }

    fn note_stranger(&self, from: EngineId) {
        self.strangers.messages.fetch_add(1, Ordering::Relaxed);
        let mut seen = self.strangers.seen.lock();
        if seen.len() < STRANGERS_MAX && seen.insert(from) {
            // A member that has just started is one for a moment, until it is dialled.
            self.members.hurry();
            // Log: that daemon names this one in its `--peers`, and this one does not name it, or has yet to dial it after
            // its start. Do: write the same `--peers` everywhere.
            tracing::info!(
                engine = format!("{:032x}", from.engine_id),
                once = true,
                "message of a daemon that is not dialled here: it is not answered"
            );
        }
    }
}

fn soon() -> SendOptions {
    SendOptions { timeout: SEND_PATIENCE, ..SendOptions::default() }
}

/// Logs a bad message, the first of each reached member.
fn note_bad(member: &Member, why: &BadMessage) {
    let mut state = member.state.lock();
    if state.trouble.is_none() {
        // Log: a daemon of the cluster speaks a protocol that this one does not know; it is not answered. Do: run one
        // version of kvlane in the cluster.
        tracing::warn!(member = %member.address, "daemon not understood: {why}");
    }
    state.trouble = Some(why.to_string());
}
