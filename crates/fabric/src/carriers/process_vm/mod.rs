//! The carrier "cma": copies bytes from another process of this host straight into this one, with `process_vm_readv`
//! (cross-memory attach).
//!
//! A *neighbour* is a peer on this host. The side that wants the bytes always reads them, so no process writes into another.
//! For a READ this process reads the peer; for a WRITE it asks the peer to read. A WRITE of less than a page travels inside
//! the request instead.
//!
//! ```text
//!  connecting side                                            listening side
//!  connect: offer: connection, pid, card ------------------> probes the card: may it read this process?
//!  probes the card <--------- accepted: the same of this side - or refused: the reason
//!  up
//!  READ:  reads the bytes, then the card
//!  WRITE: Pull: token, runs, addresses --------------------> reads the bytes
//!         <------------------------------ Done: tokens -----
//!         Inline: token, runs, bytes ----------------------> places them
//! ```
//! The wire format, all little-endian:
//!
//! ```text
//!  offer:     | connection u64 | card u64 | pid u32 |            accepted: as the offer, with its connection
//!  Pull:      | 1 u8 | 0 x 3 | count u32 | token u64 | bytes u64 | count runs | count addresses u64 |
//!  Inline:    | 2 u8 | 0 x 3 | count u32 | token u64 | bytes u64 | count runs | the bytes |
//!  Done:      | 3 u8 | 0 x 3 | count u32 | count outcomes |
//! ```
//! [`crate::wire`] draws runs and outcomes.
//!
//! The [`card`] says which regions are registered. A READ fetches the card after the bytes, in the same call, so bytes
//! of a region that was unregistered meanwhile are refused. For a WRITE the reading side checks its own regions.
//!
//! A neighbour that was asked to read may be stopped for any length of time and read when it resumes. A lease therefore
//! cannot end such a WRITE: it ends when the neighbour confirms, or when its process is gone.
//!
//! A READ needs nothing of its peer, so it also succeeds from a stopped process, until the connection has been silent for too
//! long. With Yama, `ptrace_scope` 1 lets a process read its children and those that call `prctl(PR_SET_PTRACER)`; the Python
//! package does not call it.

#![allow(unsafe_code, reason = "the kernel writes registered memory")]

mod copies;
mod neighbour;
mod served;
mod serving;
mod words;

use std::any::Any;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use kvlane_memory::ProbeError;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use self::copies::{Copies, CopyHandle, CopyId, CopyTurn, Generations, NewCopy};
pub(crate) use self::neighbour::Neighbour;
use self::neighbour::{PullError, PulledRange};
use self::served::ServedNeighbour;
#[cfg(any(feature = "fuzzing", test))]
pub(crate) use self::words::check_words;
use self::words::{Invitation, Offer, Words};
use super::awaited::{AwaitedRegions, KEYS_TIMEOUT};
pub(crate) use super::card::Card;
use crate::carrier::{BadWords, Carrier, CarrierPost, Context, Job, Owner, Party, SessionId, Touched};
use crate::fences::LEASE;
use crate::identity::Identity;
use crate::numbered::Numbered;
use crate::peers::{RemoteBytes, RemoteMemory};
use crate::provider::NotNow;
use crate::random::random;
use crate::ranges::Piece;
use crate::registrar::{MemoryRegion, OpenedWindow, RegisterError, Registrar};
use crate::tcp::BYTES_MAX;
use crate::transfers::{Completion, Memory, Op, PathId, PathSpec, PeerId, Token};
use crate::watch::{Interest, Watch};
use crate::wire::WireRun;

/// A READ's chunk is this many times as large as other posts, because the copy is cut into calls anyway. No other process
/// waits for a part of it. With posts of 512 KiB, the work beside copying was a tenth of a READ of 1 MiB.
const READ_CHUNKS: u64 = 4;
/// WRITEs below this size, less than a page, travel inside the request.
const PULLED_BYTES_MIN: u64 = 4096;
/// Watch tag of the eventfd that [`Copies`] writes when copies have ended.
const WAKE: u64 = 0;

#[derive(Debug)]
pub(crate) struct ProcessVm {
    card: Arc<Card>,
    copies: Copies,
    watch: Watch,
    read_bytes: u64,
    /// One path per peer, from the time its control connection is up until that ends.
    paths: Numbered<PeerId, PathId>,
    peers: Numbered<PeerId, ConnectedPeer>,
    posted: Numbered<Token, CmaPost>,
    serving: Numbered<SessionId, ServedNeighbour>,
    copying: Numbered<CopyId, ActiveCopy>,
    /// Cards to be probed, and broken connections whose peer may have exited. Each becomes a job.
    probes: Vec<Probe>,
    probes_running: usize,
    is_closed: bool,
    /// WRITEs of broken, fenced connections, by connection. Kept to see whether the neighbour that was to read them is gone.
    pulling: HashMap<u64, Pulling>,
}

/// WRITEs of a broken connection that its peer may still read.
#[derive(Debug)]
struct Pulling {
    neighbour: Arc<Neighbour>,
    tokens: Vec<Token>,
}

/// A peer that this process has made an offer to, and reads from once its card was probed.
#[derive(Debug)]
struct ConnectedPeer {
    path: PathId,
    number: u32,
    /// Random; drawn anew for each offer.
    connection: u64,
    /// None until the peer has accepted and its card was probed.
    neighbour: Option<Arc<Neighbour>>,
    awaited: AwaitedRegions,
}

#[derive(Debug)]
struct CmaPost {
    peer: PeerId,
    method: PostMethod,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PostMethod {
    /// The peer reads the bytes.
    Pull,
    /// The bytes travelled inside the request.
    Inline,
    /// This process reads the bytes.
    Read(CopyId),
}

/// A copy in flight.
#[derive(Debug)]
struct ActiveCopy {
    handle: CopyHandle,
    origin: CopyOrigin,
}

#[derive(Debug, Clone, Copy)]
enum CopyOrigin {
    /// A READ of this process, over this connection.
    Ours { token: Token, connection: u64 },
    /// A neighbour's WRITE, over a connection that the neighbour made.
    Theirs { session: SessionId, owner: Owner, connection: u64, token: u64, weight: usize },
}

/// A job: tries to read a neighbour's card, or looks whether a neighbour's process is gone.
#[derive(Debug)]
pub(crate) struct Probe {
    target: ProbeTarget,
    found: Option<Result<Arc<Neighbour>, ProbeError>>,
    is_gone: bool,
}

#[derive(Debug, Clone)]
enum ProbeTarget {
    Peer {
        peer: PeerId,
        connection: u64,
        at: Invitation,
        identity: Identity,
    },
    Session {
        session: SessionId,
        connection: u64,
        at: Invitation,
        identity: Identity,
    },
    /// The process at the other end of a broken connection.
    Broken {
        connection: u64,
        neighbour: Arc<Neighbour>,
    },
}

impl Job for Probe {
    fn run(&mut self) {
        match &self.target {
            ProbeTarget::Peer { at, identity, .. } | ProbeTarget::Session { at, identity, .. } => {
                self.found = Some(Neighbour::probe(at.pid, at.card, *identity).map(Arc::new));
            }
            ProbeTarget::Broken { neighbour, .. } => self.is_gone = !neighbour.is_there(),
        }
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// Marks regions and windows on the card while they are registered. A region's key is its base address, u64 little-endian.
#[derive(Debug)]
struct CardRegistrar(Arc<Card>);

impl Registrar for CardRegistrar {
    fn register(&self, region: &MemoryRegion) -> Result<Option<Vec<u8>>, RegisterError> {
        Ok(match region.memory {
            Memory::Gpu(_) => None,
            Memory::Host(_) => {
                self.0.add(region.number, region.generation);
                Some(region.address.to_le_bytes().to_vec())
            }
        })
    }

    fn withdraw(&self, region: &MemoryRegion) {
        self.0.remove(region.number);
    }

    fn open_window(&self, window: &OpenedWindow<'_>) {
        if let Memory::Host(_) = window.memory {
            self.0.add(window.number, window.generation);
        }
    }

    fn close_window(&self, number: u32, _: u32) {
        self.0.remove(number);
    }
}

impl ProcessVm {
    /// `threads`: how many copy at most, including one that waits in a call. `chunk_bytes`: size of a usual post.
    pub(crate) fn open(
        me: Identity,
        watch: Watch,
        threads: usize,
        chunk_bytes: u64,
    ) -> io::Result<ProcessVm> {
        let copies = Copies::new(threads, eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        watch.add(copies.wake(), WAKE, Interest::READS)?;
        Ok(ProcessVm {
            card: Arc::new(Card::new(me)),
            copies,
            watch,
            read_bytes: chunk_bytes.saturating_mul(READ_CHUNKS).min(BYTES_MAX),
            paths: Numbered::default(),
            peers: Numbered::default(),
            posted: Numbered::default(),
            serving: Numbered::default(),
            copying: Numbered::default(),
            probes: Vec::new(),
            probes_running: 0,
            is_closed: false,
            pulling: HashMap::new(),
        })
    }

    fn invitation(&self) -> Invitation {
        Invitation { card: self.card.address(), pid: std::process::id() }
    }

    fn probe(&mut self, target: ProbeTarget) {
        self.probes.push(Probe { target, found: None, is_gone: false });
    }

    /// A probe is done: brings the path up, accepts or refuses the session, or reports that a neighbour is gone.
    fn finish_probe(&mut self, cx: &mut Context<'_>, probe: Probe) {
        let Probe { target, found, is_gone } = probe;
        match (target, found) {
            (ProbeTarget::Peer { peer, connection, .. }, Some(found)) => {
                let Some(reader) = self.peers.get_mut(&peer).filter(|reader| reader.connection == connection)
                else {
                    return;
                };
                match found {
                    Ok(neighbour) => {
                        reader.neighbour = Some(neighbour);
                        cx.up(reader.path, reader.number);
                    }
                    Err(error) => self.give_up(cx, peer, trouble(&error)),
                }
            }
            (ProbeTarget::Session { session, connection, .. }, Some(Ok(neighbour))) => {
                let Some(owner) = cx.owner(session) else { return };
                self.serving.insert(session, ServedNeighbour::new(owner, connection, neighbour));
                let answer = Offer { connection, at: self.invitation() };
                cx.accept(session, answer.encode());
            }
            (ProbeTarget::Session { session, .. }, Some(Err(error))) => {
                tracing::debug!(?session, %error, "a peer's memory cannot be read");
                cx.refuse(session, &refusal(error.errno()));
            }
            (ProbeTarget::Broken { connection, .. }, _) if is_gone => cx.fenced(connection),
            _ => {}
        }
    }

    /// Removes the path to a peer. Its next control connection starts anew.
    fn give_up(&mut self, cx: &mut Context<'_>, peer: PeerId, why: String) {
        self.end(cx, peer, &why);
        self.paths.remove(&peer).into_iter().for_each(|path| cx.remove_path(path));
        cx.cannot_reach(peer, why);
    }

    /// Ends the connection to a peer. A post on it completes once nothing touches its memory any more.
    fn end(&mut self, cx: &mut Context<'_>, peer: PeerId, why: &str) {
        let Some(ConnectedPeer { path, number, connection, neighbour, .. }) = self.peers.remove(&peer) else {
            return;
        };
        cx.broke(path, number, why);
        let of_peer = self.posted.iter().filter(|(_, posted)| posted.peer == peer);
        let mut of_peer: Vec<(Token, PostMethod)> =
            of_peer.map(|(token, posted)| (*token, posted.method)).collect();
        of_peer.sort_unstable_by_key(|(token, _)| *token);
        let (mut pulled, mut inline) = (Vec::new(), Vec::new());
        for (token, method) in of_peer {
            match method {
                PostMethod::Pull => pulled.push(token),
                PostMethod::Inline => inline.push(token),
                // The post completes when the copy has ended.
                PostMethod::Read(copy) => {
                    self.copying.get(&copy).iter().for_each(|copying| copying.handle.give_up());
                    continue;
                }
            }
            self.posted.remove(&token);
        }
        if !pulled.is_empty() {
            let tokens = pulled.clone();
            self.pulling.extend(neighbour.map(|neighbour| (connection, Pulling { neighbour, tokens })));
            cx.fence(peer, connection, pulled, None);
        }
        if !inline.is_empty() {
            cx.fence(peer, connection, inline, Some(LEASE));
        }
    }

    /// Posts a part of a transfer. Its runs are in host memory on both sides.
    fn send(&mut self, cx: &mut Context<'_>, post: &CarrierPost<'_>) -> Result<(), NotNow> {
        let CarrierPost { peer, token, op, runs, .. } = *post;
        let reader = self.peers.get_mut(&peer).ok_or(NotNow)?;
        let connection = reader.connection;
        let neighbour = reader.neighbour.clone().ok_or(NotNow)?;
        let bytes: u64 = runs.iter().map(|run| run.len).sum();
        let method = match op {
            Op::Write => {
                let wire = runs.iter().map(|run| WireRun {
                    region: run.region,
                    generation: run.generation,
                    offset: run.offset,
                    len: run.len,
                });
                let (method, words) = if bytes < PULLED_BYTES_MIN {
                    // SAFETY: the memory belongs to the post.
                    (PostMethod::Inline, unsafe { Words::inline(token.number(), wire, runs) })
                } else {
                    (PostMethod::Pull, Words::pull(token.number(), bytes, wire, runs))
                };
                cx.send(Party::Peer(peer), words);
                method
            }
            Op::Read => {
                let mut regions = Vec::new();
                let mut ranges = Vec::with_capacity(runs.len());
                for run in runs {
                    let found = match cx.remote_memory(peer, run) {
                        RemoteMemory::Known(found) => pulled_ranges(run.local.piece, &found),
                        RemoteMemory::None => None,
                        RemoteMemory::NotYet if reader.awaited.add(cx.now, run.region, run.generation) => {
                            None
                        }
                        RemoteMemory::NotYet => return Err(NotNow),
                    };
                    let Some(found) = found else {
                        cx.completed(token, Completion::Refused);
                        return Ok(());
                    };
                    if !regions.contains(&(run.region, run.generation)) {
                        regions.push((run.region, run.generation));
                    }
                    ranges.extend(found);
                }
                let regions: Option<Generations> = Some(regions.into());
                // SAFETY: the destinations are memory of a transfer of ours, which belongs to the post until the copy is
                // over.
                let handle = unsafe { self.copies.begin(NewCopy { neighbour, ranges, regions }) };
                let copy = handle.id();
                self.copying
                    .insert(copy, ActiveCopy { handle, origin: CopyOrigin::Ours { token, connection } });
                PostMethod::Read(copy)
            }
        };
        self.posted.insert(token, CmaPost { peer, method });
        Ok(())
    }

    /// Completes the posts and requests whose copies have ended. True if there were any.
    fn take_ended(&mut self, cx: &mut Context<'_>) -> bool {
        let ended = self.copies.take_ended();
        let any = !ended.is_empty();
        if self.is_closed && self.copying.len() == ended.len() {
            // From here on a neighbour may assume that this process no longer reads its memory.
            self.card.clear();
        }
        for (copy, outcome) in ended {
            let Some(ActiveCopy { origin, .. }) = self.copying.remove(&copy) else { continue };
            cx.note_released();
            match origin {
                CopyOrigin::Ours { token, connection } => {
                    let Some(CmaPost { peer, .. }) = self.posted.remove(&token) else { continue };
                    // If that connection is gone, the outcome of its other posts is unknown, so this one's is too.
                    let is_of = |reader: &ConnectedPeer| reader.connection == connection;
                    let is_connected = self.peers.get(&peer).is_some_and(is_of);
                    match outcome {
                        _ if !is_connected => cx.completed(token, Completion::Unknown),
                        Ok(()) => cx.completed(token, Completion::Placed),
                        Err(PullError::Refused) => cx.completed(token, Completion::Refused),
                        Err(error) => {
                            cx.completed(token, Completion::Unknown);
                            self.end(cx, peer, &error.to_string());
                        }
                    }
                }
                CopyOrigin::Theirs { session, connection, token, weight, .. } => {
                    self.finish_pull(cx, session, connection, token, weight, outcome);
                }
            }
        }
        any
    }
}

impl Carrier for ProcessVm {
    fn code(&self) -> u8 {
        3
    }

    fn registrar(&self) -> Option<Arc<dyn Registrar>> {
        Some(Arc::new(CardRegistrar(Arc::clone(&self.card))))
    }

    fn control_up(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        let usual = PathSpec::new(self.reach(), PathSpec::CMA);
        cx.add_path(peer, PathSpec { read_bytes: Some(self.read_bytes), ..usual }, 0);
    }

    fn connect(&mut self, cx: &mut Context<'_>, path: PathId, number: u32, peer: PeerId, _: u64) {
        let connection = match random() {
            Ok(connection) => connection,
            Err(error) => return cx.broke(path, number, error),
        };
        self.paths.insert(peer, path);
        let reader = ConnectedPeer {
            path,
            number,
            connection,
            neighbour: None,
            awaited: AwaitedRegions::new(KEYS_TIMEOUT),
        };
        self.peers.insert(peer, reader);
        let offer = Offer { connection, at: self.invitation() };
        cx.offer(peer, offer.encode());
    }

    fn consider(&mut self, cx: &mut Context<'_>, session: SessionId, offer: &[u8]) -> Result<(), BadWords> {
        let Offer { connection, at } = Offer::decode(offer)?;
        let Some(Owner(identity)) = cx.owner(session) else { return Ok(()) };
        self.stop_serving(session);
        // A session's last offer replaces its earlier ones.
        let is_its =
            |probe: &Probe| matches!(probe.target, ProbeTarget::Session { session: of, .. } if of == session);
        self.probes.retain(|probe| !is_its(probe));
        self.probe(ProbeTarget::Session { session, connection, at, identity });
        Ok(())
    }

    fn accepted(&mut self, cx: &mut Context<'_>, peer: PeerId, answer: &[u8]) -> Result<(), BadWords> {
        let Offer { connection: offered, at } = Offer::decode(answer)?;
        let identity = cx.peers.get(&peer).and_then(|peer| peer.whom.identity);
        let connection = self.peers.get(&peer).map(|reader| reader.connection);
        // An answer to an earlier offer says nothing about this one.
        if let (Some(identity), Some(connection)) = (identity, connection.filter(|it| *it == offered)) {
            self.probe(ProbeTarget::Peer { peer, connection, at, identity });
        }
        Ok(())
    }

    fn refused(&mut self, cx: &mut Context<'_>, peer: PeerId, why: &str) {
        self.give_up(cx, peer, why.to_owned());
    }

    fn control_lost(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        self.end(cx, peer, "the control connection broke");
        self.paths.remove(&peer).into_iter().for_each(|path| cx.remove_path(path));
    }

    fn peer_removed(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        self.end(cx, peer, "the peer was removed");
        self.paths.remove(&peer);
    }

    fn session_ended(&mut self, _: &mut Context<'_>, session: SessionId) {
        self.stop_serving(session);
    }

    fn regions_changed(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        let Some(reader) = self.peers.get_mut(&peer) else { return };
        if reader.awaited.retain(|region, generation| cx.is_awaited(peer, region, generation)) {
            cx.ready(reader.path);
        }
    }

    fn receive(&mut self, cx: &mut Context<'_>, from: Party, words: &[u8]) -> Result<(), BadWords> {
        match (from, Words::decode(words)?) {
            (Party::Session(session), Words::Pull { token, runs, addresses }) => {
                self.pull(cx, session, token, &runs, &addresses)
            }
            (Party::Session(session), Words::Inline { token, runs, bytes }) => {
                self.place(cx, session, token, &runs, bytes)
            }
            (Party::Peer(peer), Words::Done(outcomes)) => {
                for outcome in outcomes {
                    let token = Token::from_number(outcome.token);
                    let is_asked = |posted: &&CmaPost| {
                        posted.peer == peer && matches!(posted.method, PostMethod::Pull | PostMethod::Inline)
                    };
                    if self.posted.get(&token).filter(is_asked).is_some() {
                        self.posted.remove(&token);
                        cx.completed(token, outcome.fate.into());
                    }
                }
                Ok(())
            }
            _ => Err(BadWords("words that are not their side's")),
        }
    }

    fn answer(&mut self, cx: &mut Context<'_>) {
        self.send_outcomes(cx);
    }

    fn close(&mut self, cx: &mut Context<'_>, path: PathId, connection: u32) {
        let is_it = |reader: &ConnectedPeer| (reader.path, reader.number) == (path, connection);
        let peer = self.peers.iter().find(|(_, reader)| is_it(reader)).map(|(peer, _)| *peer);
        peer.into_iter()
            .for_each(|peer| self.end(cx, peer, "a part of a transfer took too long, or it is not wanted"));
    }

    fn post(&mut self, cx: &mut Context<'_>, post: &CarrierPost<'_>) -> Result<(), NotNow> {
        self.send(cx, post)
    }

    fn descriptor_ready(&mut self, _: &mut Context<'_>, _: u64) -> bool {
        let mut count = [0; 8];
        let _ = rustix::io::read(self.copies.wake(), &mut count);
        self.copies.rearm_wake();
        true
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> bool {
        let any = self.take_ended(cx);
        self.send_outcomes(cx);
        for reader in self.peers.values_mut() {
            if reader.awaited.expire(cx.now) {
                cx.ready(reader.path);
            }
        }
        any
    }

    fn next_tick(&self, _: Duration) -> Option<Duration> {
        let now = (!self.probes.is_empty() || self.copies.has_turn()).then_some(Duration::ZERO);
        now.or_else(|| self.peers.values().filter_map(|reader| reader.awaited.deadline()).min())
    }

    fn is_expecting(&self) -> bool {
        !self.posted.is_empty()
    }

    fn take_job(&mut self) -> Option<Box<dyn Job>> {
        if let Some(probe) = self.probes.pop() {
            self.probes_running += 1;
            return Some(Box::new(probe));
        }
        self.copies.take_turn().map(|turn| Box::new(turn) as Box<dyn Job>)
    }

    fn put_back(&mut self, cx: &mut Context<'_>, job: Box<dyn Job>) {
        match job.into_any().downcast::<Probe>() {
            Ok(probe) => {
                self.probes_running -= 1;
                cx.note_released();
                self.finish_probe(cx, *probe);
            }
            Err(other) => {
                debug_assert!(other.is::<CopyTurn>());
                self.take_ended(cx);
                self.send_outcomes(cx);
            }
        }
    }

    fn prepare_to_sleep(&mut self) -> bool {
        self.copies.prepare_to_sleep()
    }

    fn woken(&mut self) {
        self.copies.woken();
    }

    fn fence(&mut self, _: &mut Context<'_>, from: Owner, connection: u64) -> bool {
        let is_it = |serving: &ServedNeighbour| serving.owner == from && serving.connection == connection;
        let sessions = self.serving.iter().filter(|(_, serving)| is_it(serving)).map(|(session, _)| *session);
        sessions.collect::<Vec<_>>().into_iter().for_each(|session| self.stop_serving(session));
        let is_of_it = |origin: &CopyOrigin| matches!(origin, CopyOrigin::Theirs { owner, connection: c, .. } if (*owner, *c) == (from, connection));
        !self.copying.values().any(|copying| is_of_it(&copying.origin))
    }

    fn fence_over(&mut self, cx: &mut Context<'_>, connection: u64, tokens: Vec<Token>) {
        // Inline WRITEs of the same connection end by the lease. That says nothing about the pulled ones, so these stay.
        if let Some(Pulling { tokens: left, .. }) = self.pulling.get_mut(&connection) {
            left.retain(|token| !tokens.contains(token));
            if left.is_empty() {
                self.pulling.remove(&connection);
            }
        }
        cx.process.news.change = true;
        tokens.into_iter().for_each(|token| cx.completed(token, Completion::Unknown));
    }

    fn probe_gone(&mut self, _: &mut Context<'_>, connection: u64) {
        if let Some(neighbour) = self.pulling.get(&connection).map(|pulling| Arc::clone(&pulling.neighbour)) {
            self.probe(ProbeTarget::Broken { connection, neighbour });
        }
    }

    fn touches(&self, memory: Touched<'_>) -> bool {
        // Neighbours read this process's memory by themselves: no copy here does it for them.
        let Touched { spots, reader: None } = memory else { return false };
        self.copying.values().any(|copying| copying.handle.touches(spots))
    }

    fn release(&mut self, _: &mut Context<'_>, memory: Touched<'_>) {
        let Touched { spots, reader: None } = memory else { return };
        let touching = self.copying.values().filter(|copying| copying.handle.touches(spots));
        touching.for_each(|copying| copying.handle.give_up());
    }

    fn close_all(&mut self, cx: &mut Context<'_>) {
        let peers: Vec<PeerId> = self.peers.keys().copied().collect();
        peers.into_iter().for_each(|peer| self.end(cx, peer, "the engine was closed"));
        let sessions: Vec<SessionId> = self.serving.keys().copied().collect();
        sessions.into_iter().for_each(|session| self.stop_serving(session));
        self.is_closed = true;
        self.take_ended(cx);
        self.watch.remove(self.copies.wake());
    }

    fn is_busy(&self) -> bool {
        !self.copying.is_empty() || self.probes_running > 0
    }
}

/// Where to read the bytes of a piece from: each key is a region's base address. None: a key is not one of this carrier's.
fn pulled_ranges(to: Piece, found: &[RemoteBytes<'_>]) -> Option<Vec<PulledRange>> {
    let mut left = to;
    let range = |bytes: &RemoteBytes<'_>| {
        let base = u64::from_le_bytes(bytes.key.try_into().ok()?);
        let (len, to) = (bytes.len as usize, left);
        left = to.after(len);
        Some(PulledRange { to: Piece { len, ..to }, from: base.checked_add(bytes.offset)? })
    };
    found.iter().map(range).collect()
}

/// For this process's user: why it cannot read the peer.
fn trouble(error: &ProbeError) -> String {
    match error {
        ProbeError::NotPermitted { errno, hint } => {
            format!("this process may not read the peer's memory: {errno} ({hint})")
        }
        ProbeError::Unsupported(errno) => format!("this process cannot read the peer's memory: {errno}"),
        ProbeError::WrongNonce | ProbeError::Gone => {
            "this process does not see the peer: it is on another host, or in another container".into()
        }
    }
}

/// For the peer's user: why this process cannot read the peer.
fn refusal(errno: Errno) -> String {
    match errno {
        Errno::PERM | Errno::ACCESS => {
            "the peer may not read this process's memory: another user, Yama's ptrace_scope, or a container's rules"
                .into()
        }
        Errno::FAULT | Errno::SRCH => {
            "the peer does not see this process: it is on another host, or in another container".into()
        }
        errno => format!("the peer cannot read this process's memory: {errno}"),
    }
}
