//! What a worker tells of its GPU memory, so that the daemon can map it. Client and server turn it into messages.

use kvlane_gpu::IpcHandle;

/// Most allocations that a worker's regions may lie in.
pub(crate) const ALLOCATIONS_MAX: usize = 4096;

/// A worker's GPU memory, as the worker exports it and the daemon imports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exported {
    /// UUID of the GPU that the memory is on, the same in every process of the host.
    pub device_uuid: [u8; 16],
    /// What the regions lie in.
    pub allocations: Vec<Allocation>,
    /// What fence and flags lie in.
    pub fence: Allocation,
    /// Handles of the events that requests name by their index.
    pub events: Vec<IpcHandle>,
}

/// A part of the worker's GPU memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocation {
    /// First address in the worker.
    pub base: u64,
    /// Bytes of the allocation, from its base on.
    pub bytes: u64,
    /// By which it is mapped as a whole; None for what was shared chunk by chunk before ([`ChunkShare`]).
    pub handle: Option<IpcHandle>,
}

/// The next chunks of a range of GPU memory; a descriptor comes with each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkShare {
    /// UUID of the GPU that the memory is on, the same in every process of the host.
    pub device_uuid: [u8; 16],
    /// First address of the range in the worker.
    pub base: u64,
    /// Size of the range.
    pub bytes: u64,
    /// Sizes of these chunks.
    pub chunk_bytes: Vec<u64>,
}
