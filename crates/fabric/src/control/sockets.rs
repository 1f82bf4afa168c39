//! Control connections over TCP or TLS, and through rings between processes of one host.
//!
//! ```text
//!  connecting side:   TCP connect --> challenge --> proof sent --> verdict --> Hello sent --> Welcome: up --> gone
//!  listening side:    accepted: challenge sent --> proof --> verdict sent --> Hello --> Welcome sent: serving --> gone
//!                                                                                          '--> a carrier's, for bytes
//! ```

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
use crate::shm::{Segment, Side};
use crate::silence::CONNECTING;
use crate::tcp::{
    Credentials, Dialled, Dialling, Ended, Head, PROOF_MESSAGE_BYTES, Purpose, SessionKey, Welcome,
    encode_challenge, nonce,
};
use crate::transfers::PathId;
use crate::trust::Proofs;
use crate::watch::{Interest, Watch};
use crate::wire::{BadFrame, Outcome};

/// How often connections are looked at. Whoever connected says something at each look.
pub(crate) const LOOK: Duration = Duration::from_millis(500);
/// How long nobody is accepted after that failed for want of something.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Connections of peers, and of them those of whom nothing is known yet.
const LINKS_MAX: usize = 16_384;
const ACCEPTED_MAX: usize = 1_024;
/// Connections that are accepted before others have their turn.
const ACCEPTED_A_TURN: usize = 64;
/// Listeners are told from connections by this bit of their tag.
const LISTENER: u64 = 1 << 55;

#[derive(Debug)]
pub(crate) struct ControlSockets {
    me: Identity,
    pub(crate) proofs: Proofs,
    /// With these all connections are encrypted.
    credentials: Option<Arc<Credentials>>,
    watch: Watch,
    pub(super) links: Links<Role>,
    pub(super) logged: LoggedPeers,
    pub(super) events: VecDeque<ControlEvent>,
    listeners: Vec<TcpListener>,
    /// When listeners that were left alone are listened on again.
    accept_at: Option<Duration>,
    /// The log says that no connection can be accepted.
    cannot_accept: bool,
    look_at: Duration,
    /// Whether what is said to processes of this host goes through rings.
    offers_rings: bool,
    /// Whether the bytes of frames are to have sums, where they are not encrypted.
    pub(super) wants_sums: bool,
    pub(super) paths: Numbered<PathId, PathState>,
    /// Connections of either side between processes of this host that had to do without rings.
    pub(crate) without_rings: u64,
    /// Codes of carriers that take connections for bytes.
    pub(crate) carriers: Vec<u8>,
    /// Peers whose silence never ends a connection.
    pub(crate) silent: HashSet<Identity>,
}

const NOT_ITS_SIDES: BadFrame = BadFrame("a frame that is not its side's");

/// A path that carries what is said to a peer.
#[derive(Debug, Default, Clone)]
pub(crate) struct PathState {
    link: Option<LinkId>,
    pub(crate) address: Option<SocketAddr>,
    /// Why it is not up, or was not the last time.
    pub(crate) trouble: Option<String>,
    /// Why it does not go through rings, where both sides are on one host.
    pub(crate) no_rings: Option<String>,
}

/// What a connection is.
#[derive(Debug)]
pub(crate) enum Role {
    /// Of somebody who has proved nothing, and is told nothing.
    Accepted { challenge: [u8; 16] },
    /// Of a peer that knows the secret, and has not said who it is.
    Proved { key: SessionKey },
    /// Of a peer that wants to know that nothing of a broken connection is placed any more.
    Fencing { key: SessionKey },
    /// Of a peer whose requests are served.
    Serving { served: Served },
    /// Ends when all is written.
    Leaving,
    /// Ours, on its way.
    Dialling { to: Goal, whom: Whom, dialling: Dialling, segment: Option<Result<Segment, String>> },
    /// Ours, to this peer; and the latest stamp that it sent.
    Up { path: PathId, number: u32, from: Identity, stamp: u64 },
}

/// What a connection of ours is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Goal {
    /// A path's connection of that number.
    Path(PathId, u32),
    /// That nothing more is placed of an earlier connection.
    Fence(Broken),
}

impl ControlSockets {
    pub(crate) fn open(
        me: Identity,
        proofs: Proofs,
        credentials: Option<Arc<Credentials>>,
        watch: Watch,
        listen: &[SocketAddr],
        offers_rings: bool,
        wants_sums: bool,
    ) -> io::Result<ControlSockets> {
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
            accept_at: None,
            cannot_accept: false,
            look_at: LOOK,
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

    pub(crate) fn status(&self, path: PathId) -> Option<&PathState> {
        self.paths.get(&path)
    }

    /// A descriptor is ready.
    pub(crate) fn descriptor_ready(&mut self, now: Duration, tag: u64) {
        match tag & LISTENER {
            0 => self.links.note_ready(tag),
            _ => self.accept_all(now, (tag ^ LISTENER) as usize),
        }
    }

    /// Looks at rings, and does what is due. Whether there was anything in rings.
    pub(crate) fn poll(&mut self, now: Duration, process: &mut Process) -> bool {
        let any = self.links.poll_rings();
        if now >= self.look_at {
            let is_late = now >= self.look_at + LOOK;
            self.look_at = now + LOOK;
            self.look(now, is_late);
            let immediates = &mut process.immediates;
            process.sessions.forget_old(now, |session| immediates.forget(session));
        }
        if self.accept_at.is_some_and(|at| at <= now) {
            self.accept_at = None;
            self.listen(Interest::READS);
        }
        any
    }

    /// Whether something may come that no descriptor tells of.
    pub(crate) fn has_rings(&self) -> bool {
        self.links.has_rings()
    }

    /// When there is something to do if nothing comes.
    pub(crate) fn next_tick(&self, process: &Process) -> Option<Duration> {
        if self.links.has_due() || !self.events.is_empty() {
            return Some(Duration::ZERO);
        }
        let look = (!self.links.is_empty() || !process.sessions.is_empty()).then_some(self.look_at);
        [look, self.accept_at].into_iter().flatten().min()
    }

    /// See [`Links::prepare_to_sleep`].
    pub(crate) fn prepare_to_sleep(&mut self) -> bool {
        self.links.prepare_to_sleep()
    }

    /// See [`Links::woken`].
    pub(crate) fn woken(&mut self) {
        self.links.woken();
    }

    /// See [`Links::take_news_of_rings`].
    pub(crate) fn take_news_of_rings(&mut self) -> bool {
        self.links.take_wake_needed()
    }

    pub(crate) fn take_job(&mut self) -> Option<LinkJob> {
        self.links.take_job()
    }

    /// A job is done: takes what it brought.
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
        let is_done = |entry: &Entry<Role>| matches!(entry.role, Role::Leaving) && entry.is_flushed();
        if self.links.get(id).is_some_and(is_done) {
            return self.end_link(now, process, id, Ended::Closed);
        }
        self.links.settle(id);
    }

    /// Takes what came over a connection.
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
            // Bytes of transfers go over connections of their carriers.
            Arrived::Body => Err(NOT_ITS_SIDES.into()),
        }
    }

    fn take_frame(&mut self, id: LinkId, head: Head, entries: &[u8]) -> Result<(), Ended> {
        let Some(entry) = self.links.get_mut(id) else { return Ok(()) };
        let lease = entry.lease();
        let frame = match (&mut entry.role, head) {
            (Role::Serving { .. }, Head::Ping { stamp }) => {
                if let Some(mut lease) = lease {
                    lease.renew(stamp)?;
                    self.links.set_lease(id, lease);
                }
                self.links.send_head(id, Head::Pong { stamp: lease::stamp() });
                return Ok(());
            }
            (Role::Up { stamp, .. }, Head::Pong { stamp: new }) => {
                *stamp = new;
                return Ok(());
            }
            (Role::Up { stamp, .. }, Head::Ack { stamp: new, .. }) => {
                *stamp = new;
                Frame::Outcomes(Outcome::decode_all(entries).collect())
            }
            (Role::Serving { .. }, Head::Immediate { token, number, counter, generation }) => {
                Frame::Immediate { token, number, counter, generation }
            }
            (Role::Serving { .. }, Head::Fence { connection, code }) => Frame::Fence { code, connection },
            (Role::Up { .. }, Head::Fenced { connection, code, is_over }) => {
                Frame::Fenced { code, connection, is_over }
            }
            (Role::Up { .. }, Head::NoRoom { token }) => Frame::NoRoom { token },
            _ => return Err(NOT_ITS_SIDES.into()),
        };
        self.events.push_back(ControlEvent::Heard { channel: id, frame, lease });
        Ok(())
    }

    /// A frame came, with all its bytes.
    fn take_whole(&mut self, id: LinkId, head: Head, bytes: Vec<u8>) -> Result<(), Ended> {
        let Some(entry) = self.links.get(id) else { return Ok(()) };
        if !matches!(entry.role, Role::Serving { .. } | Role::Up { .. }) {
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

    /// A connection is over.
    pub(super) fn end_link(&mut self, now: Duration, process: &mut Process, id: LinkId, why: Ended) {
        let Some((role, link, why)) = self.links.end(id, why) else { return };
        let peer = link.socket().peer_addr().ok();
        process.note_ended(peer, &why);
        match role {
            Role::Accepted { .. } | Role::Proved { .. } | Role::Fencing { .. } | Role::Leaving => {
                tracing::debug!(?peer, %why, "a connection ended")
            }
            Role::Serving { served, .. } => {
                tracing::debug!(?peer, %why, "a peer's connection ended");
                drop(link);
                process.sessions.leave(now, served.session);
                process.inbox.share_among(process.sessions.connected());
                self.events.push_back(ControlEvent::SessionEnded { channel: id });
            }
            Role::Dialling { to, .. } => {
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
            Role::Up { path, number, .. } => {
                tracing::info!(?peer, %why, "a control connection broke");
                self.note_trouble(path, &why, Some(id));
                // What the kernel has not sent, it is not to send: without this it would go on behind our back for as long as
                // the network takes.
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

    /// Ends connections that say nothing, unless nobody has listened, and says something where nobody else does.
    fn look(&mut self, now: Duration, is_late: bool) {
        let silent = |heard: Duration| now.saturating_sub(heard);
        let may_be_silent = |role: &Role| match role {
            Role::Serving { served } => self.silent.contains(&served.from),
            Role::Up { from, .. } => self.silent.contains(from),
            _ => false,
        };
        // They come back by way of their jobs' outcome, or at once.
        let dead = self
            .links
            .find(|entry| !is_late && silent(entry.heard) >= patience(entry) && !may_be_silent(&entry.role));
        // Whoever speaks TLS speaks at once. A peer that waits for us to speak is told so before it gives up.
        let mute = self.links.find(|entry| {
            matches!(entry.role, Role::Accepted { .. })
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
                Role::Up { stamp, .. } => Some((id, stamp)),
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
                // Of the one connection: others go on.
                Err(error) if !is_want(&error) => continue,
                Err(error) => {
                    if !std::mem::replace(&mut self.cannot_accept, true) {
                        tracing::warn!(%error, "no connection can be accepted; tried again every 100 ms, said once");
                    }
                    self.accept_at = Some(now + ACCEPT_PAUSE);
                    return self.listen(Interest::default());
                }
            };
            if std::mem::take(&mut self.cannot_accept) {
                tracing::info!("connections are accepted again");
            }
            if !self.make_room(peer) {
                continue;
            }
            let added = nonce().and_then(|challenge| {
                let (role, wants) = (Role::Accepted { challenge }, Wants::Greeting(PROOF_MESSAGE_BYTES));
                let id = self.links.accept(now, socket, self.credentials.as_deref(), role, wants)?;
                self.links.set_lease(id, Lease::begin());
                self.look_at = self.look_at.min(now + LOOK);
                self.links.send(id, encode_challenge(&challenge));
                Ok(())
            });
            if let Err(error) = added
                && self.logged.insert(Some(peer), "not accepted")
            {
                tracing::warn!(%peer, %error, "a connection cannot be accepted; said once of this address");
            }
        }
    }

    /// Whether one more has room. Of too many who have proved nothing the oldest goes: a peer that knows the secret proves it
    /// at once.
    fn make_room(&mut self, peer: SocketAddr) -> bool {
        if self.links.len() >= ACCEPTED_MAX {
            let unknown = self.links.find(|entry| matches!(entry.role, Role::Accepted { .. }));
            if unknown.len() >= ACCEPTED_MAX {
                if self.logged.insert(Some(peer), "too many") {
                    tracing::warn!(%peer, "too many connections prove nothing: the oldest are closed; said once of this address");
                }
                unknown.first().iter().for_each(|id| drop(self.links.end(**id, Ended::Closed)));
            }
        }
        let has_room = self.links.len() < LINKS_MAX;
        if !has_room && self.logged.insert(Some(peer), "no room") {
            tracing::warn!(%peer, "too many connections: one is refused; said once of this address");
        }
        has_room
    }

    fn listen(&self, interest: Interest) {
        for (index, listener) in (0..).zip(&self.listeners) {
            // It is known to the watch, which needs no more memory for this.
            let _ = self.watch.change(listener, LISTENER | index, interest);
        }
    }

    fn dial(&mut self, now: Duration, address: SocketAddr, to: Goal, whom: &Whom) -> io::Result<LinkId> {
        let purpose = match to {
            Goal::Path(..) => Purpose::Control,
            Goal::Fence((code, connection)) => Purpose::Fence(code, connection),
        };
        let (dialling, whom) = (Dialling::new(purpose)?, whom.clone());
        let role = Role::Dialling { to, whom, dialling, segment: None };
        let id = self.links.open(now, address, self.credentials.as_deref(), role)?;
        self.look_at = self.look_at.min(now + LOOK);
        Ok(id)
    }

    /// Ends all connections, for good, but those that ask peers to place nothing more of what broke.
    pub(crate) fn end_all(&mut self, now: Duration, process: &mut Process) {
        let is_fence = |role: &Role| matches!(role, Role::Dialling { to: Goal::Fence(_), .. });
        for id in self.links.find(|entry| !is_fence(&entry.role)) {
            self.end_link(now, process, id, Ended::Closed);
        }
        self.listeners.clear();
    }

    /// Ends those too.
    pub(crate) fn end_fences(&mut self, now: Duration, process: &mut Process) {
        for id in self.links.find(|_| true) {
            self.end_link(now, process, id, Ended::Closed);
        }
    }

    /// Shared memory for a connection that seems to stay on this host, or why there is none: then all goes through the socket.
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

    /// The peer has welcomed a connection of ours.
    pub(super) fn welcomed(
        &mut self,
        id: LinkId,
        to: Goal,
        welcome: Welcome,
        segment: Option<Result<Segment, String>>,
    ) -> Result<(), Ended> {
        let (path, number) = match to {
            Goal::Fence(broken) => {
                self.events.push_back(ControlEvent::FenceAnswered { broken, is_over: true });
                // Nothing else is said over it.
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
                self.links.switch_to_rings(id, segment.ends(Side::Connecting));
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
                tracing::info!(address = ?at.address, %why, "no shared memory with this peer: control messages use the socket");
            }
            at.no_rings = no_rings;
        }
        self.links.want(id, Wants::Frames);
        let from = welcome.from;
        if let Some(entry) = self.links.get_mut(id) {
            entry.role = Role::Up { path, number, from, stamp: 0 };
        }
        self.events.push_back(ControlEvent::Up { path, number, channel: id, from });
        Ok(())
    }

    /// A connection of ours goes on with its greeting.
    pub(super) fn go_on(&mut self, id: LinkId, greeting: &[u8]) -> Result<(), Ended> {
        let me = self.me();
        // Made when it is asked for, since only then the socket is known to be one of this host.
        let to = match self.links.get(id).map(|entry| &entry.role) {
            Some(Role::Dialling { to, .. }) => *to,
            _ => return Ok(()),
        };
        let new_segment = self.segment(id, to);
        let wants_sums = self.wants_sums;
        let Some(entry) = self.links.get_mut(id) else { return Ok(()) };
        let Role::Dialling { whom, dialling, segment, .. } = &mut entry.role else { return Ok(()) };
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
                self.welcomed(id, to, welcome, segment)
            }
        }
    }
}

impl Control for ControlSockets {
    fn connect(&mut self, now: Duration, path: PathId, number: u32, whom: &Whom) {
        // Each address in its turn.
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
        let is_it = |role: &Role| {
            matches!(role, Role::Up { path: p, number: n, .. } if (*p, *n) == (path, number))
                || matches!(role, Role::Dialling { to, .. } if *to == Goal::Path(path, number))
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
        self.report_fenced(channel, is_over);
    }

    fn forget(&mut self, path: PathId) {
        self.paths.remove(&path);
    }

    fn next_event(&mut self) -> Option<ControlEvent> {
        self.events.pop_front()
    }
}

/// Longest silence of a connection.
fn patience(entry: &Entry<Role>) -> Duration {
    match entry.role {
        Role::Accepted { .. } => CONNECTING,
        _ => entry.progress().patience(),
    }
}

/// Of descriptors or memory.
fn is_want(error: &io::Error) -> bool {
    let wants = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    Errno::from_io_error(error).is_some_and(|errno| wants.contains(&errno))
}
