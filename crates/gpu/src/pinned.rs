//! Host memory that GPUs reach at its own address: small buffers of ours, and the pool.

use crate::device::{Gpu, warn_of};
use crate::error::GpuError;

/// Bytes of a large range that are pinned at a time. Progress is reported between chunks.
pub const CHUNK_BYTES: u64 = 1 << 30;

/// Pinned host memory of our own; its first content is undefined. Code that enqueues work on it waits for that work before
/// the drop.
#[derive(Debug)]
pub struct HostBuffer {
    gpu: Gpu,
    address: u64,
    bytes: u64,
}

impl HostBuffer {
    /// A buffer that all devices of the driver can use.
    pub fn new(gpu: &Gpu, bytes: u64) -> Result<HostBuffer, GpuError> {
        let (driver, device) = gpu.raw();
        let address = driver.host_alloc(device, bytes)?;
        Ok(HostBuffer { gpu: gpu.clone(), address, bytes })
    }

    /// First address, the same on host and devices.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes of the buffer.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// First byte; at least page-aligned. Accesses must not race with enqueued work.
    pub fn as_ptr(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.address as usize)
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        let (driver, device) = self.gpu.raw();
        // SAFETY: the address came from host_alloc and is freed once; users of it have waited for their work.
        warn_of(Some(device), "free pinned memory", unsafe { driver.host_free(device, self.address) });
    }
}

/// Host memory of another owner, pinned as long as this lives.
///
/// A copy engine does not cross from one pinned chunk to the next: see [`Pinned::seams`].
#[derive(Debug)]
pub struct Pinned {
    gpu: Gpu,
    chunks: Vec<u64>,
}

impl Pinned {
    /// Pins a range, chunk by chunk of at most `chunk_bytes` ([`CHUNK_BYTES`] is a good size), for all devices of the
    /// driver. After each chunk `progress` is called with the bytes that are pinned. With 4 KiB pages this takes
    /// about 0.3 s a GiB.
    ///
    /// # Safety
    /// The range stays mapped while this lives. Code that enqueues work on it waits for that work before this is dropped.
    pub unsafe fn new(
        gpu: &Gpu,
        address: u64,
        bytes: u64,
        chunk_bytes: u64,
        mut progress: impl FnMut(u64),
    ) -> Result<Pinned, GpuError> {
        if chunk_bytes == 0 || address.checked_add(bytes).is_none() {
            return Err(GpuError::Invalid(format!(
                "{bytes} bytes at {address:#x} cannot be pinned in chunks of {chunk_bytes} bytes"
            )));
        }
        let (driver, device) = gpu.raw();
        // After an error the drop unpins the chunks that are pinned so far.
        let mut pinned = Pinned { gpu: gpu.clone(), chunks: Vec::new() };
        let mut done = 0;
        while done < bytes {
            let chunk = chunk_bytes.min(bytes - done);
            // SAFETY: the caller vouches for the range until this is dropped.
            unsafe { driver.host_register(device, address + done, chunk)? };
            pinned.chunks.push(address + done);
            done += chunk;
            progress(done);
        }
        Ok(pinned)
    }

    /// The addresses inside the range at which chunks meet, ascending.
    pub fn seams(&self) -> &[u64] {
        self.chunks.get(1..).unwrap_or_default()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let (driver, device) = self.gpu.raw();
        for chunk in &self.chunks {
            // SAFETY: the chunk was registered and is unregistered once; the owner has waited for work on it.
            warn_of(Some(device), "unpin host memory", unsafe { driver.host_unregister(device, *chunk) });
        }
    }
}
