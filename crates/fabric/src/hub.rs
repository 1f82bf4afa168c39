//! All that one process has open: its connections, what goes over them, and what came of it. Nothing here blocks.
//!
//! ```text
//!  connecting side:   TCP connect --> challenge --> Hello sent --> Welcome: up --> (fence) --> gone
//!  listening side:    accepted: challenge sent --> Hello --> Welcome sent: serving --> gone
//! ```
//! When a connection breaks that carried writes, its peer may still have bytes of them to place. They count as given back
//! only when the peer has said over another connection that it reads the broken one no more (a fence), or when its lease is
//! over ([`crate::lease`]). Bytes that are posted again elsewhere, or memory that is used otherwise, are then not
//! overwritten. Writes that a neighbour reads out of this process's memory ([`crate::same_host`]) count on no lease: it
//! confirms, or it is gone.

#![allow(unsafe_code, reason = "the kernel reads and writes registered memory")]

mod neighbours;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use self::neighbours::{Job, PULLED_CHUNKS, TURN_BYTES};
use crate::completion::Outcomes;
use crate::descriptor::{Access, Address, Descriptor, RegionDescriptor};
use crate::engine::EngineOptions;
use crate::fences::{Fences, LEASE, Whom};
use crate::immediates::{Arrival, Immediates};
use crate::inbox::{Admission, EngineId, Inbox, Message};
use crate::lease::{self, Lease};
use crate::numbered::Numbered;
use crate::regions::{Piece, Regions};
use crate::runs::Run;
use crate::same_host::{Card, Neighbour};
use crate::sessions::{Sessions, TooMany};
use crate::shape::{RegionLengths, Side};
use crate::shm::Segment;
use crate::tcp::{
    Answer, BYTES_MAX, BadFrame, Came, Credentials, ENTRIES_MAX, Ended, Head, Hello, Identity, Key, Link,
    Outcome, Purpose, Stream, Welcome, WireRun, decode_challenge, encode_challenge,
};
use crate::transfers::{Action, Completion, Op, PathId, PeerId, Post, Ticket, Token, Transfers, Work};

/// How often connections are looked at, and how long one may say nothing. Whoever connected says something at each look.
const LOOK: Duration = Duration::from_millis(500);
const SILENT: Duration = Duration::from_millis(1500);
/// Connections of peers, and of them those of whom nothing is known yet.
const LINKS_MAX: usize = 16_384;
const ACCEPTED_MAX: usize = 1_024;
/// Addresses of one peer that are used.
const ADDRESSES_MAX: usize = 16;
/// Bytes that wait in a socket to a process of the same host: few enough that the processor's caches still have them when
/// the other side takes them out. On two cores loopback brought 3.7 GB/s with this and 2.9 with the megabytes that the
/// kernel comes to by itself. Over a network it would hold back whatever is faster than this in a round trip.
const SAME_HOST_SEND_BYTES: usize = 256 << 10;
/// How long nobody is accepted after that failed for want of something.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Rings that bring something are polled so often before sockets are looked at once more, which takes a system call.
const WITHOUT_SOCKETS_MAX: u32 = 32;
/// Frames of one connection before the others have their turn.
const FRAMES_A_TURN: usize = 64;
/// The provider's number in an [`Address`].
const TCP: u8 = 1;

const WAKE: u64 = u64::MAX;
/// Listeners are told from connections by this bit.
const LISTENER: u64 = 1 << 63;

/// A number of a connection, not used twice.
type LinkId = u64;

#[derive(Debug)]
pub(crate) struct Hub {
    pub(crate) me: Identity,
    key: Key,
    /// With these all connections are encrypted.
    credentials: Option<Credentials>,
    begun: Instant,
    pub(crate) transfers: Transfers,
    pub(crate) immediates: Immediates,
    pub(crate) inbox: Inbox,
    pub(crate) regions: Regions,
    pub(crate) outcomes: Outcomes,
    epoll: Arc<OwnedFd>,
    wake: OwnedFd,
    listeners: Vec<TcpListener>,
    /// What peers are told instead of what is listened on.
    advertised: Vec<SocketAddr>,
    /// When listeners that were left alone are listened on again.
    accept_at: Option<Duration>,
    /// Paths to each address of a peer.
    connections: usize,
    links: Numbered<LinkId, Entry>,
    next_link: LinkId,
    /// Links with something to write that has not been tried.
    dirty: Vec<LinkId>,
    /// Links that had more than one turn's frames.
    ready: Vec<LinkId>,
    /// Links that go through rings, which epoll knows nothing of.
    rings: Vec<LinkId>,
    /// Polls in a row that brought enough without a look at sockets.
    without_sockets: u32,
    sessions: Sessions,
    /// Regions that are being given back.
    pub(crate) letting_go: usize,
    pub(crate) is_closed: bool,
    peers: Numbered<PeerId, Peer>,
    paths: Numbered<PathId, PathAt>,
    posted: Numbered<Token, Posted>,
    fences: Fences,
    /// What neighbours read of this process; none where nothing goes by process_vm.
    card: Option<Card>,
    /// Whether a path that goes over TCP only is none.
    needs_neighbours: bool,
    /// [`crate::transfers::Options::chunk_bytes`]
    chunk_bytes: u64,
    /// Connections of either side between neighbours that had to do without rings.
    pub(crate) without_rings: u64,
    /// What is to be read from neighbours.
    jobs: VecDeque<Job>,
    /// Of broken connections that are fenced, whom their writes were to be read by.
    pulling: HashMap<u64, Arc<Neighbour>>,
    /// What transfers under way use.
    used: Numbered<Ticket, Used>,
    look_at: Duration,
    /// Until when the thread behind this sleeps if nothing happens.
    pub(crate) asleep_until: Option<Duration>,
}

#[derive(Debug)]
struct Entry {
    link: Link,
    role: Role,
    /// What epoll tells of.
    interest: EventFlags,
    heard: Duration,
    acks: Vec<Outcome>,
    /// Whether something that came was left there, since too much waited to be written.
    is_held_up: bool,
    /// Of what it asked this process to read: [`neighbours::Job`] counts.
    queued: usize,
    /// The process at the other end, where both can read each other's memory.
    neighbour: Option<Arc<Neighbour>>,
    /// The message whose bytes are coming.
    coming: Option<Coming>,
}

#[derive(Debug)]
struct Coming {
    token: u64,
    number: u64,
    admission: Admission,
    /// Where they go; not touched before all are there. Empty if it is not admitted.
    bytes: Vec<u8>,
}

#[derive(Debug)]
enum Role {
    /// Of a peer that has not said who it is.
    Accepted { challenge: [u8; 16], lease: Lease },
    /// Of a peer whose transfers are served; and the write whose bytes are coming, with whether it is refused.
    Serving { from: Identity, session: u128, connection: u64, body: Option<(u64, bool)>, lease: Lease },
    /// Ends when all is written.
    Leaving,
    /// Ours, on its way: TCP connects, then the peer's challenge comes, then its welcome.
    Connecting { to: Goal, connection: u64 },
    Greeted {
        to: Goal,
        connection: u64,
        nonce: [u8; 16],
        /// What was offered, or why nothing is. None: nobody thought of it.
        segment: Option<Result<Segment, String>>,
    },
    /// Ours; the read whose bytes are coming, and the latest stamp that the peer sent.
    Up { path: PathId, number: u32, connection: u64, body: Option<Token>, stamp: u64 },
}

/// What a connection of ours is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Goal {
    /// A path's connection of that number.
    Path(PathId, u32),
    /// That nothing more is read of an earlier connection.
    Fence(u64),
}

#[derive(Debug)]
struct Peer {
    whom: Whom,
    regions: HashMap<u32, RegionDescriptor>,
}

#[derive(Debug)]
struct PathAt {
    peer: PeerId,
    address: SocketAddr,
    link: Option<LinkId>,
    /// Why it is not up, or was not the last time.
    trouble: Option<String>,
    transport: Transport,
    /// Why it is not a faster one.
    fallback: Option<String>,
    /// Why what is said beside the bytes does not go through rings.
    no_rings: Option<String>,
}

/// A way to a peer, as it is now.
#[derive(Debug, Clone, PartialEq)]
pub struct PathStatus {
    /// Of the peer.
    pub address: SocketAddr,
    /// Whether it carries transfers.
    pub is_up: bool,
    /// How bytes travel, or did the last time; TCP before the first.
    pub transport: Transport,
    /// Why they do not travel by [`Transport::Cma`]; None if they do, or if nobody wants that.
    pub fallback: Option<String>,
    /// With [`Transport::Cma`]: why small writes, and what is said beside the bytes, go through the socket and not through
    /// shared memory. None if they do not, and over TCP, where that is no fallback.
    pub no_rings: Option<String>,
    /// Of the last parts that it carried, each by itself; None before the first.
    pub bytes_per_second: Option<f64>,
    /// Why it broke or could not be made the last time; None if that never happened.
    pub trouble: Option<String>,
}

/// How bytes travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// Through a socket.
    Tcp,
    /// From the memory of one process straight into another's of the same host, by process_vm (cross-memory attach).
    Cma,
}

impl Transport {
    /// "tcp" or "cma".
    pub fn name(self) -> &'static str {
        match self {
            Transport::Tcp => "tcp",
            Transport::Cma => "cma",
        }
    }
}

#[derive(Debug)]
struct Posted {
    link: LinkId,
    what: Asked,
}

#[derive(Debug)]
enum Asked {
    /// And what the link has written when its bytes have left.
    Write(u64),
    /// The same, but the peer reads the bytes.
    Pull,
    Read(Vec<Piece>),
    /// A read that a job of ours does.
    Job,
    Tell,
    /// What the link has written when its bytes have left.
    Message(u64, #[expect(dead_code, reason = "what the link writes is to stay alive")] Arc<[u8]>),
}

#[derive(Debug)]
pub(crate) struct Used {
    whom: PeerId,
    /// Regions of this process.
    own: Vec<u32>,
    /// Regions of the peer, with the generation that they had when the transfer began.
    peer: Vec<(u32, u32)>,
}

/// The lengths of this process's regions and those of a peer.
pub(crate) struct BothSides<'a> {
    own: &'a Regions,
    peer: &'a HashMap<u32, RegionDescriptor>,
}

impl RegionLengths for BothSides<'_> {
    fn region_bytes(&self, side: Side, region: u32) -> Option<u64> {
        match side {
            Side::Local => self.own.bytes(region),
            Side::Remote => self.peer.get(&region).map(|region| region.len),
        }
    }
}

impl Hub {
    pub(crate) fn new(
        me: Identity,
        credentials: Option<Credentials>,
        options: EngineOptions,
    ) -> io::Result<Hub> {
        let EngineOptions { listen, advertise, token, connections, transport, transfers, inbox, .. } =
            options;
        // What is encrypted goes by TCP.
        let wanted = if credentials.is_some() { Some(Transport::Tcp) } else { transport };
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        let mut listeners = Vec::new();
        for (index, address) in (0..).zip(&listen) {
            let listener = TcpListener::bind(address)
                .map_err(|error| io::Error::new(error.kind(), format!("{address}: {error}")))?;
            listener.set_nonblocking(true)?;
            epoll::add(&epoll, &listener, EventData::new_u64(LISTENER | index), EventFlags::IN)?;
            listeners.push(listener);
        }
        Ok(Hub {
            me,
            key: Key::new(&token),
            credentials,
            begun: Instant::now(),
            chunk_bytes: transfers.chunk_bytes,
            transfers: Transfers::new(transfers),
            immediates: Immediates::default(),
            inbox: Inbox::new(inbox),
            regions: Regions::default(),
            outcomes: Outcomes::default(),
            epoll: Arc::new(epoll),
            wake,
            listeners,
            advertised: advertise,
            accept_at: None,
            connections: connections.max(1),
            links: Numbered::default(),
            next_link: 0,
            dirty: Vec::new(),
            ready: Vec::new(),
            rings: Vec::new(),
            without_sockets: 0,
            sessions: Sessions::default(),
            letting_go: 0,
            is_closed: false,
            peers: Numbered::default(),
            paths: Numbered::default(),
            posted: Numbered::default(),
            fences: Fences::default(),
            card: (wanted != Some(Transport::Tcp)).then(|| Card::new(me)),
            needs_neighbours: wanted == Some(Transport::Cma),
            without_rings: 0,
            jobs: VecDeque::new(),
            pulling: HashMap::new(),
            used: Numbered::default(),
            look_at: LOOK,
            asleep_until: None,
        })
    }

    pub(crate) fn epoll(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.epoll)
    }

    pub(crate) fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    pub(crate) fn descriptor(&self) -> io::Result<Descriptor> {
        let own = self.listeners.iter().map(TcpListener::local_addr);
        let addresses: Vec<SocketAddr> = match self.advertised.is_empty() {
            true => own.collect::<io::Result<_>>()?,
            false => self.advertised.clone(),
        };
        Ok(Descriptor {
            boot_nonce: self.me.boot,
            engine_id: self.me.engine,
            addresses: addresses.into_iter().map(encode_address).collect(),
            regions: self.regions.descriptors(),
        })
    }

    /// A peer; none if it has no address that is known here.
    pub(crate) fn add_peer(&mut self, descriptor: &Descriptor) -> io::Result<Option<PeerId>> {
        let known = descriptor.addresses.iter().filter_map(decode_address).take(ADDRESSES_MAX);
        let addresses: Vec<SocketAddr> = known.collect();
        if addresses.is_empty() {
            return Ok(None);
        }
        let session = u128::from(random()?) << 64 | u128::from(random()?);
        let now = self.now();
        let (peer, paths) = self.transfers.add_peer(now, addresses.len() * self.connections);
        for (path, address) in paths.into_iter().zip(addresses.iter().cycle()) {
            let (transport, link, address) = (Transport::Tcp, None, *address);
            let (trouble, fallback, no_rings) = (None, None, None);
            let at = PathAt { peer, address, link, trouble, transport, fallback, no_rings };
            self.paths.insert(path, at);
        }
        let whom = Whom { identity: identity(descriptor), session, addresses };
        self.peers.insert(peer, Peer { whom, regions: by_number(descriptor) });
        self.pump();
        Ok(Some(peer))
    }

    /// The peer's memory, as it is now. False if it is another process's descriptor, or no such peer is known.
    pub(crate) fn update_peer(&mut self, peer: PeerId, descriptor: &Descriptor) -> bool {
        let is_it = |peer: &&mut Peer| peer.whom.identity == identity(descriptor);
        match self.peers.get_mut(&peer).filter(is_it) {
            Some(peer) => {
                peer.regions = by_number(descriptor);
                true
            }
            None => false,
        }
    }

    /// Ends all transfers with a peer. Those that wrote are over when the peer has confirmed that, or with its lease.
    pub(crate) fn remove_peer(&mut self, peer: PeerId) {
        let now = self.now();
        self.transfers.remove_peer(now, peer);
        self.pump();
        self.peers.remove(&peer);
        // Links of paths that were still connecting.
        let left: Vec<LinkId> =
            self.paths.values().filter(|path| path.peer == peer).filter_map(|path| path.link).collect();
        left.into_iter().for_each(|link| drop(self.remove(link)));
        self.paths.retain(|_, path| path.peer != peer);
        self.pump();
    }

    /// All ways to a peer; none if there is no such peer.
    pub(crate) fn path_statuses(&self, peer: PeerId) -> Vec<PathStatus> {
        let status = |path: &PathId| {
            let PathAt { address, trouble, transport, fallback, no_rings, .. } = self.paths.get(path)?;
            let (is_up, bytes_per_second) = (self.transfers.is_up(*path), self.transfers.rate(*path));
            let (trouble, fallback, no_rings) = (trouble.clone(), fallback.clone(), no_rings.clone());
            let (address, transport) = (*address, *transport);
            Some(PathStatus { address, is_up, transport, fallback, no_rings, bytes_per_second, trouble })
        };
        self.transfers.paths(peer).iter().filter_map(status).collect()
    }

    pub(crate) fn add_region(&mut self, base: usize, len: u64, access: Access) -> u32 {
        let (number, generation) = self.regions.add(base, len, access);
        // A closed engine has cleared its card.
        self.card.iter().filter(|_| !self.is_closed).for_each(|card| card.add(number, generation));
        number
    }

    /// Requests for a region are refused from now on. False if there is no such region, or somebody else gives it up already.
    pub(crate) fn stop_serving(&mut self, region: u32) -> bool {
        let is_first = self.regions.stop_serving(region);
        self.card.iter().filter(|_| is_first).for_each(|card| card.remove(region));
        is_first
    }

    /// What both sides have registered, if the peer is known.
    pub(crate) fn both_sides(&self, peer: PeerId) -> Option<BothSides<'_>> {
        let peer = &self.peers.get(&peer)?.regions;
        Some(BothSides { own: &self.regions, peer })
    }

    /// What a transfer is going to use.
    pub(crate) fn used_by(&self, whom: PeerId, runs: &[Run]) -> Used {
        let sorted = |region: fn(&Run) -> u32| {
            let mut regions: Vec<u32> = Vec::new();
            for run in runs {
                // Mostly it is one.
                if regions.last() != Some(&region(run)) {
                    regions.push(region(run));
                }
            }
            regions.sort_unstable();
            regions.dedup();
            regions
        };
        let known = self.peers.get(&whom);
        let generation =
            |region: u32| Some((region, known?.regions.get(&region).map(|region| region.generation)?));
        let peer = sorted(|run| run.remote.region).into_iter().filter_map(generation).collect();
        Used { whom, own: sorted(|run| run.local.region), peer }
    }

    /// Notes what a transfer uses.
    pub(crate) fn note_use(&mut self, ticket: Ticket, used: Used) {
        used.own.iter().for_each(|region| self.regions.count_use(*region, 1));
        self.used.insert(ticket, used);
    }

    /// Ends the connections that move bytes of a region for a peer. Whether there were any.
    pub(crate) fn end_links_that_touch(&mut self, region: u32) -> bool {
        let busy = self.links_that_touch(region);
        for link in &busy {
            self.end(
                *link,
                &Ended::Bad(BadFrame("it was too slow to let go of memory that is not shared any more")),
            );
        }
        !busy.is_empty()
    }

    pub(crate) fn is_touched(&self, region: u32) -> bool {
        !self.links_that_touch(region).is_empty()
    }

    fn links_that_touch(&self, region: u32) -> Vec<LinkId> {
        let Some(memory) = self.regions.all_of(region) else { return Vec::new() };
        let by_socket =
            self.links.iter().filter(|(_, entry)| entry.link.touches(memory)).map(|(link, _)| *link);
        by_socket.chain(self.jobs_that_touch(memory)).collect()
    }

    /// Ends everything, for good, but what asks neighbours to read nothing more of this process ([`Hub::is_pulled`]).
    pub(crate) fn close(&mut self) {
        self.is_closed = true;
        self.outcomes.note_message();
        let peers: Vec<PeerId> = self.peers.keys().copied().collect();
        peers.into_iter().for_each(|peer| self.remove_peer(peer));
        let is_fence = |entry: &Entry| {
            matches!(
                entry.role,
                Role::Connecting { to: Goal::Fence(_), .. } | Role::Greeted { to: Goal::Fence(_), .. }
            )
        };
        self.remove_links(|entry| !is_fence(entry));
        // After the links: whoever finds nobody here any more knows that nothing of its own is read.
        self.card.iter().for_each(Card::clear);
        self.listeners.clear();
    }

    /// Of a closed hub: asks nobody any more. All that was under way is over.
    pub(crate) fn forsake(&mut self) {
        self.remove_links(|_| true);
        self.pulling.clear();
        let tokens = self.fences.take_all();
        self.give_back(tokens);
        self.pump();
    }

    fn remove_links(&mut self, is_one: impl Fn(&Entry) -> bool) {
        let links: Vec<LinkId> =
            self.links.iter().filter(|(_, entry)| is_one(entry)).map(|(link, _)| *link).collect();
        links.into_iter().for_each(|link| drop(self.remove(link)));
    }

    /// Lets whoever sleeps for this hub look again.
    pub(crate) fn wake(&self) {
        // A counter that is full wakes too.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Takes note that it was woken; what it was woken for is seen to by [`Hub::poll`].
    pub(crate) fn note_woken(&self) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut count);
    }

    /// Takes what came, without waiting, and does what is due. Whether anything happened.
    pub(crate) fn poll(&mut self, events: &mut Vec<Event>) -> bool {
        events.clear();
        let ready = std::mem::take(&mut self.ready);
        let mut any = !ready.is_empty();
        ready.into_iter().for_each(|link| self.take(link));
        let by_rings = self.take_from_rings();
        any |= by_rings;
        self.without_sockets = if by_rings { self.without_sockets + 1 } else { WITHOUT_SOCKETS_MAX };
        // Also before connections are judged by what was heard of them.
        if self.without_sockets >= WITHOUT_SOCKETS_MAX || self.now() >= self.look_at {
            self.without_sockets = 0;
            // An interrupted call brought nothing.
            let _ = epoll::wait(&self.epoll, spare_capacity(events), Some(&Timespec::default()));
        }
        for event in events.iter() {
            match event.data.u64() {
                // For the thread that sleeps.
                WAKE => continue,
                listener if listener & LISTENER != 0 => self.accept((listener ^ LISTENER) as usize),
                link => {
                    self.note_told(link);
                    self.take(link);
                }
            }
            any = true;
        }
        let now = self.now();
        if now >= self.look_at {
            let is_late = now >= self.look_at + LOOK;
            self.look_at = now + LOOK;
            self.look(now, is_late);
        }
        if self.accept_at.is_some_and(|at| at <= now) {
            self.accept_at = None;
            self.listen_to(EventFlags::IN);
        }
        self.see_to_fences(now);
        self.pump() || any
    }

    /// When there is something to do if nothing comes.
    pub(crate) fn next_tick(&self) -> Duration {
        if !self.ready.is_empty() || !self.jobs.is_empty() {
            return Duration::ZERO;
        }
        let look = (!self.links.is_empty() || !self.sessions.is_empty()).then_some(self.look_at);
        let ticks = [self.transfers.next_tick(), self.fences.next_tick(), look, self.accept_at];
        ticks.into_iter().flatten().min().unwrap_or(Duration::MAX)
    }

    /// Posts and does whatever is due now. Whether that was anything.
    pub(crate) fn pump(&mut self) -> bool {
        let mut any = false;
        let mut turn = TURN_BYTES;
        loop {
            let now = self.now();
            self.transfers.tick(now);
            let mut more = false;
            while let Some(action) = self.transfers.next_action() {
                more = true;
                self.act(action);
            }
            while let Some(post) = self.transfers.next_post(now) {
                more = true;
                self.post(post);
            }
            let dirty = std::mem::take(&mut self.dirty);
            // A link that ends here gives back what is to be posted elsewhere.
            more |= !dirty.is_empty();
            dirty.into_iter().for_each(|link| self.flush(link));
            more |= self.do_jobs(&mut turn);
            any |= more;
            if !more {
                return any;
            }
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Over(ticket, outcome) => {
                for region in self.used.remove(&ticket).map(|used| used.own).unwrap_or_default() {
                    self.regions.count_use(region, -1);
                }
                self.outcomes.tell(ticket, outcome);
            }
            Action::Close(path, number) => {
                let link = self.paths.get(&path).and_then(|path| path.link);
                let is_it = |entry: &Entry| matches!(entry.role, Role::Up { number: of, .. } if of == number);
                if let Some(link) = link.filter(|link| self.links.get(link).is_some_and(is_it)) {
                    self.end(link, &Ended::Bad(BadFrame("a part of a transfer took too long")));
                }
            }
            Action::Connect(path, number) => {
                let Some(at) = self.paths.get(&path) else { return };
                let (peer, address) = (at.peer, at.address);
                match self.connect(address, Goal::Path(path, number)) {
                    Ok(link) => {
                        if let Some(path) = self.paths.get_mut(&path) {
                            path.link = Some(link);
                        }
                    }
                    Err(error) => {
                        tracing::debug!(?peer, %address, %error, "cannot connect");
                        self.note_trouble(path, &error);
                        let now = self.now();
                        self.transfers.path_broke(now, path, number);
                    }
                }
            }
            Action::Lost(peer) => tracing::warn!(?peer, "a peer cannot be reached any more"),
        }
    }

    fn connect(&mut self, address: SocketAddr, to: Goal) -> io::Result<LinkId> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(errno) => return Err(errno.into()),
        }
        let role = Role::Connecting { to, connection: random()? };
        // Told when it is connected, or is not going to be.
        self.add(socket.into(), role, EventFlags::IN | EventFlags::OUT)
    }

    fn add(&mut self, socket: TcpStream, role: Role, interest: EventFlags) -> io::Result<LinkId> {
        socket.set_nodelay(true)?;
        let id = self.next_link;
        self.next_link += 1;
        let heard = self.now();
        let accepted = matches!(role, Role::Accepted { .. });
        let link = Link::new(Stream::new(socket, self.credentials.as_ref(), accepted)?)?;
        epoll::add(&self.epoll, &link, EventData::new_u64(id), interest)?;
        let (acks, is_held_up, queued, neighbour, coming) = (Vec::new(), false, 0, None, None);
        let entry = Entry { link, role, interest, heard, acks, is_held_up, queued, neighbour, coming };
        self.links.insert(id, entry);
        self.look_at = self.look_at.min(heard + LOOK);
        Ok(id)
    }

    /// A link that is over, still open.
    fn remove(&mut self, id: LinkId) -> Option<Entry> {
        let entry = self.links.remove(&id)?;
        if self.letting_go > 0 {
            // It touches nothing any more.
            self.outcomes.note_change();
        }
        self.rings.retain(|link| *link != id);
        if entry.neighbour.is_some() {
            self.jobs.retain(|job| job.link != id);
        }
        // A forked process may hold the socket too, which would be told of for ever.
        let _ = epoll::delete(&self.epoll, &entry.link);
        if let Role::Serving { session, .. } = entry.role {
            if let Some(Coming { admission: Admission::Admitted, bytes, .. }) = &entry.coming {
                self.inbox.release(session, bytes.len());
            }
            let now = self.now();
            self.sessions.leave(now, session);
            self.inbox.share_among(self.sessions.connected());
        }
        Some(entry)
    }

    fn accept(&mut self, index: usize) {
        for _ in 0..FRAMES_A_TURN {
            let Some(listener) = self.listeners.get(index) else { return };
            let socket = match listener.accept() {
                Ok((socket, _)) => socket,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // Of the one connection: others go on.
                Err(error) if !is_want(&error) => continue,
                Err(error) => {
                    tracing::warn!(%error, "no connection can be accepted; tried again every 100 ms");
                    self.accept_at = Some(self.now() + ACCEPT_PAUSE);
                    return self.listen_to(EventFlags::empty());
                }
            };
            let unknown = |entry: &&Entry| matches!(entry.role, Role::Accepted { .. });
            let is_full = self.links.len() >= LINKS_MAX
                || (self.links.len() >= ACCEPTED_MAX
                    && self.links.values().filter(unknown).count() >= ACCEPTED_MAX);
            if is_full {
                tracing::warn!("too many connections: one is refused");
                continue;
            }
            let added = random().and_then(|challenge| {
                let challenge = challenge_of(challenge, random()?);
                keep_in_cache(&socket);
                let link =
                    self.add(socket, Role::Accepted { challenge, lease: Lease::begin() }, EventFlags::IN)?;
                self.say(link, encode_challenge(&challenge));
                Ok(())
            });
            if let Err(error) = added {
                tracing::warn!(%error, "a connection cannot be accepted");
            }
        }
    }

    fn listen_to(&self, interest: EventFlags) {
        for (index, listener) in (0..).zip(&self.listeners) {
            // It is known to epoll, which needs no more memory for this.
            let _ = epoll::modify(&self.epoll, listener, EventData::new_u64(LISTENER | index), interest);
        }
    }

    fn say(&mut self, link: LinkId, bytes: Vec<u8>) {
        if let Some(entry) = self.links.get_mut(&link) {
            entry.link.say(bytes);
            self.dirty.push(link);
        }
    }

    fn flush(&mut self, id: LinkId) {
        let Some(entry) = self.links.get_mut(&id) else { return };
        // Not connected yet: see take_next.
        if matches!(entry.role, Role::Connecting { .. }) && entry.interest != EventFlags::IN {
            return;
        }
        // SAFETY: memory that is queued belongs to a registered region: of a transfer under way, or served to a peer;
        // a region is not given back before no link touches it. Or it is a message's, which `posted` holds until the link
        // has written it or is gone.
        if let Err(ended) = unsafe { entry.link.flush() } {
            return self.end(id, &ended);
        }
        if entry.link.is_flushed() && self.letting_go > 0 {
            self.outcomes.note_change();
        }
        if matches!(entry.role, Role::Leaving) && entry.link.is_flushed() {
            self.remove(id);
            return;
        }
        if !entry.link.is_full() && std::mem::take(&mut entry.is_held_up) {
            // What it left in our own buffer is not told of again.
            self.ready.push(id);
        }
        let (is_full, is_flushed) = (entry.link.is_full(), entry.link.is_flushed());
        if let Some(rings) = entry.link.rings() {
            if !is_flushed && !rings.prepare_to_wait_for_room() {
                self.ready.push(id);
            }
            return;
        }
        let reads = if is_full { EventFlags::empty() } else { EventFlags::IN };
        let writes = if is_flushed { EventFlags::empty() } else { EventFlags::OUT };
        self.tell_of(id, reads | writes);
    }

    /// What epoll tells of from now on.
    fn tell_of(&mut self, id: LinkId, interest: EventFlags) {
        let Some(entry) = self.links.get_mut(&id).filter(|entry| entry.interest != interest) else { return };
        entry.interest = interest;
        if let Err(errno) = epoll::modify(&self.epoll, &entry.link, EventData::new_u64(id), interest) {
            self.end(id, &Ended::Io(errno.into()));
        }
    }

    /// A connection can be read or written.
    fn take(&mut self, id: LinkId) {
        let now = self.now();
        let Some(entry) = self.links.get_mut(&id) else { return };
        if entry.interest.contains(EventFlags::OUT)
            || (!entry.link.is_flushed() && entry.link.rings().is_some())
        {
            self.dirty.push(id);
        }
        // Its peer counts on this: what is still there to be read is read no more.
        if matches!(entry.role, Role::Serving { lease, .. } if !lease.holds()) {
            return self.end(id, &Ended::Late);
        }
        let received = entry.link.received();
        let mut has_more = true;
        for _ in 0..FRAMES_A_TURN {
            let Some(entry) = self.links.get_mut(&id) else { return };
            if entry.link.is_full() {
                entry.is_held_up = true;
                // Nothing is received that would tell so.
                if entry.link.has_ended() {
                    return self.end(id, &Ended::Closed);
                }
                has_more = false;
                break;
            }
            match self.take_next(id, now) {
                Ok(true) => {}
                Ok(false) => {
                    has_more = false;
                    break;
                }
                Err(ended) => return self.end(id, &ended),
            }
        }
        if has_more {
            // What is in our own buffer is not told of again.
            self.ready.push(id);
        }
        // A greeting has its time as a whole.
        let is_greeted = |entry: &&mut Entry| matches!(entry.role, Role::Serving { .. } | Role::Up { .. });
        let entry = self.links.get_mut(&id).filter(is_greeted);
        if let Some(entry) = entry.filter(|entry| entry.link.received() > received) {
            entry.heard = now;
        }
        let Some(entry) = self.links.get_mut(&id) else { return };
        // What has left the socket is not told of again, and what TLS has to say by itself nobody has queued.
        if !has_more && entry.link.has_more() && !entry.link.is_full() {
            self.ready.push(id);
        }
        if !entry.link.is_flushed() && !entry.interest.contains(EventFlags::OUT) {
            self.dirty.push(id);
        }
        self.answer(id);
    }

    /// Sends what is known of a peer's requests by now.
    fn answer(&mut self, id: LinkId) {
        let Some(entry) = self.links.get_mut(&id) else { return };
        if !entry.acks.is_empty() {
            for outcomes in std::mem::take(&mut entry.acks).chunks(ENTRIES_MAX) {
                let mut frame =
                    Head::Ack { outcomes: outcomes.len(), stamp: lease::stamp() }.encode().to_vec();
                outcomes.iter().for_each(|outcome| outcome.encode(&mut frame));
                entry.link.say(frame);
            }
            self.dirty.push(id);
        }
    }

    /// Takes the next thing that came over a connection. False: there is nothing, or the connection is gone.
    fn take_next(&mut self, id: LinkId, now: Duration) -> Result<bool, Ended> {
        let Some(entry) = self.links.get_mut(&id) else { return Ok(false) };
        match &mut entry.role {
            Role::Accepted { challenge, .. } => {
                let Some(hello) = entry.link.greeting()? else { return Ok(false) };
                let hello = Hello::decode(&hello, &self.key, challenge)?;
                self.greet(id, hello);
                Ok(true)
            }
            Role::Connecting { to, connection } => {
                if let Ok(Err(errno)) | Err(errno) = sockopt::socket_error(&entry.link) {
                    return Err(Ended::Io(errno.into()));
                }
                if entry.interest != EventFlags::IN {
                    // Connected, or told once too often: what comes next is the peer's challenge.
                    keep_in_cache(entry.link.socket());
                    self.tell_of(id, EventFlags::IN);
                    return Ok(true);
                }
                let Some(challenge) = entry.link.greeting()? else { return Ok(false) };
                let challenge = decode_challenge(&challenge)?;
                let (to, connection, nonce) = (*to, *connection, challenge_of(random()?, random()?));
                let segment = self.card.as_ref().and_then(|_| neighbours::segment(entry.link.socket(), to));
                let offered = segment.as_ref().and_then(|segment| segment.as_ref().ok());
                let rings = offered.map(|segment| segment.as_fd().as_raw_fd() as u32);
                entry.role = Role::Greeted { to, connection, nonce, segment };
                let of_path = |path| self.peers.get(&self.paths.get(&path)?.peer);
                let (purpose, whom) = match to {
                    Goal::Path(path, _) => (Purpose::Path, of_path(path).map(|peer| &peer.whom)),
                    Goal::Fence(of) => (Purpose::Fence(of), self.fences.whom(of)),
                };
                let Some(Whom { identity, session, .. }) = whom else { return Err(Ended::Closed) };
                let (to, session) = (*identity, *session);
                let offer = self.offer(rings).filter(|_| purpose == Purpose::Path);
                let hello = Hello { purpose, connection, from: self.me, to, nonce, session, offer };
                let bytes = hello.encode(&self.key, &challenge);
                self.say(id, bytes);
                Ok(true)
            }
            Role::Greeted { to, connection, nonce, .. } => {
                let Some(welcome) = entry.link.greeting()? else { return Ok(false) };
                let (to, connection) = (*to, *connection);
                let answer = Welcome::decode(&welcome, &self.key, nonce)?;
                self.welcomed(id, to, connection, answer)
            }
            Role::Serving { .. } | Role::Up { .. } => {
                let lease = match entry.role {
                    Role::Serving { lease, .. } => Some(lease),
                    _ => None,
                };
                // SAFETY: expected memory belongs to a registered region, as queued memory does, or to the message that
                // the link's entry holds until all of it is there.
                let came = unsafe { entry.link.receive(lease)? };
                if matches!(came, Came::Nothing) {
                    return Ok(false);
                }
                match came {
                    Came::Frame(head, entries) => self.take_frame(id, head, &entries, now)?,
                    _ => self.take_body(id, now),
                }
                Ok(true)
            }
            // It goes when the answer has been written.
            Role::Leaving => Ok(false),
        }
    }

    /// A peer has said who it is; None: without a proof.
    fn greet(&mut self, id: LinkId, hello: Option<Hello>) {
        let (answer, nonce) = match hello {
            None => (Answer::WrongToken, [0; 16]),
            Some(hello) if hello.to != self.me => (Answer::SomebodyElse, hello.nonce),
            Some(hello) => (Answer::Welcome, hello.nonce),
        };
        if let (Answer::Welcome, Some(Hello { purpose: Purpose::Fence(of), from, .. })) = (answer, hello) {
            let is_it = |entry: &Entry| matches!(entry.role, Role::Serving { from: f, connection, .. } if (f, connection) == (from, of));
            let fenced: Vec<LinkId> =
                self.links.iter().filter(|(_, entry)| is_it(entry)).map(|(link, _)| *link).collect();
            fenced.iter().for_each(|link| self.end(*link, &Ended::Closed));
        }
        let wants = |hello: &Hello| hello.purpose == Purpose::Path && answer == Answer::Welcome;
        if let Some(Hello { session, from, .. }) = hello.filter(wants) {
            match self.sessions.join(self.now(), session, from) {
                Ok(forgotten) => forgotten.into_iter().for_each(|session| self.immediates.forget(session)),
                Err(TooMany) => return self.end(id, &BadFrame("it has too many sessions").into()),
            }
            self.inbox.share_among(self.sessions.connected());
        }
        let (neighbour, reads, rings) = self.meet(hello.filter(wants));
        let offer = self.offer(None).filter(|_| neighbour.is_some());
        let Some(entry) = self.links.get_mut(&id) else { return };
        entry.neighbour = neighbour;
        entry.role = match (answer, hello, &entry.role) {
            (
                Answer::Welcome,
                Some(Hello { purpose: Purpose::Path, from, connection, session, .. }),
                Role::Accepted { lease, .. },
            ) => Role::Serving { from, session, connection, body: None, lease: *lease },
            _ => Role::Leaving,
        };
        if answer == Answer::WrongToken {
            tracing::warn!(peer = ?entry.link.socket().peer_addr().ok(), "refused a peer without the token");
        }
        let welcome = Welcome { answer, from: self.me, offer, reads, rings: rings.is_some() };
        self.say(id, welcome.encode(&self.key, &nonce));
        if let Some(rings) = rings {
            self.flush(id);
            self.go_through(id, rings);
        }
    }

    /// The peer has answered our greeting; None: without a proof.
    fn welcomed(
        &mut self,
        id: LinkId,
        to: Goal,
        connection: u64,
        welcome: Option<Welcome>,
    ) -> Result<bool, Ended> {
        match (welcome, to) {
            (Some(welcome @ Welcome { answer: Answer::Welcome, .. }), Goal::Path(path, number)) => {
                let transport = self.know_neighbour(id, path, &welcome)?;
                let chunks = if transport == Transport::Cma { PULLED_CHUNKS } else { 1 };
                self.transfers.set_read_bytes(path, self.chunk_bytes.saturating_mul(chunks).min(BYTES_MAX));
                self.take_up_rings(id, path, &welcome, transport)?;
                if !self.transfers.path_up(path, number) {
                    return Err(Ended::Closed);
                }
                if let Some(entry) = self.links.get_mut(&id) {
                    entry.role = Role::Up { path, number, connection, body: None, stamp: 0 };
                }
                Ok(true)
            }
            (Some(Welcome { answer: Answer::Welcome, .. }), Goal::Fence(of)) => {
                self.remove(id);
                self.pulling.remove(&of);
                self.outcomes.note_change();
                let tokens = self.fences.confirmed(of);
                self.give_back(tokens);
                Ok(false)
            }
            (Some(_), _) => {
                Err(BadFrame("another process listens there now: describe the peer's memory again").into())
            }
            (None, _) => Err(BadFrame("it has another token").into()),
        }
    }

    fn take_frame(&mut self, id: LinkId, head: Head, entries: &[u8], now: Duration) -> Result<(), Ended> {
        let Some(entry) = self.links.get_mut(&id) else { return Ok(()) };
        match (&mut entry.role, head) {
            (Role::Serving { lease, .. }, Head::Ping { stamp }) => {
                lease.renew(stamp)?;
                self.say(id, Head::Pong { stamp: lease::stamp() }.encode().to_vec());
            }
            (Role::Up { stamp, .. }, Head::Pong { stamp: new }) => *stamp = new,
            (Role::Serving { body, lease, .. }, Head::Write { token, bytes, stamp, .. }) => {
                lease.renew(stamp)?;
                let runs = WireRun::decode_all(entries, bytes)?;
                let pieces = pieces_for_peer(&self.regions, &runs, true);
                *body = Some((token, pieces.is_none()));
                let discard = if pieces.is_none() { bytes } else { 0 };
                entry.link.expect(pieces.unwrap_or_default(), discard);
            }
            (Role::Serving { .. }, Head::Pull { token, bytes, .. }) => {
                let (runs, addresses) = WireRun::decode_pulled(entries, bytes)?;
                if entry.neighbour.is_none() {
                    return Err(BadFrame("a frame of a neighbour that is none").into());
                }
                match pieces_for_peer(&self.regions, &runs, true) {
                    Some(pieces) => self.queue(Job::pull(id, token, pieces, &addresses))?,
                    None => entry.acks.push(Outcome { token, refused: true }),
                }
            }
            (Role::Serving { .. }, Head::Read { token, bytes, .. }) => {
                let runs = WireRun::decode_all(entries, bytes)?;
                match pieces_for_peer(&self.regions, &runs, false) {
                    Some(pieces) => {
                        entry.link.say(Head::Data { token, bytes }.encode().to_vec());
                        pieces.into_iter().for_each(|piece| entry.link.say_memory(piece));
                        self.dirty.push(id);
                    }
                    None => entry.acks.push(Outcome { token, refused: true }),
                }
            }
            (Role::Serving { session, .. }, Head::Tell { token, number, counter, generation }) => {
                let arrival = self.immediates.arrive(*session, number, counter, generation);
                if matches!(arrival, Arrival::Counted(_)) {
                    self.outcomes.note_change();
                }
                entry.acks.push(Outcome { token, refused: arrival == Arrival::Refused });
            }
            (Role::Serving { session, .. }, Head::Message { token, number, bytes }) => {
                let admission = self.inbox.admit(&self.immediates, *session, number, bytes);
                let is_admitted = admission == Admission::Admitted;
                let (len, discard) = if is_admitted { (bytes as usize, 0) } else { (0, bytes) };
                let coming = Coming { token, number, admission, bytes: vec![0; len] };
                let address = entry.coming.insert(coming).bytes.as_mut_ptr().expose_provenance();
                let piece = (len > 0).then_some(Piece { address, len });
                entry.link.expect(piece.into_iter().collect(), discard);
            }
            (Role::Up { .. }, Head::NoRoom { token }) => {
                let token = Token::from_number(token);
                let Some(posted) = self.posted.get(&token).filter(|posted| posted.link == id) else {
                    return Ok(());
                };
                if !matches!(posted.what, Asked::Message(mark, _) if entry.link.has_written(mark)) {
                    return Err(BadFrame("an answer before it can be known").into());
                }
                self.posted.remove(&token);
                self.transfers.complete(now, token, Completion::NoRoom);
            }
            (Role::Up { body, .. }, Head::Data { token, bytes }) => {
                let token = Token::from_number(token);
                let pieces = match self.posted.get_mut(&token).filter(|posted| posted.link == id) {
                    Some(Posted { what: Asked::Read(pieces), .. }) => std::mem::take(pieces),
                    _ => return Err(BadFrame("an answer to nothing").into()),
                };
                if pieces.iter().map(|piece| piece.len as u64).sum::<u64>() != bytes {
                    return Err(BadFrame("an answer of other bytes").into());
                }
                *body = Some(token);
                entry.link.expect(pieces, 0);
            }
            (Role::Up { stamp, .. }, Head::Ack { stamp: new, .. }) => {
                *stamp = new;
                for Outcome { token, refused } in Outcome::decode_all(entries) {
                    let token = Token::from_number(token);
                    let Some(posted) = self.posted.get(&token).filter(|posted| posted.link == id) else {
                        continue;
                    };
                    let may_be = match &posted.what {
                        Asked::Write(mark) | Asked::Message(mark, _) => entry.link.has_written(*mark),
                        Asked::Read(_) => refused,
                        Asked::Job => false,
                        Asked::Pull | Asked::Tell => true,
                    };
                    if !may_be {
                        return Err(BadFrame("an answer before it can be known").into());
                    }
                    self.posted.remove(&token);
                    let completion = if refused { Completion::Refused } else { Completion::Placed };
                    self.transfers.complete(now, token, completion);
                }
            }
            _ => return Err(BadFrame("a frame that is not its side's").into()),
        }
        Ok(())
    }

    /// All bytes of the last frame are in place.
    fn take_body(&mut self, id: LinkId, now: Duration) {
        let Some(entry) = self.links.get_mut(&id) else { return };
        if self.letting_go > 0 {
            self.outcomes.note_change();
        }
        match &mut entry.role {
            Role::Serving { body, from, session, .. } => {
                if let Some((token, refused)) = body.take() {
                    entry.acks.push(Outcome { token, refused });
                }
                let Some(Coming { token, number, admission, bytes }) = entry.coming.take() else { return };
                match admission {
                    Admission::NoRoom => {
                        entry.link.say(Head::NoRoom { token }.encode().to_vec());
                        return self.dirty.push(id);
                    }
                    Admission::Admitted => {
                        let from = EngineId { engine_id: from.engine, boot_nonce: from.boot };
                        let message = Message { from, bytes };
                        if self.inbox.deliver(&mut self.immediates, *session, number, message) {
                            self.outcomes.note_message();
                        }
                    }
                    Admission::Known | Admission::Refused => {}
                }
                entry.acks.push(Outcome { token, refused: admission == Admission::Refused });
            }
            Role::Up { body, .. } => {
                if let Some(token) = body.take() {
                    self.posted.remove(&token);
                    self.transfers.complete(now, token, Completion::Placed);
                }
            }
            _ => {}
        }
    }

    fn post(&mut self, post: Post) {
        let Post { path, token, ticket, work } = post;
        let now = self.now();
        let link = self.paths.get(&path).and_then(|at| at.link);
        let Some((link, entry)) = link.and_then(|link| Some((link, self.links.get_mut(&link)?))) else {
            return self.transfers.hand_back(now, token);
        };
        let number = token.number();
        let entry = match &work {
            Work::Move { op, runs } if entry.neighbour.is_some() => {
                match self.post_to_neighbour(link, token, ticket, *op, runs) {
                    Some(what) => {
                        self.posted.insert(token, Posted { link, what });
                        return;
                    }
                    None => match self.links.get_mut(&link) {
                        Some(entry) => entry,
                        None => return self.transfers.hand_back(now, token),
                    },
                }
            }
            _ => entry,
        };
        let what = match work {
            Work::Tell { number: of, counter, generation } => {
                let head = Head::Tell { token: number, number: of, counter, generation };
                entry.link.say(head.encode().to_vec());
                Asked::Tell
            }
            Work::Say { number: of, bytes } => {
                let head = Head::Message { token: number, number: of, bytes: bytes.len() as u64 };
                entry.link.say(head.encode().to_vec());
                let piece = Piece { address: bytes.as_ptr().expose_provenance(), len: bytes.len() };
                (piece.len > 0).then(|| entry.link.say_memory(piece));
                Asked::Message(entry.link.mark(), bytes)
            }
            Work::Move { op, runs } => {
                let bytes = runs.iter().map(|run| run.len).sum();
                let count = runs.len();
                let head = match op {
                    Op::Write => {
                        let stamp = if let Role::Up { stamp, .. } = entry.role { stamp } else { 0 };
                        Head::Write { token: number, runs: count, bytes, stamp }
                    }
                    Op::Read => Head::Read { token: number, runs: count, bytes },
                };
                let mut frame = head.encode().to_vec();
                let mut pieces = Vec::with_capacity(count);
                for Run { local, remote, len } in runs {
                    let known = self.used.get(&ticket).map_or(&[][..], |used| &used.peer);
                    let generation = known.iter().find(|(region, _)| *region == remote.region);
                    let piece = self.regions.own(local.region, local.offset, len);
                    let (Some(piece), Some((_, generation))) = (piece, generation) else {
                        self.transfers.complete(now, token, Completion::Refused);
                        return;
                    };
                    WireRun { region: remote.region, generation: *generation, offset: remote.offset, len }
                        .encode(&mut frame);
                    pieces.push(piece);
                }
                entry.link.say(frame);
                match op {
                    Op::Write => {
                        pieces.into_iter().for_each(|piece| entry.link.say_memory(piece));
                        Asked::Write(entry.link.mark())
                    }
                    Op::Read => Asked::Read(pieces),
                }
            }
        };
        self.posted.insert(token, Posted { link, what });
        self.dirty.push(link);
    }

    /// A connection is over.
    fn end(&mut self, id: LinkId, why: &Ended) {
        let Some(entry) = self.remove(id) else { return };
        let now = self.now();
        let peer = entry.link.socket().peer_addr().ok();
        match entry.role {
            Role::Accepted { .. } | Role::Leaving => tracing::debug!(?peer, %why, "a connection ended"),
            Role::Serving { .. } => tracing::debug!(?peer, %why, "a peer's connection ended"),
            Role::Connecting { to, .. } | Role::Greeted { to, .. } => {
                tracing::debug!(?peer, %why, ?to, "a connection failed");
                match to {
                    Goal::Path(path, number) => {
                        self.note_trouble(path, why);
                        self.unlink(path, id);
                        self.transfers.path_broke(now, path, number);
                    }
                    Goal::Fence(of) => self.fence_failed(now, of),
                }
            }
            Role::Up { path, number, connection, .. } => {
                tracing::info!(?peer, %why, "a path broke");
                self.note_trouble(path, why);
                // Closed first: nothing of ours is read or written any more. What the kernel has not sent, it is not to send:
                // without this it would go on behind our back for as long as the network takes.
                let _ = sockopt::set_socket_linger(&entry.link, Some(Duration::ZERO));
                drop(entry.link);
                let of_link = |posted: &&Posted| posted.link == id;
                let is_write = |posted: &Posted| matches!(posted.what, Asked::Write(_) | Asked::Pull);
                let is_pulled =
                    self.posted.values().any(|posted| of_link(&posted) && matches!(posted.what, Asked::Pull));
                let mut broken: Vec<(Token, bool)> = self
                    .posted
                    .iter()
                    .filter(|(_, posted)| of_link(posted))
                    .map(|(token, posted)| (*token, is_write(posted)))
                    .collect();
                broken.sort_unstable_by_key(|(token, _)| *token);
                broken.iter().for_each(|(token, _)| drop(self.posted.remove(token)));
                let peer = self.unlink(path, id);
                self.transfers.path_broke(now, path, number);
                let (writes, others): (Vec<_>, Vec<_>) =
                    broken.into_iter().partition(|(_, is_write)| *is_write);
                let tokens: Vec<Token> = writes.into_iter().map(|(token, _)| token).collect();
                self.give_back(others.into_iter().map(|(token, _)| token).collect());
                match peer.and_then(|peer| self.peers.get(&peer)).filter(|_| !tokens.is_empty()) {
                    Some(peer) => {
                        // After it was closed: until then its bytes went out, and this thread may have been stopped.
                        let now = self.now();
                        let neighbour = entry.neighbour.filter(|_| is_pulled);
                        let lease = neighbour.is_none().then_some(LEASE);
                        self.fences.add(now, connection, peer.whom.clone(), tokens, lease);
                        self.pulling.extend(neighbour.map(|neighbour| (connection, neighbour)));
                        self.see_to_fences(now);
                    }
                    None => self.give_back(tokens),
                }
            }
        }
    }

    fn note_trouble(&mut self, path: PathId, why: &dyn std::fmt::Display) {
        if let Some(path) = self.paths.get_mut(&path) {
            path.trouble = Some(why.to_string());
        }
    }

    /// The path has this connection no more. Answers its peer.
    fn unlink(&mut self, path: PathId, link: LinkId) -> Option<PeerId> {
        let path = self.paths.get_mut(&path)?;
        if path.link == Some(link) {
            path.link = None;
        }
        Some(path.peer)
    }

    fn see_to_fences(&mut self, now: Duration) {
        let over = self.fences.take_over(now);
        self.give_back(over);
        for (connection, address) in self.fences.take_due(now) {
            if let Err(error) = self.connect(address, Goal::Fence(connection)) {
                tracing::debug!(%address, %error, "cannot connect");
                self.fence_failed(now, connection);
            }
        }
    }

    /// Nothing touches the memory of these posts any more.
    fn give_back(&mut self, tokens: Vec<Token>) {
        let now = self.now();
        tokens.into_iter().for_each(|token| self.transfers.complete(now, token, Completion::Unknown));
    }

    /// Ends connections that say nothing, unless nobody has listened, and says something where nobody else does.
    fn look(&mut self, now: Duration, is_late: bool) {
        let silent = |entry: &Entry| now.saturating_sub(entry.heard);
        let is_dead = |entry: &Entry| !is_late && silent(entry) >= SILENT;
        let dead: Vec<LinkId> =
            self.links.iter().filter(|(_, entry)| is_dead(entry)).map(|(link, _)| *link).collect();
        for link in dead {
            self.end(link, &Ended::Io(io::ErrorKind::TimedOut.into()));
        }
        // Whoever speaks TLS speaks at once. A peer that waits for us to speak is told so before it gives up.
        let is_mute = |entry: &Entry| {
            matches!(entry.role, Role::Accepted { .. })
                && entry.link.awaits_first_word()
                && !is_late
                && silent(entry) >= SILENT / 2
        };
        let mute: Vec<LinkId> =
            self.links.iter().filter(|(_, entry)| is_mute(entry)).map(|(link, _)| *link).collect();
        mute.into_iter().for_each(|link| self.end(link, &Ended::NoTls));
        let stamp = |entry: &Entry| if let Role::Up { stamp, .. } = entry.role { Some(stamp) } else { None };
        let up: Vec<(LinkId, u64)> =
            self.links.iter().filter_map(|(link, entry)| Some((*link, stamp(entry)?))).collect();
        up.into_iter().for_each(|(link, stamp)| self.say(link, Head::Ping { stamp }.encode().to_vec()));
        let immediates = &mut self.immediates;
        self.sessions.forget_old(now, |session| immediates.forget(session));
    }
}

fn pieces_for_peer(regions: &Regions, runs: &[WireRun], is_write: bool) -> Option<Vec<Piece>> {
    runs.iter()
        .map(|run| regions.for_peer(run.region, run.generation, run.offset, run.len, is_write))
        .collect()
}

fn identity(descriptor: &Descriptor) -> Identity {
    Identity { engine: descriptor.engine_id, boot: descriptor.boot_nonce }
}

fn by_number(descriptor: &Descriptor) -> HashMap<u32, RegionDescriptor> {
    descriptor.regions.iter().map(|region| (region.number, *region)).collect()
}

/// Whether both ends of a connection have the same address.
fn is_same_host(socket: &TcpStream) -> bool {
    let addresses = (socket.local_addr(), socket.peer_addr());
    matches!(addresses, (Ok(own), Ok(peer)) if own.ip() == peer.ip())
}

/// Bounds what waits in a socket between two processes of this host.
fn keep_in_cache(socket: &TcpStream) {
    if is_same_host(socket) {
        // Without it all is only slower.
        let _ = sockopt::set_socket_send_buffer_size(socket, SAME_HOST_SEND_BYTES);
    }
}

/// Of descriptors or memory.
fn is_want(error: &io::Error) -> bool {
    let wants = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    Errno::from_io_error(error).is_some_and(|errno| wants.contains(&errno))
}

fn challenge_of(one: u64, other: u64) -> [u8; 16] {
    (u128::from(one) << 64 | u128::from(other)).to_le_bytes()
}

/// A number that nobody else draws.
pub(crate) fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(u64::from_le_bytes(bytes))
}

fn encode_address(address: SocketAddr) -> Address {
    Address { kind: TCP, bytes: address.to_string().into_bytes() }
}

/// None if it is of another provider, or nothing that this one can reach.
fn decode_address(address: &Address) -> Option<SocketAddr> {
    let text = (address.kind == TCP).then_some(&address.bytes)?;
    std::str::from_utf8(text).ok()?.parse().ok()
}

const _: () = assert!(LEASE.as_millis() > lease::PLACES.as_millis());
