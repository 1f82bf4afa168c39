//! The daemon's access to a worker's blocks, in host memory or on a GPU.

use std::sync::Arc;

use kvlane_block::{BlockId, PoolOffset, Region};
use kvlane_memory::Arena;
use thiserror::Error;

use crate::gpu_daemon::{GpuCopyError, GpuMemory};
use crate::host_daemon::{CopyError, ProcessVm};
use crate::pace::Pace;
use crate::runs::{PlanError, Runs};

/// Bytes that are claimed and copied between two checks of the fence.
const BATCH_BYTES: u64 = 32 << 20;
/// The same on a GPU, which copies them in 5 ms; each check costs tens of microseconds.
const GPU_BATCH_BYTES: u64 = 256 << 20;

/// How the daemon reaches a worker's blocks.
#[derive(Debug)]
pub enum PeerBlocks {
    /// Host memory, by process_vm.
    ProcessVm(ProcessVm),
    /// GPU memory, by the GPU.
    Gpu(Arc<GpuMemory>),
}

/// When a request's blocks may be copied: after `event`, and while the fence holds `epoch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyCondition {
    /// Epoch of the worker's fence when it made the request.
    pub epoch: u64,
    /// On a GPU: index of the event that the copy waits for.
    pub event: Option<u32>,
}

/// Why a save does not count.
#[derive(Debug, Error)]
pub enum SaveError {
    /// The blocks or their pool offsets do not exist; nothing was copied.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Host memory: the save was given up, or the worker is gone or not readable.
    #[error(transparent)]
    Process(#[from] CopyError),
    /// GPU memory: the save was given up, the worker is gone, or the driver failed.
    #[error(transparent)]
    Gpu(#[from] GpuCopyError),
}

impl PeerBlocks {
    /// Bytes to claim and copy between two checks of the fence.
    pub fn batch_bytes(&self) -> u64 {
        match self {
            Self::ProcessVm(_) => BATCH_BYTES,
            Self::Gpu(_) => GPU_BATCH_BYTES,
        }
    }

    /// Copies blocks of these regions to the pool offsets that were claimed for them; a GPU does so after the event, and at
    /// this pace.
    ///
    /// # Errors
    /// [`SaveError`]; then the bytes in the pool are undefined.
    ///
    /// # Panics
    /// On a GPU, if `pool` is not the pinned one.
    pub fn copy_out(
        &self,
        from: &[Region],
        places: &[(BlockId, PoolOffset)],
        pool: &Arc<Arena>,
        condition: CopyCondition,
        pace: &Pace<'_>,
    ) -> Result<(), SaveError> {
        let runs = Runs::plan(from, places, pool)?;
        match self {
            Self::ProcessVm(process) => Ok(process.copy_out(&runs, condition.epoch)?),
            Self::Gpu(gpu) => Ok(gpu.copy_out(&runs, condition.epoch, condition.event, pace)?),
        }
    }
}
