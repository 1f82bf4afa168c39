//! Transfers of GPUs' memory: through slots ([`crate::staging`]) and the socket.

#![allow(unsafe_code, reason = "GPUs read and write registered memory")]

use std::time::{Duration, Instant};

use super::{Asked, LinkId, Posted, Role, Sockets};
use crate::provider::NotNow;
use crate::regions::{Piece, Regions};
use crate::runs::Run;
use crate::staging::{Frame, Incoming, Lane, Outgoing, Spot, Way, bytes_of, take_bytes};
use crate::tcp::{BadFrame, Ended, Fate, Head, Identity, Outcome, WireRun};
use crate::transfers::{Completion, Op, Ticket, Token};

/// How often a driver is asked whether it is done, by a thread that has nothing else to do.
pub(super) const LOOK_AT_COPIES: Duration = Duration::from_micros(50);
/// How long a peer that asks for a fence is kept waiting for copies; it asks again.
const FENCE_PATIENCE: Duration = Duration::from_millis(5);
/// What is to be copied for one connection's peer, in pieces of 40 bytes.
const QUEUED_MAX: usize = 1 << 18;
/// A copy to a GPU begins so long before the peer's lease is over, since it cannot be called back.
const LEASE_MARGIN: Duration = Duration::from_secs(1);

/// A read of ours into a GPU's memory.
#[derive(Debug)]
pub(super) struct StagedRead {
    /// What has not begun to come.
    left: Vec<Spot>,
    /// Frames whose bytes are not in place.
    coming: usize,
    /// What was worst so far.
    completion: Completion,
}

impl StagedRead {
    /// Nothing more is to come.
    fn is_over(&self) -> bool {
        self.left.is_empty() && self.coming == 0
    }
}

impl Sockets {
    /// A part of a transfer with memory of ours on a GPU.
    pub(super) fn post_staged(
        &mut self,
        link: LinkId,
        token: Token,
        ticket: Ticket,
        op: Op,
        runs: &[Run],
    ) -> Result<(), NotNow> {
        let known = self.used.get(&ticket).map_or(&[][..], |used| &used.peer);
        let (mut entries, mut spots) = (Vec::new(), Vec::with_capacity(runs.len()));
        for Run { local, remote, len } in runs {
            let generation = known.iter().find(|(region, _)| *region == remote.region);
            let spot = self.regions.own_spot(local.region, local.offset, *len);
            let (Some(spot), Some((region, generation))) = (spot, generation) else {
                self.completed(token, Completion::Refused);
                return Ok(());
            };
            WireRun { region: *region, generation: *generation, offset: remote.offset, len: *len }
                .encode(&mut entries);
            spots.push(spot);
        }
        let runs = runs.len();
        let what = match op {
            Op::Write => {
                let frame = Frame::Write { token, entries, runs };
                self.staging.lanes.entry(link).or_default().outgoing.push_back(Outgoing::new(frame, spots));
                Asked::Staged
            }
            Op::Read => {
                let bytes = bytes_of(&spots);
                let head = Head::Read { token: token.number(), runs, bytes };
                self.say(link, [&head.encode()[..], &entries[..]].concat());
                let (coming, completion) = (0, Completion::Placed);
                Asked::ReadStaged(Box::new(StagedRead { left: spots, coming, completion }))
            }
        };
        self.posted.insert(token, Posted { link, what });
        Ok(())
    }

    /// A peer reads.
    pub(super) fn answer_staged(&mut self, link: LinkId, token: u64, spots: Vec<Spot>) -> Result<(), Ended> {
        let lane = self.staging.lanes.entry(link).or_default();
        if lane.queued() + spots.len() > QUEUED_MAX {
            return Err(BadFrame("too much at a time").into());
        }
        lane.outgoing.push_back(Outgoing::new(Frame::Data { token }, spots));
        Ok(())
    }

    /// The bytes of a frame are coming.
    pub(super) fn receive_staged(&mut self, link: LinkId, token: u64, spots: Vec<Spot>) {
        let of = self.links.get(&link).and_then(|entry| match entry.role {
            Role::Serving { from, connection, .. } => Some((from, connection)),
            _ => None,
        });
        let lane = self.staging.lanes.entry(link).or_default();
        lane.of = of;
        lane.incoming.push_back(Incoming::new(token, spots));
        self.fill_next(link);
    }

    /// The next bytes of an answer to a read of ours into a GPU's memory.
    pub(super) fn take_staged_data(&mut self, link: LinkId, token: u64, bytes: u64) -> Result<(), Ended> {
        let posted = self.posted.get_mut(&Token::from_number(token)).filter(|posted| posted.link == link);
        let Some(Posted { what: Asked::ReadStaged(read), .. }) = posted else { return Ok(()) };
        let spots = take_bytes(&mut read.left, bytes).ok_or(BadFrame("an answer of other bytes"))?;
        read.coming += 1;
        self.receive_staged(link, token, spots);
        Ok(())
    }

    /// The peer ends a read of ours into a GPU's memory like this. What came before may still be on its way there.
    pub(super) fn end_staged_read(&mut self, token: Token, completion: Completion) {
        if let Some(Posted { what: Asked::ReadStaged(read), .. }) = self.posted.get_mut(&token) {
            read.left.clear();
            read.completion = completion;
            self.see_whether_read(token);
        }
    }

    /// A slot for what comes next over a connection; without one nothing more is read from it.
    fn fill_next(&mut self, link: LinkId) {
        let Some(mut lane) = self.staging.lanes.remove(&link) else { return };
        let part = self.staging.take_to_fill(&mut lane);
        if let Some(entry) = self.links.get_mut(&link) {
            if let Some(part) = part {
                entry.link.expect(part.host_pieces(), 0);
                lane.filling = Some(part);
            }
            let awaits_slot = lane.awaits_slot();
            if entry.awaits_slot != awaits_slot {
                entry.awaits_slot = awaits_slot;
                // What epoll is to tell of, and what is in our own buffer already.
                self.dirty.push(link);
                self.ready.extend((!awaits_slot).then_some(link));
            }
        }
        self.staging.lanes.insert(link, lane);
    }

    /// All bytes of a part are in its slot. False: what came has none.
    pub(super) fn take_staged_body(&mut self, link: LinkId) -> Result<bool, Ended> {
        let lane = self.staging.lanes.get_mut(&link);
        let Some((lane, part)) = lane.and_then(|lane| lane.filling.take().map(|part| (lane, part))) else {
            return Ok(false);
        };
        let lease = match self.links.get(&link).map(|entry| &entry.role) {
            Some(Role::Serving { lease, .. }) => Some(*lease),
            _ => None,
        };
        let Some(mut incoming) = lane.incoming.pop_back() else { return Ok(false) };
        let is_late = lease.is_some_and(|lease| !lease.holds_for(LEASE_MARGIN));
        if is_late {
            self.staging.give_back(part.slot, Way::In);
            incoming.left.clear();
        } else {
            // SAFETY: the memory belongs to a registered region: of a transfer under way, or a peer's, which is not given back
            // before no copy touches it.
            unsafe { self.staging.start_incoming(&mut incoming, part) };
        }
        if let Some(lane) = self.staging.lanes.get_mut(&link) {
            lane.incoming.push_back(incoming);
        }
        if is_late {
            return Err(Ended::Late);
        }
        self.fill_next(link);
        Ok(true)
    }

    /// Does what is due for GPUs' memory. Whether there was anything.
    pub(super) fn see_to_staging(&mut self) -> bool {
        if self.staging.is_idle() {
            return false;
        }
        let (over, mut any) = self.staging.take_orphans();
        over.into_iter().for_each(|token| self.completed(token, Completion::Unknown));
        for link in self.staging.links() {
            any |= self.see_to_lane(link);
        }
        if any && self.letting_go > 0 {
            self.news.change = true;
        }
        any
    }

    fn see_to_lane(&mut self, link: LinkId) -> bool {
        let Some(mut lane) = self.staging.lanes.remove(&link) else { return false };
        let mut any = false;
        if let Some(entry) = self.links.get(&link) {
            while lane.written.front().is_some_and(|(mark, _)| entry.link.has_written(*mark)) {
                lane.written
                    .pop_front()
                    .into_iter()
                    .for_each(|(_, slot)| self.staging.give_back(slot, Way::Out));
                any = true;
            }
        }
        any |= self.say_copied(link, &mut lane);
        // SAFETY: as in `take_staged_body`.
        any |= unsafe { self.staging.start_outgoing(&mut lane) };
        let (over, has_placed) = self.staging.take_placed(&mut lane);
        any |= has_placed || !over.is_empty();
        over.into_iter().for_each(|incoming| self.is_in_place(link, &incoming));
        let awaits_slot = lane.awaits_slot();
        if !lane.is_empty() {
            self.staging.lanes.insert(link, lane);
        }
        if awaits_slot {
            self.fill_next(link);
            any |= !self.staging.lanes.get(&link).is_some_and(Lane::awaits_slot);
        }
        self.answer(link);
        any
    }

    /// What has been copied out of a GPU's memory goes to the socket, in order.
    fn say_copied(&mut self, link: LinkId, lane: &mut Lane) -> bool {
        let mut any = false;
        while let Some(mut outgoing) = lane.outgoing.pop_front() {
            while let Some(part) = outgoing.copying.front_mut() {
                let Some(is_copied) = self.staging.is_done(part, Way::Out) else { break };
                any = true;
                let Some(part) = outgoing.copying.pop_front() else { break };
                if !is_copied {
                    outgoing.fail();
                }
                let entry = self.links.get_mut(&link).filter(|_| !outgoing.has_failed);
                let Some(entry) = entry else {
                    self.staging.give_back(part.slot, Way::Out);
                    continue;
                };
                match &outgoing.what {
                    Frame::Write { token, entries, runs } => {
                        let stamp = if let Role::Up { stamp, .. } = entry.role { stamp } else { 0 };
                        let (token, runs, bytes) = (token.number(), *runs, part.bytes());
                        let head = Head::Write { token, runs, bytes, stamp };
                        entry.link.say([&head.encode()[..], &entries[..]].concat());
                    }
                    Frame::Data { token } => {
                        entry.link.say(Head::Data { token: *token, bytes: part.bytes() }.encode().to_vec());
                    }
                }
                part.host_pieces().into_iter().for_each(|piece| entry.link.say_memory(piece));
                let mark = entry.link.mark();
                if let Frame::Write { token, .. } = &outgoing.what
                    && let Some(posted) = self.posted.get_mut(token)
                {
                    posted.what = Asked::Write(mark);
                }
                lane.written.push_back((mark, part.slot));
                self.dirty.push(link);
            }
            if !outgoing.is_over() {
                lane.outgoing.push_front(outgoing);
                return any;
            }
            any = true;
            if outgoing.has_failed {
                self.tell_of_failure(link, &outgoing.what);
            }
        }
        any
    }

    /// A driver could not copy what was to go out.
    fn tell_of_failure(&mut self, link: LinkId, what: &Frame) {
        match what {
            Frame::Write { token, .. } => {
                self.posted.remove(token);
                self.completed(*token, Completion::GpuFailed);
            }
            Frame::Data { token } => {
                let outcome = Outcome { token: *token, fate: Fate::GpuFailed };
                self.links.get_mut(&link).into_iter().for_each(|entry| entry.acks.push(outcome));
            }
        }
    }

    /// All bytes of a frame are where they belong, or cannot get there.
    fn is_in_place(&mut self, link: LinkId, incoming: &Incoming) {
        let Some(entry) = self.links.get_mut(&link) else { return };
        let fate = incoming.fate();
        match entry.role {
            Role::Serving { .. } => entry.acks.push(Outcome { token: incoming.token, fate }),
            Role::Up { .. } => {
                let token = Token::from_number(incoming.token);
                let Some(Posted { what: Asked::ReadStaged(read), .. }) = self.posted.get_mut(&token) else {
                    return;
                };
                read.coming -= 1;
                if fate != Fate::Placed {
                    read.completion = fate.into();
                }
                self.see_whether_read(token);
            }
            _ => {}
        }
    }

    fn see_whether_read(&mut self, token: Token) {
        if let Some(Posted { what: Asked::ReadStaged(read), .. }) = self.posted.get(&token)
            && read.is_over()
        {
            let completion = read.completion;
            self.posted.remove(&token);
            self.completed(token, completion);
        }
    }

    /// Whether a copy to a GPU still runs that a peer's connection, which has ended, has asked for.
    pub(super) fn still_places(&mut self, who: Identity, connection: u64) -> bool {
        let until = Instant::now() + FENCE_PATIENCE;
        while self.staging.places_for(who, connection) {
            let (over, _) = self.staging.take_orphans();
            over.into_iter().for_each(|token| self.completed(token, Completion::Unknown));
            if Instant::now() >= until {
                return self.staging.places_for(who, connection);
            }
            std::thread::yield_now();
        }
        false
    }

    /// Waits for all copies of connections that have ended.
    pub(super) fn drain_copies(&mut self) {
        self.staging.drain_orphans();
        let (over, _) = self.staging.take_orphans();
        over.into_iter().for_each(|token| self.completed(token, Completion::Unknown));
    }

    /// Whether a driver copies bytes of transfers.
    pub(crate) fn is_copying(&self) -> bool {
        !self.staging.is_idle() && self.staging.is_copying()
    }
}

/// Where these bytes are that a peer asks for, if any of them are on a GPU.
pub(super) fn spots_for_peer(regions: &Regions, runs: &[WireRun], pieces: &[Piece]) -> Option<Vec<Spot>> {
    if !regions.has_gpus() {
        return None;
    }
    let spot = |(run, piece): (&WireRun, &Piece)| Spot { piece: *piece, gpu: regions.gpu_of(run.region) };
    let spots: Vec<Spot> = runs.iter().zip(pieces).map(spot).collect();
    spots.iter().any(|spot| spot.gpu.is_some()).then_some(spots)
}
