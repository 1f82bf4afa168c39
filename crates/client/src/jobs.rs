//! What a worker is asked for, and how it ends.

use std::{sync::Arc, time::Instant};

use kvlane_block::{BlockHash, BlockId};
pub use kvlane_engine_memory::{Copied, LoadGroup, WorkerGroupSpec};

use crate::{boot::BootId, links::ids::JobKey};

/// How saves travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaveMethod {
    /// process_vm where a probe shows that it works, else mapped.
    Auto,
    /// The daemon copies out of this process.
    ProcessVm,
    /// The daemon copies out of and into this process's GPU memory; chosen by giving a GPU.
    Gpu,
    /// This process writes through its mapping of the pool.
    Mapped,
}

impl SaveMethod {
    /// As users read it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::ProcessVm => "process_vm",
            Self::Gpu => "gpu",
            Self::Mapped => "mapped",
        }
    }
}

/// Consecutive blocks of one prompt to save.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SaveGroupSpec {
    /// Index of the group.
    pub group: u32,
    /// Hash of the block before the first one.
    pub parent: Option<BlockHash>,
    /// One hash a block, in the order of the prompt.
    pub hashes: Vec<BlockHash>,
    /// Their block ids in the engine.
    pub block_ids: Vec<BlockId>,
}

/// When the request of a load may compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// When every byte has arrived.
    AtEnd,
    /// When what is left is predicted to take no longer than a step of the engine: for an engine that computes for other
    /// requests, which would have to wait with this one.
    WhenNear,
    /// As soon as the load is under way: nothing else computes.
    AtOnce,
}

/// What a job did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobKind {
    /// A load that is on its way and cannot fail any more: computing may begin, in streams that wait for it
    /// ([`Worker::wait_for_loads`](crate::Worker::wait_for_loads)). Its end comes later, as a load's.
    Released,
    /// Engine to pool.
    Save,
    /// Pool to engine.
    Load,
}

/// The end of a job; exactly one comes for each. Before that of a load that is released, one of [`JobKind::Released`] comes.
#[derive(Debug, Clone, PartialEq)]
pub struct Finished {
    /// As [`Job::number`] was given.
    pub job: u64,
    /// Whether this ends a save or a load, or only lets its request compute.
    pub kind: JobKind,
    /// Load: every byte arrived. Save: it was carried out, whatever was already there.
    pub ok: bool,
    /// Blocks that were copied, of all groups together.
    pub blocks: u64,
    /// Save: blocks that the pool had, or that another engine was saving.
    pub present: u64,
    /// Bytes of those blocks, of this rank alone.
    pub bytes: u64,
    /// From queueing to the end.
    pub seconds: f64,
    /// Why it failed, or empty.
    pub detail: String,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Work {
    /// Consecutive blocks, by group.
    Save(Arc<[SaveGroupSpec]>),
    /// Blocks of a hit, by group.
    Load {
        /// The run of the daemon in whose pool they lie.
        boot: BootId,
        /// Where to, and from where.
        groups: Arc<[LoadGroup]>,
        /// When its request may compute.
        release: Release,
    },
}

impl Work {
    fn kind(&self) -> JobKind {
        match self {
            Self::Save(..) => JobKind::Save,
            Self::Load { .. } => JobKind::Load,
        }
    }
}

/// A save or load that a worker was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// Tells it apart in this process.
    pub key: JobKey,
    /// Given by the caller, and told at the end of the job.
    pub number: u64,
    /// When it was asked for.
    pub queued: Instant,
    /// What is to be done.
    pub work: Work,
    /// Index of the event that a copy of a GPU waits for. It is given back at the job's end.
    pub event: Option<u32>,
}

impl Job {
    /// The end of this job without effect.
    pub fn failed(&self, detail: impl Into<String>, now: Instant) -> Finished {
        Finished {
            job: self.number,
            kind: self.work.kind(),
            ok: false,
            blocks: 0,
            present: 0,
            bytes: 0,
            seconds: now.saturating_duration_since(self.queued).as_secs_f64(),
            detail: detail.into(),
        }
    }
}
