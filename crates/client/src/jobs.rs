//! Jobs of a worker, saves and loads, and how they end.

use std::{sync::Arc, time::Instant};

use kvlane_block::{BlockHash, BlockId};
pub use kvlane_engine_memory::{Copied, LoadGroup, WorkerGroupSpec};

use crate::{boot::BootId, links::ids::JobKey};

/// How saves get into the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaveMethod {
    /// ProcessVm if the daemon's probe shows that it works, else Mapped.
    Auto,
    /// The daemon reads this process's memory (process_vm_readv).
    ProcessVm,
    /// The daemon copies out of and into this process's GPU memory. Always used for blocks on a GPU.
    Gpu,
    /// This process writes through its mapping of the pool.
    Mapped,
}

impl SaveMethod {
    /// The word in options and logs.
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
    /// Hash of the block before the first one; None at the prompt's start.
    pub parent: Option<BlockHash>,
    /// One hash per block, in the order of the prompt.
    pub hashes: Vec<BlockHash>,
    /// The engine's block ids, one per hash.
    pub block_ids: Vec<BlockId>,
}

/// When the request of a load may compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// When every byte has arrived.
    AtEnd,
    /// When the rest is predicted to take no longer than a step of the engine. For an engine that computes other requests,
    /// which would have to wait with this one.
    WhenNear,
    /// As soon as the load is requested, because no other request computes.
    AtOnce,
}

/// Save, load, or the release of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobKind {
    /// A load that cannot fail any more: its request may compute, in streams that wait for the load
    /// ([`Worker::wait_for_loads`](crate::Worker::wait_for_loads)). The load's end comes later, as [`JobKind::Load`].
    Released,
    /// A copy from the engine to the pool.
    Save,
    /// A copy from the pool to the engine.
    Load,
}

/// The end of a job, exactly one per job. For a load that is released, one of [`JobKind::Released`] comes before it.
#[derive(Debug, Clone, PartialEq)]
pub struct Finished {
    /// The caller's [`Job::number`].
    pub job: u64,
    /// Whether this ends a save or a load, or only lets its request compute.
    pub kind: JobKind,
    /// Load: every byte arrived. Save: it was carried out, even if every block was already there.
    pub ok: bool,
    /// Blocks that were copied, summed over groups.
    pub blocks: u64,
    /// Save: blocks that the pool had, or that another engine was saving.
    pub present: u64,
    /// Bytes of the copied blocks, of this rank only.
    pub bytes: u64,
    /// From queueing to the end.
    pub seconds: f64,
    /// Why the job failed; else empty.
    pub detail: String,
}

/// The blocks of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Work {
    /// Consecutive blocks, by group.
    Save(Arc<[SaveGroupSpec]>),
    /// Blocks of a hit, by group.
    Load {
        /// The run of the daemon whose pool holds them.
        boot: BootId,
        /// The engine's blocks and their pages in the pool.
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

/// A save or a load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// Unique in this process.
    pub key: JobKey,
    /// The caller's number, which the job's end reports.
    pub number: u64,
    /// When the caller queued it.
    pub queued: Instant,
    /// The blocks to copy, and in which direction.
    pub work: Work,
    /// On a GPU: index of the event that the copy waits for. The job's end frees it.
    pub event: Option<u32>,
}

impl Job {
    /// The end of this job as failed.
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
