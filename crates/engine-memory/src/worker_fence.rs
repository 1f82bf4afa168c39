//! A worker's fence, in host memory and, if it has a GPU, in GPU memory.

use std::sync::Arc;

use crate::gpu_worker::WorkerGpu;
use crate::host_worker::HostFence;

/// A fence in host memory. With a GPU, its value is also written to GPU memory, where the GPU reads it.
#[derive(Debug)]
pub struct WorkerFence {
    host: HostFence,
    gpu: Option<Arc<WorkerGpu>>,
}

impl WorkerFence {
    /// A fence at epoch 1.
    pub fn new(nonce: [u8; 16], gpu: Option<Arc<WorkerGpu>>) -> Self {
        let fence = Self { host: HostFence::new(nonce), gpu };
        fence.write_to_gpu();
        fence
    }

    /// Address in host memory, for the daemon.
    pub fn address(&self) -> u64 {
        self.host.address()
    }

    /// The process's nonce.
    pub fn nonce(&self) -> [u8; 16] {
        self.host.nonce()
    }

    /// Voids all copies that were requested at a lower epoch: from here on they cannot be committed.
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
