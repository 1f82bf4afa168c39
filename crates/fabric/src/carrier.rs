//! The seam between an engine and what carries its bytes.
//!
//! ```text
//!   the process: regions, peers, sessions, immediates, messages                    crate::hub
//!        |                          |
//!   control connection         carriers: tcp, cma, ...                             Carrier
//!   (proof, liveness,          bytes between the memory of both sides,
//!    messages, counters,       over whatever each of them has
//!    regions' keys, fences,
//!    carriers' words)
//! ```
//! A process has one control connection to each peer, and any number of carriers beside it. When a control connection is up,
//! each carrier may make an offer; its like at the peer accepts or refuses it. Then it adds paths
//! ([`Context::add_path`]), over which transfers are posted. The side that connected posts; the other one serves.
//!
//! ```text
//!  connecting side                        listening side
//!   control_up: offer --- words --------> consider
//!   accepted, refused <---- words ------- Context::accept, Context::refuse
//!   add_path ... connect ... up
//!   post --- however it carries bytes --> ...
//!   completed
//! ```
//! Nothing that a carrier does when it is called blocks or copies bytes of transfers: for that it has jobs
//! ([`Carrier::take_job`]), which run while nobody holds the engine's lock, or threads of its own.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::fences::Whom;
use crate::frames::Frame;
use crate::greeted::Greeted;
use crate::identity::Identity;
use crate::lease::Lease;
use crate::numbered::Numbered;
use crate::peers::{Peers, RemoteMemory};
use crate::process::Process;
use crate::provider::{Event, NotNow};
use crate::ranges::{Piece, Spot, Spots};
use crate::registrar::Registrar;
use crate::transfers::{Between, Completion, Op, PathId, PathSpec, PeerId, Reach, Ticket, Token};
use crate::wire::WordsKind;

/// Most bytes that a carrier says at once: its part of the handshake, or anything else.
pub const WORDS_BYTES_MAX: usize = crate::tcp::WORDS_BYTES_MAX;

/// Who is at the other end of a control connection that a peer has made: as long as that is up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub(crate) u64);

/// One end of a control connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Party {
    /// A peer that this process has connected to.
    Peer(PeerId),
    /// A process that has connected to this one.
    Session(SessionId),
}

/// What a peer has said does not make sense. Its control connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a carrier's words do not make sense: {0}")]
pub struct BadWords(pub &'static str);

/// Bytes of one post that are contiguous on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PostedRun {
    pub(crate) local: Spot,
    /// The peer's region.
    pub region: u32,
    /// Its generation when the transfer began; a peer refuses any other.
    pub generation: u32,
    /// Where the bytes begin in it.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl PostedRun {
    /// First address of the bytes, in the host's or the GPU's memory, as [`CarrierPost::between`] says. The memory belongs to
    /// the post until that is completed.
    pub fn address(&self) -> *mut u8 {
        self.local.piece.pointer()
    }
}

/// Bytes to be moved over a path.
#[derive(Debug)]
pub struct CarrierPost<'a> {
    /// The path.
    pub path: PathId,
    /// Its peer.
    pub peer: PeerId,
    /// By which its completion is told.
    pub token: Token,
    /// The transfer that it is a part of.
    pub ticket: Ticket,
    /// Which way.
    pub op: Op,
    /// All runs move between this memory here and this one at the peer. [`Registrar::add_gpu`] has told the numbers of GPUs
    /// here; the peer numbers its own.
    pub between: Between,
    /// None is empty.
    pub runs: &'a [PostedRun],
}

/// Something that takes its time.
pub trait Job: Send {
    /// Does it, outside of the engine's lock.
    fn run(&mut self);

    /// For the carrier that gets it back.
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

/// Moves bytes between the memory of this process and that of others, as one engine has it.
#[allow(unused_variables, reason = "what a carrier has no use for it leaves out")]
pub trait Carrier: fmt::Debug + Send {
    /// What its like at a peer is known by. From 128 on they are free for carriers that are not part of this crate.
    fn code(&self) -> u8;

    /// Routes that paths of this carrier may serve. An engine takes memory of GPUs only if a carrier serves a route with GPUs.
    fn reach(&self) -> Reach {
        Reach::HOSTS
    }

    /// What it does when memory is registered, if anything.
    fn registrar(&self) -> Option<Arc<dyn Registrar>> {
        None
    }

    /// A peer's control connection is up: the carrier may make an offer to its like there ([`Context::offer`]), now or later.
    fn control_up(&mut self, cx: &mut Context<'_>, peer: PeerId);

    /// A process that has connected makes an offer, to be answered by [`Context::accept`] or [`Context::refuse`], now or
    /// later.
    fn consider(&mut self, cx: &mut Context<'_>, session: SessionId, offer: &[u8]) -> Result<(), BadWords>;

    /// A peer has accepted the offer, and says this.
    fn accepted(&mut self, cx: &mut Context<'_>, peer: PeerId, answer: &[u8]) -> Result<(), BadWords>;

    /// A peer has refused it, or knows no such carrier.
    fn refused(&mut self, cx: &mut Context<'_>, peer: PeerId, why: &str) {
        cx.cannot_reach(peer, why.to_owned());
    }

    /// A peer's control connection is gone. Paths that need it are to be removed; others may stay. After the next connection
    /// there is another offer.
    fn control_lost(&mut self, cx: &mut Context<'_>, peer: PeerId) {}

    /// A session is over: nothing can be said to it any more.
    fn session_ended(&mut self, cx: &mut Context<'_>, session: SessionId) {}

    /// A peer is forgotten. Its paths are closed.
    fn peer_removed(&mut self, cx: &mut Context<'_>, peer: PeerId) {}

    /// What a peer, or this process, has registered has changed.
    fn regions_changed(&mut self, cx: &mut Context<'_>, peer: PeerId) {}

    /// The carrier's like at the other end says something, by [`Context::send`].
    fn receive(&mut self, cx: &mut Context<'_>, from: Party, words: &[u8]) -> Result<(), BadWords> {
        Err(BadWords("it says nothing"))
    }

    /// All that came at once was heard: what is to be answered may go together.
    fn answer(&mut self, cx: &mut Context<'_>) {}

    /// Connects a path that was added with this name, as the connection of that number. [`Context::up`] or
    /// [`Context::broke`] follows.
    fn connect(&mut self, cx: &mut Context<'_>, path: PathId, connection: u32, peer: PeerId, name: u64);

    /// Ends this connection of a path, if that has not happened yet. [`Context::broke`] follows; and for everything posted on
    /// it [`Context::completed`], as unknown unless it is known better, once nothing touches its memory any more.
    fn close(&mut self, cx: &mut Context<'_>, path: PathId, connection: u32);

    /// Takes a post; one [`Context::completed`] follows, however it ends.
    ///
    /// # Errors
    /// The path takes nothing now. [`Context::ready`], or the completion of another post on it, says when it does.
    fn post(&mut self, cx: &mut Context<'_>, post: &CarrierPost<'_>) -> Result<(), NotNow>;

    /// A descriptor that the carrier watches ([`crate::Watch`]) is ready.
    fn descriptor_ready(&mut self, cx: &mut Context<'_>, tag: u64) {}

    /// Takes what came by itself, and does what is due, without waiting. Whether there was anything.
    fn poll(&mut self, cx: &mut Context<'_>) -> bool {
        false
    }

    /// When [`Carrier::poll`] has something to do if nothing happens.
    fn next_tick(&self, now: Duration) -> Option<Duration> {
        None
    }

    /// Whether something is expected so soon that whoever waits had better look again and again.
    fn is_expecting(&self) -> bool {
        false
    }

    /// Something that takes its time, if there is anything; whoever has time runs it.
    fn take_job(&mut self) -> Option<Box<dyn Job>> {
        None
    }

    /// A job is done.
    fn put_back(&mut self, cx: &mut Context<'_>, job: Box<dyn Job>) {}

    /// The engine's thread is going to sleep on the watched descriptors. False: it must not, something is there.
    fn prepare_to_sleep(&mut self) -> bool {
        true
    }

    /// It does not sleep any more.
    fn woken(&mut self) {}

    /// A process wants nothing more to be placed here of this connection, which it had made and which is broken. Whether that
    /// is so: else it asks again.
    fn fence(&mut self, cx: &mut Context<'_>, from: Owner, connection: u64) -> bool {
        true
    }

    /// What was fenced by [`Context::fence`] is over: nothing of it is placed at the peer any more.
    fn fence_over(&mut self, cx: &mut Context<'_>, connection: u64, tokens: Vec<Token>) {
        tokens.into_iter().for_each(|token| cx.completed(token, Completion::Unknown));
    }

    /// The process at the other end of a broken connection does not answer. A carrier that can see whether it is gone says so
    /// by [`Context::fenced`], now or later.
    fn see_whether_gone(&mut self, cx: &mut Context<'_>, connection: u64) {}

    /// Whether memory of this process may still be read or written for somebody else.
    fn touches(&self, memory: Touched<'_>) -> bool {
        false
    }

    /// Memory is to be given back, and is touched for too long.
    fn let_go(&mut self, cx: &mut Context<'_>, memory: Touched<'_>) {}

    /// A connection for this carrier's bytes has been made and greeted by a peer. Only for carriers over sockets.
    #[doc(hidden)]
    fn greeted(&mut self, cx: &mut Context<'_>, greeted: Greeted) {}

    /// The engine closes: nothing is begun any more. [`Carrier::touches`] anything says when nothing is under way.
    fn close_all(&mut self, cx: &mut Context<'_>) {}

    /// Whether anything is still under way after [`Carrier::close_all`].
    fn is_busy(&self) -> bool {
        false
    }
}

/// Memory of this process that is to be given back, or not to be read by one peer any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Touched<'a> {
    pub(crate) spots: Spots<'a>,
    /// Only what is read for this process counts.
    pub(crate) reader: Option<Identity>,
}

impl Touched<'_> {
    /// Whether any of it lies in so many bytes of the host's memory from this address on.
    pub fn overlaps(&self, address: usize, len: usize) -> bool {
        self.spots.overlap_host(Piece { address, len })
    }

    /// Whether what is read or written for this process counts.
    pub fn counts_for(&self, whom: Owner) -> bool {
        self.reader.is_none_or(|reader| reader == whom.0)
    }
}

/// Who made a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Owner(pub(crate) Identity);

/// What a carrier may use while it is called.
pub struct Context<'a> {
    pub(crate) now: Duration,
    /// The carrier's place among the engine's.
    pub(crate) place: u8,
    pub(crate) code: u8,
    pub(crate) process: &'a mut Process,
    pub(crate) peers: &'a Peers,
    pub(crate) leaving: &'a Numbered<PeerId, Whom>,
    pub(crate) sessions: &'a crate::served::SessionsServed,
    pub(crate) outbox: &'a mut Outbox,
    /// Of the session that is heard right now.
    pub(crate) lease: Option<Lease>,
}

/// What carriers have said while they were called.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    pub(crate) events: VecDeque<Event>,
    pub(crate) letters: VecDeque<(Party, Frame<Arc<[u8]>>)>,
    pub(crate) fences: Vec<NewFence>,
    pub(crate) new_paths: Vec<NewPath>,
    pub(crate) troubles: Vec<(PathId, String)>,
    pub(crate) refusals: Vec<(PeerId, u8, String)>,
    pub(crate) fenced: Vec<(u8, u64)>,
    pub(crate) next_label: u64,
}

#[derive(Debug)]
pub(crate) struct NewPath {
    pub(crate) label: u64,
    pub(crate) peer: PeerId,
    pub(crate) place: u8,
    pub(crate) name: u64,
    pub(crate) address: Option<SocketAddr>,
}

#[derive(Debug)]
pub(crate) struct NewFence {
    pub(crate) code: u8,
    pub(crate) connection: u64,
    pub(crate) peer: PeerId,
    pub(crate) whom: Whom,
    pub(crate) tokens: Vec<Token>,
    pub(crate) lease: Option<Duration>,
}

impl Context<'_> {
    /// The engine's time.
    pub fn now(&self) -> Duration {
        self.now
    }

    /// One more path to a peer, which is then connected by this name.
    pub fn add_path(&mut self, peer: PeerId, spec: PathSpec, name: u64) {
        self.add_path_to(peer, spec, name, None);
    }

    pub(crate) fn add_path_to(
        &mut self,
        peer: PeerId,
        spec: PathSpec,
        name: u64,
        address: Option<SocketAddr>,
    ) {
        let label = self.outbox.next_label;
        self.outbox.next_label += 1;
        self.outbox.new_paths.push(NewPath { label, peer, place: self.place, name, address });
        self.outbox.events.push_back(Event::Comes { peer, spec, label });
    }

    /// A path goes for good.
    pub fn remove_path(&mut self, path: PathId) {
        self.outbox.events.push_back(Event::Goes(path));
    }

    /// A path's connection of that number is there.
    pub fn up(&mut self, path: PathId, connection: u32) {
        self.outbox.events.push_back(Event::Up { path, connection });
    }

    /// It broke, or could not be made.
    pub fn broke(&mut self, path: PathId, connection: u32, why: impl fmt::Display) {
        self.outbox.troubles.push((path, why.to_string()));
        self.outbox.events.push_back(Event::Broke { path, connection });
    }

    /// A path that did not take a post takes one again.
    pub fn ready(&mut self, path: PathId) {
        self.outbox.events.push_back(Event::Ready(path));
    }

    /// What became of a post.
    pub fn completed(&mut self, token: Token, completion: Completion) {
        self.outbox.events.push_back(Event::Completed(token, completion));
    }

    /// Says something to the carrier's like at the other end, at most [`WORDS_BYTES_MAX`]; in order, and lost if the control
    /// connection breaks meanwhile.
    pub fn send(&mut self, to: Party, words: Vec<u8>) {
        self.write(to, WordsKind::Other, words);
    }

    /// Offers something to the carrier's like at a peer; [`Carrier::accepted`] or [`Carrier::refused`] follows while the
    /// control connection is up.
    pub fn offer(&mut self, peer: PeerId, offer: Vec<u8>) {
        self.write(Party::Peer(peer), WordsKind::Offer, offer);
    }

    /// Accepts a session's offer, and answers this.
    pub fn accept(&mut self, session: SessionId, answer: Vec<u8>) {
        self.write(Party::Session(session), WordsKind::Accepted, answer);
    }

    /// Refuses it. `why`: for the people who run the peer.
    pub fn refuse(&mut self, session: SessionId, why: &str) {
        let short: String = why.chars().take(1024).collect();
        self.write(Party::Session(session), WordsKind::Refused, short.into_bytes());
    }

    /// The carrier cannot reach this peer, for a reason that people may want to know.
    pub fn cannot_reach(&mut self, peer: PeerId, why: String) {
        self.outbox.refusals.push((peer, self.code, why));
    }

    fn write(&mut self, to: Party, kind: WordsKind, bytes: Vec<u8>) {
        debug_assert!(bytes.len() <= WORDS_BYTES_MAX);
        self.outbox.letters.push_back((to, Frame::Words { code: self.code, kind, bytes }));
    }

    /// Where the bytes of a run are at the peer, with what this carrier's registrar there has answered for their regions.
    pub fn remote_memory(&self, peer: PeerId, run: &PostedRun) -> RemoteMemory<'_> {
        let PostedRun { region, generation, offset, len, .. } = *run;
        let known = self.peers.get(&peer);
        known.map_or(RemoteMemory::None, |peer| peer.memory(self.code, (region, generation), offset, len))
    }

    /// Whether the peer has not told yet of a region or window of this generation.
    pub fn is_awaited(&self, peer: PeerId, region: u32, generation: u32) -> bool {
        let known = self.peers.get(&peer);
        known.is_some_and(|peer| peer.memory(self.code, (region, generation), 0, 0) == RemoteMemory::NotYet)
    }

    /// Who has made a session's connection.
    pub fn owner(&self, session: SessionId) -> Option<Owner> {
        self.sessions.get(&session.0).map(|served| Owner(served.from))
    }

    /// A connection of a path broke while it carried these posts, which the peer may still place: they are over when the
    /// peer has confirmed that it does not ([`Carrier::fence`] there, [`Carrier::fence_over`] here), or after `lease`, if
    /// time can tell.
    pub fn fence(&mut self, peer: PeerId, connection: u64, tokens: Vec<Token>, lease: Option<Duration>) {
        let known = self.peers.get(&peer).map(|known| &known.whom).or_else(|| self.leaving.get(&peer));
        // A peer is remembered while anything of it is under way.
        let Some(whom) = known.filter(|_| !tokens.is_empty()).cloned() else {
            debug_assert!(tokens.is_empty(), "{peer:?} is not known");
            return tokens.into_iter().for_each(|token| self.completed(token, Completion::Unknown));
        };
        let code = self.code;
        self.outbox.fences.push(NewFence { code, connection, peer, whom, tokens, lease });
    }

    /// Nothing more is placed at the peer of this broken connection: its process is gone.
    pub fn fenced(&mut self, connection: u64) {
        self.outbox.fenced.push((self.code, connection));
    }

    /// Whether bytes that a session has just sent may be placed: not if its peer may count on the contrary by now, since
    /// the bytes were under way for too long. To be asked right before.
    pub fn may_place(&self) -> bool {
        self.lease.is_none_or(|lease| lease.holds())
    }

    /// Something of this process's memory may not be touched any more: whoever waits for that looks again.
    pub fn note_let_go(&mut self) {
        self.process.note_let_go();
    }
}

impl fmt::Debug for Context<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("now", &self.now).field("code", &self.code).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_carrier_can_tell_whether_it_touches_what_is_given_back() {
        let spot = Spot { piece: Piece { address: 1000, len: 100 }, gpu: None };
        let [me, other] = [1, 2].map(|engine| Identity { engine, boot: 0 });
        let memory = Touched { spots: Spots::one(&spot), reader: None };
        assert!(memory.overlaps(0, 1001) && memory.overlaps(1099, 1) && memory.overlaps(1050, 10));
        assert!(!memory.overlaps(0, 1000) && !memory.overlaps(1100, 100));
        assert!(memory.counts_for(Owner(me)) && memory.counts_for(Owner(other)), "it is given back");
        let read = Touched { reader: Some(me), ..memory };
        assert!(read.counts_for(Owner(me)) && !read.counts_for(Owner(other)), "one peer reads no more");
    }
}
