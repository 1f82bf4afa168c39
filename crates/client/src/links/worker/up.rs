//! A worker's connection that is up: how far it is, and what was asked over it.

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

/// A connection and what was asked over it.
#[derive(Debug)]
pub(super) struct Up {
    pub(super) id: ConnectionId,
    pub(super) peer: Peer,
    /// Zeros while greeting.
    pub(super) boot: BootId,
    /// What the daemon said of itself, for the log.
    pub(super) daemon: String,
    pub(super) stage: Stage,
    pub(super) method: SaveMethod,
    /// Why saves travel so.
    pub(super) reason: String,
    pub(super) asked: BTreeMap<u64, Asked>,
    /// A save timed out and nothing was heard since: no more are asked for.
    pub(super) silent: bool,
}

/// The daemon answered what nobody asked: it cannot be relied on.
pub(super) struct Misfit;

/// What is awaited, by the number of its request: no other answer moves it on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Greeting {
        hello: u64,
    },
    /// GPU memory, chunk by chunk, where it consists of chunks: this batch is on its way.
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
    /// The driver maps it.
    Mapping,
    Confirming {
        request: u64,
    },
    Open,
}

/// What was asked for and has no answer yet.
#[derive(Debug)]
pub(super) enum Asked {
    /// Save by the daemon: the answer ends the job.
    Save { job: Job, deadline: Instant },
    /// Save through the mapping: the answer says where to write.
    Claim { job: Job, deadline: Instant },
    /// Written through the mapping: the answer ends the job, as told.
    Commit { key: JobKey, end: Finished, deadline: Instant },
    /// A load of so many blocks, which ends by its own rules.
    Load { key: JobKey, blocks: u64 },
    /// Nobody waits; a claim that is granted now must be handed back.
    GivenUp(OfSave),
}

/// What is asked for a save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OfSave {
    Save,
    Claim,
    Commit,
}

impl Up {
    /// Whether an answer names another run of the daemon than the one that has greeted us.
    pub(super) fn is_of_another_run(&self, boot_id: &[u8]) -> bool {
        self.boot != BootId::default() && self.boot != boot_id
    }
}

impl Stage {
    /// The request whose answer is awaited.
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

impl Asked {
    /// Whether that answer may come: its kind, and of a load its size.
    pub(super) fn fits(&self, answer: Option<&Answer>) -> bool {
        match (self, answer) {
            (_, Some(Answer::Refused(_)))
            | (Self::Save { .. } | Self::GivenUp(OfSave::Save), Some(Answer::SaveResult(_)))
            | (Self::Claim { .. } | Self::GivenUp(OfSave::Claim), Some(Answer::ClaimResult(_)))
            | (Self::Commit { .. } | Self::GivenUp(OfSave::Commit), Some(Answer::Done(_))) => true,
            (Self::Load { blocks, .. }, Some(Answer::LoadResult(result))) => result.blocks == *blocks,
            _ => false,
        }
    }

    /// When it is given up.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Save { deadline, .. } | Self::Claim { deadline, .. } | Self::Commit { deadline, .. } => {
                Some(*deadline)
            }
            Self::Load { .. } | Self::GivenUp(_) => None,
        }
    }

    /// Nobody waits for it any more: what was asked for a save, or none for what is none.
    pub(super) fn give_up(&mut self) -> Option<Self> {
        let of_save = match self {
            Self::Save { .. } => OfSave::Save,
            Self::Claim { .. } => OfSave::Claim,
            Self::Commit { .. } => OfSave::Commit,
            Self::Load { .. } | Self::GivenUp(_) => return None,
        };
        Some(std::mem::replace(self, Self::GivenUp(of_save)))
    }
}
