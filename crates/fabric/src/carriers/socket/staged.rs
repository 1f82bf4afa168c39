//! Transfers of GPUs' memory: through slots ([`crate::carriers::slots`]) and the socket.

#![allow(unsafe_code, reason = "GPUs read and write registered memory")]

use std::time::Duration;

use super::posted::{Asked, Posted, StagedRead};
use super::posting::wire_run;
use super::{Role, SocketCarrier};
use crate::carrier::{CarrierPost, Context};
use crate::carriers::slots::{Frame, Incoming, Lane, Outgoing, Way};
use crate::links::LinkId;
use crate::ranges::{Spot, bytes_of, take_bytes};
use crate::tcp::{Ended, Head, Out};
use crate::transfers::{Completion, Op, Token};
use crate::wire::{BadFrame, Fate, Outcome};

/// What is to be copied for one connection's peer, in pieces of 40 bytes.
const QUEUED_MAX: usize = 1 << 18;
/// A copy to a GPU begins so long before the peer's lease is over, since it cannot be called back.
const LEASE_MARGIN: Duration = Duration::from_secs(1);

impl SocketCarrier {
    /// A part of a transfer with memory of ours on a GPU.
    pub(super) fn post_staged(&mut self, cx: &mut Context<'_>, link: LinkId, post: &CarrierPost<'_>) {
        let CarrierPost { token, op, runs, .. } = post;
        let spots: Vec<Spot> = runs.iter().map(|run| run.local).collect();
        if !self.slots.reach_gpus() {
            return cx.completed(*token, Completion::GpuFailed);
        }
        let mut entries = Vec::new();
        runs.iter().for_each(|run| wire_run(run).encode(&mut entries));
        let (token, runs) = (*token, runs.len());
        let what = match op {
            Op::Write => {
                let frame = Frame::Write { token, entries, runs };
                self.slots.lanes.entry(link).or_default().outgoing.push_back(Outgoing::new(frame, spots));
                Asked::Staged
            }
            Op::Read => {
                let bytes = bytes_of(&spots);
                let head = Head::Read { token: token.number(), runs, bytes };
                self.links.send_frame(link, head, &entries, []);
                let (coming, completion) = (0, Completion::Placed);
                Asked::ReadStaged(Box::new(StagedRead { left: spots, coming, completion }))
            }
        };
        self.posted.insert(token, Posted { link, what });
    }

    /// A peer reads.
    pub(super) fn answer_staged(&mut self, link: LinkId, token: u64, spots: Vec<Spot>) -> Result<(), Ended> {
        let lane = self.slots.lanes.entry(link).or_default();
        if lane.queued() + spots.len() > QUEUED_MAX {
            return Err(BadFrame("too much at a time").into());
        }
        lane.outgoing.push_back(Outgoing::new(Frame::Data { token }, spots));
        Ok(())
    }

    /// The bytes of a frame are coming.
    pub(super) fn receive_staged(&mut self, link: LinkId, token: u64, spots: Vec<Spot>) {
        let of = self.links.get(link).and_then(|entry| match entry.role {
            Role::Serving { from, connection, .. } => Some((from, connection)),
            _ => None,
        });
        let lane = self.slots.lanes.entry(link).or_default();
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
    pub(super) fn end_staged_read(&mut self, cx: &mut Context<'_>, token: Token, completion: Completion) {
        if let Some(Posted { what: Asked::ReadStaged(read), .. }) = self.posted.get_mut(&token) {
            read.left.clear();
            read.completion = completion;
            self.see_whether_read(cx, token);
        }
    }

    /// A slot for what comes next over a connection; without one nothing more is read from it.
    fn fill_next(&mut self, link: LinkId) {
        let Some(mut lane) = self.slots.lanes.remove(&link) else { return };
        if let Some(part) = self.slots.take_to_fill(&mut lane) {
            self.links.expect(link, part.host_pieces(), 0);
            lane.filling = Some(part);
        }
        let awaits_slot = lane.awaits_slot();
        self.slots.lanes.insert(link, lane);
        self.links.hold(link, awaits_slot);
    }

    /// All bytes of a part are in its slot. False: what came has none.
    pub(super) fn take_staged_body(&mut self, link: LinkId) -> Result<bool, Ended> {
        let lease = self.lease(link);
        let lane = self.slots.lanes.get_mut(&link);
        let Some((lane, part)) = lane.and_then(|lane| lane.filling.take().map(|part| (lane, part))) else {
            return Ok(false);
        };
        let Some(mut incoming) = lane.incoming.pop_back() else { return Ok(false) };
        let is_late = lease.is_some_and(|lease| !lease.holds_for(LEASE_MARGIN));
        if is_late {
            self.slots.give_back(part.slot, Way::In);
            incoming.left.clear();
        } else {
            // SAFETY: the memory belongs to a registered region: of a transfer under way, or a peer's, which is not given back
            // before no copy touches it.
            unsafe { self.slots.start_incoming(&mut incoming, part) };
        }
        if let Some(lane) = self.slots.lanes.get_mut(&link) {
            lane.incoming.push_back(incoming);
        }
        if is_late {
            return Err(Ended::Late);
        }
        self.fill_next(link);
        Ok(true)
    }

    /// Does what is due for GPUs' memory. Whether there was anything.
    pub(super) fn see_to_slots(&mut self, cx: &mut Context<'_>) -> bool {
        if self.slots.is_idle() {
            return false;
        }
        let (over, mut any) = self.slots.take_orphans();
        over.into_iter().for_each(|token| cx.completed(token, Completion::Unknown));
        for link in self.slots.links() {
            any |= self.see_to_lane(cx, link);
        }
        if any {
            cx.note_released();
        }
        any
    }

    fn see_to_lane(&mut self, cx: &mut Context<'_>, link: LinkId) -> bool {
        let Some(mut lane) = self.slots.lanes.remove(&link) else { return false };
        let mut any = false;
        if let Some(entry) = self.links.get(link) {
            while lane.written.front().is_some_and(|(mark, _)| entry.has_written(*mark)) {
                lane.written
                    .pop_front()
                    .into_iter()
                    .for_each(|(_, slot)| self.slots.give_back(slot, Way::Out));
                any = true;
            }
        }
        any |= self.report_copied(cx, link, &mut lane);
        // SAFETY: as in `take_staged_body`.
        any |= unsafe { self.slots.start_outgoing(&mut lane) };
        let (over, has_placed) = self.slots.take_placed(&mut lane);
        any |= has_placed || !over.is_empty();
        over.into_iter().for_each(|incoming| self.is_in_place(cx, link, &incoming));
        let awaits_slot = lane.awaits_slot();
        if !lane.is_empty() {
            self.slots.lanes.insert(link, lane);
        }
        if awaits_slot {
            self.fill_next(link);
            any |= !self.slots.lanes.get(&link).is_some_and(Lane::awaits_slot);
        }
        self.answer(link);
        any
    }

    /// What has been copied out of a GPU's memory goes to the socket, in order.
    fn report_copied(&mut self, cx: &mut Context<'_>, link: LinkId, lane: &mut Lane) -> bool {
        let mut any = false;
        while let Some(mut outgoing) = lane.outgoing.pop_front() {
            while let Some(part) = outgoing.copying.front_mut() {
                let Some(is_copied) = self.slots.is_done(part, Way::Out) else { break };
                any = true;
                let Some(part) = outgoing.copying.pop_front() else { break };
                if !is_copied {
                    outgoing.fail();
                }
                let Some(entry) = self.links.get(link).filter(|_| !outgoing.has_failed) else {
                    self.slots.give_back(part.slot, Way::Out);
                    continue;
                };
                let (head, entries) = match &outgoing.what {
                    Frame::Write { token, entries, runs } => {
                        let stamp = if let Role::Up { stamp, .. } = entry.role { stamp } else { 0 };
                        let (token, runs, bytes) = (token.number(), *runs, part.bytes());
                        (Head::Write { token, runs, bytes, stamp }, entries.as_slice())
                    }
                    Frame::Data { token } => {
                        (Head::Data { token: *token, bytes: part.bytes() }, [].as_slice())
                    }
                };
                let pieces = part.host_pieces().into_iter().map(Out::Memory);
                self.links.send_frame(link, head, entries, pieces);
                let mark = self.links.mark(link);
                if let Frame::Write { token, .. } = &outgoing.what
                    && let Some(posted) = self.posted.get_mut(token)
                {
                    posted.what = Asked::Write(mark);
                }
                lane.written.push_back((mark, part.slot));
            }
            if !outgoing.is_over() {
                lane.outgoing.push_front(outgoing);
                return any;
            }
            any = true;
            if outgoing.has_failed {
                self.report_failure(cx, link, &outgoing.what);
            }
        }
        any
    }

    /// A driver could not copy what was to go out.
    fn report_failure(&mut self, cx: &mut Context<'_>, link: LinkId, what: &Frame) {
        match what {
            Frame::Write { token, .. } => {
                self.posted.remove(token);
                cx.completed(*token, Completion::GpuFailed);
            }
            Frame::Data { token } => {
                let outcome = Outcome { token: *token, fate: Fate::GpuFailed };
                self.push_outcome(link, outcome);
            }
        }
    }

    fn push_outcome(&mut self, link: LinkId, outcome: Outcome) {
        if let Some(Role::Serving { acks, .. }) = self.links.get_mut(link).map(|entry| &mut entry.role) {
            acks.push(outcome);
        }
    }

    /// All bytes of a frame are where they belong, or cannot get there.
    fn is_in_place(&mut self, cx: &mut Context<'_>, link: LinkId, incoming: &Incoming) {
        let Some(entry) = self.links.get(link) else { return };
        let fate = incoming.fate();
        match entry.role {
            Role::Serving { .. } => self.push_outcome(link, Outcome { token: incoming.token, fate }),
            Role::Up { .. } => {
                let token = Token::from_number(incoming.token);
                let Some(Posted { what: Asked::ReadStaged(read), .. }) = self.posted.get_mut(&token) else {
                    return;
                };
                read.coming -= 1;
                if fate != Fate::Placed {
                    read.completion = fate.into();
                }
                self.see_whether_read(cx, token);
            }
            Role::Dialling { .. } => {}
        }
    }

    fn see_whether_read(&mut self, cx: &mut Context<'_>, token: Token) {
        if let Some(Posted { what: Asked::ReadStaged(read), .. }) = self.posted.get(&token)
            && read.is_over()
        {
            let completion = read.completion;
            self.posted.remove(&token);
            cx.completed(token, completion);
        }
    }
}
