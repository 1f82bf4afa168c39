//! Encodes a worker's exported GPU memory for the daemon.

use bytes::Bytes;
use kvlane_engine_memory::{Allocation, ChunkShare, Exported};
use kvlane_proto::v1;

/// The GPU in RegisterWorker.
pub(crate) fn exported(gpu: &Exported) -> v1::WorkerGpu {
    v1::WorkerGpu {
        device_uuid: Bytes::copy_from_slice(&gpu.device_uuid),
        allocations: gpu.allocations.iter().map(allocation).collect(),
        fence: Some(allocation(&gpu.fence)),
        events: gpu.events.iter().map(|handle| Bytes::copy_from_slice(handle)).collect(),
    }
}

/// The body of a ShareChunks request; its descriptors travel beside it.
pub(crate) fn chunk_share(share: ChunkShare) -> v1::ShareChunks {
    v1::ShareChunks {
        device_uuid: Bytes::copy_from_slice(&share.device_uuid),
        base: share.base,
        bytes: share.bytes,
        chunk_bytes: share.chunk_bytes,
    }
}

fn allocation(allocation: &Allocation) -> v1::GpuAllocation {
    v1::GpuAllocation {
        base: allocation.base,
        bytes: allocation.bytes,
        handle: allocation.handle.map_or_else(Bytes::new, |handle| Bytes::copy_from_slice(&handle)),
    }
}
