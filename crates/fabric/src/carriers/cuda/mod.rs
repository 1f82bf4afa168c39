//! The carrier "cuda": copies bytes of another process's GPU memory straight into this process's, over the link between the
//! GPUs or within one GPU.
//!
//! A *neighbour* is a peer of the same user on this host whose GPU memory this process maps. As with cma, the side that wants
//! the bytes always reads them: for a READ this process copies from the peer, for a WRITE it asks the peer to copy. No process
//! writes into another's memory.
//!
//! ```text
//!  connecting side                                            listening side
//!  connect: offer: connection, meeting ---------------------> GPU memory is registered here?
//!         <--------------------------------------- Waiting -  not yet: the offer waits
//!  meets it: maps its card and regions <--------- accepted: its meeting - or refused: the reason
//!  up
//!  READ:  copies the bytes, then looks at the card
//!  WRITE: Pull: token, runs, sources -----------------------> meets this side the first time; copies, looks at its card
//!         <------------------------------ Done: tokens -----
//!         Mapped, Unmapped: regions <---------------------->  what each side has mapped of the other
//!         Return: regions <-------------------------------->  "my owner takes these back"
//! ```
//! The wire format, all little-endian:
//!
//! ```text
//!  offer:     | connection u64 | meeting: socket u64, pass 16 B |      accepted: the same, with the meeting of that side
//!  Pull:      | 1 u8 | 0 x 3 | count u32 | token u64 | bytes u64 | count runs | count x source |
//!  Done:      | 2 u8 | 0 x 3 | count u32 | count outcomes |
//!  Mapped:    | 3 u8 | 0 x 3 | count u32 | count x (region u32, generation u32) |   Unmapped: 4, Return: 5, Waiting: 6, 0 x
//!  source:    | region u32 | generation u32 | offset u64 |
//! ```
//! [`crate::wire`] draws runs and outcomes, [`meeting`] the socket that gives out handles.
//!
//! # When bytes count
//!
//! ```text
//!  owner:   close_window: clears the mark ---> reuses the memory, without waiting for the peer
//!  reader:  copies in its stream ---> the stream is done ---> reads the mark: still there? placed : refused
//! ```
//! The driver never says that bytes are stale: copies from memory that its owner freed, or whose owner has died, succeed with
//! old bytes. So bytes count only if the [`card`](super::card) still marks their region, or window, after the last of them was
//! copied. A late copy only reads. So an owner never waits for a reader, even one that is stopped in the middle of a copy.
//!
//! # When imports end
//! An import keeps the owner's memory allocated, even after its death. A successor of the owner would find its GPU full. So this
//! carrier unmaps a peer's regions as soon as the peer gives them back, its control connection ends, or nothing has used them
//! for [`IDLE`]. An owner that gives back a region waits up to a second for that ([`Carrier::touches`]).

#![allow(unsafe_code, reason = "GPUs write registered memory")]

mod copies;
mod exposed;
mod handles;
mod imports;
mod mapping;
mod meeting;
mod neighbour;
mod reading;
mod registrar;
mod served;
mod serving;
mod words;

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use kvlane_memory::pidfd_exited;

use self::copies::{CopyId, GpuCopies};
use self::exposed::Exposed;
#[cfg(any(feature = "fuzzing", test))]
pub(crate) use self::handles::check_handles;
use self::imports::{FetchId, Imports};
use self::meeting::Meeting;
#[cfg(doc)]
use self::neighbour::IDLE;
use self::neighbour::{MappedRegion, Neighbour};
use self::registrar::CudaRegistrar;
use self::served::ServedPeer;
#[cfg(any(feature = "fuzzing", test))]
pub(crate) use self::words::check_words;
use self::words::{Offer, Words};
use super::awaited::{AwaitedRegions, KEYS_TIMEOUT};
use super::card::SharedCard;
use crate::carrier::{BadWords, Carrier, CarrierPost, Context, Job, Owner, Party, SessionId, Touched};
use crate::identity::Identity;
use crate::numbered::Numbered;
use crate::provider::NotNow;
use crate::random::random;
use crate::registrar::Registrar;
use crate::tcp::{BYTES_MAX, ENTRIES_MAX};
use crate::transfers::{Completion, Memory, Op, PathId, PathSpec, PeerId, Reach, Route, Token};
use crate::watch::{Interest, Watch};

/// Watch tag of the eventfd that [`Imports`] writes when something is done.
const WAKE: u64 = 0;
/// How long the engine's thread sleeps while a GPU copies, because no event tells of the end.
const COPY_POLL_INTERVAL: Duration = Duration::from_micros(50);

#[derive(Debug)]
pub(crate) struct Cuda {
    exposed: Arc<Exposed>,
    registrar: Arc<CudaRegistrar>,
    imports: Imports,
    copies: GpuCopies,
    watch: Watch,
    /// Peers whose control connection is up.
    reachable: Vec<PeerId>,
    /// One path per peer, from the time its control connection is up and GPU memory is registered here until that ends.
    paths: Numbered<PeerId, PathId>,
    peers: Numbered<PeerId, ConnectedPeer>,
    /// Offers that wait until GPU memory is registered here.
    pending: Vec<PendingOffer>,
    serving: Numbered<SessionId, ServedPeer>,
    fetching: Numbered<FetchId, ActiveFetch>,
    posted: Numbered<Token, CudaPost>,
    copying: Numbered<CopyId, ActiveCopy>,
    /// Paths whose posts found no free stream.
    starved: Vec<PathId>,
    /// Regions of this process that peers have mapped.
    lent: HashSet<(Party, u32, u32)>,
    /// By the watch's tag: neighbours whose end is watched, with the connection.
    watched: HashMap<u64, (Party, u64)>,
    next_tag: u64,
    /// WRITEs of broken, fenced connections, by connection. Kept to see whether the neighbour that was to copy them is gone.
    pulling: HashMap<u64, Pulling>,
    is_closed: bool,
}

/// A peer that this process has made an offer to, and copies from once it was met.
#[derive(Debug)]
struct ConnectedPeer {
    path: PathId,
    number: u32,
    /// Random; drawn anew for each offer.
    connection: u64,
    /// None until the peer has accepted.
    neighbour: Option<Neighbour>,
    is_up: bool,
    awaited: AwaitedRegions,
}

#[derive(Debug, Clone, Copy)]
struct PendingOffer {
    session: SessionId,
    offer: Offer,
}

/// WRITEs of a broken connection that its peer may still copy.
#[derive(Debug)]
struct Pulling {
    process: Arc<OwnedFd>,
    tokens: Vec<Token>,
}

#[derive(Debug)]
struct ActiveFetch {
    party: Party,
    connection: u64,
    gpu: u16,
    regions: Vec<(u32, u32)>,
}

#[derive(Debug)]
struct CudaPost {
    peer: PeerId,
    /// The peer copies the bytes. False: this process does.
    is_pulled: bool,
}

/// A copy in flight.
#[derive(Debug)]
struct ActiveCopy {
    origin: CopyOrigin,
    card: Arc<SharedCard>,
    /// Regions and windows that the card has to mark once the bytes were copied, as (number, generation).
    marks: Vec<(u32, u32)>,
    /// Its sources, which stay mapped.
    mapped: Vec<MappedRegion>,
}

#[derive(Debug, Clone, Copy)]
enum CopyOrigin {
    /// A READ of this process, over this connection.
    Ours { token: Token, connection: u64 },
    /// A peer's WRITE, over a connection that the peer made.
    Theirs { session: SessionId, owner: Owner, connection: u64, token: u64, weight: usize },
}

impl Cuda {
    pub(crate) fn open(me: Identity, watch: Watch) -> io::Result<Cuda> {
        let (exposed, imports) = (Arc::new(Exposed::new(me)), Imports::new()?);
        watch.add(imports.wake(), WAKE, Interest::READS)?;
        let registrar = Arc::new(CudaRegistrar::new(Arc::clone(&exposed), imports.waker()));
        Ok(Cuda {
            exposed,
            registrar,
            imports,
            copies: GpuCopies::default(),
            watch,
            reachable: Vec::new(),
            paths: Numbered::default(),
            peers: Numbered::default(),
            pending: Vec::new(),
            serving: Numbered::default(),
            fetching: Numbered::default(),
            posted: Numbered::default(),
            copying: Numbered::default(),
            starved: Vec::new(),
            lent: HashSet::new(),
            watched: HashMap::new(),
            next_tag: WAKE + 1,
            pulling: HashMap::new(),
            is_closed: false,
        })
    }

    /// Adds the paths, and answers the offers, that waited for GPU memory here.
    fn begin_meeting(&mut self, cx: &mut Context<'_>) {
        let Some(meeting) = self.registrar.meeting() else { return };
        for peer in std::mem::take(&mut self.reachable) {
            cx.add_path(peer, self.spec(), 0);
        }
        for PendingOffer { session, offer } in std::mem::take(&mut self.pending) {
            self.answer_offer(cx, session, offer, &meeting);
        }
    }

    fn spec(&self) -> PathSpec {
        // A layer of a prompt then is one post, and the copy engines stay busy between posts.
        let usual = PathSpec::new(self.reach(), PathSpec::CUDA);
        PathSpec { read_bytes: Some(BYTES_MAX), read_runs: Some(ENTRIES_MAX), ..usual }
    }

    fn answer_offer(
        &mut self,
        cx: &mut Context<'_>,
        session: SessionId,
        offer: Offer,
        own: &Result<Meeting, String>,
    ) {
        let Some(owner) = cx.owner(session) else { return };
        match own {
            Err(why) => refuse(cx, session, why),
            Ok(own) => {
                let Offer { connection, meeting } = offer;
                let Owner(identity) = owner;
                let neighbour = Neighbour::new(connection, identity, meeting, cx.now());
                self.serving.insert(session, ServedPeer::new(owner, neighbour));
                cx.accept(session, Offer { connection, meeting: *own }.encode());
            }
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
        let pulled = self.posted.iter().filter(|(_, posted)| posted.peer == peer && posted.is_pulled);
        let mut pulled: Vec<Token> = pulled.map(|(token, _)| *token).collect();
        pulled.sort_unstable();
        self.posted.retain(|token, _| !pulled.contains(token));
        let Some(mut neighbour) = neighbour else { return };
        self.unwatch(&neighbour);
        let mapped = neighbour.take_all();
        self.close_imports(mapped);
        if !pulled.is_empty() {
            // A peer that is stopped in the middle of a copy goes on with it when it continues. So time alone does not end
            // these WRITEs.
            let tokens = pulled.clone();
            self.pulling.extend(neighbour.process.map(|process| (connection, Pulling { process, tokens })));
            cx.fence(peer, connection, pulled, None);
        }
    }

    /// Asks the peers that have mapped them to unmap regions whose owner here takes them back.
    fn ask_back(&mut self, cx: &mut Context<'_>) {
        for (region, generation) in self.exposed.take_withdrawn() {
            for (party, of, its) in &self.lent {
                if (*of, *its) == (region, generation) {
                    send(cx, *party, &Words::Return(vec![(region, generation)]));
                }
            }
        }
    }

    /// Whether peers have mapped any of this memory.
    fn is_lent(&self, memory: Touched<'_>) -> bool {
        let is_it = |region: &u32, generation: &u32| {
            self.exposed.spot(*region, *generation).is_some_and(|spot| memory.spots.overlap(spot))
        };
        self.lent.iter().any(|(_, region, generation)| is_it(region, generation))
    }
}

/// Refuses an offer with a sentence that this process would show its own users. The peer shows it to its users.
fn refuse(cx: &mut Context<'_>, session: SessionId, why: &str) {
    cx.refuse(session, &format!("the peer reports: {why}"));
}

fn send(cx: &mut Context<'_>, to: Party, words: &Words) {
    words.encode().into_iter().for_each(|words| cx.send(to, words));
}

impl Carrier for Cuda {
    fn code(&self) -> u8 {
        4
    }

    fn reach(&self) -> Reach {
        Reach::of(&[Route::GpuToGpu])
    }

    fn registrar(&self) -> Option<Arc<dyn Registrar>> {
        Some(Arc::clone(&self.registrar) as Arc<dyn Registrar>)
    }

    fn control_up(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        self.reachable.push(peer);
        self.begin_meeting(cx);
    }

    fn connect(&mut self, cx: &mut Context<'_>, path: PathId, number: u32, peer: PeerId, _: u64) {
        let connection = match random() {
            Ok(connection) => connection,
            Err(error) => return cx.broke(path, number, error),
        };
        self.paths.insert(peer, path);
        let (neighbour, is_up, awaited) = (None, false, AwaitedRegions::new(KEYS_TIMEOUT));
        self.peers.insert(peer, ConnectedPeer { path, number, connection, neighbour, is_up, awaited });
        match self.registrar.meeting() {
            Some(Ok(meeting)) => cx.offer(peer, Offer { connection, meeting }.encode()),
            Some(Err(why)) => self.give_up(cx, peer, why),
            None => self.give_up(cx, peer, "no GPU memory is registered here".into()),
        }
    }

    fn consider(&mut self, cx: &mut Context<'_>, session: SessionId, offer: &[u8]) -> Result<(), BadWords> {
        let offer = Offer::decode(offer)?;
        // A session's last offer replaces its earlier ones.
        self.stop_serving(session);
        self.pending.push(PendingOffer { session, offer });
        self.begin_meeting(cx);
        if !self.pending.is_empty() {
            send(cx, Party::Session(session), &Words::Waiting);
        }
        Ok(())
    }

    fn accepted(&mut self, cx: &mut Context<'_>, peer: PeerId, answer: &[u8]) -> Result<(), BadWords> {
        let Offer { connection, meeting } = Offer::decode(answer)?;
        let identity = cx.peers.get(&peer).and_then(|peer| peer.whom.identity);
        // An answer to an earlier offer says nothing about this one.
        let is_its =
            |reader: &&mut ConnectedPeer| reader.connection == connection && reader.neighbour.is_none();
        let Some((reader, identity)) = self.peers.get_mut(&peer).filter(is_its).zip(identity) else {
            return Ok(());
        };
        reader.neighbour = Some(Neighbour::new(connection, identity, meeting, cx.now()));
        self.meet(cx, peer);
        Ok(())
    }

    fn refused(&mut self, cx: &mut Context<'_>, peer: PeerId, why: &str) {
        self.give_up(cx, peer, why.to_owned());
    }

    fn control_lost(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        self.end(cx, peer, "the control connection broke");
        self.paths.remove(&peer).into_iter().for_each(|path| cx.remove_path(path));
        self.reachable.retain(|known| *known != peer);
        self.lent.retain(|(party, ..)| *party != Party::Peer(peer));
        cx.note_released();
    }

    fn peer_removed(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        self.end(cx, peer, "the peer was removed");
        self.paths.remove(&peer);
        self.reachable.retain(|known| *known != peer);
        self.lent.retain(|(party, ..)| *party != Party::Peer(peer));
        cx.note_released();
    }

    fn session_ended(&mut self, cx: &mut Context<'_>, session: SessionId) {
        self.stop_serving(session);
        self.lent.retain(|(party, ..)| *party != Party::Session(session));
        cx.note_released();
    }

    fn regions_changed(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        let Some(reader) = self.peers.get_mut(&peer) else { return };
        if reader.awaited.retain(|region, generation| cx.is_awaited(peer, region, generation)) {
            cx.ready(reader.path);
        }
        self.close_gone(cx, peer);
        self.meet(cx, peer);
    }

    fn receive(&mut self, cx: &mut Context<'_>, from: Party, words: &[u8]) -> Result<(), BadWords> {
        match (from, Words::decode(words)?) {
            (Party::Session(session), Words::Pull { token, runs, sources }) => {
                self.pull(cx, session, token, &runs, &sources)?;
            }
            (Party::Peer(peer), Words::Done(outcomes)) => {
                for outcome in outcomes {
                    let token = Token::from_number(outcome.token);
                    let is_asked = |posted: &&CudaPost| posted.peer == peer && posted.is_pulled;
                    if self.posted.get(&token).filter(is_asked).is_some() {
                        self.posted.remove(&token);
                        cx.completed(token, outcome.fate.into());
                    }
                }
            }
            (Party::Peer(peer), Words::Waiting) => {
                let reader = self.peers.get(&peer).filter(|reader| reader.neighbour.is_none());
                let why = "the peer has registered no memory of a GPU yet";
                reader.into_iter().for_each(|reader| cx.waits(reader.path, why));
            }
            (party, Words::Mapped(regions)) => {
                for (region, generation) in regions {
                    let found = self.exposed.region(region, generation);
                    if found.is_some() {
                        self.lent.insert((party, region, generation));
                    }
                    // It was withdrawn while the peer mapped it.
                    if found.is_none_or(|(found, _)| !found.is_open) {
                        send(cx, party, &Words::Return(vec![(region, generation)]));
                    }
                }
            }
            (party, Words::Unmapped(regions)) => {
                let is_it =
                    |known: &(Party, u32, u32)| known.0 == party && regions.contains(&(known.1, known.2));
                self.lent.retain(|known| !is_it(known));
                cx.note_released();
            }
            (party, Words::Return(regions)) => {
                let neighbour = match party {
                    Party::Peer(peer) => {
                        self.peers.get_mut(&peer).and_then(|reader| reader.neighbour.as_mut())
                    }
                    Party::Session(session) => {
                        self.serving.get_mut(&session).map(|serving| &mut serving.neighbour)
                    }
                };
                let mapped: Vec<MappedRegion> = neighbour
                    .map(|neighbour| {
                        regions.iter().flat_map(|(region, generation)| neighbour.take(*region, *generation))
                    })
                    .into_iter()
                    .flatten()
                    .collect();
                self.close_imports(mapped);
            }
            _ => return Err(BadWords("words that are not their side's")),
        }
        Ok(())
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
        let Memory::Gpu(gpu) = post.between.local else {
            cx.completed(post.token, Completion::Refused);
            return Ok(());
        };
        match post.op {
            Op::Write => self.ask_pull(cx, post),
            Op::Read => self.read(cx, post, gpu),
        }
    }

    fn descriptor_ready(&mut self, cx: &mut Context<'_>, tag: u64) -> bool {
        if tag == WAKE {
            let mut count = [0; 8];
            let _ = rustix::io::read(self.imports.wake(), &mut count);
        } else if let Some((party, connection)) = self.watched.get(&tag).copied() {
            self.neighbour_exited(cx, party, connection);
        }
        true
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> bool {
        self.begin_meeting(cx);
        self.copies.poll();
        let any = self.take_done(cx) | self.take_ended(cx);
        self.send_outcomes(cx);
        self.ask_back(cx);
        for reader in self.peers.values_mut() {
            if reader.awaited.expire(cx.now()) {
                cx.ready(reader.path);
            }
        }
        self.close_unused(cx.now());
        any
    }

    fn next_tick(&self, now: Duration) -> Option<Duration> {
        if self.copies.has_job() {
            return Some(Duration::ZERO);
        }
        let copies = self.copies.is_running() || self.is_closed && self.imports.are_mapped();
        let copies = copies.then(|| now + COPY_POLL_INTERVAL);
        let peers = self.peers.values().filter_map(|reader| {
            let idle = reader.neighbour.as_ref().and_then(Neighbour::idle_at);
            [reader.awaited.deadline(), idle].into_iter().flatten().min()
        });
        let sessions = self.serving.values().filter_map(|serving| serving.neighbour.idle_at());
        copies.into_iter().chain(peers).chain(sessions).min()
    }

    fn is_expecting(&self) -> bool {
        !self.posted.is_empty() || self.copies.is_running()
    }

    fn take_job(&mut self) -> Option<Box<dyn Job>> {
        self.copies.take_job()
    }

    fn put_back(&mut self, cx: &mut Context<'_>, job: Box<dyn Job>) {
        self.copies.put_back(job.into_any());
        self.copies.poll();
        self.take_ended(cx);
        self.send_outcomes(cx);
    }

    fn fence(&mut self, _: &mut Context<'_>, from: Owner, connection: u64) -> bool {
        let is_it =
            |serving: &ServedPeer| serving.owner == from && serving.neighbour.connection == connection;
        let sessions = self.serving.iter().filter(|(_, serving)| is_it(serving)).map(|(session, _)| *session);
        sessions.collect::<Vec<_>>().into_iter().for_each(|session| self.stop_serving(session));
        let is_of_it = |origin: &CopyOrigin| matches!(origin, CopyOrigin::Theirs { owner, connection: c, .. } if (*owner, *c) == (from, connection));
        !self.copying.values().any(|copying| is_of_it(&copying.origin))
    }

    fn fence_over(&mut self, cx: &mut Context<'_>, connection: u64, tokens: Vec<Token>) {
        if let Some(Pulling { tokens: left, .. }) = self.pulling.get_mut(&connection) {
            left.retain(|token| !tokens.contains(token));
            if left.is_empty() {
                self.pulling.remove(&connection);
            }
        }
        cx.process.news.change = true;
        tokens.into_iter().for_each(|token| cx.completed(token, Completion::Unknown));
    }

    fn probe_gone(&mut self, cx: &mut Context<'_>, connection: u64) {
        let pulling = self.pulling.get(&connection);
        if pulling.is_some_and(|pulling| pidfd_exited(&pulling.process)) {
            cx.fenced(connection);
        }
    }

    fn touches(&self, memory: Touched<'_>) -> bool {
        // Peers copy by themselves, so no copy here does it for them.
        let Touched { spots, reader: None } = memory else { return false };
        self.copying.keys().any(|copy| self.copies.touches(*copy, spots)) || self.is_lent(memory)
    }

    fn release(&mut self, _: &mut Context<'_>, memory: Touched<'_>) {
        let Touched { spots, reader: None } = memory else { return };
        // The peers do not unmap it. From now on the card alone protects it.
        let exposed = &self.exposed;
        self.lent.retain(|(_, region, generation)| {
            exposed.spot(*region, *generation).is_some_and(|spot| !spots.overlap(spot))
        });
    }

    fn close_all(&mut self, cx: &mut Context<'_>) {
        let peers: Vec<PeerId> = self.peers.keys().copied().collect();
        peers.into_iter().for_each(|peer| self.end(cx, peer, "the engine was closed"));
        let sessions: Vec<SessionId> = self.serving.keys().copied().collect();
        sessions.into_iter().for_each(|session| self.stop_serving(session));
        self.is_closed = true;
        self.exposed.clear();
        self.registrar.close();
        self.imports.give_up_fetches();
        self.take_ended(cx);
        self.watch.remove(self.imports.wake());
    }

    fn is_busy(&self) -> bool {
        self.copies.is_busy() || self.imports.are_mapped()
    }
}
