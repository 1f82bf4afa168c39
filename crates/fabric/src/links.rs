//! Connections of one part of the engine: what is to be written to them, and what came.
//!
//! Sockets and rings are read and written by [`LinkJob`]s, by whichever thread has time, while nobody holds the engine's lock:
//!
//! ```text
//!              say           take_job                  run: no lock                 put_back
//!  the owner ------> said  -----------> LinkJob (link) ------------> written, came -----------> the owner looks at it
//! ```
//! While a job has a link, what is said to it waits, and its end waits until the job is back: then nothing is read or written
//! any more.

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
use crate::tcp::{Came, Credentials, Ended, Head, Link, Out, Stream};
use crate::watch::{Interest, Watch};

/// A number of a connection, not used twice.
pub(crate) type LinkId = u64;

/// Answers that wait for a peer that does not read them: beyond this nothing more is read from it.
const OWN_BYTES_MAX: usize = 256 << 10;
const ENTRIES_MAX: usize = 64 << 10;
/// Frames of one connection before the others have their turn.
const FRAMES_A_TURN: usize = 64;
/// The same of what their entries say, all of which is looked at in one hold of the engine's lock: as much as one frame has at
/// the most, so that it is less than twice as much.
const ENTRY_BYTES_A_TURN: usize = crate::tcp::ENTRIES_MAX * crate::wire::RUN_BYTES;
/// Bytes that wait in a socket to a process of the same host: few enough that the processor's caches still have them when
/// the other side takes them out. On two cores writes of 1 MiB reached 2.3 and 2.6 GB/s with this in two runs, 2.0 and 1.4
/// with half of it, 1.9 with twice as much; reads of 16 MiB 3.3 and 3.4, 2.9 and 2.2, 2.6. Over a network it would hold back
/// whatever is faster than this in a round trip.
const SAME_HOST_SEND_BYTES: usize = 512 << 10;

/// Connections, each with what its owner knows of it.
#[derive(Debug)]
pub(crate) struct Links<R> {
    watch: Watch,
    entries: Numbered<LinkId, Entry<R>>,
    next: LinkId,
    /// Links with something to write or to read.
    due: VecDeque<LinkId>,
    /// Links that go through rings, which the watch knows nothing of.
    rings: Vec<LinkId>,
    has_news_of_rings: bool,
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

/// A connection.
#[derive(Debug)]
pub(crate) struct Entry<R> {
    /// What it is to its owner.
    pub(crate) role: R,
    turn: Turn,
    peer: Option<SocketAddr>,
    wants: Wants,
    lease: Option<Lease>,
    /// What waits for the next job, and what it is with what the link still has to write.
    said: Vec<Out>,
    own_bytes: usize,
    waiting: usize,
    /// Where the bytes of the frame that came last go, from the next job on; and how many go nowhere.
    expected: Option<(Vec<Piece>, u64)>,
    /// Whether sums stand behind the bytes of what is said from now on.
    has_sums: bool,
    /// Entries that were ever said, and of them those that have been written.
    queued: u64,
    written: u64,
    interest: Interest,
    /// When the peer was heard the last time.
    pub(crate) heard: Duration,
    input: Input,
    /// The owner wants nothing more of it for now.
    is_held: bool,
    /// From the next job on, when so much of what was said is written, everything goes through these.
    switch: Option<(usize, (Writer, Reader))>,
    /// What comes of a frame that is taken as a whole.
    whole: Option<Whole>,
    /// Why it ends as soon as the job is back.
    ending: Option<Ended>,
}

/// Who has a link, and whether it waits for a job.
#[derive(Debug)]
enum Turn {
    /// Nothing to do.
    Idle(Box<Link>),
    /// In the queue of links with something to write or to read.
    Due(Box<Link>),
    /// A job has the link.
    Running,
}

/// What there may be to read from a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Input {
    Nothing,
    /// Something may be there, in the link, its socket or its ring.
    Possible,
    /// The watch reported the socket as ready. For a link with rings that may be a wake, or the end of the connection.
    Reported,
}

/// What is to come next over a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wants {
    /// That it is connected.
    Connection,
    /// A greeting of so many bytes.
    Greeting(usize),
    /// Frames.
    Frames,
    /// Nothing: it ends when all is written.
    Nothing,
}

/// Something that came over a link.
#[derive(Debug)]
pub(crate) enum Arrived {
    Connected,
    Greeting(Vec<u8>),
    /// A head and its entries. If it has a body, the owner says where that goes before anything else.
    Frame(Head, Vec<u8>),
    /// All bytes of the frame before are where they belong.
    Body,
    /// A frame of a control connection, with the bytes that follow it.
    Whole(Head, Vec<u8>),
}

/// A frame whose bytes are coming. They are not looked at before all are there.
#[derive(Debug)]
struct Whole {
    head: Head,
    bytes: Vec<u8>,
}

/// What one link is to write, and what there is to be read.
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
    has_more: bool,
    received: u64,
}

/// What a job does with its link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Task {
    WriteAndRead,
    /// Nothing is read, because the owner holds the link, or the peer does not read its answers.
    Write,
    /// Nothing: the owner ends the link when the job is back.
    End,
}

/// What came of a job.
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
            has_news_of_rings: false,
            traffic: Traffic::Bytes,
        }
    }

    /// Links for frames that are taken whole, so a peer may have got no processor for longer than its lease.
    pub(crate) fn of_messages(watch: Watch) -> Links<R> {
        Links { traffic: Traffic::Messages, ..Links::new(watch) }
    }

    /// The same where the bytes of one frame may be expected in parts.
    pub(crate) fn in_parts(watch: Watch) -> Links<R> {
        Links { traffic: Traffic::BytesInParts, ..Links::new(watch) }
    }

    /// A connection to this address, on its way.
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
        // Told when it is connected, or is not going to be.
        let interest = Interest { reads: true, writes: true };
        self.add(now, Box::new(link), role, Wants::Connection, interest)
    }

    /// A connection that a peer has made.
    pub(crate) fn accept(
        &mut self,
        now: Duration,
        socket: TcpStream,
        credentials: Option<&Credentials>,
        role: R,
        wants: Wants,
    ) -> io::Result<LinkId> {
        socket.set_nodelay(true)?;
        suit_host(&socket);
        let link = Link::new(Stream::new(socket, credentials, true)?)?;
        self.add(now, Box::new(link), role, wants, Interest::READS)
    }

    /// A connection that another part has greeted. Something may have come over it already.
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
            said: Vec::new(),
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

    /// Those of which this holds.
    pub(crate) fn find(&self, is_one: impl Fn(&Entry<R>) -> bool) -> Vec<LinkId> {
        let mut found: Vec<LinkId> =
            self.entries.iter().filter(|(_, entry)| is_one(entry)).map(|(id, _)| *id).collect();
        found.sort_unstable();
        found
    }

    /// Takes a link out that is over; dropped, it is closed. None: there is no such link, or a job has it: then it comes back
    /// with this as its outcome.
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

    /// Ends a link by way of its next job, whose outcome this is: for whoever cannot see to the end right now.
    pub(crate) fn fail(&mut self, id: LinkId, why: Ended) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.ending.get_or_insert(why);
            self.make_due(id);
        }
    }

    /// Takes a link out for another owner, with all that was said to it. None: a job has it.
    pub(crate) fn take_out(&mut self, id: LinkId) -> Option<Box<Link>> {
        self.entries.get(&id)?.link()?;
        let Entry { turn, said, .. } = self.entries.remove(&id)?;
        let mut link = turn.into_link()?;
        link.send_all(said);
        self.watch.remove(&*link);
        Some(link)
    }

    /// Writes bytes.
    pub(crate) fn send(&mut self, id: LinkId, bytes: Vec<u8>) {
        self.send_out(id, Out::Bytes(bytes, 0));
    }

    /// Writes a frame: its head, its entries, and the bytes that follow. Memory is not touched any more once it has been
    /// written, or the link is gone.
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

    /// A frame of nothing but its head.
    pub(crate) fn send_head(&mut self, id: LinkId, head: Head) {
        self.send_frame(id, head, &[], []);
    }

    /// From the next frame on its bytes have a sum behind them, in both directions.
    pub(crate) fn begin_sums(&mut self, id: LinkId) {
        if let Some(entry) = self.entries.get_mut(&id)
            && let Some(link) = entry.turn.link_mut()
        {
            link.begin_sums();
            entry.has_sums = true;
        } else {
            // The owner says so when it has looked at a greeting, which a job has brought back.
            debug_assert!(false, "a job has the link");
        }
    }

    fn send_out(&mut self, id: LinkId, out: Out) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        entry.own_bytes += out.own_bytes();
        entry.waiting += 1;
        entry.queued += 1;
        entry.said.push(out);
        self.make_due(id);
    }

    /// A name for all that was said to a link by now.
    pub(crate) fn mark(&self, id: LinkId) -> u64 {
        self.entries.get(&id).map_or(0, |entry| entry.queued)
    }

    /// What is to become of the bytes of the frame that came last: to the pieces in this order, or nowhere.
    pub(crate) fn expect(&mut self, id: LinkId, to: Vec<Piece>, discard: u64) {
        if let Some(entry) = self.entries.get_mut(&id) {
            debug_assert!(entry.expected.is_none());
            entry.expected = Some((to, discard));
        }
    }

    /// From now on this is to come over a link.
    pub(crate) fn want(&mut self, id: LinkId, wants: Wants) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.wants = wants;
        }
    }

    /// Bytes that come over a link are placed while this holds.
    pub(crate) fn set_lease(&mut self, id: LinkId, lease: Lease) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.lease = Some(lease);
        }
    }

    /// Whether more is wanted of a link.
    pub(crate) fn hold(&mut self, id: LinkId, is_held: bool) {
        if let Some(entry) = self.entries.get_mut(&id)
            && std::mem::replace(&mut entry.is_held, is_held) != is_held
        {
            // What has left the socket already is not told of again.
            entry.note_input();
            self.settle(id);
        }
    }

    /// Everything goes through these ends of a segment as soon as what was said is written.
    pub(crate) fn go_through(&mut self, id: LinkId, ends: (Writer, Reader)) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.switch = Some((entry.said.len(), ends));
            self.make_due(id);
        }
    }

    /// The watch tells of a link.
    pub(crate) fn note_ready(&mut self, id: LinkId) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        entry.input = Input::Reported;
        // Whoever takes the wake has to see to it that there is another one for whoever sleeps.
        self.has_news_of_rings |= self.rings.contains(&id);
        self.make_due(id);
    }

    fn make_due(&mut self, id: LinkId) {
        if let Some(entry) = self.entries.get_mut(&id)
            && entry.turn.make_due()
        {
            self.due.push_back(id);
        }
    }

    /// Whether a job waits to be taken.
    pub(crate) fn has_due(&self) -> bool {
        !self.due.is_empty()
    }

    /// The next link with something to do.
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
            // Not before it is connected, which is told.
            let may_write = entry.wants != Wants::Connection && task != Task::End;
            // What was said after the switch goes through the new ends.
            let (until, switch) = match entry.switch.take() {
                Some((until, ends)) => (until, Some(ends)),
                None => (entry.said.len(), None),
            };
            if may_write {
                link.send_all(entry.said.drain(..until));
            }
            if let Some((to, discard)) = entry.expected.take() {
                link.expect(to, discard);
            }
            // What is not read now is there to be read later.
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

    /// A job is done. [`Links::settle`] has to follow, when its owner has looked at what came. None: the link is not wanted
    /// any more, and is over.
    pub(crate) fn put_back(&mut self, now: Duration, job: LinkJob) -> Option<Back> {
        let LinkJob { id, mut link, wants, received, mut arrived, whole, mut outcome, has_more, .. } = job;
        let entry = self.entries.get_mut(&id)?;
        entry.whole = whole;
        entry.written = link.written();
        let (own_bytes, waiting) = link.backlog();
        entry.own_bytes = own_bytes + entry.said.iter().map(Out::own_bytes).sum::<usize>();
        entry.waiting = waiting + entry.said.len();
        if has_more {
            entry.note_input();
        }
        // A greeting has its time as a whole.
        if wants == Wants::Frames && link.received() > received {
            entry.heard = now;
        }
        if link.rings().is_some() && !self.rings.contains(&id) {
            self.rings.push(id);
            // Something may be there already, and no wake for it.
            entry.note_input();
            self.has_news_of_rings = true;
        }
        if let Some(why) = entry.ending.take() {
            // What came meanwhile is not wanted any more.
            arrived.clear();
            outcome = Err(why);
        }
        entry.turn = Turn::Idle(link);
        Some(Back { arrived, outcome })
    }

    /// Sees to it that a link has its next job, or is told of.
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
        let mut is_due = (!entry.said.is_empty() && !is_connecting) || has_input || entry.switch.is_some();
        if !is_stuck && !is_connecting && link.has_more() {
            // It has left the socket: nothing tells of it again.
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
                // The next job finds out.
                tracing::debug!(%error, "a connection cannot be listened to");
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

    /// Links whose rings have something. Whether there were any.
    pub(crate) fn look_at_rings(&mut self) -> bool {
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

    /// Whoever has something for this process from now on wakes it over a socket. False: something is there already, or a job
    /// looks right now.
    pub(crate) fn prepare_to_sleep(&mut self) -> bool {
        let mut may_sleep = true;
        for id in &self.rings {
            let Some(entry) = self.entries.get_mut(id) else { continue };
            // Of a full one nothing is taken before its peer has made room, or a driver.
            if !entry.is_stuck() {
                let rings = entry.turn.link_mut().map(|link| link.rings());
                may_sleep &= rings.is_some_and(|rings| rings.is_none_or(|rings| rings.prepare_to_sleep()));
            }
        }
        may_sleep
    }

    /// Nobody need wake this process any more.
    pub(crate) fn woken(&mut self) {
        for id in &self.rings {
            let link = self.entries.get_mut(id).and_then(|entry| entry.turn.link_mut());
            if let Some(rings) = link.and_then(|link| link.rings()) {
                rings.woken();
            }
        }
    }

    /// Whether something has changed, since this was asked last, of which whoever sleeps on sockets would not hear.
    pub(crate) fn take_news_of_rings(&mut self) -> bool {
        std::mem::take(&mut self.has_news_of_rings)
    }

    /// Whether any link of those that count may read or write this memory. Of one that a job has nobody knows.
    pub(crate) fn may_touch(&self, memory: Spots<'_>, counts: impl Fn(&R) -> bool) -> bool {
        let may = |entry: &Entry<R>| entry.link().is_none() || entry.touches(memory);
        self.entries.values().any(|entry| counts(&entry.role) && may(entry))
    }

    /// Links that are going to read or write this memory, but those that a job has.
    pub(crate) fn touching(&self, memory: Spots<'_>) -> Vec<LinkId> {
        self.find(|entry| entry.link().is_some() && entry.touches(memory))
    }
}

impl<R> Entry<R> {
    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        self.peer
    }

    /// Whether all that was said by then has been written.
    pub(crate) fn has_written(&self, mark: u64) -> bool {
        self.written >= mark
    }

    /// Whether all is written.
    pub(crate) fn is_flushed(&self) -> bool {
        self.said.is_empty() && self.link().is_some_and(Link::is_flushed)
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

    /// The connection itself, unless a job has it.
    pub(crate) fn link(&self) -> Option<&Link> {
        self.turn.link()
    }

    /// Something may be there to be read.
    fn note_input(&mut self) {
        self.input = self.input.or_possible();
    }

    /// Whether nothing is read from it for now.
    fn is_stuck(&self) -> bool {
        self.is_held || self.own_bytes > OWN_BYTES_MAX || self.waiting > ENTRIES_MAX
    }

    /// As far as it is known: what a job has is not.
    fn touches(&self, memory: Spots<'_>) -> bool {
        let is_expected = |to: &[Piece]| to.iter().any(|piece| memory.overlap_host(*piece));
        self.said.iter().any(|out| out.touches(memory))
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
                suit_host(self.link.socket());
                self.arrived.push(Arrived::Connected);
            }
            return Ok(());
        }
        // Its peer counts on this: what is still there to be read is read no more.
        if self.lease.is_some_and(|lease| !lease.holds()) {
            return Err(Ended::Late);
        }
        // SAFETY: memory that is queued belongs to a registered region: of a transfer under way, or served to a peer; a region
        // is not given back before no link touches it. Or it is a message's, which its owner holds until the link has
        // written it or is gone. Or a slot's, which the link's lane holds as long.
        unsafe { self.link.flush()? };
        if let Some(ends) = self.switch.take() {
            if !self.link.is_flushed() {
                // Its socket is new and takes a greeting at once, unless the peer is up to something.
                return Err(Ended::Closed);
            }
            self.link.go_through(ends);
            return Ok(());
        }
        if self.input == Input::Reported
            && let Some(rings) = self.link.rings()
        {
            rings.note_told();
        }
        if !self.reads() || self.wants == Wants::Nothing {
            // Nothing is received that would tell so.
            let has_ended = self.input == Input::Reported && self.link.has_ended();
            return if has_ended { Err(Ended::Closed) } else { Ok(()) };
        }
        self.receive()
    }

    /// Whether it takes what there may be to read.
    fn reads(&self) -> bool {
        self.task == Task::WriteAndRead && self.input != Input::Nothing
    }

    fn receive(&mut self) -> Result<(), Ended> {
        let mut entry_bytes = 0;
        for _ in 0..FRAMES_A_TURN {
            if let Wants::Greeting(len) = self.wants {
                self.arrived.extend(self.link.greeting(len)?.map(Arrived::Greeting));
                // What follows depends on it.
                self.has_more = !self.arrived.is_empty();
                return Ok(());
            }
            // SAFETY: expected memory belongs to a registered region, as queued memory does, to a frame that this job takes as a
            // whole, or to a slot that the link's lane holds.
            match unsafe { self.link.receive(self.lease)? } {
                Came::Nothing => return Ok(()),
                Came::Body if self.whole.is_some() => {
                    let whole = self.whole.take().map(|Whole { head, bytes }| Arrived::Whole(head, bytes));
                    self.arrived.extend(whole);
                    if entry_bytes >= ENTRY_BYTES_A_TURN {
                        break;
                    }
                }
                Came::Body => {
                    self.arrived.push(Arrived::Body);
                    if self.traffic == Traffic::BytesInParts {
                        break;
                    }
                }
                Came::Frame(head, entries) => {
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
                // Somebody waits for what came, or for the answer: the socket is not asked again before that, since it tells if
                // there is more.
                return Ok(());
            }
        }
        self.has_more = true;
        Ok(())
    }
}

/// Whether both ends of a connection have the same address.
pub(crate) fn is_same_host(socket: &TcpStream) -> bool {
    let addresses = (socket.local_addr(), socket.peer_addr());
    matches!(addresses, (Ok(own), Ok(peer)) if own.ip() == peer.ip())
}

/// Bounds the bytes that wait in a socket between two processes of this host. Between hosts the kernel ends a connection whose
/// other end acknowledges nothing.
fn suit_host(socket: &TcpStream) {
    // Both options may fail: the connection is then slower, or its end is noticed later.
    if is_same_host(socket) {
        let _ = sockopt::set_socket_send_buffer_size(socket.as_fd(), SAME_HOST_SEND_BYTES);
    } else {
        let _ = sockopt::set_tcp_user_timeout(socket.as_fd(), UNACKNOWLEDGED_MS);
    }
}
