//! The fence of a worker, wherever its blocks lie.

use std::sync::Arc;

use crate::gpu_worker::WorkerGpu;
use crate::host_worker::HostFence;

/// The fence in host memory. With a GPU it stands in its memory too, for the copies that it does.
#[derive(Debug)]
pub struct WorkerFence {
    host: HostFence,
    gpu: Option<Arc<WorkerGpu>>,
}

impl WorkerFence {
    /// At epoch 1, in GPU memory too.
    pub fn new(nonce: [u8; 16], gpu: Option<Arc<WorkerGpu>>) -> Self {
        let fence = Self { host: HostFence::new(nonce), gpu };
        fence.write_to_gpu();
        fence
    }

    /// Where the daemon finds it in host memory.
    pub fn address(&self) -> u64 {
        self.host.address()
    }

    /// The process's nonce.
    pub fn nonce(&self) -> [u8; 16] {
        self.host.nonce()
    }

    /// From here on no copy that was asked for under a former epoch can be committed.
    pub fn raise_to(&self, epoch: u64) {
        self.host.raise_to(epoch);
        self.write_to_gpu();
    }

    fn write_to_gpu(&self) {
        if let Some(gpu) = &self.gpu {
            gpu.write_fence(self.host.value());
        }
    }
}
