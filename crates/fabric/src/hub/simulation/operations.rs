//! Everything that applications asked for, and whether it ended rightly.

use std::time::Duration;

use super::faults::Fault;
use super::memory::{PieceAt, RegionState, WorldMemory};
use crate::transfers::{Failure, Op, PeerId, Ticket};

/// A transfer or a message of an application.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) process: usize,
    pub(super) to: usize,
    pub(super) peer: PeerId,
    pub(super) ticket: Ticket,
    pub(super) what: What,
    pub(super) deadline: Option<Duration>,
    pub(super) is_cancelled: bool,
    /// Begun after the network was calmed down, so it must succeed.
    pub(super) is_calm: bool,
    pub(super) over: Option<Result<(), Failure>>,
}

#[derive(Debug)]
pub(super) enum What {
    Transfer {
        op: Op,
        pieces: Vec<PieceAt>,
        /// The transfer names a counter, which no other one names.
        has_counter: bool,
        is_counted: bool,
        /// The counter was retired.
        is_retired: bool,
    },
    /// `received`: how often the receiver took it.
    Message { bytes: Vec<u8>, received: u64 },
}

impl Operation {
    pub(super) fn whose(&self) -> (usize, Ticket) {
        (self.process, self.ticket)
    }

    pub(super) fn pieces(&self) -> &[PieceAt] {
        match &self.what {
            What::Transfer { pieces, .. } => pieces,
            What::Message { .. } => &[],
        }
    }

    /// Checks that a failure has a cause, and that a success happened.
    pub(super) fn check_outcome(
        &self,
        memory: &WorldMemory,
        now: Duration,
        outcome: Result<(), Failure>,
        is_peer_gone: bool,
        fault: Fault,
    ) -> Result<(), String> {
        let is_message = matches!(self.what, What::Message { .. });
        let has_cause = match outcome {
            Ok(()) => return self.is_done(memory),
            Err(Failure::Cancelled) => self.is_cancelled,
            Err(Failure::DeadlineExceeded) => self.deadline.is_some_and(|at| at <= now),
            Err(Failure::NoRoom) => is_message && self.deadline.is_some_and(|at| at <= now),
            Err(Failure::Refused) => !is_message && self.may_be_refused(memory),
            Err(Failure::PeerLost) => is_peer_gone || !self.is_calm,
            Err(Failure::PathsBreak) => !self.is_calm,
            Err(Failure::Gpu) => false,
        };
        if has_cause || fault != Fault::None {
            return Ok(());
        }
        Err(format!("{self:?} ended without a cause: {outcome:?}"))
    }

    /// Whether the peer may refuse it: a region is not registered there, or is not writable.
    pub(super) fn may_be_refused(&self, memory: &WorldMemory) -> bool {
        let What::Transfer { op, pieces, .. } = &self.what else { return false };
        pieces.iter().any(|piece| {
            piece.remote.is_none_or(|slice| {
                let region = &memory.regions[slice.region];
                region.state != RegionState::Registered || (*op == Op::Write && !region.is_writable)
            })
        })
    }

    fn is_done(&self, memory: &WorldMemory) -> Result<(), String> {
        let What::Transfer { op, pieces, has_counter, is_counted, is_retired } = &self.what else {
            return Ok(());
        };
        if !memory.is_placed(self.whose(), *op, pieces) {
            return Err(format!("{self:?} is done and its bytes are not in place"));
        }
        if pieces.iter().any(|piece| piece.remote.is_none()) {
            return Err(format!("{self:?} is done with memory that had been given back before"));
        }
        let may_write =
            |piece: &PieceAt| piece.remote.is_some_and(|slice| memory.regions[slice.region].is_writable);
        if *op == Op::Write && !pieces.iter().all(may_write) {
            return Err(format!("{self:?} has written what may only be read"));
        }
        if *has_counter && !is_counted && !is_retired {
            return Err(format!("{self:?} is done and was not counted"));
        }
        Ok(())
    }
}
