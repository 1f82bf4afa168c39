//! The connections of one owner (the control connections, or a carrier over sockets): queues what the owner sends, and hands
//! it what arrived.
//!
//! [`LinkJob`]s read and write the sockets and rings without the engine's lock. The engine's own thread runs them, or a
//! thread that waits for a transfer:
//!
//! ```text
//!              send                take_job                 run: no lock              put_back, settle
//!  the owner ------> Entry: outgoing ------> LinkJob (link) ------------> sent, arrived --------------> the owner
//! ```
//! Who ends a link, and when:
//! - The owner, with [`Links::end`], which hands the link out; dropping it closes the connection. If a job has the link,
//!   [`Links::put_back`] returns the reason as the job's outcome, and the owner calls `end` then.
//! - An error of the connection (the peer closed it, a bad frame, an expired lease) is the outcome of the job that met it.
//!
//! After `end` has handed a link out, no thread reads or writes registered memory for it.
//!
//! While a job has a link, frames that the owner sends wait in the entry for the next job. A link whose peer does not read
//! its answers, or whose owner holds it, is not read.

#![allow(unsafe_code, reason = "the kernel reads and writes registered memory")]

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use kvlane_shm_ring::{Reader, Writer};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::lease::Lease;
use crate::numbered::Numbered;
use crate::ranges::{Piece, Spots};
use crate::silence::{Progress, UNACKNOWLEDGED_MS};
use crate::tcp::{Credentials, Ended, Head, Link, Out, Received, Stream};
use crate::watch::{Interest, Watch};

/// Never used twice by one owner.
pub(crate) type LinkId = u64;

/// Bytes of heads, entries and messages that wait to be written ([`Out::own_bytes`]). Beyond this the peer is not reading its
/// answers, and nothing more is read from it.
const OWN_BYTES_MAX: usize = 256 << 10;
/// The same bound for the number of [`Out`]s that wait.
const ENTRIES_MAX: usize = 64 << 10;
/// Frames that one job reads from a connection before the others have their turn.
const FRAMES_A_TURN: usize = 64;
/// Entry bytes after which a job reads no further frame. The owner parses all of them in one hold of the engine's lock. One
/// frame has at most this many, so a job brings less than twice as many.
const ENTRY_BYTES_A_TURN: usize = crate::tcp::ENTRIES_MAX * crate::wire::RUN_BYTES;
/// Send buffer of a socket to a process of the same host: small enough that the receiver finds the bytes in the processor's
/// caches. Not for other hosts, because it bounds the bytes of a round trip. Measured on two cores, GB/s in two runs:
///
/// ```text
///                    256 KiB     512 KiB     1 MiB (one run)
///  writes of 1 MiB   2.0, 1.4    2.3, 2.6    1.9
///  reads of 16 MiB   2.9, 2.2    3.3, 3.4    2.6
/// ```
const SAME_HOST_SEND_BYTES: usize = 512 << 10;

/// The connections of one owner, each with the owner's `R`.
#[derive(Debug)]
pub(crate) struct Links<R> {
    watch: Watch,
    entries: Numbered<LinkId, Entry<R>>,
    next: LinkId,
    /// Links in [`Turn::Due`], in the order in which they became due. May name links that have ended.
    due: VecDeque<LinkId>,
    /// Links that go through rings. The watch does not report what arrives in a ring.
    rings: Vec<LinkId>,
    /// A ring was added, or its wake was taken from the socket: a thread that sleeps on sockets must wake and check the rings.
    wake_needed: bool,
    traffic: Traffic,
}

/// The frames of an owner's links, and when their lease is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Traffic {
    /// Frames taken whole, whether or not the lease holds: the owner checks it before it places a frame's bytes.
    Messages,
    /// Bytes of regions, placed only while the lease holds. The owner knows all pieces of a frame when its head comes.
    Bytes,
    /// The same in parts: when the bytes of one part are in place, the owner says where the next part goes.
    BytesInParts,
}

/// One connection, with what waits for its next job.
#[derive(Debug)]
pub(crate) struct Entry<R> {
    pub(crate) role: R,
    turn: Turn,
    peer: Option<SocketAddr>,
    wants: Wants,
    lease: Option<Lease>,
    /// Sent by the owner, not yet given to a job.
    outgoing: Vec<Out>,
    /// [`Out::own_bytes`] of `outgoing` and of what the link has not written yet.
    own_bytes: usize,
    /// The number of these [`Out`]s.
    waiting: usize,
    /// Where the next job puts the body of the last frame: into these pieces, then so many bytes nowhere.
    expected: Option<(Vec<Piece>, u64)>,
    /// Whether a checksum follows each body that the owner sends from now on.
    has_sums: bool,
    /// [`Out`]s that the owner has ever sent; a [`Links::mark`] is a value of this.
    queued: u64,
    /// How many of them the link has written.
    written: u64,
    interest: Interest,
    /// When a job last received a frame's bytes; before that, when the link was added.
    pub(crate) heard: Duration,
    input: Input,
    /// The owner reads nothing more for now.
    is_held: bool,
    /// The next job writes so many of `outgoing` to the socket, then sends and receives everything through these rings.
    switch: Option<(usize, (Writer, Reader))>,
    /// A frame that is taken whole, of which some bytes are missing.
    whole: Option<Whole>,
    /// Set when the link ends while a job has it, or by its next job: that job's outcome.
    ending: Option<Ended>,
}

/// The scheduling state of a link.
#[derive(Debug)]
enum Turn {
    /// The link has nothing to write or to read, as far as is known.
    Idle(Box<Link>),
    /// In the queue of links with something to write or to read.
    Due(Box<Link>),
    /// A job has the link.
    Running,
}

/// The input of a link, as far as it is known without reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Input {
    Nothing,
    /// Something may be there, in the link, its socket or its ring.
    Possible,
    /// The watch reported the socket as ready. For a link with rings that may be a wake, or the end of the connection.
    Reported,
}

/// The next item that the owner expects from a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wants {
    /// The end of connect(2), as success or error.
    Connection,
    /// A greeting of so many bytes.
    Greeting(usize),
    Frames,
    /// No more input: the owner ends the link when all is written.
    Nothing,
}

/// An item that a job received.
#[derive(Debug)]
pub(crate) enum Arrived {
    Connected,
    Greeting(Vec<u8>),
    /// A head and its entries. If the frame has a body, the owner calls [`Links::expect`] before the next job.
    Frame(Head, Vec<u8>),
    /// The expected bytes of the frame before are in place.
    Body,
    /// A frame that is taken whole: its head, and its body as bytes of this process.
    Whole(Head, Vec<u8>),
}

/// A frame that is taken whole while its body arrives. Nothing reads the bytes before all are there.
#[derive(Debug)]
struct Whole {
    head: Head,
    bytes: Vec<u8>,
}

/// Reads and writes one link, without the engine's lock.
#[derive(Debug)]
pub(crate) struct LinkJob {
    pub(crate) id: LinkId,
    link: Box<Link>,
    wants: Wants,
    lease: Option<Lease>,
    task: Task,
    input: Input,
    traffic: Traffic,
    switch: Option<(Writer, Reader)>,
    arrived: Vec<Arrived>,
    whole: Option<Whole>,
    outcome: Result<(), Ended>,
    /// The job stopped at its bound, and there may be more to read.
    has_more: bool,
    /// The link's count of received bytes when the job began.
    received: u64,
}

/// The work of a job on its link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Task {
    WriteAndRead,
    /// Nothing is read, because the owner holds the link, or the peer does not read its answers.
    Write,
    /// Nothing: the owner ends the link when the job is back.
    End,
}

/// The results of a job, for the owner.
#[derive(Debug)]
pub(crate) struct Back {
    pub(crate) arrived: Vec<Arrived>,
    pub(crate) outcome: Result<(), Ended>,
}

impl<R> Links<R> {
    pub(crate) fn new(watch: Watch) -> Links<R> {
        Links {
            watch,
            entries: Numbered::default(),
            next: 0,
            due: VecDeque::new(),
            rings: Vec::new(),
            wake_needed: false,
            traffic: Traffic::Bytes,
        }
    }

    /// Links for frames that are taken whole. Such frames are read after the lease expired too, because a peer may get no
    /// processor for longer than that.
    pub(crate) fn of_messages(watch: Watch) -> Links<R> {
        Links { traffic: Traffic::Messages, ..Links::new(watch) }
    }

    /// Links where the owner may expect the bytes of one frame in parts.
    pub(crate) fn in_parts(watch: Watch) -> Links<R> {
        Links { traffic: Traffic::BytesInParts, ..Links::new(watch) }
    }

    /// Begins to connect to an address. [`Arrived::Connected`] or the outcome of a job says how that ends.
    pub(crate) fn open(
        &mut self,
        now: Duration,
        address: SocketAddr,
        credentials: Option<&Credentials>,
        role: R,
    ) -> io::Result<LinkId> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(errno) => return Err(errno.into()),
        }
        let socket = TcpStream::from(socket);
        socket.set_nodelay(true)?;
        let link = Link::new(Stream::new(socket, credentials, false)?)?;
        // The watch reports the end of connect(2), success or failure, by one of these.
        let interest = Interest { reads: true, writes: true };
        self.add(now, Box::new(link), role, Wants::Connection, interest)
    }

    /// Adds a connection that a peer has made.
    pub(crate) fn accept(
        &mut self,
        now: Duration,
        socket: TcpStream,
        credentials: Option<&Credentials>,
        role: R,
        wants: Wants,
    ) -> io::Result<LinkId> {
        socket.set_nodelay(true)?;
        tune_socket(&socket);
        let link = Link::new(Stream::new(socket, credentials, true)?)?;
        self.add(now, Box::new(link), role, wants, Interest::READS)
    }

    /// Adds a connection that another owner has greeted. Frames may have arrived over it already.
    pub(crate) fn adopt(
        &mut self,
        now: Duration,
        link: Box<Link>,
        lease: Lease,
        role: R,
    ) -> io::Result<LinkId> {
        let id = self.add(now, link, role, Wants::Frames, Interest::READS)?;
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.lease = Some(lease);
            entry.note_input();
        }
        self.settle(id);
        Ok(id)
    }

    fn add(
        &mut self,
        now: Duration,
        link: Box<Link>,
        role: R,
        wants: Wants,
        interest: Interest,
    ) -> io::Result<LinkId> {
        let id = self.next;
        self.next += 1;
        self.watch.add(&*link, id, interest)?;
        let entry = Entry {
            role,
            peer: link.socket().peer_addr().ok(),
            written: link.written(),
            queued: link.written() + link.backlog().1 as u64,
            own_bytes: link.backlog().0,
            waiting: link.backlog().1,
            has_sums: link.has_sums(),
            turn: Turn::Idle(link),
            wants,
            lease: None,
            outgoing: Vec::new(),
            expected: None,
            interest,
            heard: now,
            input: Input::Nothing,
            is_held: false,
            switch: None,
            whole: None,
            ending: None,
        };
        self.entries.insert(id, entry);
        Ok(id)
    }

    pub(crate) fn get(&self, id: LinkId) -> Option<&Entry<R>> {
        self.entries.get(&id)
    }

    pub(crate) fn get_mut(&mut self, id: LinkId) -> Option<&mut Entry<R>> {
        self.entries.get_mut(&id)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (LinkId, &Entry<R>)> {
        self.entries.iter().map(|(id, entry)| (*id, entry))
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The links for which `is_one` holds, in the order of their numbers.
    pub(crate) fn find(&self, is_one: impl Fn(&Entry<R>) -> bool) -> Vec<LinkId> {
        let mut found: Vec<LinkId> =
            self.entries.iter().filter(|(_, entry)| is_one(entry)).map(|(id, _)| *id).collect();
        found.sort_unstable();
        found
    }

    /// Removes a link and hands it out; dropping it closes the connection. None: there is no such link, or a job has it. In
    /// the second case the job comes back with `why` as its outcome, and the owner calls `end` again.
    pub(crate) fn end(&mut self, id: LinkId, why: Ended) -> Option<(R, Box<Link>, Ended)> {
        let entry = self.entries.get_mut(&id)?;
        if entry.link().is_none() {
            entry.ending.get_or_insert(why);
            return None;
        }
        let Entry { role, turn, .. } = self.entries.remove(&id)?;
        let link = turn.into_link()?;
        self.rings.retain(|other| *other != id);
        self.watch.remove(&*link);
        Some((role, link, why))
    }

    /// Ends a link later: `why` is the outcome of its next job. For callers that cannot handle the end of the link now.
    pub(crate) fn fail(&mut self, id: LinkId, why: Ended) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.ending.get_or_insert(why);
            self.make_due(id);
        }
    }

    /// Removes a link for another owner, with all that was sent on it. None: a job has it.
    pub(crate) fn take_out(&mut self, id: LinkId) -> Option<Box<Link>> {
        self.entries.get(&id)?.link()?;
        let Entry { turn, outgoing, .. } = self.entries.remove(&id)?;
        let mut link = turn.into_link()?;
        link.send_all(outgoing);
        self.watch.remove(&*link);
        Some(link)
    }

    /// Queues bytes that belong to no frame, as greetings do.
    pub(crate) fn send(&mut self, id: LinkId, bytes: Vec<u8>) {
        self.send_out(id, Out::Bytes(bytes, 0));
    }

    /// Queues a frame: its head, its entries, and its body. The link reads memory of the body until it has written the frame
    /// ([`Entry::has_written`]) or has ended.
    pub(crate) fn send_frame(
        &mut self,
        id: LinkId,
        head: Head,
        entries: &[u8],
        body: impl IntoIterator<Item = Out>,
    ) {
        self.send(id, head.frame(entries));
        let mut has_body = false;
        for out in body {
            has_body = true;
            self.send_out(id, out);
        }
        if has_body && self.entries.get(&id).is_some_and(|entry| entry.has_sums) {
            self.send_out(id, Out::sum());
        }
    }

    /// Queues a frame without entries and body.
    pub(crate) fn send_head(&mut self, id: LinkId, head: Head) {
        self.send_frame(id, head, &[], []);
    }

    /// From the next frame on a checksum follows each body, in both directions.
    pub(crate) fn begin_sums(&mut self, id: LinkId) {
        if let Some(entry) = self.entries.get_mut(&id)
            && let Some(link) = entry.turn.link_mut()
        {
            link.begin_sums();
            entry.has_sums = true;
        } else {
            // The owner calls this after it has parsed a greeting, between two jobs.
            debug_assert!(false, "a job has the link");
        }
    }

    fn send_out(&mut self, id: LinkId, out: Out) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        entry.own_bytes += out.own_bytes();
        entry.waiting += 1;
        entry.queued += 1;
        entry.outgoing.push(out);
        self.make_due(id);
    }

    /// A mark behind all that was sent on a link until now, for [`Entry::has_written`].
    pub(crate) fn mark(&self, id: LinkId) -> u64 {
        self.entries.get(&id).map_or(0, |entry| entry.queued)
    }

    /// Says where the body of the last frame goes: into the pieces in this order, then `discard` bytes nowhere.
    pub(crate) fn expect(&mut self, id: LinkId, to: Vec<Piece>, discard: u64) {
        if let Some(entry) = self.entries.get_mut(&id) {
            debug_assert!(entry.expected.is_none());
            entry.expected = Some((to, discard));
        }
    }

    /// Sets what the owner expects next from a link.
    pub(crate) fn want(&mut self, id: LinkId, wants: Wants) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.wants = wants;
        }
    }

    /// Jobs place the bytes of a link while this lease holds.
    pub(crate) fn set_lease(&mut self, id: LinkId, lease: Lease) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.lease = Some(lease);
        }
    }

    /// Stops reading a link, or goes on with it.
    pub(crate) fn hold(&mut self, id: LinkId, is_held: bool) {
        if let Some(entry) = self.entries.get_mut(&id)
            && std::mem::replace(&mut entry.is_held, is_held) != is_held
        {
            // The watch does not report again what has left the socket already.
            entry.note_input();
            self.settle(id);
        }
    }

    /// Switches a link to these ends of a segment, as soon as what was sent until now is written.
    pub(crate) fn switch_to_rings(&mut self, id: LinkId, ends: (Writer, Reader)) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.switch = Some((entry.outgoing.len(), ends));
            self.make_due(id);
        }
    }

    /// The watch reports a link as ready. False: a job has the link. The watch reports it again and again until that job has
    /// read what is there, so the caller must not poll meanwhile.
    pub(crate) fn note_ready(&mut self, id: LinkId) -> bool {
        let Some(entry) = self.entries.get_mut(&id) else { return true };
        entry.input = Input::Reported;
        let is_running = matches!(entry.turn, Turn::Running);
        // This thread, or the job's, takes the peer's wake from the socket. If another thread sleeps on the watch, it needs one
        // of its own.
        self.wake_needed |= self.rings.contains(&id);
        if is_running {
            return false;
        }
        self.make_due(id);
        true
    }

    fn make_due(&mut self, id: LinkId) {
        if let Some(entry) = self.entries.get_mut(&id)
            && entry.turn.make_due()
        {
            self.due.push_back(id);
        }
    }

    /// Whether [`Links::take_job`] may have a job.
    pub(crate) fn has_due(&self) -> bool {
        !self.due.is_empty()
    }

    /// A job for the next link that is due.
    pub(crate) fn take_job(&mut self) -> Option<LinkJob> {
        loop {
            let id = self.due.pop_front()?;
            let Some(entry) = self.entries.get_mut(&id) else { continue };
            let Some(mut link) = std::mem::replace(&mut entry.turn, Turn::Running).into_link() else {
                continue;
            };
            let is_stuck = entry.is_stuck();
            let task = match (&entry.ending, is_stuck) {
                (Some(_), _) => Task::End,
                (None, true) => Task::Write,
                (None, false) => Task::WriteAndRead,
            };
            // Not before connect(2) has ended, which the watch reports.
            let may_write = entry.wants != Wants::Connection && task != Task::End;
            // Frames that the owner sent after the switch go through the rings.
            let (until, switch) = match entry.switch.take() {
                Some((until, ends)) => (until, Some(ends)),
                None => (entry.outgoing.len(), None),
            };
            if may_write {
                link.send_all(entry.outgoing.drain(..until));
            }
            if let Some((to, discard)) = entry.expected.take() {
                link.expect(to, discard);
            }
            // Input that this job does not read stays for a later one.
            let left = if is_stuck { Input::Possible } else { Input::Nothing };
            return Some(LinkJob {
                id,
                received: link.received(),
                link,
                wants: entry.wants,
                lease: entry.lease.filter(|_| self.traffic != Traffic::Messages),
                task,
                input: std::mem::replace(&mut entry.input, left),
                traffic: self.traffic,
                switch,
                arrived: Vec::new(),
                whole: entry.whole.take(),
                outcome: Ok(()),
                has_more: false,
            });
        }
    }

    /// Takes a link back from its job. The owner handles what arrived, and then calls [`Links::settle`]. None: the link has
    /// been removed meanwhile.
    pub(crate) fn put_back(&mut self, now: Duration, job: LinkJob) -> Option<Back> {
        let LinkJob { id, mut link, wants, received, mut arrived, whole, mut outcome, has_more, .. } = job;
        let entry = self.entries.get_mut(&id)?;
        entry.whole = whole;
        entry.written = link.written();
        let (own_bytes, waiting) = link.backlog();
        entry.own_bytes = own_bytes + entry.outgoing.iter().map(Out::own_bytes).sum::<usize>();
        entry.waiting = waiting + entry.outgoing.len();
        if has_more {
            entry.note_input();
        }
        // A greeting has one deadline, which its parts do not move.
        if wants == Wants::Frames && link.received() > received {
            entry.heard = now;
        }
        if link.rings().is_some() && !self.rings.contains(&id) {
            self.rings.push(id);
            // Frames may be in the ring already, and no wake will come for them.
            entry.note_input();
            self.wake_needed = true;
        }
        if let Some(why) = entry.ending.take() {
            // The owner has ended the link, and ignores what arrived since.
            arrived.clear();
            outcome = Err(why);
        }
        entry.turn = Turn::Idle(link);
        Some(Back { arrived, outcome })
    }

    /// Makes a link due if there is something to do, else has the watch (or a wake from the peer) report it.
    pub(crate) fn settle(&mut self, id: LinkId) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        let is_stuck = entry.is_stuck();
        let Some(link) = entry.turn.link_mut() else { return };
        let is_connecting = entry.wants == Wants::Connection;
        let has_input = match entry.input {
            Input::Nothing => false,
            Input::Possible => !is_stuck,
            Input::Reported => true,
        };
        let mut is_due =
            (!entry.outgoing.is_empty() && !is_connecting) || has_input || entry.switch.is_some();
        if !is_stuck && !is_connecting && link.has_more() {
            // These bytes have left the socket: the watch does not report them again.
            entry.input = entry.input.or_possible();
            is_due = true;
        }
        let is_flushed = link.is_flushed();
        if let Some(rings) = link.rings() {
            is_due |= !is_flushed && !rings.prepare_to_wait_for_room();
        } else if !is_connecting {
            let interest = Interest { reads: !is_stuck, writes: !is_flushed };
            if std::mem::replace(&mut entry.interest, interest) != interest
                && let Err(error) = self.watch.change(&*link, id, interest)
            {
                // The next job has the error as its outcome.
                tracing::debug!(link = id, %error, "cannot watch socket; ending its connection");
                entry.ending = Some(error.into());
                is_due = true;
            }
        }
        if is_due {
            self.make_due(id);
        }
    }

    pub(crate) fn has_rings(&self) -> bool {
        !self.rings.is_empty()
    }

    /// Makes the links due whose rings have something to read. True if there were any.
    pub(crate) fn poll_rings(&mut self) -> bool {
        let mut any = false;
        for index in 0..self.rings.len() {
            let id = self.rings[index];
            let Some(entry) = self.entries.get_mut(&id) else { continue };
            if entry.is_stuck() || matches!(entry.turn, Turn::Due(_)) {
                continue;
            }
            let Some(rings) = entry.turn.link_mut().and_then(|link| link.rings()) else { continue };
            if !rings.is_empty() {
                any = true;
                entry.note_input();
                self.make_due(id);
            }
        }
        any
    }

    /// Asks the peers of all rings for a wake over the socket when they next write. False: a ring has something already, or a
    /// job is reading one right now.
    pub(crate) fn prepare_to_sleep(&mut self) -> bool {
        let mut may_sleep = true;
        for id in &self.rings {
            let Some(entry) = self.entries.get_mut(id) else { continue };
            // A stuck link is not read before its peer takes its answers, or a driver frees a slot.
            if !entry.is_stuck() {
                let rings = entry.turn.link_mut().map(|link| link.rings());
                may_sleep &= rings.is_some_and(|rings| rings.is_none_or(|rings| rings.prepare_to_sleep()));
            }
        }
        may_sleep
    }

    /// Tells the peers of all rings that no wakes are needed any more.
    pub(crate) fn woken(&mut self) {
        for id in &self.rings {
            let link = self.entries.get_mut(id).and_then(|entry| entry.turn.link_mut());
            if let Some(rings) = link.and_then(|link| link.rings()) {
                rings.woken();
            }
        }
    }

    /// Whether the rings have changed, since the last call, in a way that a thread which sleeps on sockets would not notice.
    pub(crate) fn take_wake_needed(&mut self) -> bool {
        std::mem::take(&mut self.wake_needed)
    }

    /// Whether a link whose role counts may read or write this memory. A link that a job has counts as touching everything.
    pub(crate) fn may_touch(&self, memory: Spots<'_>, counts: impl Fn(&R) -> bool) -> bool {
        let may = |entry: &Entry<R>| entry.link().is_none() || entry.touches(memory);
        self.entries.values().any(|entry| counts(&entry.role) && may(entry))
    }

    /// Links that will read or write this memory, except those that a job has.
    pub(crate) fn touching(&self, memory: Spots<'_>) -> Vec<LinkId> {
        self.find(|entry| entry.link().is_some() && entry.touches(memory))
    }
}

impl<R> Entry<R> {
    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        self.peer
    }

    /// Whether all that was sent before this mark has been written.
    pub(crate) fn has_written(&self, mark: u64) -> bool {
        self.written >= mark
    }

    /// Whether everything is written.
    pub(crate) fn is_flushed(&self) -> bool {
        self.outgoing.is_empty() && self.link().is_some_and(Link::is_flushed)
    }

    pub(crate) fn lease(&self) -> Option<Lease> {
        self.lease
    }

    pub(crate) fn progress(&self) -> Progress {
        match self.wants {
            Wants::Connection => Progress::Connecting,
            Wants::Greeting(_) | Wants::Nothing => Progress::Greeting,
            Wants::Frames => Progress::Greeted,
        }
    }

    /// None: a job has the link.
    pub(crate) fn link(&self) -> Option<&Link> {
        self.turn.link()
    }

    /// Records that there may be something to read. A report of the watch stays one.
    fn note_input(&mut self) {
        self.input = self.input.or_possible();
    }

    /// Whether jobs must not read the link: the owner holds it, or its peer does not read its answers.
    fn is_stuck(&self) -> bool {
        self.is_held || self.own_bytes > OWN_BYTES_MAX || self.waiting > ENTRIES_MAX
    }

    /// Whether frames that wait, expected bytes, or the link itself touch this memory. The link is not asked while a job has
    /// it.
    fn touches(&self, memory: Spots<'_>) -> bool {
        let is_expected = |to: &[Piece]| to.iter().any(|piece| memory.overlap_host(*piece));
        self.outgoing.iter().any(|out| out.touches(memory))
            || self.expected.as_ref().is_some_and(|(to, _)| is_expected(to))
            || self.link().is_some_and(|link| link.touches(memory))
    }
}

impl Turn {
    fn link(&self) -> Option<&Link> {
        match self {
            Turn::Idle(link) | Turn::Due(link) => Some(link),
            Turn::Running => None,
        }
    }

    fn link_mut(&mut self) -> Option<&mut Link> {
        match self {
            Turn::Idle(link) | Turn::Due(link) => Some(link),
            Turn::Running => None,
        }
    }

    fn into_link(self) -> Option<Box<Link>> {
        match self {
            Turn::Idle(link) | Turn::Due(link) => Some(link),
            Turn::Running => None,
        }
    }

    /// Makes an idle link due. False: it was due already, or a job has it.
    fn make_due(&mut self) -> bool {
        match std::mem::replace(self, Turn::Running) {
            Turn::Idle(link) => {
                *self = Turn::Due(link);
                true
            }
            other => {
                *self = other;
                false
            }
        }
    }
}

impl Input {
    fn or_possible(self) -> Input {
        match self {
            Input::Nothing => Input::Possible,
            other => other,
        }
    }
}

impl LinkJob {
    /// Writes and reads, without waiting.
    pub(crate) fn run(&mut self) {
        self.outcome = self.work();
    }

    fn work(&mut self) -> Result<(), Ended> {
        if self.task == Task::End {
            return Ok(());
        }
        if self.wants == Wants::Connection {
            if let Ok(Err(errno)) | Err(errno) = sockopt::socket_error(&*self.link) {
                return Err(Ended::Io(errno.into()));
            }
            if self.reads() {
                tune_socket(self.link.socket());
                self.arrived.push(Arrived::Connected);
            }
            return Ok(());
        }
        // The peer relies on the lease, so bytes that arrived but were not read yet stay unread.
        if self.lease.is_some_and(|lease| !lease.holds()) {
            return Err(Ended::Late);
        }
        // SAFETY: queued memory belongs to a registered region, of a transfer in flight or served to a peer. A region is not
        // given back while a link touches it. Or the memory belongs to a message, whose owner holds it until the link has
        // written it or is gone. Or it belongs to a slot, which the link's lane holds as long.
        unsafe { self.link.flush()? };
        if let Some(ends) = self.switch.take() {
            if !self.link.is_flushed() {
                // A new socket takes a whole greeting at once, unless the peer misbehaves.
                return Err(Ended::Closed);
            }
            self.link.switch_to_rings(ends);
            return Ok(());
        }
        if self.input == Input::Reported
            && let Some(rings) = self.link.rings()
        {
            rings.note_readable();
        }
        if !self.reads() || self.wants == Wants::Nothing {
            // Nothing is received here, so the end of the connection has to be asked for.
            let has_ended = self.input == Input::Reported && self.link.has_ended();
            return if has_ended { Err(Ended::Closed) } else { Ok(()) };
        }
        self.receive()
    }

    /// Whether the job reads: it may, and there may be something.
    fn reads(&self) -> bool {
        self.task == Task::WriteAndRead && self.input != Input::Nothing
    }

    fn receive(&mut self) -> Result<(), Ended> {
        let mut entry_bytes = 0;
        for _ in 0..FRAMES_A_TURN {
            if let Wants::Greeting(len) = self.wants {
                self.arrived.extend(self.link.greeting(len)?.map(Arrived::Greeting));
                // How the next bytes are read depends on the greeting, which the owner parses first.
                self.has_more = !self.arrived.is_empty();
                return Ok(());
            }
            // SAFETY: expected memory belongs to a registered region, as queued memory does, or to a frame that this job takes
            // whole, or to a slot that the link's lane holds.
            match unsafe { self.link.receive(self.lease)? } {
                Received::Nothing => return Ok(()),
                Received::Body if self.whole.is_some() => {
                    let whole = self.whole.take().map(|Whole { head, bytes }| Arrived::Whole(head, bytes));
                    self.arrived.extend(whole);
                    if entry_bytes >= ENTRY_BYTES_A_TURN {
                        break;
                    }
                }
                Received::Body => {
                    self.arrived.push(Arrived::Body);
                    if self.traffic == Traffic::BytesInParts {
                        break;
                    }
                }
                Received::Frame(head, entries) => {
                    entry_bytes += entries.len();
                    if let Some(bytes) = head.own_bytes() {
                        entry_bytes += bytes as usize;
                        let Whole { bytes, .. } =
                            self.whole.insert(Whole { head, bytes: vec![0; bytes as usize] });
                        let piece =
                            Piece { address: bytes.as_mut_ptr().expose_provenance(), len: bytes.len() };
                        self.link.expect((piece.len > 0).then_some(piece).into_iter().collect(), 0);
                        continue;
                    }
                    self.arrived.push(Arrived::Frame(head, entries));
                    if head.body_bytes().is_some() || entry_bytes >= ENTRY_BYTES_A_TURN {
                        break;
                    }
                }
            }
            if !self.link.has_begun() {
                // The receiver, or the peer, waits for what arrived. So the socket is not read again first: the watch reports
                // if there is more.
                return Ok(());
            }
        }
        self.has_more = true;
        Ok(())
    }
}

/// Whether both ends of a connection have the same IP address.
pub(crate) fn is_same_host(socket: &TcpStream) -> bool {
    let addresses = (socket.local_addr(), socket.peer_addr());
    matches!(addresses, (Ok(own), Ok(peer)) if own.ip() == peer.ip())
}

/// Sets the send buffer of a socket between two processes of this host. Between hosts, has the kernel end a connection whose
/// other end acknowledges nothing.
fn tune_socket(socket: &TcpStream) {
    // If an option cannot be set, the connection is slower, or its end is noticed later.
    if is_same_host(socket) {
        let _ = sockopt::set_socket_send_buffer_size(socket.as_fd(), SAME_HOST_SEND_BYTES);
    } else {
        let _ = sockopt::set_tcp_user_timeout(socket.as_fd(), UNACKNOWLEDGED_MS);
    }
}
