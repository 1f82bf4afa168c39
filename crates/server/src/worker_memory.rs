//! The memory of a worker that the daemon itself copies from and to.

use std::sync::Arc;

use kvlane_block::Run;
use kvlane_engine_memory::ProcessVm;

use crate::{gpu::GpuMemory, save_pace::Pace};

/// Bytes that are claimed and copied between two looks at the fence.
const BATCH_BYTES: u64 = 32 << 20;
/// As above; a GPU moves it in 5 ms, and each look costs tens of microseconds.
const GPU_BATCH_BYTES: u64 = 256 << 20;

/// How the daemon reaches a worker's blocks.
pub(crate) enum WorkerMemory {
    /// Host memory, by process_vm.
    ProcessVm(ProcessVm),
    /// GPU memory, by the GPU.
    Gpu(Arc<GpuMemory>),
}

impl WorkerMemory {
    pub(crate) fn batch_bytes(&self) -> u64 {
        match self {
            Self::ProcessVm(_) => BATCH_BYTES,
            Self::Gpu(_) => GPU_BATCH_BYTES,
        }
    }

    /// Gathers runs into the pool; a GPU does so after the event, and at this pace.
    ///
    /// # Safety
    /// As for [`kvlane_engine_memory::ProcessVm::copy_out`].
    pub(crate) unsafe fn copy_out(
        &self,
        runs: &[Run],
        pool_base: *mut u8,
        epoch: u64,
        event: Option<u32>,
        pace: &Pace<'_>,
    ) -> Result<(), String> {
        match self {
            Self::ProcessVm(process) => {
                // SAFETY: the caller's promise is passed on.
                unsafe { process.copy_out(runs, pool_base, epoch) }.map_err(|error| error.to_string())
            }
            Self::Gpu(gpu) => {
                // SAFETY: as above; the daemon's pool is pinned where there are GPUs.
                unsafe { gpu.copy_out(runs, pool_base, epoch, event, pace) }
                    .map_err(|error| error.to_string())
            }
        }
    }
}
