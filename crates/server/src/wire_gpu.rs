//! Parses a worker's messages about its GPU memory.

use kvlane_engine_memory::{Allocation, ChunkShare, Exported};
use kvlane_gpu::GpuError;
use kvlane_proto::v1;

/// Parses the part of RegisterWorker.
pub(crate) fn exported(worker: &v1::WorkerGpu) -> Result<Exported, GpuError> {
    let device_uuid = uuid(&worker.device_uuid)?;
    let fence = worker.fence.as_ref().ok_or_else(|| GpuError::Invalid("the fence is missing".into()))?;
    // The fence always comes with a handle; the regions may be shared as chunks instead.
    let fence = Allocation { handle: Some(handle(&fence.handle)?), ..whole(fence) };
    let allocation = |allocation: &v1::GpuAllocation| match allocation.handle.is_empty() {
        true => Ok(whole(allocation)),
        false => Ok(Allocation { handle: Some(handle(&allocation.handle)?), ..whole(allocation) }),
    };
    let event = |handle: &bytes::Bytes| {
        let handle = handle.as_ref().try_into();
        handle.map_err(|_| GpuError::Invalid("an event's handle has 64 bytes".into()))
    };
    Ok(Exported {
        device_uuid,
        allocations: worker.allocations.iter().map(allocation).collect::<Result<_, GpuError>>()?,
        fence,
        events: worker.events.iter().map(event).collect::<Result<_, _>>()?,
    })
}

/// Parses ShareChunks.
pub(crate) fn chunk_share(share: &v1::ShareChunks) -> Result<ChunkShare, GpuError> {
    Ok(ChunkShare {
        device_uuid: uuid(&share.device_uuid)?,
        base: share.base,
        bytes: share.bytes,
        chunk_bytes: share.chunk_bytes.clone(),
    })
}

fn whole(allocation: &v1::GpuAllocation) -> Allocation {
    Allocation { base: allocation.base, bytes: allocation.bytes, handle: None }
}

fn handle(handle: &[u8]) -> Result<[u8; 64], GpuError> {
    handle.try_into().map_err(|_| GpuError::Invalid("an allocation's handle has 64 bytes".into()))
}

fn uuid(uuid: &[u8]) -> Result<[u8; 16], GpuError> {
    uuid.try_into().map_err(|_| GpuError::Invalid("a GPU's UUID has 16 bytes".into()))
}
