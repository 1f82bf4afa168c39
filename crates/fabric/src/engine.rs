//! The transfer engine of a process: memory, peers, transfers, counters.

#![allow(unsafe_code, reason = "the kernel reads and writes registered memory")]

use std::future::Future;
use std::io;
use std::mem::ManuallyDrop;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZero;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvlane_gpu::{Gpu, GpuError};
use kvlane_memory::{Forked, OwnProcess, RuntimeFolder};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, Event};
use thiserror::Error;

use crate::descriptor::{Access, Descriptor};
use crate::group::Group;
use crate::hub::Hub;
use crate::inbox::{EngineId, InboxOptions, MESSAGE_BYTES_MAX, Message};
use crate::runs::Run;
use crate::shape::{Pieces, ShapeError};
use crate::sockets::{PathStatus, Transport, random};
use crate::staging::Staged;
use crate::tcp::{BYTES_MAX, Credentials, ENTRIES_MAX, Identity, Tls, TlsError};
use crate::transfers::{CannotSend, Failure, Op, Options, PeerId, Priority, Request, Stretch, Ticket};
use crate::trust::{Mistrust, Proofs};

/// How long whoever waits looks again and again before it sleeps. A sleeper is woken within a few times as much.
const SPIN: Duration = Duration::from_micros(50);
/// The same while a neighbour reads what this process has written: until it has read a part of a transfer, 0.2 ms for each
/// half a mebibyte, nothing is heard of it. Of a GPU that copies nothing is heard either.
const SPIN_FOR_NEIGHBOURS: Duration = Duration::from_micros(500);
/// Of that, how long it keeps its processor to itself. Where there are fewer of them than there is work, the peer may need
/// it to answer; while bytes are streaming, the next ones come sooner than this.
const KEEP: Duration = Duration::from_micros(10);
/// How long the thread behind leaves the work to those who wait, before it looks whether they still do.
const PARK: Duration = Duration::from_micros(200);
/// How long memory that is given back may still be read or written for peers, before their connections are ended.
const LET_GO: Duration = Duration::from_secs(1);
const EVENTS: usize = 64;
/// Threads that copy between processes of this host, if nobody says how many, and at the most.
const COPY_THREADS_USUAL: usize = 4;
const COPY_THREADS_MAX: usize = 64;

/// How an engine is set up.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Where peers find it: port 0 for any. Each address is a path of its own for those who connect.
    pub listen: Vec<SocketAddr>,
    /// What peers are told instead, where they reach it at other addresses; needed where `listen` says all addresses.
    pub advertise: Vec<SocketAddr>,
    /// What both sides of a connection have to know; they prove it to each other. Needed where an address is not of this
    /// host only. Empty: [`Trust`](crate::Trust) says what is proved instead, the secret of this process's user mostly.
    pub token: String,
    /// Connections to each address of a peer.
    pub connections: usize,
    /// How bytes are to travel: None for the best way that a peer and this process both have, TCP for nothing else, CMA for
    /// to connect to no peers but those of this host whose memory can be read.
    pub transport: Option<Transport>,
    /// So many threads at the most copy between this process and others of this host, whoever waits among them; 1 to 64.
    /// The others are made when 256 KiB or more are to be copied for the first time, and sleep when there is nothing.
    pub copy_threads: usize,
    /// With it all connections are encrypted, and nothing is sent to peers that have none. What is encrypted goes by TCP.
    pub tls: Option<Tls>,
    /// The limits of transfers.
    pub transfers: Options,
    /// The limits of what waits for [`Engine::receive`].
    pub inbox: InboxOptions,
}

impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions {
            listen: vec![SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0)],
            advertise: Vec::new(),
            token: String::new(),
            connections: 1,
            transport: None,
            copy_threads: copy_threads(),
            tls: None,
            transfers: Options::default(),
            inbox: InboxOptions::default(),
        }
    }
}

/// As many as this process has processors, but few: what is left of the memory's rate is others'.
fn copy_threads() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get).min(COPY_THREADS_USUAL)
}

/// Why something cannot be done.
#[derive(Debug, Error)]
pub enum FabricError {
    /// An address that other hosts reach, without a token.
    #[error(
        "{0} can be reached from other hosts: give a token that only your processes know, or listen on 127.0.0.1"
    )]
    NoToken(SocketAddr),
    /// All addresses, which peers cannot connect to.
    #[error("peers cannot connect to {0}: advertise the addresses at which they reach this host")]
    NoAddressToTell(SocketAddr),
    /// A limit that the protocol does not have, or that would let nothing move.
    #[error("{0}")]
    Limit(String),
    /// A GPU's driver refused.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// Memory of a GPU where nothing but [`Transport::Cma`] is wanted.
    #[error("memory of GPUs cannot go by cma: process_vm does not reach it")]
    NoWayToGpus,
    /// A file of [`Tls`].
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Of the operating system.
    #[error("the fabric cannot be opened: {0}")]
    Io(#[from] io::Error),
    /// After [`Engine::close`].
    #[error("the engine is closed")]
    Closed,
    /// In a process that was forked from the engine's.
    #[error(transparent)]
    Forked(#[from] Forked),
    /// The descriptor names no address that can be reached from here.
    #[error("the peer's descriptor has no address of a kind that is known here")]
    NoAddress,
    /// The descriptor is of an engine that nothing can be proved to.
    #[error(transparent)]
    Mistrust(#[from] Mistrust),
    /// A transfer that does not fit the memory of both sides.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// No such peer, or a descriptor of another process.
    #[error("no such peer: it was removed, or restarted; connect with its new descriptor")]
    NoSuchPeer,
    /// Nobody registered this.
    #[error("region {0} is not registered")]
    NoSuchRegion(u32),
    /// Transfers under way use it.
    #[error("region {region} is in use by {transfers} transfers: wait for them or cancel them first")]
    RegionInUse {
        /// The region.
        region: u32,
        /// How many.
        transfers: usize,
    },
    /// As many transfers as can be.
    #[error("{0} transfers are under way, as many as can be: wait for one to be over")]
    Full(usize),
    /// Longer than a message can be.
    #[error("a message of {0} bytes; it can have {MESSAGE_BYTES_MAX}")]
    MessageTooLong(usize),
    /// As many bytes of messages as can be.
    #[error("{0} bytes of messages are under way, as many as can be: wait for some to be over")]
    MessagesFull(usize),
    /// The same peer as two members of a group, by their places in the list.
    #[error("members {0} and {1} of the group are the same peer")]
    SameMember(usize, usize),
    /// Not one part, or counter, for each member.
    #[error("{given} parts for a group of {members} members: each has one, which may be empty")]
    Parts {
        /// How many there are.
        given: usize,
        /// How many there have to be.
        members: usize,
    },
    /// The part of one member cannot be begun, so that none was.
    #[error("member {member} of the group: {why}")]
    Member {
        /// Its place in the group's list.
        member: usize,
        /// What is wrong with it.
        #[source]
        why: Box<FabricError>,
    },
    /// Fewer transfers can begin than a group has members, so that none was.
    #[error("a group of {members} members, and room for {room} transfers: wait for others to be over")]
    NoRoomForAll {
        /// How many would begin.
        members: usize,
        /// How many can.
        room: usize,
    },
}

/// What to move.
#[derive(Debug, Clone)]
pub struct Transfer {
    /// Which way.
    pub op: Op,
    /// What.
    pub pieces: Pieces,
    /// A counter at the peer, and its generation there, that counts once all bytes are in place.
    pub immediate: Option<(u32, u32)>,
    /// After so long it is given up.
    pub timeout: Option<Duration>,
    /// Its turn.
    pub priority: Priority,
}

impl Transfer {
    /// All bytes to the peer, with no time limit.
    pub fn write(pieces: Pieces) -> Transfer {
        Transfer { op: Op::Write, pieces, immediate: None, timeout: None, priority: Priority::High }
    }

    /// All bytes from the peer, with no time limit.
    pub fn read(pieces: Pieces) -> Transfer {
        Transfer { op: Op::Read, ..Transfer::write(pieces) }
    }
}

/// How a message is sent.
#[derive(Debug, Clone)]
pub struct SendOptions {
    /// After so long it is given up.
    pub timeout: Duration,
    /// Its turn.
    pub priority: Priority,
}

impl Default for SendOptions {
    fn default() -> SendOptions {
        SendOptions { timeout: Duration::from_secs(10), priority: Priority::High }
    }
}

/// Moves bytes between registered memory of this process and its peers'.
///
/// One thread serves peers and carries transfers on; whoever waits for one does that work meanwhile, so that a small
/// transfer needs no switch of threads. Idle, nothing runs but a word to each peer twice a second.
///
/// What a closed or dropped engine had under way may still arrive at its peers for a moment.
///
/// An engine belongs to the process that made it. In a child that this process forks, its calls and those of all that it
/// made fail as [`FabricError::Forked`] or, where they return no such error, panic; closing and dropping do nothing there. A
/// child makes an engine of its own.
#[derive(Debug)]
pub struct Engine {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    /// Where all of this may be used.
    own: OwnProcess,
    hub: Mutex<Hub>,
    /// Something that a sleeper may wait for has happened.
    changed: Condvar,
    /// How many wait and do the work; the thread behind rests until there are none.
    pollers: AtomicUsize,
    sleepers: AtomicUsize,
    /// How often somebody who waits has done some work. Not in the hub: whoever asks for that would stand in line for it, and
    /// be let in between two turns of the work.
    polls: AtomicU64,
    stop: AtomicBool,
}

impl Engine {
    /// Listens, and starts its thread.
    pub fn new(options: EngineOptions) -> Result<Engine, FabricError> {
        let is_open = |address: &&SocketAddr| !address.ip().is_loopback() && options.token.is_empty();
        if let Some(open) = options.listen.iter().find(is_open) {
            return Err(FabricError::NoToken(*open));
        }
        let all = options.listen.iter().find(|address| address.ip().is_unspecified());
        if let Some(all) = all.filter(|_| options.advertise.is_empty()) {
            return Err(FabricError::NoAddressToTell(*all));
        }
        check(&options.transfers)?;
        check_inbox(&options.inbox)?;
        if !(1..=COPY_THREADS_MAX).contains(&options.copy_threads) {
            let threads = options.copy_threads;
            return Err(FabricError::Limit(format!("copy_threads {threads}: 1 to {COPY_THREADS_MAX}")));
        }
        let engine = u128::from(random()?) << 64 | u128::from(random()?);
        let me = Identity { engine, boot: random()? };
        if options.tls.is_some() && options.transport == Some(Transport::Cma) {
            return Err(FabricError::Limit("with TLS bytes go by TCP, and not by cma".into()));
        }
        let credentials = options.tls.as_ref().map(Credentials::load).transpose()?;
        let proofs = Proofs::new(&options.token, &RuntimeFolder::of_this_user())?;
        let hub = Hub::new(me, proofs, credentials, options)?;
        let shared = Arc::new(Shared {
            own: OwnProcess::this(),
            hub: Mutex::new(hub),
            changed: Condvar::new(),
            pollers: AtomicUsize::new(0),
            sleepers: AtomicUsize::new(0),
            polls: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        });
        let thread = std::thread::Builder::new().name("kvlane-fabric".into()).spawn({
            let shared = Arc::clone(&shared);
            move || shared.serve()
        })?;
        Ok(Engine { shared, thread: Some(thread) })
    }

    /// Lets transfers touch memory: those of this process both ways, those of peers as `access` says. Answers its number.
    ///
    /// # Safety
    /// The memory is valid for reads and writes until [`Engine::unregister`] has given it back, or the engine was dropped.
    /// Others may write it at any time, so that it is read and written only as such memory may be.
    pub unsafe fn register(&self, memory: *mut u8, len: u64, access: Access) -> u32 {
        self.shared.hub().sockets.add_region(memory.expose_provenance(), len, access)
    }

    /// As [`Engine::register`], of a GPU's memory. Its bytes go through pinned memory of the host ([`Staged`]) and through
    /// sockets, also where the host's memory goes by [`Transport::Cma`]. An immediate comes after the last copy. The engine
    /// copies in streams of its own: what others enqueued that writes or reads the memory has to be over when a transfer
    /// begins.
    ///
    /// # Errors
    /// [`FabricError::NoWayToGpus`] with [`Transport::Cma`] required; [`FabricError::Gpu`] if the memory is not allocated on
    /// that GPU, or its driver gives no pinned memory.
    ///
    /// # Safety
    /// The memory stays allocated until [`Engine::unregister`] has given it back, or the engine was closed.
    pub unsafe fn register_gpu(
        &self,
        gpu: &Gpu,
        address: u64,
        len: u64,
        access: Access,
    ) -> Result<u32, FabricError> {
        self.shared.own.check()?;
        check_allocated(gpu, address, len)?;
        let mut hub = self.shared.try_hub()?;
        if hub.sockets.excludes_gpus() {
            return Err(FabricError::NoWayToGpus);
        }
        Ok(hub.sockets.add_gpu_region(gpu, address, len, access)?)
    }

    /// What went through pinned memory of the host, to GPUs and from them, since the engine was made.
    pub fn staged(&self) -> Staged {
        self.shared.hub().sockets.staging.staged
    }

    /// Gives memory back: when this returns nothing touches it any more, and peers that ask for it are refused.
    pub fn unregister(&self, region: u32) -> Result<(), FabricError> {
        let mut hub = self.shared.try_hub()?;
        match hub.sockets.regions.uses(region) {
            0 => {}
            transfers => return Err(FabricError::RegionInUse { region, transfers }),
        }
        if !hub.sockets.stop_serving(region) {
            return Err(FabricError::NoSuchRegion(region));
        }
        hub.sockets.letting_go += 1;
        let deadline = Instant::now() + LET_GO;
        let let_go =
            self.shared.wait(&mut hub, Some(deadline), |hub| (!hub.sockets.is_touched(region)).then_some(()));
        hub.sockets.letting_go -= 1;
        if let_go.is_none() {
            hub.sockets.end_links_that_touch(region);
            hub.pump();
            self.shared.tell(&mut hub);
            // A driver cannot be told to stop.
            self.shared.wait(&mut hub, None, |hub| (!hub.sockets.is_touched(region)).then_some(()));
        }
        hub.sockets.regions.remove(region);
        Ok(())
    }

    /// What peers have to know of this process and all memory that is registered now.
    pub fn describe(&self) -> Result<Descriptor, FabricError> {
        Ok(self.shared.try_hub()?.sockets.descriptor()?)
    }

    /// A peer, by what it tells of itself. Connections are made meanwhile.
    pub fn connect(&self, descriptor: &Descriptor) -> Result<PeerId, FabricError> {
        let mut hub = self.shared.try_hub()?;
        if hub.is_closed {
            return Err(FabricError::Closed);
        }
        let peer = hub.add_peer(descriptor)?.ok_or(FabricError::NoAddress)?;
        self.shared.tell(&mut hub);
        self.shared.wake_if_needed(&hub);
        Ok(peer)
    }

    /// Takes note of what memory a peer has registered since.
    pub fn update(&self, peer: PeerId, descriptor: &Descriptor) -> Result<(), FabricError> {
        let known = self.shared.try_hub()?.sockets.update_peer(peer, descriptor);
        known.then_some(()).ok_or(FabricError::NoSuchPeer)
    }

    /// The ways to a peer, and what is wrong with those that are not up; none if there is no such peer.
    pub fn paths(&self, peer: PeerId) -> Vec<PathStatus> {
        self.shared.hub().path_statuses(peer)
    }

    /// Connections of either side that carried bytes by [`Transport::Cma`], but had to do without shared memory for the rest,
    /// ever: [`PathStatus::no_rings`] says why.
    pub fn connections_without_rings(&self) -> u64 {
        self.shared.hub().sockets.without_rings
    }

    /// Ends all transfers with a peer as failed, and its connections. Those that wrote are over as soon as the peer has
    /// confirmed it, or within a few seconds; those that a process of this host was to read are not over before that.
    pub fn disconnect(&self, peer: PeerId) {
        let mut hub = self.shared.hub();
        hub.remove_peer(peer);
        self.shared.tell(&mut hub);
        self.shared.wake_if_needed(&hub);
    }

    /// Begins a transfer. Its memory of both sides belongs to it until it is over.
    pub fn begin(&self, peer: PeerId, transfer: Transfer) -> Result<Handle, FabricError> {
        let mut hub = self.shared.try_hub()?;
        let runs = runs_of(&hub, peer, &transfer.pieces)?;
        let handle = self.shared.submit(&mut hub, peer, transfer, runs)?;
        self.shared.set_going(&mut hub);
        Ok(handle)
    }

    /// These peers, in this order, as one: see [`Group`].
    pub fn group(&self, peers: &[PeerId]) -> Result<Group, FabricError> {
        Group::new(Arc::clone(&self.shared), peers)
    }

    /// Sends a message of at most [`MESSAGE_BYTES_MAX`] bytes to a peer, which takes it by [`Engine::receive`].
    ///
    /// It is delivered once, or fails; messages have no order, among each other or with transfers. Where the peer has no
    /// room for it, it is sent again with pauses of 1 to 100 ms ([`Options::room_pause`]), and fails at last as
    /// [`Failure::NoRoom`]. One that failed for another reason may have been delivered, or may still be for a moment where
    /// a connection broke; never twice.
    pub fn send(
        &self,
        peer: PeerId,
        bytes: impl Into<Arc<[u8]>>,
        options: SendOptions,
    ) -> Result<Handle, FabricError> {
        let bytes = bytes.into();
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(FabricError::MessageTooLong(bytes.len()));
        }
        let mut hub = self.shared.try_hub()?;
        if hub.is_closed {
            return Err(FabricError::Closed);
        }
        hub.sockets.both_sides(peer).ok_or(FabricError::NoSuchPeer)?;
        let now = hub.now();
        let deadline = now.saturating_add(options.timeout);
        let sent = hub.transfers.send(now, peer, bytes, deadline, options.priority);
        let ticket = sent.map_err(|why| match why {
            CannotSend::Full(full) => FabricError::Full(full.0),
            CannotSend::Bytes(bytes) => FabricError::MessagesFull(bytes),
        })?;
        hub.outcomes.want(ticket);
        self.shared.set_going(&mut hub);
        drop(hub);
        Ok(Handle { shared: Arc::clone(&self.shared), ticket })
    }

    /// A message of any peer, of those that arrived the one that waits the longest. None: not in this time, or the engine
    /// was closed and nothing is left that arrived before.
    ///
    /// What is not taken fills the inbox ([`EngineOptions::inbox`]); then peers are told that there is no room.
    pub fn receive(&self, timeout: Option<Duration>) -> Option<Message> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut hub = self.shared.hub();
        self.shared.wait(&mut hub, deadline, next_message).flatten()
    }

    /// As [`Engine::receive`], for tasks. Dropped before it is ready, it has taken nothing.
    pub fn receiving(&self) -> Receiving {
        let receiver = self.shared.hub().outcomes.add_receiver();
        Receiving { shared: Arc::clone(&self.shared), receiver }
    }

    /// What messages from here say of their sender; the same as in the descriptor.
    pub fn id(&self) -> EngineId {
        let me = self.shared.hub().sockets.me;
        EngineId { engine_id: me.engine, boot_nonce: me.boot }
    }

    /// Whether it was closed.
    pub fn is_closed(&self) -> bool {
        self.shared.hub().is_closed
    }

    /// Names a counter of this process: peers' immediates for it are to carry the generation that is answered.
    pub fn open_counter(&self, counter: u32) -> u32 {
        self.shared.hub().sockets.immediates.open(counter)
    }

    /// How many immediates have arrived for a counter of this generation.
    pub fn count(&self, counter: u32, generation: u32) -> u64 {
        self.shared.hub().sockets.immediates.count(counter, generation)
    }

    /// Ends a counter's use, and answers the generation of the next.
    pub fn retire_counter(&self, counter: u32, generation: u32) -> u32 {
        let mut hub = self.shared.hub();
        let next = hub.sockets.immediates.retire(counter, generation);
        hub.outcomes.note_change();
        self.shared.tell(&mut hub);
        next
    }

    /// Whether nothing counts for this use of a counter any more: it was retired, or the engine closed.
    pub fn is_counter_over(&self, counter: u32, generation: u32) -> bool {
        let hub = self.shared.hub();
        hub.is_closed || hub.sockets.immediates.is_retired(counter, generation)
    }

    /// Waits until so many immediates have arrived. False: not in this time, or this use of the counter or the
    /// engine has ended.
    pub fn wait_count(&self, counter: u32, generation: u32, target: u64, timeout: Option<Duration>) -> bool {
        let mut hub = self.shared.hub();
        let reached = |hub: &mut Hub| {
            let has = hub.sockets.immediates.count(counter, generation) >= target;
            let is_over = hub.is_closed || hub.sockets.immediates.is_retired(counter, generation);
            (has || is_over).then_some(has)
        };
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        self.shared.wait(&mut hub, deadline, reached).unwrap_or(false)
    }
}

impl Engine {
    /// Ends all transfers as failed and all connections, for good: when this returns nothing of this process's memory is
    /// touched any more, whoever else still has the engine in hand, and all who wait are told. Only a process of this host
    /// that is stopped while it takes a write of ours may read on for a moment when it goes on.
    ///
    /// Does nothing in another process than the engine's.
    pub fn close(&self) {
        if !self.shared.is_here() {
            return;
        }
        let mut hub = self.shared.hub();
        hub.close();
        let deadline = Instant::now() + LET_GO;
        self.shared.wait(&mut hub, Some(deadline), |hub| (!hub.sockets.is_pulled()).then_some(()));
        hub.forsake();
        self.shared.stop.store(true, Ordering::Release);
        self.shared.tell(&mut hub);
        hub.sockets.wake();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if !self.shared.is_here() {
            // The parent goes on with it: its thread is not here to be joined, and nothing that it shares is ended.
            let _thread = ManuallyDrop::new(self.thread.take());
            let _shared = ManuallyDrop::new(Arc::clone(&self.shared));
            return;
        }
        self.close();
        let is_itself = |thread: &JoinHandle<()>| thread.thread().id() == std::thread::current().id();
        if let Some(thread) = self.thread.take().filter(|thread| !is_itself(thread)) {
            // It does not panic; if it did, there is nothing left to end.
            let _ = thread.join();
        }
    }
}

/// A transfer that was begun. Dropping it changes nothing for the transfer.
#[derive(Debug)]
pub struct Handle {
    shared: Arc<Shared>,
    pub(crate) ticket: Ticket,
}

impl Handle {
    /// The outcome, if it is over.
    pub fn outcome(&self) -> Option<Result<(), Failure>> {
        self.shared.hub().outcomes.of(self.ticket)
    }

    /// Waits until it is over. None: not in this time.
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Result<(), Failure>> {
        let mut hub = self.shared.hub();
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        self.shared.wait(&mut hub, deadline, |hub| hub.outcomes.of(self.ticket))
    }

    /// Gives it up. It is over when [`Handle::wait`] says so: its memory belongs to it until then.
    pub fn cancel(&self) {
        let mut hub = self.shared.hub();
        let now = hub.now();
        hub.transfers.cancel(now, self.ticket);
        self.shared.set_going(&mut hub);
    }
}

impl Future for Handle {
    type Output = Result<(), Failure>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut hub = self.shared.hub();
        if let Some(outcome) = hub.outcomes.of(self.ticket) {
            return Poll::Ready(outcome);
        }
        let former = hub.outcomes.wake_with(self.ticket, context.waker());
        // A task may go with it, and what it holds.
        drop(hub);
        drop(former);
        Poll::Pending
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.shared.is_here() {
            return;
        }
        let waker = self.shared.hub().outcomes.forget(self.ticket);
        drop(waker);
    }
}

/// A message to come, of [`Engine::receiving`]; None once the engine is closed and nothing is left. It can be asked again
/// for the next one.
#[derive(Debug)]
pub struct Receiving {
    shared: Arc<Shared>,
    receiver: u64,
}

impl Future for Receiving {
    type Output = Option<Message>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut hub = self.shared.hub();
        if let Some(next) = next_message(&mut hub) {
            return Poll::Ready(next);
        }
        let former = hub.outcomes.receive_with(self.receiver, context.waker());
        // A task may go with it, and what it holds.
        drop(hub);
        drop(former);
        Poll::Pending
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        if !self.shared.is_here() {
            return;
        }
        let waker = self.shared.hub().outcomes.forget_receiver(self.receiver);
        drop(waker);
    }
}

/// A message that has arrived; Some(None): there will be none any more.
fn next_message(hub: &mut Hub) -> Option<Option<Message>> {
    let message = hub.sockets.inbox.take();
    (message.is_some() || hub.is_closed).then_some(message)
}

impl Shared {
    /// All that the engine has. Only in its own process: in a forked one the lock may be held by a thread that is not there.
    pub(crate) fn try_hub(&self) -> Result<MutexGuard<'_, Hub>, FabricError> {
        self.own.check()?;
        Ok(self.hub.lock())
    }

    /// The same for calls that return no such error.
    ///
    /// # Panics
    /// In another process than the engine's.
    pub(crate) fn hub(&self) -> MutexGuard<'_, Hub> {
        assert!(self.is_here(), "{Forked}");
        self.hub.lock()
    }

    /// Whether this is the engine's own process.
    pub(crate) fn is_here(&self) -> bool {
        self.own.is_this()
    }

    /// Makes a transfer of runs that were checked. It is begun by [`Shared::set_going`].
    pub(crate) fn submit(
        self: &Arc<Shared>,
        hub: &mut Hub,
        peer: PeerId,
        transfer: Transfer,
        runs: Vec<Run>,
    ) -> Result<Handle, FabricError> {
        let now = hub.now();
        let used = hub.sockets.used_by(peer, &runs);
        let request = Request {
            peer,
            op: transfer.op,
            stretches: vec![Stretch::of_hosts(runs)],
            immediate: transfer.immediate,
            deadline: transfer.timeout.map(|timeout| now.saturating_add(timeout)),
            priority: transfer.priority,
        };
        let ticket = hub.transfers.submit(now, request).map_err(|full| FabricError::Full(full.0))?;
        hub.outcomes.want(ticket);
        hub.sockets.note_use(ticket, used);
        Ok(Handle { shared: Arc::clone(self), ticket })
    }

    /// Does what was asked for since, and tells those who wait for it.
    pub(crate) fn set_going(&self, hub: &mut MutexGuard<'_, Hub>) {
        hub.pump();
        self.tell(hub);
        self.wake_if_needed(hub);
    }

    /// Waits until `found` finds something, and does the engine's work meanwhile. None: not by the deadline.
    pub(crate) fn wait<T>(
        &self,
        hub: &mut MutexGuard<'_, Hub>,
        deadline: Option<Instant>,
        mut found: impl FnMut(&mut Hub) -> Option<T>,
    ) -> Option<T> {
        if let Some(found) = found(hub) {
            return Some(found);
        }
        let mut events = Vec::<Event>::with_capacity(EVENTS);
        self.pollers.fetch_add(1, Ordering::AcqRel);
        let mut spin_until = Instant::now() + SPIN;
        let answer = loop {
            self.polls.fetch_add(1, Ordering::Relaxed);
            if hub.poll(&mut events) {
                spin_until = Instant::now() + SPIN;
            }
            self.tell(hub);
            if let Some(found) = found(hub) {
                break Some(found);
            }
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                break None;
            }
            let is_read = now >= spin_until
                && now < spin_until + SPIN_FOR_NEIGHBOURS
                && (hub.sockets.is_being_read() || hub.sockets.is_copying());
            if now < spin_until || is_read {
                // Others may begin transfers meanwhile.
                if now + SPIN < spin_until + KEEP {
                    MutexGuard::bump(hub);
                } else {
                    MutexGuard::unlocked(hub, std::thread::yield_now);
                }
                continue;
            }
            // The thread behind goes on.
            self.pollers.fetch_sub(1, Ordering::AcqRel);
            self.sleepers.fetch_add(1, Ordering::AcqRel);
            self.wake_if_needed(hub);
            match deadline {
                Some(deadline) => drop(self.changed.wait_until(hub, deadline)),
                None => self.changed.wait(hub),
            }
            self.sleepers.fetch_sub(1, Ordering::AcqRel);
            if let Some(found) = found(hub) {
                return Some(found);
            }
            self.pollers.fetch_add(1, Ordering::AcqRel);
            spin_until = Instant::now() + SPIN;
        };
        self.pollers.fetch_sub(1, Ordering::AcqRel);
        self.wake_if_needed(hub);
        answer
    }

    /// Wakes those who sleep, and tasks, if anything happened that they may wait for.
    fn tell(&self, hub: &mut MutexGuard<'_, Hub>) {
        if hub.outcomes.take_changed() && self.sleepers.load(Ordering::Acquire) > 0 {
            self.changed.notify_all();
        }
        let wakers = hub.outcomes.take_wakers();
        if !wakers.is_empty() {
            // They may ask for what this guards.
            MutexGuard::unlocked(hub, || wakers.into_iter().for_each(std::task::Waker::wake));
        }
    }

    /// Wakes the thread behind if something is due before it looks by itself.
    fn wake_if_needed(&self, hub: &Hub) {
        if hub.asleep_until.is_some_and(|until| hub.next_tick() < until) {
            hub.sockets.wake();
        }
    }

    /// What the thread behind does.
    fn serve(&self) {
        let epoll = self.hub.lock().sockets.epoll();
        let mut events = Vec::<Event>::with_capacity(EVENTS);
        let mut busy_until = Instant::now();
        while !self.stop.load(Ordering::Acquire) {
            if self.pollers.load(Ordering::Acquire) > 0 {
                // They do the work, unless they have no CPU to do it on.
                let before = self.polls.load(Ordering::Relaxed);
                std::thread::sleep(PARK);
                if self.polls.load(Ordering::Relaxed) != before {
                    continue;
                }
            }
            // Whoever has it does the work. To stand in line would make them share it, in turns of which each begins with cold
            // caches: one turn may take longer than this thread rests.
            let hub = match self.pollers.load(Ordering::Acquire) {
                0 => Some(self.hub.lock()),
                _ => self.hub.try_lock(),
            };
            let Some(mut hub) = hub else { continue };
            if hub.poll(&mut events) {
                busy_until = Instant::now() + SPIN;
            }
            self.tell(&mut hub);
            let now = Instant::now();
            if now < busy_until {
                drop(hub);
                if now + SPIN >= busy_until + KEEP {
                    std::thread::yield_now();
                }
                continue;
            }
            let until = hub.next_tick();
            let timeout = until.saturating_sub(hub.now());
            if !hub.sockets.prepare_to_sleep() {
                hub.sockets.woken();
                continue;
            }
            hub.asleep_until = Some(until);
            drop(hub);
            // What comes is taken above.
            events.clear();
            let timeout =
                Timespec { tv_sec: timeout.as_secs().min(60) as i64, tv_nsec: timeout.subsec_nanos().into() };
            let _ = epoll::wait(&*epoll, spare_capacity(&mut events), Some(&timeout));
            let mut hub = self.hub.lock();
            hub.asleep_until = None;
            hub.sockets.woken();
            hub.sockets.note_woken();
        }
    }
}

/// What a transfer with a peer moves, checked against the memory of both sides.
pub(crate) fn runs_of(hub: &Hub, peer: PeerId, pieces: &Pieces) -> Result<Vec<Run>, FabricError> {
    let sides = hub.sockets.both_sides(peer).ok_or(FabricError::NoSuchPeer)?;
    let runs = pieces.runs(&sides)?;
    if hub.sockets.excludes_gpus() && hub.sockets.used_by(peer, &runs).has_gpus() {
        return Err(FabricError::NoWayToGpus);
    }
    Ok(runs)
}

/// Whether all of it is device memory of this GPU, which may consist of several allocations.
fn check_allocated(gpu: &Gpu, address: u64, len: u64) -> Result<(), GpuError> {
    let (driver, device) = gpu.raw();
    let end =
        address.checked_add(len).ok_or_else(|| GpuError::Invalid(format!("{len} bytes at {address:#x}")))?;
    let mut at = address;
    while at < end {
        let (base, bytes) = driver.address_range(device, at)?;
        at = base.saturating_add(bytes).max(at + 1);
    }
    Ok(())
}

/// Whether transfers of these limits fit into frames.
fn check(options: &Options) -> Result<(), FabricError> {
    let Options { chunk_bytes, chunk_runs, credits, bulk_every, live_max, backoff, room_pause, .. } = options;
    let is_one = (1..=BYTES_MAX).contains(chunk_bytes)
        && (1..=ENTRIES_MAX).contains(chunk_runs)
        && *credits > 0
        && *bulk_every > 1
        && *live_max > 0
        && *backoff > Duration::ZERO
        && *room_pause > Duration::ZERO;
    let wanted = || {
        format!(
            "transfers need chunks of 1 to {BYTES_MAX} bytes and 1 to {ENTRIES_MAX} runs, credits, pauses, room for \
             one transfer, and bulk at most every second time: {options:?}"
        )
    };
    is_one.then_some(()).ok_or_else(|| FabricError::Limit(wanted()))
}

/// Whether any message can ever be taken.
fn check_inbox(options: &InboxOptions) -> Result<(), FabricError> {
    let fits = options.messages > 0 && options.bytes >= MESSAGE_BYTES_MAX;
    let wanted =
        || format!("an inbox has to hold one message of {MESSAGE_BYTES_MAX} bytes at least: {options:?}");
    fits.then_some(()).ok_or_else(|| FabricError::Limit(wanted()))
}
