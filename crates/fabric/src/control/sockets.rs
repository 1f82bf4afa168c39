//! Control connections over TCP or TLS, and through rings between processes of one host.
//!
//! ```text
//!  connecting side:   TCP connect --> Challenge --> send Proof --> Verdict --> send Hello --> Welcome: up --> gone
//!  listening side:    accepted: send Challenge --> Proof --> send Verdict --> Hello --> send Welcome: serving --> gone
//!                                                                                          '--> handed to a carrier
//! ```
//! All connections of other processes arrive here. Until its Proof, a connection is a stranger: it is told nothing, and
//! the oldest strangers are closed if there are more than [`ACCEPTED_MAX`]. The Hello then says whether the connection is
//! a control connection, a question for a fence, or carries bytes; the last kind goes to its carrier.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt;

use super::{ChannelId, Control, ControlEvent};
use crate::fences::{Broken, Question, Whom};
use crate::frames::Frame;
use crate::identity::Identity;
use crate::lease::{self, Lease};
use crate::links::{Arrived, Back, Entry, LinkId, LinkJob, Links, Wants};
use crate::logged_peers::LoggedPeers;
use crate::numbered::Numbered;
use crate::process::Process;
use crate::served::Served;
use crate::shm::{RingSide, Segment};
use crate::silence::CONNECTING;
use crate::tcp::{
    Credentials, Dialled, Dialling, Ended, Head, PROOF_MESSAGE_BYTES, Purpose, SessionKey, Welcome,
    encode_challenge, nonce,
};
use crate::transfers::PathId;
use crate::trust::Proofs;
use crate::watch::{Interest, Watch};
use crate::wire::{BadFrame, Outcome};

/// How often silent connections are looked for. The connecting side pings as often.
pub(crate) const LIVENESS_INTERVAL: Duration = Duration::from_millis(500);
/// Pause after a connection could not be accepted for lack of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Most connections, and most that have proved nothing.
const LINKS_MAX: usize = 16_384;
const ACCEPTED_MAX: usize = 1_024;
/// Connections that are accepted before other work has its turn.
const ACCEPTED_A_TURN: usize = 64;
/// This bit of a watch tag marks a listener.
const LISTENER: u64 = 1 << 55;

#[derive(Debug)]
pub(crate) struct ControlSockets {
    me: Identity,
    pub(crate) proofs: Proofs,
    /// If present, every connection is encrypted.
    credentials: Option<Arc<Credentials>>,
    watch: Watch,
    pub(super) links: Links<ControlRole>,
    pub(super) logged: LoggedPeers,
    pub(super) events: VecDeque<ControlEvent>,
    listeners: Vec<TcpListener>,
    /// When a paused listener is watched again.
    resume_accepting_at: Option<Duration>,
    /// The log has said that connections cannot be accepted.
    cannot_accept: bool,
    check_at: Duration,
    /// Whether connections within this host use shared-memory rings instead of the socket.
    offers_rings: bool,
    /// Whether bodies of frames get checksums on connections that are not encrypted.
    pub(super) wants_sums: bool,
    pub(super) paths: Numbered<PathId, ControlPath>,
    /// Connections within this host, of either side, that had to use the socket instead of rings.
    pub(crate) without_rings: u64,
    /// Codes of carriers that take connections for bytes.
    pub(crate) carriers: Vec<u8>,
    /// Peers that are allowed to be silent: their connections never time out.
    pub(crate) silent: HashSet<Identity>,
}

const NOT_ITS_SIDES: BadFrame = BadFrame("a frame that is not its side's");

/// A control path: how it stands with the connection to one peer.
#[derive(Debug, Default, Clone)]
pub(crate) struct ControlPath {
    link: Option<LinkId>,
    pub(crate) address: Option<SocketAddr>,
    /// Why it is not up now, or was not the last time.
    pub(crate) trouble: Option<String>,
    /// Why it does not use rings, although both sides are on one host.
    pub(crate) no_rings: Option<String>,
}

/// Purpose and stage of a connection.
#[derive(Debug)]
pub(crate) enum ControlRole {
    /// A stranger: has proved nothing, and is told nothing.
    Accepted { challenge: [u8; 16] },
    /// The peer has proved the secret, but not said who it is.
    Proved { key: SessionKey },
    /// The peer asks whether anything of a broken connection may still be placed here.
    Fencing { key: SessionKey },
    /// A control connection of a peer, whose requests are served.
    Serving { served: Served },
    /// Ends once everything queued is written.
    Leaving,
    /// Made by this process; the greeting is under way.
    Dialling { to: Goal, whom: Whom, dialling: Dialling, segment: Option<Result<Segment, String>> },
    /// Made by this process, to this peer. `stamp`: the peer's latest.
    Up { path: PathId, number: u32, from: Identity, stamp: u64 },
}

/// The purpose of a connection that this process makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Goal {
    /// A path's connection of that number.
    Path(PathId, u32),
    /// To ask whether anything of an earlier connection may still be placed.
    Fence(Broken),
}

/// Options of [`ControlSockets::open`].
#[derive(Debug)]
pub(crate) struct ControlOptions<'a> {
    pub(crate) me: Identity,
    pub(crate) proofs: Proofs,
    /// If present, every connection is encrypted.
    pub(crate) credentials: Option<Arc<Credentials>>,
    pub(crate) listen: &'a [SocketAddr],
    /// Whether connections within this host use shared-memory rings instead of the socket.
    pub(crate) offers_rings: bool,
    /// Whether bodies of frames get checksums on connections that are not encrypted.
    pub(crate) wants_sums: bool,
}

impl ControlSockets {
    /// Listens at all addresses.
    ///
    /// # Errors
    /// An address cannot be listened at, or a listener cannot be watched.
    pub(crate) fn open(watch: Watch, options: ControlOptions<'_>) -> io::Result<ControlSockets> {
        let ControlOptions { me, proofs, credentials, listen, offers_rings, wants_sums } = options;
        let mut listeners = Vec::new();
        for (index, address) in (0..).zip(listen) {
            let listener = TcpListener::bind(address)
                .map_err(|error| io::Error::new(error.kind(), format!("{address}: {error}")))?;
            listener.set_nonblocking(true)?;
            watch.add(&listener, LISTENER | index, Interest::READS)?;
            listeners.push(listener);
        }
        Ok(ControlSockets {
            me,
            proofs,
            credentials,
            links: Links::of_messages(watch.clone()),
            watch,
            logged: LoggedPeers::default(),
            events: VecDeque::new(),
            listeners,
            resume_accepting_at: None,
            cannot_accept: false,
            check_at: LIVENESS_INTERVAL,
            offers_rings,
            wants_sums,
            paths: Numbered::default(),
            without_rings: 0,
            carriers: Vec::new(),
            silent: HashSet::new(),
        })
    }

    pub(crate) fn listens_at(&self) -> io::Result<Vec<SocketAddr>> {
        self.listeners.iter().map(TcpListener::local_addr).collect()
    }

    pub(crate) fn status(&self, path: PathId) -> Option<&ControlPath> {
        self.paths.get(&path)
    }

    /// The watch says that a descriptor is ready. False: a job that has it has to end first.
    pub(crate) fn descriptor_ready(&mut self, now: Duration, tag: u64) -> bool {
        if tag & LISTENER == 0 {
            return self.links.note_ready(tag);
        }
        self.accept_all(now, (tag ^ LISTENER) as usize);
        true
    }

    /// Polls the rings, and does what is due. Whether a ring had anything.
    pub(crate) fn poll(&mut self, now: Duration, process: &mut Process) -> bool {
        let any = self.links.poll_rings();
        if now >= self.check_at {
            let is_late = now >= self.check_at + LIVENESS_INTERVAL;
            self.check_at = now + LIVENESS_INTERVAL;
            self.check_liveness(now, is_late);
            let immediates = &mut process.immediates;
            process.sessions.forget_old(now, |session| immediates.forget(session));
        }
        if self.resume_accepting_at.is_some_and(|at| at <= now) {
            self.resume_accepting_at = None;
            self.listen(Interest::READS);
        }
        any
    }

    /// Whether there are rings: bytes may arrive that no descriptor tells of.
    pub(crate) fn has_rings(&self) -> bool {
        self.links.has_rings()
    }

    /// When [`ControlSockets::poll`] has something to do if nothing arrives.
    pub(crate) fn next_tick(&self, process: &Process) -> Option<Duration> {
        if self.links.has_due() || !self.events.is_empty() {
            return Some(Duration::ZERO);
        }
        let liveness = (!self.links.is_empty() || !process.sessions.is_empty()).then_some(self.check_at);
        [liveness, self.resume_accepting_at].into_iter().flatten().min()
    }

    /// See [`Links::prepare_to_sleep`].
    pub(crate) fn prepare_to_sleep(&mut self) -> bool {
        self.links.prepare_to_sleep()
    }

    /// See [`Links::woken`].
    pub(crate) fn woken(&mut self) {
        self.links.woken();
    }

    /// See [`Links::take_wake_needed`].
    pub(crate) fn take_wake_needed(&mut self) -> bool {
        self.links.take_wake_needed()
    }

    pub(crate) fn take_job(&mut self) -> Option<LinkJob> {
        self.links.take_job()
    }

    /// A job has run: takes what it received, or ends the connection.
    pub(crate) fn put_back(&mut self, now: Duration, process: &mut Process, job: LinkJob) {
        let id = job.id;
        let Some(Back { arrived, outcome }) = self.links.put_back(now, job) else { return };
        for arrived in arrived {
            if let Err(ended) = self.take(now, process, id, arrived) {
                return self.end_link(now, process, id, ended);
            }
        }
        if let Err(ended) = outcome {
            return self.end_link(now, process, id, ended);
        }
        let is_done =
            |entry: &Entry<ControlRole>| matches!(entry.role, ControlRole::Leaving) && entry.is_flushed();
        if self.links.get(id).is_some_and(is_done) {
            return self.end_link(now, process, id, Ended::Closed);
        }
        self.links.settle(id);
    }

    /// Takes one thing that arrived over a connection.
    fn take(
        &mut self,
        now: Duration,
        process: &mut Process,
        id: LinkId,
        arrived: Arrived,
    ) -> Result<(), Ended> {
        match arrived {
            Arrived::Connected => {
                self.links.want(id, Wants::Greeting(Dialling::FIRST));
                Ok(())
            }
            Arrived::Greeting(bytes) => self.take_greeting(now, process, id, &bytes),
            Arrived::Frame(head, entries) => self.take_frame(id, head, &entries),
            Arrived::Whole(head, bytes) => self.take_whole(id, head, bytes),
            // Bodies in registered memory arrive on carriers' connections only.
            Arrived::Body => Err(NOT_ITS_SIDES.into()),
        }
    }

    fn take_frame(&mut self, id: LinkId, head: Head, entries: &[u8]) -> Result<(), Ended> {
        let Some(entry) = self.links.get_mut(id) else { return Ok(()) };
        let lease = entry.lease();
        let frame = match (&mut entry.role, head) {
            (ControlRole::Serving { .. }, Head::Ping { stamp }) => {
                if let Some(mut lease) = lease {
                    lease.renew(stamp)?;
                    self.links.set_lease(id, lease);
                }
                self.links.send_head(id, Head::Pong { stamp: lease::stamp() });
                return Ok(());
            }
            (ControlRole::Up { stamp, .. }, Head::Pong { stamp: new }) => {
                *stamp = new;
                return Ok(());
            }
            (ControlRole::Up { stamp, .. }, Head::Ack { stamp: new, .. }) => {
                *stamp = new;
                Frame::Outcomes(Outcome::decode_all(entries).collect())
            }
            (ControlRole::Serving { .. }, Head::Immediate { token, number, counter, generation }) => {
                Frame::Immediate { token, number, counter, generation }
            }
            (ControlRole::Serving { .. }, Head::Fence { connection, code }) => {
                Frame::Fence { code, connection }
            }
            (ControlRole::Up { .. }, Head::Fenced { connection, code, is_over }) => {
                Frame::Fenced { code, connection, is_over }
            }
            (ControlRole::Up { .. }, Head::NoRoom { token }) => Frame::NoRoom { token },
            _ => return Err(NOT_ITS_SIDES.into()),
        };
        self.events.push_back(ControlEvent::Heard { channel: id, frame, lease });
        Ok(())
    }

    /// Takes a frame with its body.
    fn take_whole(&mut self, id: LinkId, head: Head, bytes: Vec<u8>) -> Result<(), Ended> {
        let Some(entry) = self.links.get(id) else { return Ok(()) };
        if !matches!(entry.role, ControlRole::Serving { .. } | ControlRole::Up { .. }) {
            return Err(NOT_ITS_SIDES.into());
        }
        let frame = match head {
            Head::Message { token, number, .. } => Frame::Message { token, number, bytes },
            Head::Words { code, kind, .. } => Frame::Words { code, kind, bytes },
            _ => Frame::Regions(bytes),
        };
        let lease = entry.lease();
        self.events.push_back(ControlEvent::Heard { channel: id, frame, lease });
        Ok(())
    }

    /// Ends a connection. If a job holds its link, the end waits until the job is back.
    pub(super) fn end_link(&mut self, now: Duration, process: &mut Process, id: LinkId, why: Ended) {
        let Some((role, link, why)) = self.links.end(id, why) else { return };
        let peer = link.socket().peer_addr().ok();
        process.note_ended(peer, &why);
        match role {
            ControlRole::Accepted { .. }
            | ControlRole::Proved { .. }
            | ControlRole::Fencing { .. }
            | ControlRole::Leaving => {
                tracing::debug!(?peer, %why, "a connection ended")
            }
            ControlRole::Serving { served, .. } => {
                tracing::debug!(?peer, %why, "a peer's connection ended");
                drop(link);
                process.sessions.leave(now, served.session);
                process.inbox.share_among(process.sessions.connected());
                self.events.push_back(ControlEvent::SessionEnded { channel: id });
            }
            ControlRole::Dialling { to, .. } => {
                tracing::debug!(?peer, %why, ?to, "a connection failed");
                match to {
                    Goal::Path(path, number) => {
                        self.note_trouble(path, &why, Some(id));
                        self.events.push_back(ControlEvent::Broke { path, number, channel: None });
                    }
                    Goal::Fence(broken) => {
                        self.events.push_back(ControlEvent::FenceAnswered { broken, is_over: false });
                    }
                }
            }
            ControlRole::Up { path, number, .. } => {
                // Log: the control connection to a peer ended; it is opened again. Do: look at the peer's log if
                // it repeats.
                tracing::info!(?peer, %why, "a control connection broke");
                self.note_trouble(path, &why, Some(id));
                // Linger 0 discards what the kernel has not sent, which it would otherwise keep sending for as long
                // as the network takes.
                let _ = sockopt::set_socket_linger(&*link, Some(Duration::ZERO));
                drop(link);
                self.events.push_back(ControlEvent::Broke { path, number, channel: Some(id) });
            }
        }
    }

    fn note_trouble(&mut self, path: PathId, why: &dyn std::fmt::Display, link: Option<LinkId>) {
        if let Some(path) = self.paths.get_mut(&path) {
            path.trouble = Some(why.to_string());
            if path.link == link {
                path.link = None;
            }
        }
    }

    /// Ends connections whose peer was silent for too long, unless this process was itself too late to hear it. Then pings on
    /// all connections that this process made.
    fn check_liveness(&mut self, now: Duration, is_late: bool) {
        let silent = |heard: Duration| now.saturating_sub(heard);
        let may_be_silent = |role: &ControlRole| match role {
            ControlRole::Serving { served } => self.silent.contains(&served.from),
            ControlRole::Up { from, .. } => self.silent.contains(from),
            _ => false,
        };
        // Each link is failed by its next job, or by the one that holds it.
        let dead = self
            .links
            .find(|entry| !is_late && silent(entry.heard) >= patience(entry) && !may_be_silent(&entry.role));
        // A TLS peer speaks at once. A silent one waits for us to speak first, so say what is wrong before it gives up.
        let mute = self.links.find(|entry| {
            matches!(entry.role, ControlRole::Accepted { .. })
                && entry.link().is_some_and(|link| link.awaits_first_word())
                && !is_late
                && silent(entry.heard) >= CONNECTING / 2
        });
        dead.into_iter().for_each(|id| self.links.fail(id, Ended::Io(io::ErrorKind::TimedOut.into())));
        mute.into_iter().for_each(|id| self.links.fail(id, Ended::NoTls));
        let up: Vec<(LinkId, u64)> = self
            .links
            .iter()
            .filter_map(|(id, entry)| match entry.role {
                ControlRole::Up { stamp, .. } => Some((id, stamp)),
                _ => None,
            })
            .collect();
        up.into_iter().for_each(|(id, stamp)| self.links.send_head(id, Head::Ping { stamp }));
    }

    fn accept_all(&mut self, now: Duration, index: usize) {
        for _ in 0..ACCEPTED_A_TURN {
            let Some(listener) = self.listeners.get(index) else { return };
            let (socket, peer) = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // The error concerns this one connection. Others can be accepted.
                Err(error) if !is_shortage(&error) => continue,
                Err(error) => {
                    if !std::mem::replace(&mut self.cannot_accept, true) {
                        let retry_ms = ACCEPT_PAUSE.as_millis() as u64;
                        // Log: file descriptors or memory ran out; new peers wait, connected ones go on. Do:
                        // raise the limit of open files (ulimit -n).
                        tracing::warn!(once = true, %error, retry_ms, "cannot accept connections; retrying");
                    }
                    self.resume_accepting_at = Some(now + ACCEPT_PAUSE);
                    return self.listen(Interest::default());
                }
            };
            if std::mem::take(&mut self.cannot_accept) {
                // Log: the shortage that kept peers from connecting is over.
                tracing::info!("accepting connections again");
            }
            if !self.make_room(peer) {
                continue;
            }
            let added = nonce().and_then(|challenge| {
                let (role, wants) =
                    (ControlRole::Accepted { challenge }, Wants::Greeting(PROOF_MESSAGE_BYTES));
                let id = self.links.accept(now, socket, self.credentials.as_deref(), role, wants)?;
                self.links.set_lease(id, Lease::begin());
                self.check_at = self.check_at.min(now + LIVENESS_INTERVAL);
                self.links.send(id, encode_challenge(&challenge));
                Ok(())
            });
            if let Err(error) = added
                && self.logged.insert(Some(peer), "not accepted")
            {
                // Log: a peer's connection was closed at its start for lack of a descriptor or memory. Do: raise
                // the limit of open files (ulimit -n).
                tracing::warn!(once = true, %peer, %error, "cannot accept a connection");
            }
        }
    }

    /// Whether one more connection may be added. If too many have proved nothing, ends the oldest of them: a peer that
    /// knows the secret proves it at once.
    fn make_room(&mut self, peer: SocketAddr) -> bool {
        if self.links.len() >= ACCEPTED_MAX {
            let unknown = self.links.find(|entry| matches!(entry.role, ControlRole::Accepted { .. }));
            if unknown.len() >= ACCEPTED_MAX {
                if self.logged.insert(Some(peer), "too many") {
                    let limit = ACCEPTED_MAX;
                    // Log: processes connect and prove nothing; engines that prove the secret still connect. Do:
                    // find out who connects from this address, and keep strangers away by a firewall.
                    tracing::warn!(once = true, %peer, limit, "too many unauthenticated connections; closing the oldest");
                }
                unknown.first().iter().for_each(|id| drop(self.links.end(**id, Ended::Closed)));
            }
        }
        let has_room = self.links.len() < LINKS_MAX;
        if !has_room && self.logged.insert(Some(peer), "no room") {
            // Log: this engine holds as many connections as it may; the peer tries again. Do: look for engines
            // that connect too often, or use fewer engines with this one.
            tracing::warn!(once = true, %peer, limit = LINKS_MAX, "too many connections; refusing this one");
        }
        has_room
    }

    fn listen(&self, interest: Interest) {
        for (index, listener) in (0..).zip(&self.listeners) {
            // Cannot fail for lack of memory, because the watch knows the listener already.
            let _ = self.watch.change(listener, LISTENER | index, interest);
        }
    }

    fn dial(&mut self, now: Duration, address: SocketAddr, to: Goal, whom: &Whom) -> io::Result<LinkId> {
        let purpose = match to {
            Goal::Path(..) => Purpose::Control,
            Goal::Fence((code, connection)) => Purpose::Fence(code, connection),
        };
        let (dialling, whom) = (Dialling::new(purpose)?, whom.clone());
        let role = ControlRole::Dialling { to, whom, dialling, segment: None };
        let id = self.links.open(now, address, self.credentials.as_deref(), role)?;
        self.check_at = self.check_at.min(now + LIVENESS_INTERVAL);
        Ok(id)
    }

    /// Ends all connections for good, except those that ask peers for fences.
    pub(crate) fn end_all(&mut self, now: Duration, process: &mut Process) {
        let is_fence = |role: &ControlRole| matches!(role, ControlRole::Dialling { to: Goal::Fence(_), .. });
        for id in self.links.find(|entry| !is_fence(&entry.role)) {
            self.end_link(now, process, id, Ended::Closed);
        }
        self.listeners.clear();
    }

    /// Ends the connections that ask for fences, too.
    pub(crate) fn end_fences(&mut self, now: Duration, process: &mut Process) {
        for id in self.links.find(|_| true) {
            self.end_link(now, process, id, Ended::Closed);
        }
    }

    /// Shared memory for a connection within this host, or why there is none. In that case everything uses the socket.
    pub(super) fn segment(&self, id: LinkId, to: Goal) -> Option<Result<Segment, String>> {
        let socket = self.links.get(id)?.link()?.socket();
        let may_be = self.offers_rings && matches!(to, Goal::Path(..)) && crate::links::is_same_host(socket);
        may_be.then(|| {
            Segment::create(crate::shm::RING_BYTES)
                .map_err(|error| format!("this process cannot share memory: {error}"))
        })
    }

    pub(super) fn me(&self) -> Identity {
        self.me
    }

    pub(super) fn offers_rings(&self) -> bool {
        self.offers_rings
    }

    /// The peer has welcomed a connection of this process.
    pub(super) fn take_welcome(
        &mut self,
        id: LinkId,
        to: Goal,
        welcome: Welcome,
        segment: Option<Result<Segment, String>>,
    ) -> Result<(), Ended> {
        let (path, number) = match to {
            Goal::Fence(broken) => {
                self.events.push_back(ControlEvent::FenceAnswered { broken, is_over: true });
                // This connection has served its purpose.
                drop(self.links.end(id, Ended::Closed));
                return Ok(());
            }
            Goal::Path(path, number) => (path, number),
        };
        if welcome.sums && !welcome.rings {
            self.links.begin_sums(id);
        }
        let no_rings = match (welcome.rings, segment) {
            (true, Some(Ok(segment))) => {
                self.links.switch_to_rings(id, segment.ends(RingSide::Connecting));
                None
            }
            (true, _) => return Err(BadFrame("it uses shared memory that was not offered").into()),
            (false, Some(Ok(_))) => Some("the peer cannot use our shared memory, as its log says".to_owned()),
            (false, Some(Err(why))) => Some(why),
            (false, None) => None,
        };
        self.without_rings += u64::from(no_rings.is_some());
        if let Some(at) = self.paths.get_mut(&path) {
            if let Some(why) = no_rings.as_ref().filter(|_| at.no_rings != no_rings) {
                // Log: the peer or this host allows no shared memory; small messages take the socket, which is a
                // little slower. Do: nothing, unless both run on one host: then see the field why.
                tracing::info!(address = ?at.address, %why, "no shared memory with this peer: control messages use the socket");
            }
            at.no_rings = no_rings;
        }
        self.links.want(id, Wants::Frames);
        let from = welcome.from;
        if let Some(entry) = self.links.get_mut(id) {
            entry.role = ControlRole::Up { path, number, from, stamp: 0 };
        }
        self.events.push_back(ControlEvent::Up { path, number, channel: id, from });
        Ok(())
    }

    /// Takes the peer's next message of a greeting.
    pub(super) fn advance_handshake(&mut self, id: LinkId, greeting: &[u8]) -> Result<(), Ended> {
        let me = self.me();
        // Made only now, because the socket had to be connected to show that the peer is on this host.
        let to = match self.links.get(id).map(|entry| &entry.role) {
            Some(ControlRole::Dialling { to, .. }) => *to,
            _ => return Ok(()),
        };
        let new_segment = self.segment(id, to);
        let wants_sums = self.wants_sums;
        let Some(entry) = self.links.get_mut(id) else { return Ok(()) };
        let ControlRole::Dialling { whom, dialling, segment, .. } = &mut entry.role else { return Ok(()) };
        let mut offered = None;
        let rings = || {
            let offer = new_segment.as_ref().and_then(|made| made.as_ref().ok()?.offer());
            offered = Some(new_segment);
            offer
        };
        let dialled = dialling.take(greeting, me, whom, wants_sums, rings)?;
        if let Some(new) = offered {
            *segment = new;
        }
        match dialled {
            Dialled::Send(bytes, next) => {
                self.links.send(id, bytes);
                self.links.want(id, Wants::Greeting(next));
                Ok(())
            }
            Dialled::Welcome(welcome) => {
                let segment = segment.take();
                self.take_welcome(id, to, welcome, segment)
            }
        }
    }
}

impl Control for ControlSockets {
    fn connect(&mut self, now: Duration, path: PathId, number: u32, whom: &Whom) {
        // Each attempt uses the next address.
        let address = whom.addresses[number as usize % whom.addresses.len()];
        let dialled = self.dial(now, address, Goal::Path(path, number), whom);
        let at = self.paths.entry(path).or_default();
        at.address = Some(address);
        match dialled {
            Ok(link) => at.link = Some(link),
            Err(error) => {
                tracing::debug!(%address, %error, "cannot connect");
                at.trouble = Some(error.to_string());
                self.events.push_back(ControlEvent::Broke { path, number, channel: None });
            }
        }
    }

    fn close(&mut self, _: Duration, path: PathId, number: u32) {
        let is_it = |role: &ControlRole| {
            matches!(role, ControlRole::Up { path: p, number: n, .. } if (*p, *n) == (path, number))
                || matches!(role, ControlRole::Dialling { to, .. } if *to == Goal::Path(path, number))
        };
        for id in self.links.find(|entry| is_it(&entry.role)) {
            self.links
                .fail(id, Ended::Bad(BadFrame("it is not wanted any more, or an answer took too long")));
        }
    }

    fn send(&mut self, channel: ChannelId, frame: Frame<Arc<[u8]>>) {
        let (head, entries, body) = frame.write();
        self.links.send_frame(channel, head, &entries, body);
    }

    fn end(&mut self, _: Duration, channel: ChannelId, why: &'static str) {
        self.links.fail(channel, Ended::Bad(BadFrame(why)));
    }

    fn ask_fence(&mut self, now: Duration, question: Question, whom: &Whom) {
        let Question { broken, address, .. } = question;
        if let Err(error) = self.dial(now, address, Goal::Fence(broken), whom) {
            tracing::debug!(%address, %error, "cannot connect");
            self.events.push_back(ControlEvent::FenceAnswered { broken, is_over: false });
        }
    }

    fn answer_fence(&mut self, _: Duration, channel: ChannelId, is_over: bool) {
        self.send_fence_answer(channel, is_over);
    }

    fn forget(&mut self, path: PathId) {
        self.paths.remove(&path);
    }

    fn next_event(&mut self) -> Option<ControlEvent> {
        self.events.pop_front()
    }
}

/// The longest silence that a connection survives.
fn patience(entry: &Entry<ControlRole>) -> Duration {
    match entry.role {
        ControlRole::Accepted { .. } => CONNECTING,
        _ => entry.progress().patience(),
    }
}

/// Whether accepting failed for lack of descriptors or memory.
fn is_shortage(error: &io::Error) -> bool {
    let wants = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    Errno::from_io_error(error).is_some_and(|errno| wants.contains(&errno))
}
