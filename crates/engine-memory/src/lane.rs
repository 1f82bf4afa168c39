//! A lane: a stream of the daemon on a worker's GPU, with its copier and its buffer for fences.
#![expect(unsafe_code, reason = "the GPU writes fences into its buffer")]

use std::sync::Arc;

use kvlane_gpu::{
    Copier, CopierOptions, Copy, Direction, Gpu, GpuError, HostBuffer, Priority, Stream, Thresholds,
};

use crate::fence::{FENCE_BYTES, FenceValue};

/// Offset in the lane's buffer of the fence as it was before the copies.
pub(crate) const FENCE_BEFORE: u64 = 0;
/// Offset in the lane's buffer of the fence as it was after the copies.
pub(crate) const FENCE_AFTER: u64 = 64;
const FENCE_BUFFER_BYTES: u64 = 4096;
const _: () =
    assert!(FENCE_BYTES as u64 <= FENCE_AFTER && FENCE_AFTER + FENCE_BYTES as u64 <= FENCE_BUFFER_BYTES);
/// Most tables of copies in flight, 400 kB each.
const TABLES: usize = 32;

#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) stream: Arc<Stream>,
    pub(crate) copier: Copier,
    fences: HostBuffer,
}

impl Lane {
    /// `seams`: the addresses at which the pinned parts of the pool meet.
    pub(crate) fn new(gpu: &Gpu, priority: Priority, seams: &[u64]) -> Result<Self, GpuError> {
        let stream = Arc::new(Stream::new(gpu, priority)?);
        let options = CopierOptions {
            seams: seams.to_vec(),
            tables: TABLES,
            // Used by the lane that saves. Each load sets its own.
            thresholds: Thresholds::beside_compute(Direction::DeviceToHost),
            ..CopierOptions::default()
        };
        let copier = Copier::new(Arc::clone(&stream), options)?;
        Ok(Self { stream, copier, fences: HostBuffer::new(gpu, FENCE_BUFFER_BYTES)? })
    }

    /// Enqueues a read of the worker's fence, into the buffer at [`FENCE_BEFORE`] or [`FENCE_AFTER`].
    ///
    /// # Safety
    /// `fence` is the address of a fence that stays mapped, and this buffer stays, until the stream has been waited for.
    pub(crate) unsafe fn read_fence(&self, fence: u64, at: u64) -> Result<(), GpuError> {
        let copy = Copy { dst: self.fences.address() + at, src: fence, len: FENCE_BYTES as u64 };
        // SAFETY: the caller's promise; both places lie inside the buffer, which is this lane's.
        unsafe { self.stream.copy(copy) }
    }

    /// The fence that was read into the buffer there. The lane has waited for it.
    pub(crate) fn fence_at(&self, at: u64) -> FenceValue {
        // SAFETY: inside the buffer, and the lane has waited for the copies into it.
        FenceValue::from_bytes(unsafe {
            self.fences.as_ptr().add(at as usize).cast::<[u8; FENCE_BYTES]>().read_volatile()
        })
    }
}
