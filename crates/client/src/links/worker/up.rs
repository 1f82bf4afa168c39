//! A worker's connection that is up: the stage of its handshake, and its pending requests.

use std::{collections::BTreeMap, time::Instant};

use kvlane_proto::v1::reply::Body as Answer;

use super::{
    super::ids::{ConnectionId, JobKey},
    event::Peer,
};
use crate::{
    boot::BootId,
    jobs::{Finished, Job, SaveMethod},
};

/// A connection that is up, and the requests that were sent over it.
#[derive(Debug)]
pub(super) struct WorkerUp {
    pub(super) id: ConnectionId,
    pub(super) peer: Peer,
    /// The daemon's run; zeros while greeting.
    pub(super) boot: BootId,
    /// The daemon's version and pool size, for the log.
    pub(super) daemon: String,
    /// The version of the wire; 0 while greeting.
    pub(super) wire: u32,
    pub(super) stage: WorkerStage,
    pub(super) method: SaveMethod,
    /// Why the daemon chose this method.
    pub(super) reason: String,
    /// By id of the request.
    pub(super) pending: BTreeMap<u64, PendingRequest>,
    /// A save timed out and no reply has come since: new saves end at once.
    pub(super) silent: bool,
}

/// An answer that does not fit its request. The link leaves such a daemon.
pub(super) struct UnexpectedReply;

/// The stage of the handshake, with the id of the request whose answer ends it. No other answer does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WorkerStage {
    Greeting {
        hello: u64,
    },
    /// Only for GPU memory that consists of chunks: this batch was sent.
    Sharing {
        request: u64,
        batch: usize,
    },
    Registering {
        request: u64,
    },
    AskingForPool {
        request: u64,
    },
    /// The driver is mapping the pool.
    Mapping,
    Confirming {
        request: u64,
    },
    Open,
}

/// A request without an answer.
#[derive(Debug)]
pub(super) enum PendingRequest {
    /// Save by the daemon: the answer ends the job.
    Save { job: Job, deadline: Instant },
    /// Save through the mapping: the answer names the pages to write.
    Claim { job: Job, deadline: Instant },
    /// After writing through the mapping: the answer ends the job with `end`.
    Commit { key: JobKey, end: Finished, deadline: Instant },
    /// A load of so many blocks, which ends by its own rules (loads.rs).
    Load { key: JobKey, blocks: u64 },
    /// The job has ended. A claim that is granted now must be aborted.
    GivenUp(SaveRequest),
}

/// The kind of a save's request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SaveRequest {
    Save,
    Claim,
    Commit,
}

impl WorkerUp {
    /// Whether an answer names another run of the daemon than its Welcome did.
    pub(super) fn is_of_another_run(&self, boot_id: &[u8]) -> bool {
        self.boot != BootId::default() && self.boot != boot_id
    }
}

impl WorkerStage {
    /// The request whose answer ends this stage.
    pub(super) fn awaits(self) -> Option<u64> {
        match self {
            Self::Greeting { hello: request }
            | Self::Sharing { request, .. }
            | Self::Registering { request }
            | Self::AskingForPool { request }
            | Self::Confirming { request } => Some(request),
            Self::Mapping | Self::Open => None,
        }
    }
}

impl PendingRequest {
    /// Whether the answer fits: its kind, and for a load its number of blocks.
    pub(super) fn fits(&self, answer: Option<&Answer>) -> bool {
        match (self, answer) {
            (_, Some(Answer::Refused(_)))
            | (Self::Save { .. } | Self::GivenUp(SaveRequest::Save), Some(Answer::SaveResult(_)))
            | (Self::Claim { .. } | Self::GivenUp(SaveRequest::Claim), Some(Answer::ClaimResult(_)))
            | (Self::Commit { .. } | Self::GivenUp(SaveRequest::Commit), Some(Answer::Done(_))) => true,
            (Self::Load { blocks, .. }, Some(Answer::LoadResult(result))) => result.blocks == *blocks,
            _ => false,
        }
    }

    /// When a save is given up. Loads have no deadline here.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Save { deadline, .. } | Self::Claim { deadline, .. } | Self::Commit { deadline, .. } => {
                Some(*deadline)
            }
            Self::Load { .. } | Self::GivenUp(_) => None,
        }
    }

    /// Gives a save up, and returns it as it was; None for a load, or if it was given up before.
    pub(super) fn give_up(&mut self) -> Option<Self> {
        let of_save = match self {
            Self::Save { .. } => SaveRequest::Save,
            Self::Claim { .. } => SaveRequest::Claim,
            Self::Commit { .. } => SaveRequest::Commit,
            Self::Load { .. } | Self::GivenUp(_) => return None,
        };
        Some(std::mem::replace(self, Self::GivenUp(of_save)))
    }
}
