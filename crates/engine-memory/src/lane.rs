//! A stream of the daemon on a worker's GPU, with what its copies need.
#![expect(unsafe_code, reason = "the GPU writes fences into its buffer")]

use std::sync::Arc;

use kvlane_gpu::{
    Copier, CopierOptions, Copy, Direction, Gpu, GpuError, HostBuffer, Priority, Stream, Thresholds,
};

use crate::fence::{FENCE_BYTES, FenceValue};

/// Where the fence as it was before the copies goes in its buffer.
pub(crate) const FENCE_BEFORE: u64 = 0;
/// Where the second copy of the fence goes in its buffer.
pub(crate) const FENCE_AFTER: u64 = 64;
const FENCE_BUFFER_BYTES: u64 = 4096;
const _: () =
    assert!(FENCE_BYTES as u64 <= FENCE_AFTER && FENCE_AFTER + FENCE_BYTES as u64 <= FENCE_BUFFER_BYTES);
/// Tables of copies that may be under way, 400 kB each.
const TABLES: usize = 32;

/// A stream with what its copies need.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) stream: Arc<Stream>,
    pub(crate) copier: Copier,
    fences: HostBuffer,
}

impl Lane {
    /// `seams`: where the pinned parts of the pool meet.
    pub(crate) fn new(gpu: &Gpu, priority: Priority, seams: &[u64]) -> Result<Self, GpuError> {
        let stream = Arc::new(Stream::new(gpu, priority)?);
        let options = CopierOptions {
            seams: seams.to_vec(),
            tables: TABLES,
            // Of the lane that saves; loads choose for themselves.
            thresholds: Thresholds::beside_compute(Direction::DeviceToHost),
            ..CopierOptions::default()
        };
        let copier = Copier::new(Arc::clone(&stream), options)?;
        Ok(Self { stream, copier, fences: HostBuffer::new(gpu, FENCE_BUFFER_BYTES)? })
    }

    /// Reads the worker's fence before ([`FENCE_BEFORE`]) or after ([`FENCE_AFTER`]) the copies that are enqueued.
    ///
    /// # Safety
    /// `fence` is the address of a fence that stays mapped, and this buffer stays, until the stream has been waited for.
    pub(crate) unsafe fn look_at(&self, fence: u64, at: u64) -> Result<(), GpuError> {
        let copy = Copy { dst: self.fences.address() + at, src: fence, len: FENCE_BYTES as u64 };
        // SAFETY: the caller's promise; both places lie inside the buffer, which is this lane's.
        unsafe { self.stream.copy(copy) }
    }

    /// What was read there. The lane has waited for it.
    pub(crate) fn fence_at(&self, at: u64) -> FenceValue {
        // SAFETY: inside the buffer, and the lane has waited for the copies into it.
        FenceValue::from_bytes(unsafe {
            self.fences.as_ptr().add(at as usize).cast::<[u8; FENCE_BYTES]>().read_volatile()
        })
    }
}
