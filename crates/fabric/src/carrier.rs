//! The interface between an engine and a transport that moves its bytes: the engine calls a [`Carrier`], and the carrier
//! reports back through a [`Context`].
//!
//! ```text
//!   the process: regions, peers, sessions, immediates, messages                    crate::hub
//!        |                          |
//!   control connection         carriers: tcp, cma, ...                             Carrier
//!   (proof, liveness,          bytes between the memory of both sides,
//!    messages, counters,       by socket, system call or driver
//!    regions' keys, fences,
//!    carriers' words)
//! ```
//! A process has one control connection to each peer, and any number of carriers beside it. When a control connection comes
//! up, each carrier may send an offer. The carrier with the same code at the peer accepts or refuses it. The offering side
//! then adds paths ([`Context::add_path`]), and the engine posts transfers on them. The side that connected posts; the
//! other side serves.
//!
//! ```text
//!  connecting side                        listening side
//!   control_up: offer --- words --------> consider
//!   accepted, refused <---- words ------- Context::accept, Context::refuse
//!   add_path ... connect ... up
//!   post --- however it carries bytes --> ...
//!   completed
//! ```
//! The engine calls a carrier under its lock, so a call neither blocks nor copies bytes of transfers. A carrier does such work
//! in jobs ([`Carrier::take_job`]), which run without the lock, or on threads of its own.
//!
//! # When memory may be reused
//!
//! ```text
//!                          after a READ                             after a WRITE
//!  the side that posts     the transfer is over: all of its posts   the same; a post whose connection broke completes only
//!                          have had Context::completed              after a fence or a lease (Context::fence)
//!  the side that serves    Engine::unregister (a region) or         Engine::unregister has returned
//!                          Engine::close_window (a window)
//!                          has returned
//! ```
//! On the side that posts, the memory belongs to the post until [`Context::completed`], also if the caller cancelled it.
//!
//! A peer that gives up a READ (cancel, deadline) does not tell the owner of the region. So the owner does not wait for the
//! peer: it calls `unregister` or `close_window`, and may reuse the memory when the call returns. After that no read can
//! succeed with bytes that were written later:
//! - If the owner sends the bytes (through sockets), it refuses new requests. [`Carrier::touches`] is true while any byte is
//!   queued or in a job, and the call waits until it is false. After one second [`Carrier::release`] closes the peer's
//!   connection, which ends the wait.
//! - If the peer reads by itself (cma, cuda), [`Registrar::withdraw`] and [`Registrar::close_window`] first clear the mark of the
//!   region or window on the owner's card. The peer reads the bytes and then the mark. If it is gone, or of another generation,
//!   the READ fails as Refused. The owner waits for nobody, even if the peer is stopped in the middle of a read.
//!
//! With cma and cuda no process writes into another: the target of a WRITE reads it. So there the side that serves touches only
//! its own memory, and can stop.

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

/// Most bytes of one offer, answer or [`Context::send`].
pub const WORDS_BYTES_MAX: usize = crate::tcp::WORDS_BYTES_MAX;

/// A control connection that a peer made to this process. The number is never used again, so it is stale once the connection
/// has ended.
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

/// A carrier at the peer violated the protocol. The engine ends the control connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a carrier's words do not make sense: {0}")]
pub struct BadWords(pub &'static str);

/// Bytes of one post that are contiguous on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PostedRun {
    pub(crate) local: Spot,
    /// The peer's region, or a window, by its number there.
    pub region: u32,
    /// Its generation when the transfer began; the peer refuses any other.
    pub generation: u32,
    /// Bytes from the start of the region or window.
    pub offset: u64,
    /// The number of bytes, never 0.
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
    /// A path of this carrier that is up.
    pub path: PathId,
    /// The peer that the path leads to.
    pub peer: PeerId,
    /// Pass it to [`Context::completed`].
    pub token: Token,
    /// The transfer that the post is a part of.
    pub ticket: Ticket,
    /// The direction, as seen from this process.
    pub op: Op,
    /// The one memory here and the one at the peer that all runs move between. [`Registrar::add_gpu`] gave the numbers of
    /// GPUs here; the peer numbers its own.
    pub between: Between,
    /// At least one; none of them is empty.
    pub runs: &'a [PostedRun],
}

/// Work of a carrier that blocks or copies.
pub trait Job: Send {
    /// Does the work. The engine calls it without its lock.
    fn run(&mut self);

    /// Lets [`Carrier::put_back`] downcast the job.
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

/// Moves bytes between the memory of this process and that of its peers, for one engine.
#[allow(unused_variables, reason = "a default method ignores what it is called with")]
pub trait Carrier: fmt::Debug + Send {
    /// Wire id, equal at both ends. 128 and above are for carriers outside this crate.
    fn code(&self) -> u8;

    /// Routes that paths of this carrier may serve. An engine takes memory of GPUs only if a carrier serves a route with GPUs.
    fn reach(&self) -> Reach {
        Reach::HOSTS
    }

    /// The hooks that the engine runs when memory is registered and given back. None: the carrier needs none.
    fn registrar(&self) -> Option<Arc<dyn Registrar>> {
        None
    }

    /// A peer's control connection is up. The carrier may send an offer ([`Context::offer`]), now or later.
    fn control_up(&mut self, cx: &mut Context<'_>, peer: PeerId);

    /// A process that connected to this one sends an offer. The carrier answers with [`Context::accept`] or
    /// [`Context::refuse`], now or later.
    fn consider(&mut self, cx: &mut Context<'_>, session: SessionId, offer: &[u8]) -> Result<(), BadWords>;

    /// A peer accepted the offer. `answer` is what its carrier passed to [`Context::accept`].
    fn accepted(&mut self, cx: &mut Context<'_>, peer: PeerId, answer: &[u8]) -> Result<(), BadWords>;

    /// A peer refused the offer, or has no carrier with this code.
    fn refused(&mut self, cx: &mut Context<'_>, peer: PeerId, why: &str) {
        cx.cannot_reach(peer, why.to_owned());
    }

    /// A peer's control connection is gone. The carrier removes the paths that need it; others may stay. After the next
    /// connection [`Carrier::control_up`] asks for another offer.
    fn control_lost(&mut self, cx: &mut Context<'_>, peer: PeerId) {}

    /// A session ended. Words to it are lost from now on.
    fn session_ended(&mut self, cx: &mut Context<'_>, session: SessionId) {}

    /// The engine forgets a peer, and has closed its paths.
    fn peer_removed(&mut self, cx: &mut Context<'_>, peer: PeerId) {}

    /// The registered regions of a peer, or of this process, have changed.
    fn regions_changed(&mut self, cx: &mut Context<'_>, peer: PeerId) {}

    /// The carrier at the other end called [`Context::send`].
    fn receive(&mut self, cx: &mut Context<'_>, from: Party, words: &[u8]) -> Result<(), BadWords> {
        Err(BadWords("it says nothing"))
    }

    /// The engine has delivered all frames that arrived together. A carrier may send its answers to them in one batch.
    fn answer(&mut self, cx: &mut Context<'_>) {}

    /// Opens connection number `connection` of a path that was added under `name`. [`Context::up`] or [`Context::broke`]
    /// follows.
    fn connect(&mut self, cx: &mut Context<'_>, path: PathId, connection: u32, peer: PeerId, name: u64);

    /// Ends this connection of a path, unless it has ended already. [`Context::broke`] follows. Each of its posts completes
    /// once nothing touches its memory any more: as unknown, unless the carrier knows the outcome.
    fn close(&mut self, cx: &mut Context<'_>, path: PathId, connection: u32);

    /// Takes a post. Exactly one [`Context::completed`] follows, however the post ends.
    ///
    /// # Errors
    /// The path takes nothing now. The engine posts again after [`Context::ready`] or the completion of another post on it.
    fn post(&mut self, cx: &mut Context<'_>, post: &CarrierPost<'_>) -> Result<(), NotNow>;

    /// A descriptor that the carrier watches ([`crate::Watch`]) is ready. False: one of the carrier's jobs has to end first, and
    /// the engine does not poll for that.
    fn descriptor_ready(&mut self, cx: &mut Context<'_>, tag: u64) -> bool {
        true
    }

    /// Takes what has arrived and does what is due, without waiting. True if there was anything.
    fn poll(&mut self, cx: &mut Context<'_>) -> bool {
        false
    }

    /// When [`Carrier::poll`] is due even if no descriptor becomes ready.
    fn next_tick(&self, now: Duration) -> Option<Duration> {
        None
    }

    /// Whether an answer is due so soon that a waiting thread should spin instead of sleeping.
    fn is_expecting(&self) -> bool {
        false
    }

    /// The next job, if there is any. A thread that waits for a transfer runs it, or the engine's own thread.
    fn take_job(&mut self) -> Option<Box<dyn Job>> {
        None
    }

    /// Takes back a job that has run.
    fn put_back(&mut self, cx: &mut Context<'_>, job: Box<dyn Job>) {}

    /// The engine's thread is about to sleep on the watched descriptors. False: it must poll instead, because something has
    /// arrived.
    fn prepare_to_sleep(&mut self) -> bool {
        true
    }

    /// The engine's thread is awake again: peers need not wake it.
    fn woken(&mut self) {}

    /// The process that made this connection, which has broken, asks that none of its bytes be placed here any more. False:
    /// some may still be; the process asks again.
    fn fence(&mut self, cx: &mut Context<'_>, from: Owner, connection: u64) -> bool {
        true
    }

    /// A fence that [`Context::fence`] began is over: the peer places none of these posts any more.
    fn fence_over(&mut self, cx: &mut Context<'_>, connection: u64, tokens: Vec<Token>) {
        tokens.into_iter().for_each(|token| cx.completed(token, Completion::Unknown));
    }

    /// The peer of a broken connection does not answer a fence. If the carrier can find out that the process is gone, it
    /// calls [`Context::fenced`], now or later.
    fn probe_gone(&mut self, cx: &mut Context<'_>, connection: u64) {}

    /// Whether memory of this process may still be read or written for a peer.
    fn touches(&self, memory: Touched<'_>) -> bool {
        false
    }

    /// The owner wants this memory back, and has waited for a second. The carrier ends whatever still touches it.
    fn release(&mut self, cx: &mut Context<'_>, memory: Touched<'_>) {}

    /// A peer has made and greeted a connection for this carrier's bytes. Only for carriers over sockets.
    #[doc(hidden)]
    fn greeted(&mut self, cx: &mut Context<'_>, greeted: Greeted) {}

    /// The engine closes. The carrier begins nothing new and closes its paths; [`Carrier::is_busy`] says when it is done.
    fn close_all(&mut self, cx: &mut Context<'_>) {}

    /// Whether anything is still under way after [`Carrier::close_all`].
    fn is_busy(&self) -> bool {
        false
    }
}

/// Memory of this process that its owner wants back, from all peers or from one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Touched<'a> {
    pub(crate) spots: Spots<'a>,
    /// A window is closed: only reads by this process count. None: a region is given back, and every access counts.
    pub(crate) reader: Option<Identity>,
}

impl Touched<'_> {
    /// Whether it overlaps `len` bytes of the host's memory at `address`.
    pub fn overlaps(&self, address: usize, len: usize) -> bool {
        self.spots.overlap_host(Piece { address, len })
    }

    /// Whether reads and writes for this process count.
    pub fn counts_for(&self, whom: Owner) -> bool {
        self.reader.is_none_or(|reader| reader == whom.0)
    }
}

/// The process that made a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Owner(pub(crate) Identity);

/// The engine, as a carrier sees it during a call.
pub struct Context<'a> {
    pub(crate) now: Duration,
    /// Index of the carrier in the engine's list.
    pub(crate) place: u8,
    pub(crate) code: u8,
    pub(crate) process: &'a mut Process,
    pub(crate) peers: &'a Peers,
    pub(crate) leaving: &'a Numbered<PeerId, Whom>,
    pub(crate) sessions: &'a crate::served::SessionsServed,
    pub(crate) outbox: &'a mut Outbox,
    /// The lease of the session whose frame is being delivered. None outside of such a delivery.
    pub(crate) lease: Option<Lease>,
}

/// Reports and requests that carriers made during calls, until the hub takes them.
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
    /// Time since the engine was made, read once when the lock was taken.
    pub fn now(&self) -> Duration {
        self.now
    }

    /// Adds a path to a peer. [`Carrier::connect`] follows, with this name.
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
        self.outbox.events.push_back(Event::PathAdded { peer, spec, label });
    }

    /// Removes a path for good.
    pub fn remove_path(&mut self, path: PathId) {
        self.outbox.events.push_back(Event::PathRemoved(path));
    }

    /// Reports that a path's connection is up.
    pub fn up(&mut self, path: PathId, connection: u32) {
        self.outbox.events.push_back(Event::Up { path, connection });
    }

    /// Reports that a path's connection broke, or could not be made. Users read `why` in [`crate::PathStatus`].
    pub fn broke(&mut self, path: PathId, connection: u32, why: impl fmt::Display) {
        self.outbox.troubles.push((path, why.to_string()));
        self.outbox.events.push_back(Event::Broke { path, connection });
    }

    /// Shows users why a path is not up yet.
    pub fn waits(&mut self, path: PathId, why: impl fmt::Display) {
        self.outbox.troubles.push((path, why.to_string()));
    }

    /// Reports that a path which answered [`NotNow`] takes posts again.
    pub fn ready(&mut self, path: PathId) {
        self.outbox.events.push_back(Event::Ready(path));
    }

    /// Reports how a post ended. From now on the carrier must not touch its memory.
    pub fn completed(&mut self, token: Token, completion: Completion) {
        self.outbox.events.push_back(Event::Completed(token, completion));
    }

    /// Sends words to the carrier at the other end, at most [`WORDS_BYTES_MAX`]. They arrive in order, and are lost if the
    /// control connection breaks meanwhile.
    pub fn send(&mut self, to: Party, words: Vec<u8>) {
        self.write(to, WordsKind::Other, words);
    }

    /// Sends an offer to the carrier at a peer. [`Carrier::accepted`] or [`Carrier::refused`] follows, unless the control
    /// connection breaks first.
    pub fn offer(&mut self, peer: PeerId, offer: Vec<u8>) {
        self.write(Party::Peer(peer), WordsKind::Offer, offer);
    }

    /// Accepts a session's offer. `answer` goes to [`Carrier::accepted`] there.
    pub fn accept(&mut self, session: SessionId, answer: Vec<u8>) {
        self.write(Party::Session(session), WordsKind::Accepted, answer);
    }

    /// Refuses a session's offer. The operators of the peer read `why`, cut to 1,024 characters.
    pub fn refuse(&mut self, session: SessionId, why: &str) {
        let short: String = why.chars().take(1024).collect();
        self.write(Party::Session(session), WordsKind::Refused, short.into_bytes());
    }

    /// Reports that the carrier cannot reach a peer. Users read `why` in [`crate::PathStatus`], and the log has it once.
    pub fn cannot_reach(&mut self, peer: PeerId, why: String) {
        self.outbox.refusals.push((peer, self.code, why));
    }

    fn write(&mut self, to: Party, kind: WordsKind, bytes: Vec<u8>) {
        debug_assert!(bytes.len() <= WORDS_BYTES_MAX);
        self.outbox.letters.push_back((to, Frame::Words { code: self.code, kind, bytes }));
    }

    /// Finds the bytes of a run at the peer, with the keys that this carrier's registrar there made for their regions.
    pub fn remote_memory(&self, peer: PeerId, run: &PostedRun) -> RemoteMemory<'_> {
        let PostedRun { region, generation, offset, len, .. } = *run;
        let known = self.peers.get(&peer);
        known.map_or(RemoteMemory::None, |peer| peer.memory(self.code, (region, generation), offset, len))
    }

    /// The regions of a peer that have a key of this carrier, as (number, generation, key).
    pub fn remote_regions(&self, peer: PeerId) -> Vec<(u32, u32, &[u8])> {
        self.peers.get(&peer).map(|known| known.keyed(self.code).collect()).unwrap_or_default()
    }

    /// Whether the peer has yet to announce this generation of a region or window.
    pub fn is_awaited(&self, peer: PeerId, region: u32, generation: u32) -> bool {
        let known = self.peers.get(&peer);
        known.is_some_and(|peer| peer.memory(self.code, (region, generation), 0, 0) == RemoteMemory::NotYet)
    }

    /// The process that made a session's connection. None: the session has ended.
    pub fn owner(&self, session: SessionId) -> Option<Owner> {
        self.sessions.get(&session.0).map(|served| Owner(served.from))
    }

    /// Fences a broken connection whose posts the peer may still place. They are over when the peer confirms that it places
    /// nothing more ([`Carrier::fence`] there, [`Carrier::fence_over`] here), or after `lease`. No lease: time alone never
    /// ends them.
    pub fn fence(&mut self, peer: PeerId, connection: u64, tokens: Vec<Token>, lease: Option<Duration>) {
        let known = self.peers.get(&peer).map(|known| &known.whom).or_else(|| self.leaving.get(&peer));
        // The hub remembers a peer while anything of it is under way.
        let Some(whom) = known.filter(|_| !tokens.is_empty()).cloned() else {
            debug_assert!(tokens.is_empty(), "{peer:?} is not known");
            return tokens.into_iter().for_each(|token| self.completed(token, Completion::Unknown));
        };
        let code = self.code;
        self.outbox.fences.push(NewFence { code, connection, peer, whom, tokens, lease });
    }

    /// Ends the fence of a broken connection: its peer's process is gone, and places nothing any more.
    pub fn fenced(&mut self, connection: u64) {
        self.outbox.fenced.push((self.code, connection));
    }

    /// Whether bytes of the words being delivered may be placed. False: the lease expired, so the peer may have given up
    /// the write by now. Ask right before each copy.
    pub fn may_place(&self) -> bool {
        self.lease.is_none_or(|lease| lease.holds())
    }

    /// Wakes the threads that wait to take memory back, because the carrier may touch less than before.
    pub fn note_released(&mut self) {
        self.process.note_released();
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
