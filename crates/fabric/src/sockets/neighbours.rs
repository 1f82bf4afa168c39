//! Transfers with processes of this host.

#![allow(unsafe_code, reason = "the kernel writes registered memory")]

use std::collections::VecDeque;
use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use kvlane_memory::ProbeError;
use rustix::io::Errno;

use super::links::is_same_host;
use super::{Asked, Goal, LinkId, Role, Sockets, Transport};
use crate::regions::Piece;
use crate::runs::Run;
use crate::same_host::{Generations, Neighbour, PARTS_MAX, Part, PullError};
use crate::shm::{RING_BYTES, Reader, Segment, Side, Writer};
use crate::tcp::{BadFrame, Ended, Fate, Head, Hello, Offer, Outcome, Reads, Rings, Welcome, WireRun};
use crate::transfers::{Completion, Op, PathId, Ticket, Token};

/// Bytes that each thread reads from neighbours before sockets and those who wait have their turn: a fraction of a
/// millisecond.
const TURN_BYTES: usize = 1 << 20;
/// A post that reads from a neighbour has so many times the bytes of another: it is read in turns anyway, and nobody waits
/// for a part of it. Of posts of 512 KiB each, what is done beside the copying was a tenth of a read of 1 MiB.
pub(super) const PULLED_CHUNKS: u64 = 4;
/// What a part counts of a turn at the least: a short one takes about as long as a page.
const PART_COST: usize = 4096;
/// Writes of fewer bytes, less than a page, go with what is said of them.
const PULLED_BYTES_MIN: u64 = 4096;
/// What a job takes beside its parts, as a number of them.
const JOB_PARTS: usize = 4;
/// Parts that a peer may have asked this process to read at a time, 24 bytes each.
const PARTS_QUEUED_MAX: usize = 1 << 20;

/// Something to be read from the neighbour at the other end of a link.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) link: LinkId,
    token: u64,
    /// Counts so much while it is queued: its parts, and what it takes by itself. 0 for a read of ours.
    weight: usize,
    parts: VecDeque<Part>,
    /// Of a read: the neighbour's regions, by number and generation. None: a write of the neighbour's.
    regions: Option<Generations>,
}

impl Job {
    /// What a peer has written is read from there. As many pieces as addresses.
    pub(super) fn pull(link: LinkId, token: u64, pieces: Vec<Piece>, addresses: &[u64]) -> Job {
        let parts = pieces.into_iter().zip(addresses).map(|(to, from)| Part { to, from: *from }).collect();
        let weight = addresses.len() + JOB_PARTS;
        Job { link, token, weight, parts, regions: None }
    }

    /// The next parts, of at most so many bytes together.
    fn take_parts(&mut self, mut bytes: usize) -> Vec<Part> {
        let mut taken = Vec::new();
        while let Some(part) = self.parts.front_mut()
            && bytes > 0
            && taken.len() < PARTS_MAX
        {
            let (first, rest) = part.split_at(part.to.len.min(bytes));
            bytes -= first.to.len;
            taken.push(first);
            if rest.to.len == 0 {
                self.parts.pop_front();
            } else {
                *part = rest;
            }
        }
        taken
    }
}

impl Sockets {
    /// Where neighbours may read this process's card, and which descriptor is a segment for a connection.
    pub(super) fn offer(&self, rings: Option<u32>) -> Option<Offer> {
        self.card.as_ref().map(|card| Offer { pid: std::process::id(), card: card.address(), rings })
    }

    /// The process that says hello, if it is a neighbour, and the ends of its segment.
    pub(super) fn meet(
        &mut self,
        hello: Option<Hello>,
    ) -> (Option<Arc<Neighbour>>, Reads, Option<(Writer, Reader)>) {
        let known = hello.and_then(|hello| Some((hello.from, hello.offer?)));
        let (Some(_), Some((from, offer))) = (&self.card, known) else { return (None, Reads::No, None) };
        match Neighbour::probe(offer.pid, offer.card, from) {
            Ok(neighbour) => {
                let segment = offer.rings.map(|fd| neighbour.descriptor(fd).and_then(Segment::open));
                let segment = segment.transpose().unwrap_or_else(|error| {
                    tracing::info!(pid = offer.pid, %error, "a peer's shared memory cannot be used");
                    self.without_rings += 1;
                    None
                });
                let ends = segment.map(|segment| segment.ends(Side::Listening));
                (Some(Arc::new(neighbour)), Reads::Yes, ends)
            }
            Err(error) => {
                tracing::debug!(pid = offer.pid, %error, "a peer's memory cannot be read");
                (None, Reads::Refused(error.errno().raw_os_error().clamp(1, 254) as u8), None)
            }
        }
    }

    /// The connection of a path goes through the segment that we offered, if the peer does so. Else the path says why not,
    /// where neighbours should have it.
    pub(super) fn take_up_rings(
        &mut self,
        id: LinkId,
        path: PathId,
        welcome: &Welcome,
        transport: Transport,
    ) -> Result<(), Ended> {
        let Some(entry) = self.links.get_mut(&id) else { return Ok(()) };
        let Role::Greeted { segment, .. } = &mut entry.role else { return Ok(()) };
        let no_rings = match (welcome.rings, segment.take()) {
            (true, Some(Ok(segment))) => {
                self.go_through(id, segment.ends(Side::Connecting));
                None
            }
            (true, _) => return Err(BadFrame("it uses shared memory that was not offered").into()),
            _ if transport == Transport::Tcp => None,
            (false, Some(Ok(_))) => Some("the peer cannot use our shared memory, as its log says".to_owned()),
            (false, Some(Err(why))) => Some(why),
            (false, None) => Some("both ends of the connection have different addresses".to_owned()),
        };
        self.without_rings += u64::from(no_rings.is_some());
        if let Some(at) = self.paths.get_mut(&path) {
            if let Some(why) = no_rings.as_ref().filter(|_| at.no_rings != no_rings) {
                tracing::info!(address = %at.address, %why, "what is said to a neighbour goes through the socket");
            }
            at.no_rings = no_rings;
        }
        Ok(())
    }

    /// From now on all of a connection goes through these.
    pub(super) fn go_through(&mut self, id: LinkId, ends: (Writer, Reader)) {
        let Some(entry) = self.links.get_mut(&id) else { return };
        if !entry.link.is_flushed() {
            // Its socket is new and takes a greeting at once, unless the peer is up to something.
            return self.end(id, &Ended::Closed);
        }
        entry.link.go_through(ends);
        self.rings.push(id);
        // Something may be there already, and no wake for it.
        self.ready.push(id);
        self.news.rings = true;
    }

    /// Whether a neighbour was asked to read from this process, and has not said that it has.
    pub(crate) fn is_being_read(&self) -> bool {
        self.posted.values().any(|posted| matches!(posted.what, Asked::Pull))
    }

    /// Takes what came through rings. Whether there was anything.
    pub(super) fn take_from_rings(&mut self) -> bool {
        let mut any = false;
        for index in (0..self.rings.len()).rev() {
            // A link that ends takes its place in the list along.
            let Some(id) = self.rings.get(index).copied() else { continue };
            let Some(entry) = self.links.get_mut(&id) else { continue };
            if !entry.is_stuck() && entry.link.rings().is_some_and(|rings| !rings.is_empty()) {
                any = true;
                self.take(id);
            }
        }
        any
    }

    /// The socket of a link can be read.
    pub(super) fn note_told(&mut self, id: LinkId) {
        if let Some(rings) = self.links.get_mut(&id).and_then(|entry| entry.link.rings()) {
            rings.note_told();
            self.news.rings = true;
        }
    }

    /// Whoever has something for this process from now on wakes it over a socket. False: something is there already.
    pub(crate) fn prepare_to_sleep(&mut self) -> bool {
        let mut may_sleep = true;
        for id in &self.rings {
            let Some(entry) = self.links.get_mut(id) else { continue };
            // Of a full one nothing is taken before its peer has made room, or a driver.
            if !entry.is_stuck() {
                may_sleep &= entry.link.rings().is_none_or(Rings::prepare_to_sleep);
            }
        }
        may_sleep
    }

    /// Nobody need wake this process any more.
    pub(crate) fn woken(&mut self) {
        for id in &self.rings {
            if let Some(rings) = self.links.get_mut(id).and_then(|entry| entry.link.rings()) {
                rings.woken();
            }
        }
    }

    /// Takes note of how bytes travel over a path whose peer has welcomed us.
    pub(super) fn know_neighbour(
        &mut self,
        id: LinkId,
        path: PathId,
        welcome: &Welcome,
    ) -> Result<Transport, Ended> {
        let found = match (&self.card, welcome.reads, welcome.offer) {
            (None, ..) => Err(None),
            (_, Reads::Yes, Some(offer)) => {
                Neighbour::probe(offer.pid, offer.card, welcome.from).map_err(|error| Some(trouble(&error)))
            }
            (_, Reads::Refused(errno), _) => Err(Some(refusal(Errno::from_raw_os_error(errno.into())))),
            _ => Err(Some("the peer goes by TCP only".into())),
        };
        let (neighbour, fallback) = match found {
            Ok(neighbour) => (Some(Arc::new(neighbour)), None),
            Err(fallback) => (None, fallback),
        };
        if let Some(why) = fallback.as_ref().filter(|_| self.needs_neighbours) {
            return Err(Ended::Io(io::Error::other(format!("cma is required, but {why}"))));
        }
        let transport = if neighbour.is_some() { Transport::Cma } else { Transport::Tcp };
        if let Some(at) = self.paths.get_mut(&path) {
            if at.transport != transport || at.fallback != fallback {
                tracing::info!(address = %at.address, transport = transport.name(), ?fallback, "a path is up");
            }
            (at.transport, at.fallback) = (transport, fallback);
        }
        if let Some(entry) = self.links.get_mut(&id) {
            entry.neighbour = neighbour;
        }
        Ok(transport)
    }

    /// A part of a transfer with a neighbour. None: it goes through the socket.
    pub(super) fn post_to_neighbour(
        &mut self,
        link: LinkId,
        token: Token,
        ticket: Ticket,
        op: Op,
        runs: &[Run],
    ) -> Option<Asked> {
        let entry = self.links.get_mut(&link)?;
        let neighbour = entry.neighbour.as_ref()?;
        let used = self.used.get(&ticket)?;
        let bytes: u64 = runs.iter().map(|run| run.len).sum();
        if used.has_gpus() {
            if !std::mem::replace(&mut self.has_told_of_gpus, true) {
                tracing::info!(
                    "transfers of GPUs' memory go through the socket: process_vm does not reach it"
                );
            }
            return None;
        }
        if op == Op::Write && bytes < PULLED_BYTES_MIN {
            return None;
        }
        let generation_of = |region: u32| used.peer.iter().find(|(number, _)| *number == region).copied();
        match op {
            Op::Write => {
                let mut frame =
                    Head::Pull { token: token.number(), runs: runs.len(), bytes }.encode().to_vec();
                for Run { local, remote, len } in runs {
                    let own = self.regions.own(local.region, local.offset, *len)?;
                    let (region, generation) = generation_of(remote.region)?;
                    WireRun { region, generation, offset: remote.offset, len: *len }.encode(&mut frame);
                    frame.extend((own.address as u64).to_le_bytes());
                }
                entry.link.say(frame);
                self.dirty.push(link);
                Some(Asked::Pull)
            }
            Op::Read => {
                let peer = &self.peers.get(&used.whom)?.regions;
                let mut regions = Vec::new();
                let mut parts = VecDeque::with_capacity(runs.len());
                for Run { local, remote, len } in runs {
                    let known = generation_of(remote.region)?;
                    // Where it lies is known of the generation that it has now.
                    let there = peer.get(&remote.region).filter(|there| there.generation == known.1)?;
                    if !regions.contains(&known) {
                        regions.push(known);
                    }
                    let to = self.regions.own(local.region, local.offset, *len)?;
                    parts.push_back(Part { to, from: there.base.checked_add(remote.offset)? });
                }
                if !regions.iter().all(|(region, generation)| neighbour.tells_of(*region, *generation)) {
                    return None;
                }
                let (token, weight) = (token.number(), 0);
                self.jobs.push_back(Job { link, token, weight, parts, regions: Some(regions.into()) });
                Some(Asked::Job)
            }
        }
    }

    /// A peer's request.
    pub(super) fn queue(&mut self, job: Job) -> Result<(), Ended> {
        let Some(entry) = self.links.get_mut(&job.link) else { return Ok(()) };
        entry.queued += job.weight;
        if entry.queued > PARTS_QUEUED_MAX {
            return Err(BadFrame("too much at a time").into());
        }
        self.jobs.push_back(job);
        Ok(())
    }

    /// Bytes that a turn has, which all threads read together.
    pub(crate) fn turn_bytes(&self) -> usize {
        TURN_BYTES * self.crew.threads()
    }

    /// Reads from neighbours, as many bytes as this turn has left. Whether there was anything to do.
    pub(super) fn do_jobs(&mut self, turn: &mut usize) -> bool {
        let mut any = false;
        while *turn > 0 {
            let Some(mut job) = self.jobs.pop_front() else { break };
            let neighbour = self.links.get(&job.link).and_then(|entry| entry.neighbour.clone());
            // A link takes its jobs along when it goes.
            let Some(neighbour) = neighbour else { continue };
            any = true;
            let parts = job.take_parts(*turn);
            *turn = turn.saturating_sub(parts.iter().map(|part| part.to.len.max(PART_COST)).sum());
            // SAFETY: the destinations are memory of a transfer of ours, or registered memory that its link touches: a
            // region is not given back before no job touches it.
            let outcome = unsafe { self.crew.read(&neighbour, parts, job.regions.as_ref()) };
            match outcome {
                Ok(()) if !job.parts.is_empty() => self.jobs.push_back(job),
                Ok(()) => self.job_is_over(&job, false),
                Err(PullError::Refused) => self.job_is_over(&job, true),
                Err(PullError::Gone) => self.end(job.link, &Ended::Closed),
                Err(PullError::Failed(errno)) => self.end(job.link, &Ended::Io(errno.into())),
            }
        }
        any
    }

    fn job_is_over(&mut self, job: &Job, refused: bool) {
        if self.letting_go > 0 {
            self.news.change = true;
        }
        if job.regions.is_none() {
            if let Some(entry) = self.links.get_mut(&job.link) {
                entry.queued -= job.weight;
                entry.acks.push(Outcome { token: job.token, fate: Fate::of(refused) });
            }
            return self.answer(job.link);
        }
        let token = Token::from_number(job.token);
        if self.posted.remove(&token).is_some() {
            let completion = if refused { Completion::Refused } else { Completion::Placed };
            self.completed(token, completion);
        }
    }

    /// Links whose jobs write some of this memory.
    pub(super) fn jobs_that_touch(&self, memory: Piece) -> impl Iterator<Item = LinkId> {
        let touches = move |job: &&Job| job.parts.iter().any(|part| part.to.overlaps(memory));
        self.jobs.iter().filter(touches).map(|job| job.link)
    }

    /// Whether a neighbour may still be reading this process's memory over a connection that has ended.
    pub(crate) fn is_pulled(&self) -> bool {
        !self.pulling.is_empty()
    }

    /// A fence could not be asked for. Where its peer is gone, nothing is read any more.
    pub(super) fn fence_failed(&mut self, now: Duration, of: u64) {
        if self.pulling.get(&of).is_some_and(|neighbour| !neighbour.is_there()) {
            self.pulling.remove(&of);
            self.news.change = true;
            let tokens = self.fences.confirmed(of);
            return self.give_back(tokens);
        }
        self.fences.failed(now, of);
    }
}

/// Shared memory for a connection that seems to stay on this host, or why there is none: then all goes through the socket.
pub(super) fn segment(socket: &TcpStream, to: Goal) -> Option<Result<Segment, String>> {
    let may_be = matches!(to, Goal::Path(..)) && is_same_host(socket);
    may_be.then(|| {
        Segment::create(RING_BYTES).map_err(|error| format!("this process cannot share memory: {error}"))
    })
}

/// In words: why this process cannot read the peer.
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

/// In words: why the peer cannot read this process.
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
