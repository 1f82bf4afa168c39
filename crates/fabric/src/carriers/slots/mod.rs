//! Slots: pinned host memory between a GPU's memory and a socket. A socket reads and writes slots; the GPU's driver copies
//! between them and the GPU. Everything that waits for a driver, to allocate a slot or to drain a failed stream, is a
//! [`SlotJob`] and runs without the engine's lock.
//!
//! ```text
//!             take: at most 4 a connection, 32 a direction      copied         the socket has taken it
//!  out:  free -------------------------------------> copying ----------> written ---------------------> free
//!                                                    D2H                 behind its frame
//!             take: as above           full            copied
//!  in:   free ---------------> filling -----> copying -----------------------------------------------> free
//!                              from the socket  H2D      then the answer, the immediate, the transfer's end
//! ```
//! A slot in a copy belongs to that copy, even if the connection ends. Such a copy becomes an [`Orphan`]. Until it is over,
//! it holds back the end of its transfer, the release of its region and the fence of its connection.
//!
//! Each direction has slots of its own. A slot for sending is freed when the peer reads; one for receiving needs only a
//! driver. So two processes never wait for each other's slots.
//!
//! A slot holds one chunk. Slots are made when they are needed, and are kept. Each slot has its own streams, so an error fails only the transfer whose bytes it carried. After
//! a lost context all transfers of that GPU fail until the process restarts.

#![allow(unsafe_code, reason = "GPUs read and write registered memory")]

mod lane;
mod pool;
mod slot;

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;

use kvlane_gpu::GpuError;

use self::lane::take_part;
pub(crate) use self::lane::{Lane, SlotPart, StagedFrame, StagedReceive, StagedSend};
pub(crate) use self::pool::SlotPool;
pub use self::pool::Staged;
use self::slot::Drain;
pub(crate) use self::slot::{Direction, Slot};
use crate::carrier::Job;
use crate::identity::Identity;
use crate::links::LinkId;
use crate::numbered::Numbered;
use crate::ranges::Spots;
use crate::registrar::Registrar;
use crate::transfers::Token;

/// A copy in flight whose connection has ended.
#[derive(Debug)]
struct Orphan {
    part: SlotPart,
    direction: Direction,
    /// The transfer of this process that it belongs to.
    token: Option<Token>,
    /// The peer whose transfer it belongs to, and that peer's connection.
    of: Option<(Identity, u64)>,
}

/// All slots in use of one carrier, by connection.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    /// None if the carrier does not reach GPUs.
    pool: Option<Arc<SlotPool>>,
    pub(crate) lanes: Numbered<LinkId, Lane>,
    orphans: Vec<Orphan>,
    /// Streams in which a copy failed. A job waits for each.
    drains: Vec<Drain>,
    /// Whether a job allocates a slot, by direction.
    is_growing: [bool; 2],
    /// Rotates the order in which connections are served.
    turn: usize,
}

/// Work that waits for a driver.
#[derive(Debug)]
pub(crate) enum SlotJob {
    /// Allocates one more slot.
    Grow(Arc<SlotPool>, Direction),
    Drain(Drain),
}

impl Job for SlotJob {
    fn run(&mut self) {
        match self {
            SlotJob::Grow(pool, direction) => pool.grow(*direction),
            SlotJob::Drain(drain) => drain.wait(),
        }
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

impl Slots {
    pub(crate) fn new(pool: Arc<SlotPool>) -> Slots {
        Slots { pool: Some(pool), ..Slots::default() }
    }

    /// The pool, which hears of each GPU whose memory is registered.
    pub(crate) fn registrar(&self) -> Option<Arc<dyn Registrar>> {
        self.pool.clone().map(|pool| pool as Arc<dyn Registrar>)
    }

    /// Whether this carrier moves bytes of GPUs at all.
    pub(crate) fn reach_gpus(&self) -> bool {
        self.pool.is_some()
    }

    /// Whether [`Slots::take_job`] has something.
    pub(crate) fn has_job(&self) -> bool {
        !self.drains.is_empty() || self.direction_to_grow().is_some()
    }

    /// The next job, if a driver is to be waited for.
    pub(crate) fn take_job(&mut self) -> Option<SlotJob> {
        if let Some(drain) = self.drains.pop() {
            return Some(SlotJob::Drain(drain));
        }
        let direction = self.direction_to_grow()?;
        self.is_growing[direction as usize] = true;
        Some(SlotJob::Grow(Arc::clone(self.pool.as_ref()?), direction))
    }

    /// The job has run.
    pub(crate) fn put_back(&mut self, job: SlotJob) {
        if let SlotJob::Grow(_, direction) = job {
            self.is_growing[direction as usize] = false;
        }
    }

    /// A direction in which a connection waits for a slot, and the pool may allocate one.
    fn direction_to_grow(&self) -> Option<Direction> {
        let pool = self.pool.as_ref()?;
        let waits = |direction: &Direction| match direction {
            Direction::Out => self.lanes.values().any(Lane::awaits_slot_to_send),
            Direction::In => self.lanes.values().any(Lane::awaits_slot),
        };
        let mut directions = [Direction::Out, Direction::In].into_iter();
        directions.find(|direction| {
            !self.is_growing[*direction as usize] && pool.can_grow(*direction) && waits(direction)
        })
    }

    /// Whether nothing is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.lanes.is_empty() && self.orphans.is_empty()
    }

    /// Whether a copy of the driver is in flight. No event tells of its end, so the caller polls.
    pub(crate) fn is_copying(&self) -> bool {
        !self.orphans.is_empty() || self.lanes.values().any(Lane::is_copying)
    }

    /// All connections with something in flight, starting with another one each time.
    pub(crate) fn rotate_links(&mut self) -> Vec<LinkId> {
        let mut links: Vec<LinkId> = self.lanes.keys().copied().collect();
        links.sort_unstable();
        self.turn = self.turn.wrapping_add(1);
        let first = self.turn % links.len().max(1);
        links.rotate_left(first);
        links
    }

    /// The next part to receive over a connection, with a slot. None: no bytes are due, or no slot is free.
    pub(crate) fn take_to_fill(&mut self, lane: &mut Lane) -> Option<SlotPart> {
        let pool = self.pool.as_ref()?;
        if !lane.awaits_slot() || !lane.may_receive_more() {
            return None;
        }
        let slot = pool.take(Direction::In)?;
        let spots = take_part(&mut lane.incoming.back_mut()?.left, pool.slot_bytes());
        Some(SlotPart { slot, spots })
    }

    /// Starts copies from GPUs for as many parts as get slots. Whether any was started.
    ///
    /// # Safety
    /// The memory is valid for reads until the copies are over.
    pub(crate) unsafe fn start_outgoing(&mut self, lane: &mut Lane) -> bool {
        let Some(pool) = self.pool.clone() else { return false };
        let mut any = false;
        let mut next = 0;
        while let Some(outgoing) = lane.outgoing.get(next) {
            if outgoing.left.is_empty() {
                next += 1;
                continue;
            }
            if !lane.may_send_more() {
                break;
            }
            let Some(mut slot) = pool.take(Direction::Out) else { break };
            any = true;
            let outgoing = &mut lane.outgoing[next];
            let spots = take_part(&mut outgoing.left, pool.slot_bytes());
            // SAFETY: the caller's promise, and a part fits its slot.
            unsafe { slot.start(&pool.gpus(), &spots, Direction::Out) };
            outgoing.copying.push_back(SlotPart { slot, spots });
        }
        any
    }

    /// Starts the copy of a received part to its GPU, unless another part of the same frame has failed.
    ///
    /// # Safety
    /// The memory is valid for writes until the copies are over.
    pub(crate) unsafe fn start_incoming(&mut self, incoming: &mut StagedReceive, mut part: SlotPart) {
        let Some(pool) = self.pool.clone() else { return };
        if incoming.has_failed {
            return self.give_back(part.slot, Direction::In);
        }
        // SAFETY: the caller's promise, and a part fits its slot.
        unsafe { part.slot.start(&pool.gpus(), &part.spots, Direction::In) };
        incoming.copying.push(part);
    }

    /// Whether the copies of a part succeeded. None while they run.
    pub(crate) fn poll_part(&mut self, part: &mut SlotPart, direction: Direction) -> Option<bool> {
        match part.slot.poll(&mut self.drains)? {
            Ok(()) => {
                let bytes: usize =
                    part.spots.iter().filter(|spot| spot.gpu.is_some()).map(|spot| spot.piece.len).sum();
                self.pool.iter().for_each(|pool| pool.count(direction, bytes as u64));
                Some(true)
            }
            Err(error) => {
                self.note_failure(&error, direction);
                Some(false)
            }
        }
    }

    /// Gives back the slots of incoming parts whose copies are over. Returns the frames that are finished, in place or
    /// failed, and whether any copy was over.
    pub(crate) fn reap_placed(&mut self, lane: &mut Lane) -> (VecDeque<StagedReceive>, bool) {
        let mut any = false;
        for incoming in &mut lane.incoming {
            let mut index = 0;
            while let Some(part) = incoming.copying.get_mut(index) {
                match self.poll_part(part, Direction::In) {
                    None => index += 1,
                    Some(is_placed) => {
                        incoming.has_failed |= !is_placed;
                        self.give_back(incoming.copying.swap_remove(index).slot, Direction::In);
                        any = true;
                    }
                }
            }
        }
        let is_filled = lane.filling.is_some();
        let last = lane.incoming.len().saturating_sub(1);
        let mut index = 0;
        let (over, rest) = std::mem::take(&mut lane.incoming).into_iter().partition(|incoming| {
            let is_coming = index == last && (is_filled || !incoming.left.is_empty());
            index += 1;
            incoming.copying.is_empty() && !is_coming
        });
        lane.incoming = rest;
        (over, any)
    }

    pub(crate) fn give_back(&mut self, slot: Slot, direction: Direction) {
        if let Some(pool) = &self.pool {
            pool.give_back(slot, direction);
        }
    }

    /// A connection has ended, and its link touches no memory any more. Copies in flight become orphans. `token_of`: from the
    /// token of an incoming frame to this process's transfer.
    pub(crate) fn detach(&mut self, link: LinkId, token_of: impl Fn(u64) -> Option<Token>) {
        let Some(Lane { outgoing, written, incoming, filling, of }) = self.lanes.remove(&link) else {
            return;
        };
        written.into_iter().for_each(|(_, slot)| self.give_back(slot, Direction::Out));
        filling.into_iter().for_each(|part| self.give_back(part.slot, Direction::In));
        for StagedSend { frame, copying, .. } in outgoing {
            let token = if let StagedFrame::Write { token, .. } = frame { Some(token) } else { None };
            let orphan = |part| Orphan { part, direction: Direction::Out, token, of };
            self.orphans.extend(copying.into_iter().map(orphan));
        }
        for StagedReceive { token, copying, .. } in incoming {
            let token = token_of(token);
            let orphan = |part| Orphan { part, direction: Direction::In, token, of };
            self.orphans.extend(copying.into_iter().map(orphan));
        }
    }

    /// Gives back the slots of orphans whose copies are over. Returns the transfers that have no orphan left, and
    /// whether any copy was over.
    pub(crate) fn reap_orphans(&mut self) -> (Vec<Token>, bool) {
        let mut over = Vec::new();
        let before = self.orphans.len();
        for mut orphan in std::mem::take(&mut self.orphans) {
            if self.poll_part(&mut orphan.part, orphan.direction).is_some() {
                self.give_back(orphan.part.slot, orphan.direction);
                over.extend(orphan.token);
            } else {
                self.orphans.push(orphan);
            }
        }
        over.sort_unstable();
        over.dedup();
        over.retain(|token| !self.has_orphan_of(*token));
        (over, self.orphans.len() < before)
    }

    /// Whether an orphan belongs to this transfer.
    pub(crate) fn has_orphan_of(&self, token: Token) -> bool {
        self.orphans.iter().any(|orphan| orphan.token == Some(token))
    }

    /// Whether an orphan still writes this process's GPUs for that connection of a peer.
    pub(crate) fn is_placing_for(&self, who: Identity, connection: u64) -> bool {
        self.orphans
            .iter()
            .any(|orphan| orphan.direction == Direction::In && orphan.of == Some((who, connection)))
    }

    /// Connections that are still to read or write this memory.
    pub(crate) fn links_that_touch(&self, memory: Spots<'_>) -> Vec<LinkId> {
        let touches = |lane: &Lane| lane.spots().any(|spot| memory.overlap(*spot));
        self.lanes.iter().filter(|(_, lane)| touches(lane)).map(|(link, _)| *link).collect()
    }

    /// Whether an orphan touches this memory.
    pub(crate) fn is_touched_by_orphans(&self, memory: Spots<'_>) -> bool {
        self.orphans.iter().flat_map(|orphan| &orphan.part.spots).any(|spot| memory.overlap(*spot))
    }

    fn note_failure(&mut self, error: &GpuError, direction: Direction) {
        self.pool.iter().for_each(|pool| pool.count_failure());
        // Log: a transfer to or from a GPU failed; for a hand-off, the decode engine computes those blocks. Do:
        // look for CUDA errors in the engine's log and Xid in dmesg.
        tracing::warn!(%error, ?direction, "GPU driver failed to copy bytes of a transfer");
    }
}
