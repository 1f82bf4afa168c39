//! A description of a worker's GPU memory by which the daemon maps it. Client and server convert it to and from messages.

use kvlane_gpu::IpcHandle;

/// Most allocations that a worker's regions may lie in.
pub(crate) const ALLOCATIONS_MAX: usize = 4096;

/// A worker's GPU memory, as the worker exports it and the daemon imports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exported {
    /// UUID of the GPU that the memory is on, the same in every process of the host.
    pub device_uuid: [u8; 16],
    /// Allocations that hold the regions.
    pub allocations: Vec<Allocation>,
    /// The allocation that holds the fence and the flags.
    pub fence: Allocation,
    /// Handles of the worker's events. Requests name an event by its index here.
    pub events: Vec<IpcHandle>,
}

/// One allocation, or one range of chunks, of the worker's GPU memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocation {
    /// First address in the worker.
    pub base: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Maps the whole allocation; None for a range that was shared chunk by chunk before ([`ChunkShare`]).
    pub handle: Option<IpcHandle>,
}

/// The next chunks of a range of GPU memory. Each chunk's descriptor travels beside it.
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
