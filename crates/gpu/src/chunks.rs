//! Device memory that consists of chunks: separate allocations at consecutive addresses. torch's expandable segments and
//! vLLM's sleep mode make such memory with the driver's API for virtual memory.

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};

use crate::device::{Gpu, uuid_text, warn_of};
use crate::error::GpuError;
use crate::import::MappedImport;

/// Chunks at consecutive addresses of one process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkRange {
    /// Address of its first byte in the process that shares it.
    pub base: u64,
    /// Bytes of each chunk.
    pub chunks: Vec<u64>,
}

impl ChunkRange {
    /// The sum of all chunks, in bytes.
    pub fn bytes(&self) -> u64 {
        self.chunks.iter().sum()
    }
}

impl Gpu {
    /// Whether the memory at an address consists of chunks. Then [`Gpu::export_chunk`] shares it, and [`Gpu::export`] cannot.
    pub fn is_chunked(&self, address: u64) -> Result<bool, GpuError> {
        let (driver, device) = self.raw();
        driver.is_ipc_capable(device, address).map(|capable| !capable)
    }

    /// The chunks that hold these ranges (first address and bytes) of this process, in as few ranges as possible. A chunk may
    /// be part of several tensors.
    pub fn chunk_ranges(&self, ranges: &[(u64, u64)]) -> Result<Vec<ChunkRange>, GpuError> {
        let (driver, device) = self.raw();
        let mut chunks = BTreeMap::new();
        for (first, bytes) in ranges {
            let end =
                first.checked_add(*bytes).ok_or(GpuError::NotImported { address: *first, bytes: *bytes })?;
            let mut next = *first;
            while next < end {
                let (base, bytes) = driver.address_range(device, next)?;
                chunks.insert(base, bytes);
                next = base.checked_add(bytes).filter(|end| *end > next).ok_or_else(|| {
                    GpuError::Invalid(format!("the driver finds {next:#x} in {bytes} bytes at {base:#x}"))
                })?;
            }
        }
        Ok(joined(chunks))
    }

    /// A descriptor by which other processes of the host can map the chunk that holds an address. It keeps the memory.
    ///
    /// # Errors
    /// [`GpuError::NotShareable`] if the memory was not made for it, [`GpuError::NoDescriptor`] at the limit of open files, and
    /// the driver's errors.
    pub fn export_chunk(&self, address: u64) -> Result<OwnedFd, GpuError> {
        let (driver, device) = self.raw();
        driver.chunk_export(device, address)
    }
}

fn joined(chunks: BTreeMap<u64, u64>) -> Vec<ChunkRange> {
    let mut ranges: Vec<ChunkRange> = Vec::new();
    for (base, bytes) in chunks {
        match ranges.last_mut() {
            Some(last) if last.base + last.bytes() == base => last.chunks.push(bytes),
            _ => ranges.push(ChunkRange { base, chunks: vec![bytes] }),
        }
    }
    ranges
}

/// Addresses of this process, with chunks mapped from their beginning on. A drop unmaps the chunks, so the holder waits for
/// all work on them first.
#[derive(Debug)]
pub struct Chunks {
    gpu: Gpu,
    base: u64,
    bytes: u64,
    mapped: Vec<u64>,
    /// Bytes of the mapped chunks.
    filled: u64,
}

impl Chunks {
    /// Reserves addresses for chunks of `bytes` in sum, a multiple of 2 MiB.
    pub fn reserve(gpu: &Gpu, bytes: u64) -> Result<Chunks, GpuError> {
        let (driver, device) = gpu.raw();
        let base = driver.reserve(device, bytes)?;
        Ok(Chunks { gpu: gpu.clone(), base, bytes, mapped: Vec::new(), filled: 0 })
    }

    /// Allocates chunks of these sizes, multiples of 2 MiB, as an engine's allocator does.
    pub fn alloc(gpu: &Gpu, sizes: &[u64], shareable: bool) -> Result<Chunks, GpuError> {
        let mut chunks = Chunks::reserve(gpu, sizes.iter().sum())?;
        for bytes in sizes {
            let (driver, device) = gpu.raw();
            let address = chunks.place(*bytes)?;
            // SAFETY: the addresses are reserved, and nothing is mapped there yet.
            unsafe { driver.chunk_create(device, address, *bytes, shareable)? };
            chunks.count(*bytes);
        }
        Ok(chunks)
    }

    /// Maps a chunk of another process behind the mapped ones. The caller may close the descriptor afterwards.
    ///
    /// # Errors
    /// The chunk does not fit, or the descriptor is not of a chunk of `bytes`.
    pub fn import(&mut self, bytes: u64, descriptor: BorrowedFd<'_>) -> Result<(), GpuError> {
        let address = self.place(bytes)?;
        let (driver, device) = self.gpu.raw();
        // SAFETY: the addresses are reserved, and nothing is mapped there yet.
        unsafe { driver.chunk_import(device, address, bytes, descriptor)? };
        self.count(bytes);
        Ok(())
    }

    /// The address of the next chunk.
    fn place(&self, bytes: u64) -> Result<u64, GpuError> {
        let room = self.bytes - self.filled;
        if bytes == 0 || bytes > room {
            return Err(GpuError::Invalid(format!(
                "a chunk of {bytes} bytes does not fit into the {room} left"
            )));
        }
        Ok(self.base + self.filled)
    }

    fn count(&mut self, bytes: u64) {
        self.mapped.push(bytes);
        self.filled += bytes;
    }

    /// The first reserved address.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Bytes of all addresses.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The device that holds them.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }
}

impl Drop for Chunks {
    fn drop(&mut self) {
        let (driver, device) = self.gpu.raw();
        let mut address = self.base;
        let mut left = false;
        for bytes in &self.mapped {
            // SAFETY: the chunk was mapped here and is unmapped once; the holder has waited for work on it.
            let unmapped = unsafe { driver.chunk_unmap(device, address, *bytes) };
            left |= unmapped.is_err();
            warn_of(Some(device), "unmap a chunk", unmapped);
            address += bytes;
        }
        // Addresses where something is still mapped are not given to others.
        if !left {
            // SAFETY: the addresses were reserved here, and nothing is mapped there any more.
            warn_of(Some(device), "release addresses", unsafe {
                driver.unreserve(device, self.base, self.bytes)
            });
        }
    }
}

/// Another process's range of chunks, mapped here as one range, chunk by chunk as they come.
#[derive(Debug)]
pub struct ImportedChunks {
    engine_base: u64,
    chunks: Chunks,
}

impl ImportedChunks {
    /// Addresses for a range that another process has at `engine_base`, on the device with this UUID.
    pub fn begin(gpu: &Gpu, device_uuid: [u8; 16], engine_base: u64, bytes: u64) -> Result<Self, GpuError> {
        let info = gpu.info();
        if device_uuid != info.uuid {
            return Err(GpuError::WrongDevice {
                exported: uuid_text(device_uuid),
                importing: uuid_text(info.uuid),
            });
        }
        // Checks the peer's report before it reserves addresses.
        if bytes > info.total_bytes {
            return Err(GpuError::Invalid(format!(
                "{bytes} bytes of chunks at {engine_base:#x}, on a GPU of {} bytes",
                info.total_bytes
            )));
        }
        Self::begin_from_any(gpu, engine_base, bytes)
    }

    /// As [`ImportedChunks::begin`], for chunks of any GPU of this host, which this process need not see. A driver may map
    /// memory that `gpu` does not reach, so the caller tries a copy.
    pub fn begin_from_any(gpu: &Gpu, engine_base: u64, bytes: u64) -> Result<Self, GpuError> {
        if bytes == 0 || engine_base.checked_add(bytes).is_none() {
            return Err(GpuError::Invalid(format!("{bytes} bytes of chunks at {engine_base:#x}")));
        }
        Ok(Self { engine_base, chunks: Chunks::reserve(gpu, bytes)? })
    }

    /// Maps the next chunk; see [`Chunks::import`].
    pub fn push(&mut self, bytes: u64, descriptor: BorrowedFd<'_>) -> Result<(), GpuError> {
        self.chunks.import(bytes, descriptor)
    }

    /// First address in the other process.
    pub fn engine_base(&self) -> u64 {
        self.engine_base
    }

    /// The chunks here.
    pub fn chunks(&self) -> &Chunks {
        &self.chunks
    }

    /// The whole range.
    ///
    /// # Errors
    /// [`GpuError::Invalid`] while chunks are missing.
    pub fn mapped(&self) -> Result<MappedImport, GpuError> {
        let Chunks { base, bytes, filled, .. } = self.chunks;
        if filled < bytes {
            return Err(GpuError::Invalid(format!(
                "only {filled} of the {bytes} bytes at {:#x} were shared: a chunk is missing",
                self.engine_base
            )));
        }
        Ok(MappedImport { engine_base: self.engine_base, local_base: base, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_that_follow_each_other_are_one_range() {
        let chunks = BTreeMap::from([(100, 10), (110, 20), (140, 5), (145, 5), (160, 1)]);
        let range = |base, chunks: &[u64]| ChunkRange { base, chunks: chunks.to_vec() };
        let ranges = joined(chunks);
        assert_eq!(ranges, [range(100, &[10, 20]), range(140, &[5, 5]), range(160, &[1])]);
        assert_eq!(ranges[0].bytes(), 30);
        assert_eq!(joined(BTreeMap::new()), []);
    }
}
