//! The daemon's side of GPU memory that a worker shares chunk by chunk, before it registers.
//!
//! ```text
//!  worker                                                daemon
//!  ShareChunks(range, sizes) + up to 128 descriptors --> reserves the range's addresses (once), maps each chunk behind the
//!        <------------------------------------ Done ---  one before, closes the descriptors
//!  ... until all chunks are shared ...
//!  RegisterWorker(allocations, ranges, fence, events) -> registers if every range is complete, else refuses
//! ```
//! cudaIpc has no handle for a chunk. The worker makes descriptors batch by batch and closes them once they are sent, so neither
//! side has more than one batch open: 40 GB in chunks of 20 MiB are 2,000 descriptors. Chunks at consecutive addresses form one
//! range on both sides, so a run of a copy may cross them. A mapping here keeps the memory until the session is over. An engine
//! that goes to sleep ends its session first.

use std::os::fd::{AsFd, OwnedFd};

use kvlane_gpu::{GpuError, ImportedChunks};

use crate::exported::{ALLOCATIONS_MAX, Allocation, ChunkShare};
use crate::gpu_pool::Gpus;

/// Most chunks of a worker: 128 GiB in chunks of 2 MiB, which are the smallest.
const CHUNKS_MAX: usize = 1 << 16;

/// The ranges that one worker has shared, and their chunks that have come so far.
#[derive(Debug, Default)]
pub struct SharedChunks {
    ranges: Vec<ImportedChunks>,
    count: usize,
}

impl SharedChunks {
    /// Maps the next chunks of a range, and closes their descriptors.
    ///
    /// # Errors
    /// There are too many chunks, or the driver does not accept one. Chunks before it stay mapped, but the range cannot be
    /// completed.
    pub fn push(
        &mut self,
        gpus: &Gpus,
        share: &ChunkShare,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), GpuError> {
        self.check_count(share.chunk_bytes.len(), descriptors.len())?;
        let known = self.ranges.iter().position(|range| range.engine_base() == share.base);
        let range = match known {
            Some(index) => &mut self.ranges[index],
            None if self.ranges.len() == ALLOCATIONS_MAX => {
                return Err(GpuError::Invalid(format!("more than {ALLOCATIONS_MAX} ranges of chunks")));
            }
            None => {
                let gpu = gpus.open(share.device_uuid)?;
                // Bounds the reserved addresses by the GPU's memory, because the sizes come from the worker.
                let taken: u64 = self.ranges.iter().map(|range| range.chunks().bytes()).sum();
                let total = gpu.info().total_bytes;
                if taken.saturating_add(share.bytes) > total {
                    return Err(GpuError::Invalid(format!(
                        "ranges of chunks exceed the GPU's {total} bytes of memory"
                    )));
                }
                self.ranges.push(ImportedChunks::begin(&gpu, share.device_uuid, share.base, share.bytes)?);
                let last = self.ranges.len() - 1;
                &mut self.ranges[last]
            }
        };
        for (bytes, descriptor) in share.chunk_bytes.iter().zip(descriptors) {
            range.push(*bytes, descriptor.as_fd())?;
            self.count += 1;
        }
        Ok(())
    }

    fn check_count(&self, chunks: usize, descriptors: usize) -> Result<(), GpuError> {
        if chunks == 0 || chunks != descriptors {
            return Err(GpuError::Invalid(format!("{chunks} chunks came with {descriptors} descriptors")));
        }
        if self.count + chunks > CHUNKS_MAX {
            return Err(GpuError::Invalid(format!(
                "a worker can share {CHUNKS_MAX} chunks of memory, not more"
            )));
        }
        Ok(())
    }

    /// Takes the range that was shared as this allocation. All of its chunks must have come.
    pub(crate) fn take(
        &mut self,
        allocation: &Allocation,
        device_uuid: [u8; 16],
    ) -> Result<ImportedChunks, GpuError> {
        let is_it = |range: &ImportedChunks| {
            let chunks = range.chunks();
            let device = chunks.gpu().info().uuid;
            range.engine_base() == allocation.base
                && chunks.bytes() == allocation.bytes
                && device == device_uuid
        };
        let at = self.ranges.iter().position(is_it).ok_or_else(|| {
            GpuError::Invalid(format!(
                "the {} bytes at {:#x} have neither a handle nor chunks",
                allocation.bytes, allocation.base
            ))
        })?;
        let range = self.ranges.swap_remove(at);
        range.mapped()?;
        Ok(range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_counted_over_all_messages() {
        let nearly = SharedChunks { ranges: Vec::new(), count: CHUNKS_MAX - 1 };
        assert_eq!(nearly.check_count(1, 1), Ok(()));
        assert!(nearly.check_count(2, 2).unwrap_err().to_string().contains("65536"));
        for (chunks, descriptors) in [(0, 0), (1, 0), (1, 2)] {
            assert!(nearly.check_count(chunks, descriptors).is_err());
        }
    }
}
