//! The [`Provider`] of this crate: TCP connections, and between processes of one host rings and process_vm beside them.
//! Also what peers ask of this process. Nothing here blocks.
//!
//! ```text
//!  connecting side:   TCP connect --> challenge --> proof sent --> verdict --> Hello sent --> Welcome: up --> (fence) --> gone
//!  listening side:    accepted: challenge sent --> proof --> verdict sent --> Hello --> Welcome sent: serving --> gone
//! ```
//! When a connection breaks that carried writes, its peer may still have bytes of them to place. They count as given back
//! only when the peer has said over another connection that it reads the broken one no more (a fence), or when its lease is
//! over ([`crate::lease`]). Bytes that are posted again elsewhere, or memory that is used otherwise, are then not
//! overwritten. Writes that a neighbour reads out of this process's memory ([`crate::same_host`]) count on no lease: it
//! confirms, or it is gone.

mod ending;
mod greeting;
mod links;
mod neighbours;
mod peers;
mod posting;
mod serving;
mod staged;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};

use self::neighbours::Job;
use self::staged::{LOOK_AT_COPIES, StagedRead};
use crate::descriptor::RegionDescriptor;
use crate::engine::EngineOptions;
use crate::fences::{Fences, LEASE, Whom};
use crate::immediates::Immediates;
use crate::inbox::{Admission, Inbox};
use crate::lease::{self, Lease};
use crate::numbered::Numbered;
use crate::provider::{self, NotNow, Provider};
use crate::regions::{Piece, Regions};
use crate::same_host::{Card, Crew, Neighbour};
use crate::sessions::Sessions;
use crate::shape::{RegionLengths, Side};
use crate::shm::Segment;
use crate::staging::Staging;
use crate::tcp::{BadFrame, Credentials, Ended, Identity, Link, Nonces, Outcome, SessionKey};
use crate::told::Told;
use crate::transfers::{Completion, PathId, PeerId, Post, Route, Ticket, Token};
use crate::trust::{Proofs, Trust};

/// How often connections are looked at. Whoever connected says something at each look.
const LOOK: Duration = Duration::from_millis(500);
/// Rings that bring something are polled so often before sockets are looked at once more, which takes a system call.
const WITHOUT_SOCKETS_MAX: u32 = 32;

const WAKE: u64 = u64::MAX;
/// Listeners are told from connections by this bit.
const LISTENER: u64 = 1 << 63;

/// A number of a connection, not used twice.
type LinkId = u64;

#[derive(Debug)]
pub(crate) struct Sockets {
    pub(crate) me: Identity,
    pub(crate) proofs: Proofs,
    /// With these all connections are encrypted.
    credentials: Option<Credentials>,
    begun: Instant,
    told: Told,
    pub(crate) immediates: Immediates,
    pub(crate) inbox: Inbox,
    pub(crate) regions: Regions,
    /// What [`Provider::next_event`] is going to tell.
    happened: VecDeque<provider::Event>,
    news: News,
    epoll: Arc<OwnedFd>,
    wake: OwnedFd,
    listeners: Vec<TcpListener>,
    /// What peers are told instead of what is listened on.
    advertised: Vec<SocketAddr>,
    /// When listeners that were left alone are listened on again.
    accept_at: Option<Duration>,
    /// The log says that no connection can be accepted.
    cannot_accept: bool,
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
    is_closed: bool,
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
    /// And by whom.
    crew: Crew,
    /// Of broken connections that are fenced, whom their writes were to be read by.
    pulling: HashMap<u64, Arc<Neighbour>>,
    /// What goes to and from the memory of GPUs.
    pub(crate) staging: Staging,
    /// Whether it was said that a neighbour's transfer goes through the socket, since memory is on a GPU.
    has_told_of_gpus: bool,
    /// What transfers under way use.
    used: Numbered<Ticket, Used>,
    look_at: Duration,
}

/// What happened beside transfers that somebody may wait for.
#[derive(Debug, Default)]
pub(crate) struct News {
    /// A message came.
    pub(crate) message: bool,
    /// Something else: a counter counted, or memory was let go.
    pub(crate) change: bool,
    /// A connection goes through rings from now on, or the byte was taken that tells of something in them: whoever sleeps
    /// on sockets would not hear of the next thing.
    pub(crate) rings: bool,
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
    /// Whether what comes next has to wait for a slot.
    awaits_slot: bool,
    /// Of what it asked this process to read: [`neighbours::Job`] counts.
    queued: usize,
    /// The process at the other end, where both can read each other's memory.
    neighbour: Option<Arc<Neighbour>>,
    /// The message whose bytes are coming.
    coming: Option<Coming>,
}

impl Entry {
    /// Whether nothing is read from it for now.
    fn is_stuck(&self) -> bool {
        self.link.is_full() || self.awaits_slot
    }
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
    /// Of somebody who has proved nothing, and is told nothing.
    Accepted {
        challenge: [u8; 16],
        lease: Lease,
    },
    /// Of a peer that knows the secret, and has not said who it is.
    Proved {
        key: SessionKey,
        lease: Lease,
    },
    /// Of a peer whose transfers are served; and the write whose bytes are coming, with whether it is refused.
    Serving {
        from: Identity,
        session: u128,
        connection: u64,
        body: Option<(u64, bool)>,
        lease: Lease,
    },
    /// Ends when all is written.
    Leaving,
    /// Ours, on its way: TCP connects, then the peer's challenge comes, then its verdict about our proof, then its welcome.
    Connecting {
        to: Goal,
        connection: u64,
    },
    Proving {
        to: Goal,
        connection: u64,
        nonces: Nonces,
    },
    Greeted {
        to: Goal,
        connection: u64,
        key: SessionKey,
        /// What was offered, or why nothing is. None: nobody thought of it.
        segment: Option<Result<Segment, String>>,
    },
    /// Ours; the read whose bytes are coming, and the latest stamp that the peer sent.
    Up {
        path: PathId,
        number: u32,
        connection: u64,
        body: Option<Token>,
        stamp: u64,
    },
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
    /// As its descriptor said, which does not change while it runs.
    trust: Trust,
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
    /// A write of bytes that are being copied out of a GPU's memory: nothing was sent yet.
    Staged,
    /// A write whose bytes the peer reads.
    Pull,
    /// And where what has not begun to come belongs.
    Read(Vec<Piece>),
    /// A read into a GPU's memory.
    ReadStaged(Box<StagedRead>),
    /// A read that a job of ours does.
    Job,
    Tell,
    /// What the link has written when its bytes have left.
    Message(u64, #[expect(dead_code, reason = "what the link writes is to stay alive")] Arc<[u8]>),
}

#[derive(Debug)]
pub(crate) struct Used {
    whom: PeerId,
    /// Regions of this process, and whether any of them is on a GPU.
    own: Vec<u32>,
    is_gpu_here: bool,
    /// Regions of the peer, with the generation that they had when the transfer began.
    peer: Vec<(u32, u32)>,
    /// Whether any of those is on a GPU.
    is_gpu_there: bool,
}

impl Used {
    /// Whether any of the memory is on a GPU, here or there.
    pub(crate) fn has_gpus(&self) -> bool {
        self.is_gpu_here || self.is_gpu_there
    }
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

impl Sockets {
    pub(crate) fn open(
        me: Identity,
        proofs: Proofs,
        credentials: Option<Credentials>,
        options: EngineOptions,
    ) -> io::Result<Sockets> {
        let EngineOptions {
            listen, advertise, connections, transport, copy_threads, transfers, inbox, ..
        } = options;
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
        Ok(Sockets {
            me,
            proofs,
            credentials,
            begun: Instant::now(),
            told: Told::default(),
            chunk_bytes: transfers.chunk_bytes,
            immediates: Immediates::default(),
            inbox: Inbox::new(inbox),
            regions: Regions::default(),
            happened: VecDeque::new(),
            news: News::default(),
            epoll: Arc::new(epoll),
            wake,
            listeners,
            advertised: advertise,
            accept_at: None,
            cannot_accept: false,
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
            crew: Crew::new(copy_threads),
            pulling: HashMap::new(),
            staging: Staging::new(transfers.chunk_bytes),
            has_told_of_gpus: false,
            used: Numbered::default(),
            look_at: LOOK,
        })
    }

    pub(crate) fn epoll(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.epoll)
    }

    pub(crate) fn now(&self) -> Duration {
        self.begun.elapsed()
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

    /// Takes what came, without waiting. Whether there was anything.
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
        any
    }

    /// When there is something to do if nothing comes.
    pub(crate) fn next_tick(&self) -> Duration {
        if !self.ready.is_empty() || !self.jobs.is_empty() || !self.happened.is_empty() {
            return Duration::ZERO;
        }
        let look = (!self.links.is_empty() || !self.sessions.is_empty()).then_some(self.look_at);
        let copies = self.is_copying().then(|| self.now() + LOOK_AT_COPIES);
        let ticks = [self.fences.next_tick(), look, self.accept_at, copies];
        ticks.into_iter().flatten().min().unwrap_or(Duration::MAX)
    }

    /// Writes what is to be said, and reads from neighbours as many bytes as `turn` has left. Whether there was anything.
    pub(crate) fn work(&mut self, turn: &mut usize) -> bool {
        let dirty = std::mem::take(&mut self.dirty);
        // A link that ends here gives back what is to be posted elsewhere.
        let any = !dirty.is_empty();
        dirty.into_iter().for_each(|link| self.flush(link));
        let has_staged = self.see_to_staging();
        self.do_jobs(turn) || has_staged || any
    }

    /// What came by itself since this was asked the last time.
    pub(crate) fn take_news(&mut self) -> News {
        std::mem::take(&mut self.news)
    }

    /// Whether bytes of GPUs have no way, since nothing but process_vm was wanted.
    pub(crate) fn excludes_gpus(&self) -> bool {
        self.needs_neighbours
    }

    fn broke(&mut self, path: PathId, connection: u32) {
        self.happened.push_back(provider::Event::Broke { path, connection });
    }

    fn completed(&mut self, token: Token, completion: Completion) {
        self.happened.push_back(provider::Event::Completed(token, completion));
    }
}

impl Provider for Sockets {
    fn connect(&mut self, _: Duration, path: PathId, connection: u32) {
        let Some(at) = self.paths.get(&path) else { return };
        let (peer, address) = (at.peer, at.address);
        match self.open_link(address, Goal::Path(path, connection)) {
            Ok(link) => {
                if let Some(path) = self.paths.get_mut(&path) {
                    path.link = Some(link);
                }
            }
            Err(error) => {
                tracing::debug!(?peer, %address, %error, "cannot connect");
                self.note_trouble(path, &error);
                self.broke(path, connection);
            }
        }
    }

    fn close(&mut self, _: Duration, path: PathId, connection: u32) {
        let link = self.paths.get(&path).and_then(|path| path.link);
        let is_it = |entry: &Entry| matches!(entry.role, Role::Up { number, .. } if number == connection);
        if let Some(link) = link.filter(|link| self.links.get(link).is_some_and(is_it)) {
            self.end(link, &Ended::Bad(BadFrame("a part of a transfer took too long")));
        }
    }

    fn post(&mut self, _: Duration, post: Post) -> Result<(), NotNow> {
        self.send(post)
    }

    fn lost(&mut self, _: Duration, peer: PeerId, route: Route) {
        if route == Route::Words {
            tracing::warn!(?peer, "a peer cannot be reached any more");
        }
    }

    fn next_event(&mut self) -> Option<provider::Event> {
        self.happened.pop_front()
    }
}

/// A number that nobody else draws.
pub(crate) fn random() -> io::Result<u64> {
    Ok(u64::from_le_bytes(kvlane_memory::random()?))
}

const _: () = assert!(LEASE.as_millis() > lease::PLACES.as_millis());
