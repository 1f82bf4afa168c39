//! Connections: opened, accepted, read and written. What comes over them is taken by the other files.

#![allow(unsafe_code, reason = "the kernel reads and writes registered memory")]

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::greeting::challenge_of;
use super::{Coming, Entry, Goal, LISTENER, LOOK, LinkId, Role, Sockets, random};
use crate::fences::Whom;
use crate::inbox::Admission;
use crate::lease::{self, Lease};
use crate::tcp::{
    BadFrame, Came, ENTRIES_MAX, Ended, Head, Hello, Link, Nonces, Purpose, Stream, Verdict, Welcome,
    decode_challenge, encode_challenge,
};
use crate::transfers::Token;

/// Connections of peers, and of them those of whom nothing is known yet.
const LINKS_MAX: usize = 16_384;
const ACCEPTED_MAX: usize = 1_024;
/// Bytes that wait in a socket to a process of the same host: few enough that the processor's caches still have them when
/// the other side takes them out. On two cores writes of 1 MiB reached 2.3 and 2.6 GB/s with this in two runs, 2.0 and 1.4
/// with half of it, 1.9 with twice as much; reads of 16 MiB 3.3 and 3.4, 2.9 and 2.2, 2.6. Over a network it would hold back
/// whatever is faster than this in a round trip.
const SAME_HOST_SEND_BYTES: usize = 512 << 10;
/// Where one side does not know the secret of the other.
const UNPROVED: &str = "it has another token, or other engines than ours are trusted there: without a token these are those of \
     one user, with one runtime folder. Give both sides the same token";
/// How long nobody is accepted after that failed for want of something.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Frames of one connection before the others have their turn.
const FRAMES_A_TURN: usize = 64;

impl Sockets {
    pub(super) fn open_link(&mut self, address: SocketAddr, to: Goal) -> io::Result<LinkId> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(errno) => return Err(errno.into()),
        }
        let role = Role::Connecting { to, connection: random()? };
        // Told when it is connected, or is not going to be.
        self.add(socket.into(), role, EventFlags::IN | EventFlags::OUT)
    }

    pub(super) fn add(&mut self, socket: TcpStream, role: Role, interest: EventFlags) -> io::Result<LinkId> {
        socket.set_nodelay(true)?;
        let id = self.next_link;
        self.next_link += 1;
        let heard = self.now();
        let accepted = matches!(role, Role::Accepted { .. });
        let link = Link::new(Stream::new(socket, self.credentials.as_ref(), accepted)?)?;
        epoll::add(&self.epoll, &link, EventData::new_u64(id), interest)?;
        let (acks, is_held_up, awaits_slot) = (Vec::new(), false, false);
        let (queued, neighbour, coming) = (0, None, None);
        let entry =
            Entry { link, role, interest, heard, acks, is_held_up, awaits_slot, queued, neighbour, coming };
        self.links.insert(id, entry);
        self.look_at = self.look_at.min(heard + LOOK);
        Ok(id)
    }

    /// A link that is over, still open.
    pub(super) fn remove(&mut self, id: LinkId) -> Option<Entry> {
        let entry = self.links.remove(&id)?;
        if self.letting_go > 0 {
            // It touches nothing any more.
            self.news.change = true;
        }
        self.rings.retain(|link| *link != id);
        if entry.neighbour.is_some() {
            self.jobs.retain(|job| job.link != id);
        }
        let is_ours = matches!(entry.role, Role::Up { .. });
        self.staging.leave(id, |token| is_ours.then(|| Token::from_number(token)));
        // A forked process may hold the socket too, which would be told of for ever.
        let _ = epoll::delete(&self.epoll, &entry.link);
        if let Role::Serving { session, .. } = entry.role {
            if let Some(Coming { admission: Admission::Admitted, bytes, .. }) = &entry.coming {
                self.inbox.release(session, bytes.len());
            }
            let now = self.now();
            self.sessions.leave(now, session);
            self.inbox.share_among(self.sessions.connected());
        }
        Some(entry)
    }

    pub(super) fn remove_links(&mut self, is_one: impl Fn(&Entry) -> bool) {
        let links: Vec<LinkId> =
            self.links.iter().filter(|(_, entry)| is_one(entry)).map(|(link, _)| *link).collect();
        links.into_iter().for_each(|link| drop(self.remove(link)));
    }

    pub(super) fn accept(&mut self, index: usize) {
        for _ in 0..FRAMES_A_TURN {
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
                    self.accept_at = Some(self.now() + ACCEPT_PAUSE);
                    return self.listen_to(EventFlags::empty());
                }
            };
            if std::mem::take(&mut self.cannot_accept) {
                tracing::info!("connections are accepted again");
            }
            if !self.make_room(peer) {
                continue;
            }
            let added = random().and_then(|challenge| {
                let challenge = challenge_of(challenge, random()?);
                keep_in_cache(&socket);
                let link =
                    self.add(socket, Role::Accepted { challenge, lease: Lease::begin() }, EventFlags::IN)?;
                self.say(link, encode_challenge(&challenge));
                Ok(())
            });
            if let Err(error) = added
                && self.told.is_news(Some(peer), "not accepted")
            {
                tracing::warn!(%peer, %error, "a connection cannot be accepted; said once of this address");
            }
        }
    }

    /// Whether one more has room. Of too many who have proved nothing the oldest goes: a peer that knows the secret proves it
    /// at once.
    fn make_room(&mut self, peer: SocketAddr) -> bool {
        let unknown = |(_, entry): &(&LinkId, &Entry)| matches!(entry.role, Role::Accepted { .. });
        if self.links.len() >= ACCEPTED_MAX && self.links.iter().filter(unknown).count() >= ACCEPTED_MAX {
            if self.told.is_news(Some(peer), "too many") {
                tracing::warn!(%peer, "too many connections prove nothing: the oldest are closed; said once of this address");
            }
            let oldest = self.links.iter().filter(unknown).map(|(link, _)| *link).min();
            oldest.into_iter().for_each(|link| self.end(link, &Ended::Closed));
        }
        let has_room = self.links.len() < LINKS_MAX;
        if !has_room && self.told.is_news(Some(peer), "no room") {
            tracing::warn!(%peer, "too many connections: one is refused; said once of this address");
        }
        has_room
    }

    pub(super) fn listen_to(&self, interest: EventFlags) {
        for (index, listener) in (0..).zip(&self.listeners) {
            // It is known to epoll, which needs no more memory for this.
            let _ = epoll::modify(&self.epoll, listener, EventData::new_u64(LISTENER | index), interest);
        }
    }

    pub(super) fn say(&mut self, link: LinkId, bytes: Vec<u8>) {
        if let Some(entry) = self.links.get_mut(&link) {
            entry.link.say(bytes);
            self.dirty.push(link);
        }
    }

    pub(super) fn flush(&mut self, id: LinkId) {
        let Some(entry) = self.links.get_mut(&id) else { return };
        // Not connected yet: see take_next.
        if matches!(entry.role, Role::Connecting { .. }) && entry.interest != EventFlags::IN {
            return;
        }
        // SAFETY: memory that is queued belongs to a registered region: of a transfer under way, or served to a peer;
        // a region is not given back before no link touches it. Or it is a message's, which `posted` holds until the link
        // has written it or is gone. Or a slot's, which the link's lane holds as long.
        if let Err(ended) = unsafe { entry.link.flush() } {
            return self.end(id, &ended);
        }
        if entry.link.is_flushed() && self.letting_go > 0 {
            self.news.change = true;
        }
        if matches!(entry.role, Role::Leaving) && entry.link.is_flushed() {
            self.remove(id);
            return;
        }
        if !entry.is_stuck() && std::mem::take(&mut entry.is_held_up) {
            // What it left in our own buffer is not told of again.
            self.ready.push(id);
        }
        let (is_stuck, is_flushed) = (entry.is_stuck(), entry.link.is_flushed());
        if let Some(rings) = entry.link.rings() {
            if !is_flushed && !rings.prepare_to_wait_for_room() {
                self.ready.push(id);
            }
            return;
        }
        let reads = if is_stuck { EventFlags::empty() } else { EventFlags::IN };
        let writes = if is_flushed { EventFlags::empty() } else { EventFlags::OUT };
        self.tell_of(id, reads | writes);
    }

    /// What epoll tells of from now on.
    pub(super) fn tell_of(&mut self, id: LinkId, interest: EventFlags) {
        let Some(entry) = self.links.get_mut(&id).filter(|entry| entry.interest != interest) else { return };
        entry.interest = interest;
        if let Err(errno) = epoll::modify(&self.epoll, &entry.link, EventData::new_u64(id), interest) {
            self.end(id, &Ended::Io(errno.into()));
        }
    }

    /// A connection can be read or written.
    pub(super) fn take(&mut self, id: LinkId) {
        let now = self.now();
        let Some(entry) = self.links.get_mut(&id) else { return };
        if entry.interest.contains(EventFlags::OUT)
            || (!entry.link.is_flushed() && entry.link.rings().is_some())
        {
            self.dirty.push(id);
        }
        // Its peer counts on this: what is still there to be read is read no more.
        if matches!(entry.role, Role::Serving { lease, .. } if !lease.holds()) {
            return self.end(id, &Ended::Late);
        }
        let received = entry.link.received();
        let mut has_more = true;
        for _ in 0..FRAMES_A_TURN {
            let Some(entry) = self.links.get_mut(&id) else { return };
            if entry.is_stuck() {
                entry.is_held_up = true;
                // Nothing is received that would tell so.
                if entry.link.has_ended() {
                    return self.end(id, &Ended::Closed);
                }
                has_more = false;
                break;
            }
            match self.take_next(id) {
                Ok(true) => {}
                Ok(false) => {
                    has_more = false;
                    break;
                }
                Err(ended) => return self.end(id, &ended),
            }
        }
        if has_more {
            // What is in our own buffer is not told of again.
            self.ready.push(id);
        }
        // A greeting has its time as a whole.
        let is_greeted = |entry: &&mut Entry| matches!(entry.role, Role::Serving { .. } | Role::Up { .. });
        let entry = self.links.get_mut(&id).filter(is_greeted);
        if let Some(entry) = entry.filter(|entry| entry.link.received() > received) {
            entry.heard = now;
        }
        let Some(entry) = self.links.get_mut(&id) else { return };
        // What has left the socket is not told of again, and what TLS has to say by itself nobody has queued.
        if !has_more && entry.link.has_more() && !entry.is_stuck() {
            self.ready.push(id);
        }
        if !entry.link.is_flushed() && !entry.interest.contains(EventFlags::OUT) {
            self.dirty.push(id);
        }
        self.answer(id);
    }

    /// Sends what is known of a peer's requests by now.
    pub(super) fn answer(&mut self, id: LinkId) {
        let Some(entry) = self.links.get_mut(&id) else { return };
        if !entry.acks.is_empty() {
            for outcomes in std::mem::take(&mut entry.acks).chunks(ENTRIES_MAX) {
                let mut frame =
                    Head::Ack { outcomes: outcomes.len(), stamp: lease::stamp() }.encode().to_vec();
                outcomes.iter().for_each(|outcome| outcome.encode(&mut frame));
                entry.link.say(frame);
            }
            self.dirty.push(id);
        }
    }

    /// At whom a connection of ours aims, if that is still wanted.
    fn whom(&self, to: Goal) -> Option<&Whom> {
        match to {
            Goal::Path(path, _) => Some(&self.peers.get(&self.paths.get(&path)?.peer)?.whom),
            Goal::Fence(of) => self.fences.whom(of),
        }
    }

    /// Takes the next thing that came over a connection. False: there is nothing, or the connection is gone.
    pub(super) fn take_next(&mut self, id: LinkId) -> Result<bool, Ended> {
        let Some(entry) = self.links.get_mut(&id) else { return Ok(false) };
        match &mut entry.role {
            Role::Accepted { challenge, .. } => {
                let Some(proof) = entry.link.greeting()? else { return Ok(false) };
                let proved = self.proofs.own.decode_proof(&proof, challenge)?;
                self.judge(id, proved);
                Ok(true)
            }
            Role::Proved { key, .. } => {
                let Some(hello) = entry.link.greeting()? else { return Ok(false) };
                let (hello, key) = (Hello::decode(&hello, key)?, key.clone());
                self.greet(id, hello, &key);
                Ok(true)
            }
            Role::Connecting { to, connection } => {
                if let Ok(Err(errno)) | Err(errno) = sockopt::socket_error(&entry.link) {
                    return Err(Ended::Io(errno.into()));
                }
                if entry.interest != EventFlags::IN {
                    // Connected, or told once too often: what comes next is the peer's challenge.
                    keep_in_cache(entry.link.socket());
                    self.tell_of(id, EventFlags::IN);
                    return Ok(true);
                }
                let Some(challenge) = entry.link.greeting()? else { return Ok(false) };
                let listening = decode_challenge(&challenge)?;
                let nonces = Nonces { listening, connecting: challenge_of(random()?, random()?) };
                let (to, connection) = (*to, *connection);
                entry.role = Role::Proving { to, connection, nonces };
                let Some(Whom { key, .. }) = self.whom(to) else { return Err(Ended::Closed) };
                let proof = key.encode_proof(&nonces);
                self.say(id, proof);
                Ok(true)
            }
            Role::Proving { to, connection, nonces } => {
                let Some(verdict) = entry.link.greeting()? else { return Ok(false) };
                let (to, connection, nonces) = (*to, *connection, *nonces);
                let Some(Whom { identity, session, key, .. }) = self.whom(to) else {
                    return Err(Ended::Closed);
                };
                let (wanted, session) = (*identity, *session);
                match key.decode_verdict(&verdict, &nonces)? {
                    Verdict::Proved => {}
                    Verdict::Unproved | Verdict::Refused => return Err(BadFrame(UNPROVED).into()),
                }
                let key = key.session(&nonces);
                let Some(entry) = self.links.get_mut(&id) else { return Ok(false) };
                let segment =
                    self.card.as_ref().and_then(|_| super::neighbours::segment(entry.link.socket(), to));
                let offered = segment.as_ref().and_then(|segment| segment.as_ref().ok());
                let rings = offered.map(|segment| segment.as_fd().as_raw_fd() as u32);
                entry.role = Role::Greeted { to, connection, key: key.clone(), segment };
                let purpose = match to {
                    Goal::Path(..) => Purpose::Path,
                    Goal::Fence(of) => Purpose::Fence(of),
                };
                let offer = self.offer(rings).filter(|_| purpose == Purpose::Path);
                let hello = Hello { purpose, connection, from: self.me, to: wanted, session, offer };
                let bytes = hello.encode(&key);
                self.say(id, bytes);
                Ok(true)
            }
            Role::Greeted { to, connection, key, .. } => {
                let Some(welcome) = entry.link.greeting()? else { return Ok(false) };
                let (to, connection) = (*to, *connection);
                let answer = Welcome::decode(&welcome, key)?;
                self.welcomed(id, to, connection, answer)
            }
            Role::Serving { .. } | Role::Up { .. } => {
                let lease = match entry.role {
                    Role::Serving { lease, .. } => Some(lease),
                    _ => None,
                };
                // SAFETY: expected memory belongs to a registered region, as queued memory does, to the message that the
                // link's entry holds until all of it is there, or to a slot that the link's lane holds.
                let came = unsafe { entry.link.receive(lease)? };
                if matches!(came, Came::Nothing) {
                    return Ok(false);
                }
                match came {
                    Came::Frame(head, entries) => self.take_frame(id, head, &entries)?,
                    _ => self.take_body(id)?,
                }
                Ok(true)
            }
            // It goes when the answer has been written.
            Role::Leaving => Ok(false),
        }
    }
}

/// Whether both ends of a connection have the same address.
pub(super) fn is_same_host(socket: &TcpStream) -> bool {
    let addresses = (socket.local_addr(), socket.peer_addr());
    matches!(addresses, (Ok(own), Ok(peer)) if own.ip() == peer.ip())
}

/// Bounds what waits in a socket between two processes of this host.
fn keep_in_cache(socket: &TcpStream) {
    if is_same_host(socket) {
        // Without it all is only slower.
        let _ = sockopt::set_socket_send_buffer_size(socket, SAME_HOST_SEND_BYTES);
    }
}

/// Of descriptors or memory.
fn is_want(error: &io::Error) -> bool {
    let wants = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    Errno::from_io_error(error).is_some_and(|errno| wants.contains(&errno))
}
