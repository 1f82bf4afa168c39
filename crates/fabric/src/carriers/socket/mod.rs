//! The carriers over sockets: each path is a TCP or TLS connection of its own, beside the control connection.
//!
//! There are two, which share this code. "tcp" moves bytes between host memory, which the socket reads and writes in place.
//! "tcp-slots" serves transfers with a GPU on either side, through slots of pinned memory ([`crate::carriers::slots`]).
//!
//! ```text
//!  connecting side                                      listening side
//!  connect: a greeting of purpose Bytes(code) --------> greeted: served
//!  post:  Write, runs, bytes -------------------------> places them in the runs
//!         <------------------------------ Ack ---------
//!         Read, runs ---------------------------------> sends the bytes of the runs
//!         <------------------------------ Data, bytes -
//! ```
//! When a connection breaks that carried WRITEs, the peer may still have bytes of them to place. So the posts stay open until
//! the peer has confirmed that it no longer reads that connection (a fence), or until its lease is over ([`crate::lease`]).
//! Only then may the bytes be posted again elsewhere, or the memory be reused: a late byte cannot overwrite either.

mod ending;
mod posted;
mod posting;
mod serving;
mod staged;

use std::any::Any;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use self::posted::SocketPost;
use crate::carrier::{BadWords, Carrier, CarrierPost, Context, Job, Owner, SessionId, Touched};
use crate::carriers::slots::{SlotJob, SlotPool, Slots};
use crate::control::sockets::LIVENESS_INTERVAL;
use crate::greeted::Greeted;
use crate::identity::Identity;
use crate::lease::Lease;
use crate::links::{Arrived, Back, LinkId, LinkJob, Links, Wants};
use crate::numbered::Numbered;
use crate::provider::NotNow;
use crate::registrar::Registrar;
use crate::tcp::{Credentials, Dialled, Dialling, Ended, Purpose};
use crate::transfers::{PathId, PathSpec, PeerId, Reach, Token};
use crate::watch::Watch;
use crate::wire::{BadFrame, Outcome};

/// Addresses used of one peer.
const ADDRESSES_MAX: usize = 16;
/// How often a waiting thread asks the driver whether a copy is done. No event tells of that.
const COPY_POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Which of the two carriers this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Tcp,
    TcpSlots,
}

#[derive(Debug)]
pub(crate) struct SocketCarrier {
    kind: Kind,
    me: Identity,
    /// If present, every connection is encrypted.
    credentials: Option<Arc<Credentials>>,
    wants_sums: bool,
    /// Where peers reach this process. Sent to peers that know an address only.
    addresses: Vec<SocketAddr>,
    /// Paths to each address of a peer.
    connections: usize,
    links: Links<BytesRole>,
    peers: Numbered<PeerId, AcceptedPeer>,
    paths: Numbered<PathId, LinkId>,
    posted: Numbered<Token, SocketPost>,
    /// Transfers of GPU memory. Stays empty for `Kind::Tcp`.
    slots: Slots,
    check_at: Duration,
    is_closed: bool,
}

/// A peer that has accepted the offer.
#[derive(Debug)]
struct AcceptedPeer {
    addresses: Vec<SocketAddr>,
    has_paths: bool,
}

#[derive(Debug)]
enum BytesRole {
    /// Made by this process; the handshake is under way.
    Dialling { path: PathId, number: u32, peer: PeerId, dialling: Dialling },
    /// Made by this process. `body`: the READ whose bytes are arriving; `stamp`: the peer's latest.
    Up { path: PathId, number: u32, peer: PeerId, connection: u64, body: Option<Token>, stamp: u64 },
    /// Made by a peer, and served. `body`: the WRITE whose bytes are arriving, and whether it is refused.
    Serving { from: Identity, connection: u64, body: Option<(u64, bool)>, acks: Vec<Outcome> },
}

impl BytesRole {
    /// Whether it serves this process's requests.
    fn serves(&self, reader: Identity) -> bool {
        matches!(self, BytesRole::Serving { from, .. } if *from == reader)
    }
}

/// Options of a [`SocketCarrier`].
#[derive(Debug, Clone)]
pub(crate) struct SocketOptions {
    pub(crate) me: Identity,
    pub(crate) credentials: Option<Arc<Credentials>>,
    /// Whether bodies of frames get checksums on connections that are not encrypted.
    pub(crate) wants_sums: bool,
    pub(crate) addresses: Vec<SocketAddr>,
    pub(crate) connections: usize,
}

impl SocketCarrier {
    /// For transfers between host memory.
    pub(crate) fn tcp(watch: Watch, options: SocketOptions) -> SocketCarrier {
        SocketCarrier::new(Kind::Tcp, watch, options, Slots::default())
    }

    /// For transfers with a GPU on either side.
    pub(crate) fn tcp_slots(watch: Watch, options: SocketOptions, pool: Arc<SlotPool>) -> SocketCarrier {
        SocketCarrier::new(Kind::TcpSlots, watch, options, Slots::new(pool))
    }

    fn new(kind: Kind, watch: Watch, options: SocketOptions, slots: Slots) -> SocketCarrier {
        let SocketOptions { me, credentials, wants_sums, addresses, connections } = options;
        SocketCarrier {
            kind,
            me,
            credentials,
            wants_sums,
            addresses,
            connections: connections.max(1),
            links: if kind == Kind::TcpSlots { Links::in_parts(watch) } else { Links::new(watch) },
            peers: Numbered::default(),
            paths: Numbered::default(),
            posted: Numbered::default(),
            slots,
            check_at: LIVENESS_INTERVAL,
            is_closed: false,
        }
    }

    /// Adds the paths to a peer. "tcp-slots" waits until either side has registered a GPU's memory.
    fn add_paths(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        let spec = PathSpec::new(self.reach(), PathSpec::SOCKETS);
        let Some(known) = self.peers.get_mut(&peer).filter(|known| !known.has_paths) else { return };
        let has_gpus = || {
            cx.process.regions.has_had_gpus() || cx.peers.get(&peer).is_some_and(|peer| peer.has_had_gpus())
        };
        if self.kind == Kind::TcpSlots && !has_gpus() {
            return;
        }
        known.has_paths = true;
        for name in 0..known.addresses.len() * self.connections {
            let address = known.addresses[name % known.addresses.len()];
            cx.add_path_to(peer, spec, name as u64, Some(address));
        }
    }

    /// The peer has sent the next message of the greeting.
    fn advance_handshake(&mut self, cx: &mut Context<'_>, id: LinkId, greeting: &[u8]) -> Result<(), Ended> {
        let Some(entry) = self.links.get_mut(id) else { return Ok(()) };
        let BytesRole::Dialling { path, number, peer, dialling } = &mut entry.role else { return Ok(()) };
        let (path, number, peer, connection) = (*path, *number, *peer, dialling.connection);
        let Some(known) = cx.peers.get(&peer) else { return Err(Ended::Closed) };
        match dialling.take(greeting, self.me, &known.whom, self.wants_sums, || None)? {
            Dialled::Send(bytes, next) => {
                self.links.send(id, bytes);
                self.links.want(id, Wants::Greeting(next));
            }
            Dialled::Welcome(welcome) => {
                entry.role = BytesRole::Up { path, number, peer, connection, body: None, stamp: 0 };
                self.links.want(id, Wants::Frames);
                if welcome.sums {
                    self.links.begin_sums(id);
                }
                cx.up(path, number);
            }
        }
        Ok(())
    }

    fn arrive(&mut self, cx: &mut Context<'_>, id: LinkId, arrived: Arrived) -> Result<(), Ended> {
        match arrived {
            Arrived::Connected => {
                self.links.want(id, Wants::Greeting(Dialling::FIRST));
                Ok(())
            }
            Arrived::Greeting(bytes) => self.advance_handshake(cx, id, &bytes),
            Arrived::Frame(head, entries) => self.take_frame(cx, id, head, &entries),
            Arrived::Body => self.take_body(cx, id),
            Arrived::Whole(..) => Err(BadFrame("a frame of a control connection").into()),
        }
    }

    fn finish_job(&mut self, cx: &mut Context<'_>, job: LinkJob) {
        let id = job.id;
        let Some(Back { arrived, outcome }) = self.links.put_back(cx.now, job) else { return };
        cx.note_released();
        for arrived in arrived {
            if let Err(ended) = self.arrive(cx, id, arrived) {
                return self.end(cx, id, ended);
            }
        }
        if let Err(ended) = outcome {
            return self.end(cx, id, ended);
        }
        self.answer(id);
        self.links.settle(id);
    }
}

impl Carrier for SocketCarrier {
    fn code(&self) -> u8 {
        match self.kind {
            Kind::Tcp => 1,
            Kind::TcpSlots => 2,
        }
    }

    fn reach(&self) -> Reach {
        match self.kind {
            Kind::Tcp => Reach::HOSTS,
            Kind::TcpSlots => Reach::GPUS,
        }
    }

    fn registrar(&self) -> Option<Arc<dyn Registrar>> {
        self.slots.registrar()
    }

    fn control_up(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        cx.offer(peer, Vec::new());
    }

    /// Answers with the addresses of this process, one a line.
    fn consider(&mut self, cx: &mut Context<'_>, session: SessionId, _: &[u8]) -> Result<(), BadWords> {
        let addresses: Vec<String> =
            self.addresses.iter().take(ADDRESSES_MAX).map(SocketAddr::to_string).collect();
        cx.accept(session, addresses.join("\n").into_bytes());
        Ok(())
    }

    /// The descriptor names the peer's addresses. A peer that was connected by address only names them in its answer.
    fn accepted(&mut self, cx: &mut Context<'_>, peer: PeerId, answer: &[u8]) -> Result<(), BadWords> {
        let Some(known) = cx.peers.get(&peer) else { return Ok(()) };
        let mut addresses = known.whom.addresses.clone();
        if known.is_known_by_address {
            let text = std::str::from_utf8(answer).map_err(|_| BadWords("addresses that are no text"))?;
            let listed: Vec<SocketAddr> =
                text.lines().filter_map(|line| line.parse().ok()).take(ADDRESSES_MAX).collect();
            // Otherwise something leads there that the peer does not know of, such as NAT. Keep the address that worked.
            if addresses.iter().all(|address| listed.contains(address)) {
                addresses = listed;
            }
        }
        addresses.truncate(ADDRESSES_MAX);
        self.peers.entry(peer).or_insert(AcceptedPeer { addresses, has_paths: false });
        self.add_paths(cx, peer);
        Ok(())
    }

    fn peer_removed(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        self.peers.remove(&peer);
        // Paths that were still connecting.
        let of_peer = |role: &BytesRole| matches!(role, BytesRole::Dialling { peer: of, .. } if *of == peer);
        for id in self.links.find(|entry| of_peer(&entry.role)) {
            self.end(cx, id, Ended::Closed);
        }
    }

    fn regions_changed(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        self.add_paths(cx, peer);
    }

    fn connect(&mut self, cx: &mut Context<'_>, path: PathId, number: u32, peer: PeerId, name: u64) {
        let Some(known) = self.peers.get(&peer) else { return cx.broke(path, number, "the peer is gone") };
        let address = known.addresses[name as usize % known.addresses.len()];
        let opened = Dialling::new(Purpose::Bytes(self.code())).and_then(|dialling| {
            let role = BytesRole::Dialling { path, number, peer, dialling };
            self.links.open(cx.now, address, self.credentials.as_deref(), role)
        });
        match opened {
            Ok(link) => {
                self.check_at = self.check_at.min(cx.now + LIVENESS_INTERVAL);
                self.paths.insert(path, link);
            }
            Err(error) => {
                tracing::debug!(?peer, %address, %error, "cannot connect");
                cx.broke(path, number, error);
            }
        }
    }

    fn close(&mut self, cx: &mut Context<'_>, path: PathId, connection: u32) {
        let Some(link) = self.paths.get(&path).copied() else { return };
        let is_it = match self.links.get(link).map(|entry| &entry.role) {
            Some(BytesRole::Up { number, .. } | BytesRole::Dialling { number, .. }) => *number == connection,
            _ => false,
        };
        if is_it {
            self.end(cx, link, Ended::NotWanted);
        }
    }

    fn post(&mut self, cx: &mut Context<'_>, post: &CarrierPost<'_>) -> Result<(), NotNow> {
        self.send(cx, post)
    }

    fn descriptor_ready(&mut self, _: &mut Context<'_>, tag: u64) -> bool {
        self.links.note_ready(tag)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> bool {
        if cx.now >= self.check_at {
            let is_late = cx.now >= self.check_at + LIVENESS_INTERVAL;
            self.check_at = cx.now + LIVENESS_INTERVAL;
            self.check_liveness(cx.now, is_late);
        }
        self.serve_slots(cx)
    }

    fn next_tick(&self, now: Duration) -> Option<Duration> {
        if self.links.has_due() || self.slots.has_job() {
            return Some(Duration::ZERO);
        }
        let liveness = (!self.links.is_empty()).then_some(self.check_at);
        let copies = self.is_expecting().then(|| now + COPY_POLL_INTERVAL);
        [liveness, copies].into_iter().flatten().min()
    }

    fn is_expecting(&self) -> bool {
        self.slots.is_copying()
    }

    fn take_job(&mut self) -> Option<Box<dyn Job>> {
        match self.links.take_job() {
            Some(job) => Some(Box::new(job)),
            None => self.slots.take_job().map(|job| Box::new(job) as Box<dyn Job>),
        }
    }

    fn put_back(&mut self, cx: &mut Context<'_>, job: Box<dyn Job>) {
        match job.into_any().downcast::<LinkJob>() {
            Ok(job) => self.finish_job(cx, *job),
            Err(other) => {
                if let Ok(job) = other.downcast::<SlotJob>() {
                    self.slots.put_back(*job);
                    // Bytes waited for the new slot, and no event comes for them.
                    self.serve_slots(cx);
                }
            }
        }
    }

    fn fence(&mut self, cx: &mut Context<'_>, from: Owner, connection: u64) -> bool {
        let is_it = |role: &BytesRole| matches!(role, BytesRole::Serving { from: f, connection: c, .. } if (*f, *c) == (from.0, connection));
        for id in self.links.find(|entry| is_it(&entry.role)) {
            self.end(cx, id, Ended::Closed);
        }
        // A connection that a job holds ends when the job is back, so the peer has to ask again.
        self.links.iter().all(|(_, entry)| !is_it(&entry.role))
            && !self.slots.is_placing_for(from.0, connection)
    }

    fn fence_over(&mut self, cx: &mut Context<'_>, _: u64, tokens: Vec<Token>) {
        self.complete_unknown(cx, tokens);
    }

    fn touches(&self, memory: Touched<'_>) -> bool {
        let Touched { spots, reader } = memory;
        let counts = |role: &BytesRole| reader.is_none_or(|reader| role.serves(reader));
        let by_links = self.links.may_touch(spots, counts);
        let of_slots = self.slots.links_that_touch(spots);
        let by_slots =
            of_slots.into_iter().any(|id| self.links.get(id).is_none_or(|entry| counts(&entry.role)));
        // An orphan has lost its connection, so its bytes reach no reader.
        by_links || by_slots || (reader.is_none() && self.slots.is_touched_by_orphans(spots))
    }

    fn release(&mut self, cx: &mut Context<'_>, memory: Touched<'_>) {
        for id in self.links_that_touch(memory) {
            self.end(cx, id, Ended::TooSlow);
        }
    }

    fn greeted(&mut self, cx: &mut Context<'_>, greeted: Greeted) {
        let Greeted { link, lease, from, connection } = greeted;
        if self.is_closed {
            return;
        }
        let role = BytesRole::Serving { from, connection, body: None, acks: Vec::new() };
        if let Err(error) = self.links.adopt(cx.now, link, lease, role) {
            tracing::debug!(%error, "a peer's connection cannot be served");
        }
        self.check_at = self.check_at.min(cx.now + LIVENESS_INTERVAL);
    }

    fn close_all(&mut self, cx: &mut Context<'_>) {
        self.is_closed = true;
        for id in self.links.find(|_| true) {
            self.end(cx, id, Ended::Closed);
        }
    }

    fn is_busy(&self) -> bool {
        !self.links.is_empty() || self.slots.is_copying()
    }
}

impl Job for LinkJob {
    fn run(&mut self) {
        LinkJob::run(self);
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

impl SocketCarrier {
    /// The lease of a connection that is served.
    fn lease(&self, id: LinkId) -> Option<Lease> {
        self.links.get(id)?.lease()
    }
}
