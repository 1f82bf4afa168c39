//! Moves bytes of GPUs: between slots ([`crate::carriers::slots`]) and a connection.

#![allow(unsafe_code, reason = "GPUs read and write registered memory")]

use std::time::Duration;

use super::posted::{PostState, SocketPost, StagedRead};
use super::posting::wire_run;
use super::{BytesRole, SocketCarrier};
use crate::carrier::{CarrierPost, Context};
use crate::carriers::slots::{Direction, Lane, StagedFrame, StagedReceive, StagedSend};
use crate::links::LinkId;
use crate::ranges::{Spot, bytes_of, take_bytes};
use crate::tcp::{Ended, Head, Out};
use crate::transfers::{Completion, Op, Token};
use crate::wire::{BadFrame, Fate, Outcome};

/// Most spots, of 40 bytes each, that wait to be copied for the peer of one connection.
const QUEUED_MAX: usize = 1 << 18;
/// Time that the lease must have left when a copy to a GPU begins, because such a copy cannot be cancelled.
const LEASE_MARGIN: Duration = Duration::from_secs(1);

impl SocketCarrier {
    /// Posts a part of a transfer whose local memory is on a GPU.
    pub(super) fn post_staged(&mut self, cx: &mut Context<'_>, link: LinkId, post: &CarrierPost<'_>) {
        let CarrierPost { token, op, runs, .. } = post;
        let spots: Vec<Spot> = runs.iter().map(|run| run.local).collect();
        if !self.slots.reach_gpus() {
            return cx.completed(*token, Completion::GpuFailed);
        }
        let mut entries = Vec::new();
        runs.iter().for_each(|run| wire_run(run).encode(&mut entries));
        let (token, runs) = (*token, runs.len());
        let state = match op {
            Op::Write => {
                let frame = StagedFrame::Write { token, entries, runs };
                self.slots.lanes.entry(link).or_default().outgoing.push_back(StagedSend::new(frame, spots));
                PostState::Staged
            }
            Op::Read => {
                let bytes = bytes_of(&spots);
                let head = Head::Read { token: token.number(), runs, bytes };
                self.links.send_frame(link, head, &entries, []);
                let (coming, completion) = (0, Completion::Placed);
                PostState::ReadStaged(Box::new(StagedRead { left: spots, coming, completion }))
            }
        };
        self.posted.insert(token, SocketPost { link, state });
    }

    /// Queues the answer to a peer's READ.
    pub(super) fn answer_staged(&mut self, link: LinkId, token: u64, spots: Vec<Spot>) -> Result<(), Ended> {
        let lane = self.slots.lanes.entry(link).or_default();
        if lane.queued() + spots.len() > QUEUED_MAX {
            return Err(BadFrame("too much at a time").into());
        }
        lane.outgoing.push_back(StagedSend::new(StagedFrame::Data { token }, spots));
        Ok(())
    }

    /// The bytes of a frame follow, and go to these spots.
    pub(super) fn receive_staged(&mut self, link: LinkId, token: u64, spots: Vec<Spot>) {
        let of = self.links.get(link).and_then(|entry| match entry.role {
            BytesRole::Serving { from, connection, .. } => Some((from, connection)),
            _ => None,
        });
        let lane = self.slots.lanes.entry(link).or_default();
        lane.of = of;
        lane.incoming.push_back(StagedReceive::new(token, spots));
        self.fill_next(link);
    }

    /// The next Data frame of a READ into a GPU's memory follows.
    pub(super) fn take_staged_data(&mut self, link: LinkId, token: u64, bytes: u64) -> Result<(), Ended> {
        let posted = self.posted.get_mut(&Token::from_number(token)).filter(|posted| posted.link == link);
        let Some(SocketPost { state: PostState::ReadStaged(read), .. }) = posted else { return Ok(()) };
        let spots = take_bytes(&mut read.left, bytes).ok_or(BadFrame("an answer of other bytes"))?;
        read.coming += 1;
        self.receive_staged(link, token, spots);
        Ok(())
    }

    /// The peer has ended a READ into a GPU's memory. Bytes that it sent before may still be on their way to the GPU.
    pub(super) fn end_staged_read(&mut self, cx: &mut Context<'_>, token: Token, completion: Completion) {
        if let Some(SocketPost { state: PostState::ReadStaged(read), .. }) = self.posted.get_mut(&token) {
            read.left.clear();
            read.completion = completion;
            self.complete_if_read(cx, token);
        }
    }

    /// Takes a slot for the bytes that come next over a connection. Without one, the socket is not read.
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

    /// All bytes of a part are in its slot. False: the bytes that arrived were not staged.
    pub(super) fn take_staged_body(&mut self, link: LinkId) -> Result<bool, Ended> {
        let lease = self.lease(link);
        let lane = self.slots.lanes.get_mut(&link);
        let Some((lane, part)) = lane.and_then(|lane| lane.filling.take().map(|part| (lane, part))) else {
            return Ok(false);
        };
        let Some(mut incoming) = lane.incoming.pop_back() else { return Ok(false) };
        let is_late = lease.is_some_and(|lease| !lease.holds_for(LEASE_MARGIN));
        if is_late {
            self.slots.give_back(part.slot, Direction::In);
            incoming.left.clear();
        } else {
            // SAFETY: the memory is that of a transfer in flight, or a registered region that is not given back before no
            // copy touches it.
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

    /// Advances all transfers of GPU memory. Whether anything happened.
    pub(super) fn serve_slots(&mut self, cx: &mut Context<'_>) -> bool {
        if self.slots.is_idle() {
            return false;
        }
        let (over, mut any) = self.slots.reap_orphans();
        over.into_iter().for_each(|token| cx.completed(token, Completion::Unknown));
        for link in self.slots.rotate_links() {
            any |= self.serve_lane(cx, link);
        }
        if any {
            cx.note_released();
        }
        any
    }

    fn serve_lane(&mut self, cx: &mut Context<'_>, link: LinkId) -> bool {
        let Some(mut lane) = self.slots.lanes.remove(&link) else { return false };
        let mut any = false;
        if let Some(entry) = self.links.get(link) {
            while lane.written.front().is_some_and(|(mark, _)| entry.has_written(*mark)) {
                lane.written
                    .pop_front()
                    .into_iter()
                    .for_each(|(_, slot)| self.slots.give_back(slot, Direction::Out));
                any = true;
            }
        }
        any |= self.send_copied(cx, link, &mut lane);
        // SAFETY: as in `take_staged_body`.
        any |= unsafe { self.slots.start_outgoing(&mut lane) };
        let (over, has_placed) = self.slots.reap_placed(&mut lane);
        any |= has_placed || !over.is_empty();
        over.into_iter().for_each(|incoming| self.report_placed(cx, link, &incoming));
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

    /// Sends the parts that were copied out of a GPU, in order.
    fn send_copied(&mut self, cx: &mut Context<'_>, link: LinkId, lane: &mut Lane) -> bool {
        let mut any = false;
        while let Some(mut outgoing) = lane.outgoing.pop_front() {
            while let Some(part) = outgoing.copying.front_mut() {
                let Some(is_copied) = self.slots.poll_part(part, Direction::Out) else { break };
                any = true;
                let Some(part) = outgoing.copying.pop_front() else { break };
                if !is_copied {
                    outgoing.fail();
                }
                let Some(entry) = self.links.get(link).filter(|_| !outgoing.has_failed) else {
                    self.slots.give_back(part.slot, Direction::Out);
                    continue;
                };
                let (head, entries) = match &outgoing.frame {
                    StagedFrame::Write { token, entries, runs } => {
                        let stamp = if let BytesRole::Up { stamp, .. } = entry.role { stamp } else { 0 };
                        let (token, runs, bytes) = (token.number(), *runs, part.bytes());
                        (Head::Write { token, runs, bytes, stamp }, entries.as_slice())
                    }
                    StagedFrame::Data { token } => {
                        (Head::Data { token: *token, bytes: part.bytes() }, [].as_slice())
                    }
                };
                let pieces = part.host_pieces().into_iter().map(Out::Memory);
                self.links.send_frame(link, head, entries, pieces);
                let mark = self.links.mark(link);
                if let StagedFrame::Write { token, .. } = &outgoing.frame
                    && let Some(posted) = self.posted.get_mut(token)
                {
                    posted.state = PostState::Write(mark);
                }
                lane.written.push_back((mark, part.slot));
            }
            if !outgoing.is_over() {
                lane.outgoing.push_front(outgoing);
                return any;
            }
            any = true;
            if outgoing.has_failed {
                self.report_failure(cx, link, &outgoing.frame);
            }
        }
        any
    }

    /// The driver failed to copy a part that was to be sent: fails the WRITE, or the peer's READ.
    fn report_failure(&mut self, cx: &mut Context<'_>, link: LinkId, frame: &StagedFrame) {
        match frame {
            StagedFrame::Write { token, .. } => {
                self.posted.remove(token);
                cx.completed(*token, Completion::GpuFailed);
            }
            StagedFrame::Data { token } => {
                let outcome = Outcome { token: *token, fate: Fate::GpuFailed };
                self.push_outcome(link, outcome);
            }
        }
    }

    fn push_outcome(&mut self, link: LinkId, outcome: Outcome) {
        if let Some(BytesRole::Serving { acks, .. }) = self.links.get_mut(link).map(|entry| &mut entry.role) {
            acks.push(outcome);
        }
    }

    /// All bytes of a frame are on the GPU, or its driver failed: reports that to the peer, or counts it for the READ.
    fn report_placed(&mut self, cx: &mut Context<'_>, link: LinkId, incoming: &StagedReceive) {
        let Some(entry) = self.links.get(link) else { return };
        let fate = incoming.fate();
        match entry.role {
            BytesRole::Serving { .. } => self.push_outcome(link, Outcome { token: incoming.token, fate }),
            BytesRole::Up { .. } => {
                let token = Token::from_number(incoming.token);
                let Some(SocketPost { state: PostState::ReadStaged(read), .. }) = self.posted.get_mut(&token)
                else {
                    return;
                };
                read.coming -= 1;
                if fate != Fate::Placed {
                    read.completion = fate.into();
                }
                self.complete_if_read(cx, token);
            }
            BytesRole::Dialling { .. } => {}
        }
    }

    fn complete_if_read(&mut self, cx: &mut Context<'_>, token: Token) {
        if let Some(SocketPost { state: PostState::ReadStaged(read), .. }) = self.posted.get(&token)
            && read.is_over()
        {
            let completion = read.completion;
            self.posted.remove(&token);
            cx.completed(token, completion);
        }
    }
}
