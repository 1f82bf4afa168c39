//! The blocks of a worker that the daemon itself copies from and to.

use std::sync::Arc;

use kvlane_block::{BlockId, PoolOffset, Region};
use kvlane_memory::Arena;
use thiserror::Error;

use crate::gpu_daemon::{GpuCopyError, GpuMemory};
use crate::host_daemon::{CopyError, ProcessVm};
use crate::pace::Pace;
use crate::runs::{PlanError, Runs};

/// Bytes that are claimed and copied between two looks at the fence.
const BATCH_BYTES: u64 = 32 << 20;
/// As above; a GPU moves it in 5 ms, and each look costs tens of microseconds.
const GPU_BATCH_BYTES: u64 = 256 << 20;

/// How the daemon reaches a worker's blocks.
#[derive(Debug)]
pub enum PeerBlocks {
    /// Host memory, by process_vm.
    ProcessVm(ProcessVm),
    /// GPU memory, by the GPU.
    Gpu(Arc<GpuMemory>),
}

/// What a request says of when its blocks may be copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    /// Of the fence when it was made.
    pub epoch: u64,
    /// That a GPU waits for first.
    pub event: Option<u32>,
}

/// Why a save is worth nothing.
#[derive(Debug, Error)]
pub enum SaveError {
    /// The blocks or their places do not exist; nothing was copied.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Of a worker in host memory: given up, gone, or not readable.
    #[error(transparent)]
    Process(#[from] CopyError),
    /// Of a worker on a GPU: given up, gone, or an error of the driver.
    #[error(transparent)]
    Gpu(#[from] GpuCopyError),
}

impl PeerBlocks {
    /// Bytes that are claimed and copied between two looks at the fence.
    pub fn batch_bytes(&self) -> u64 {
        match self {
            Self::ProcessVm(_) => BATCH_BYTES,
            Self::Gpu(_) => GPU_BATCH_BYTES,
        }
    }

    /// Copies blocks of these regions to places in the pool, which were claimed for them; a GPU does so after the event,
    /// and at this pace.
    ///
    /// # Errors
    /// [`SaveError`]; then what the pool holds there is worth nothing.
    ///
    /// # Panics
    /// On a GPU, for another pool than the one that is pinned.
    pub fn copy_out(
        &self,
        from: &[Region],
        places: &[(BlockId, PoolOffset)],
        pool: &Arc<Arena>,
        asked: Asked,
        pace: &Pace<'_>,
    ) -> Result<(), SaveError> {
        let runs = Runs::plan(from, places, pool)?;
        match self {
            Self::ProcessVm(process) => Ok(process.copy_out(&runs, asked.epoch)?),
            Self::Gpu(gpu) => Ok(gpu.copy_out(&runs, asked.epoch, asked.event, pace)?),
        }
    }
}
