//! The mappings of the fake's device and host memory.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

/// Addresses that a fake reserves for its devices. None is used twice, so a late access faults.
const RESERVED: u64 = 1 << 40;

/// Begins the name of a file that is memory of a GPU. The GPU's number follows.
const NAME: &str = "kvlane-fake-gpu-";

/// Allocations begin at multiples of this.
pub(super) const GRAIN: u64 = 2 << 20;

/// A range of addresses that is not accessible except where an allocation was mapped into it.
#[derive(Debug)]
pub(super) struct Arena {
    base: u64,
    next: AtomicU64,
}

impl Arena {
    pub(super) fn new() -> io::Result<Arc<Arena>> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the kernel picks an unused range, so no memory of this process is replaced.
        let base = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), RESERVED as usize, ProtFlags::empty(), flags)?
        };
        let base = base.expose_provenance() as u64;
        Ok(Arc::new(Arena { base, next: AtomicU64::new(base.next_multiple_of(GRAIN)) }))
    }

    pub(super) fn contains(&self, address: u64) -> bool {
        address.wrapping_sub(self.base) < RESERVED
    }

    pub(super) fn take(&self, bytes: u64) -> io::Result<u64> {
        let bytes = bytes.checked_next_multiple_of(GRAIN).ok_or(io::ErrorKind::OutOfMemory)?;
        let fits = |start: u64| start.checked_add(bytes).filter(|end| *end - self.base <= RESERVED);
        self.next
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
            .map_err(|_| io::ErrorKind::OutOfMemory.into())
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the range is the arena's own, and every mapping in it holds the arena.
        let unmapped = unsafe { rustix::mm::munmap(pointer(self.base).cast(), RESERVED as usize) };
        if let Err(error) = unmapped {
            // Log: the simulation kept addresses of its process.
            tracing::error!(%error, "cannot unmap the fake's memory");
        }
    }
}

/// Device memory: a file that other processes can open, mapped in the arena.
#[derive(Debug)]
pub(super) struct DeviceMapping {
    pub(super) base: u64,
    pub(super) bytes: u64,
    pub(super) file: File,
    /// Number of the host's GPU that holds it.
    pub(super) holder: u32,
    arena: Arc<Arena>,
}

impl DeviceMapping {
    pub(super) fn new(arena: &Arc<Arena>, holder: u32, bytes: u64) -> io::Result<DeviceMapping> {
        DeviceMapping::of(arena, device_file(holder, bytes)?, bytes)
    }

    pub(super) fn of(arena: &Arc<Arena>, file: File, bytes: u64) -> io::Result<DeviceMapping> {
        let base = arena.take(bytes)?;
        DeviceMapping::at(arena, base, file, bytes)
    }

    /// Maps a file at addresses that were taken from the arena for it.
    pub(super) fn at(arena: &Arc<Arena>, base: u64, file: File, bytes: u64) -> io::Result<DeviceMapping> {
        let holder = holder(&file)?;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the range was taken from the arena for this mapping alone.
        unsafe { rustix::mm::mmap(pointer(base).cast(), bytes as usize, prot, flags, &file, 0)? };
        Ok(DeviceMapping { base, bytes, file, holder, arena: Arc::clone(arena) })
    }
}

impl Drop for DeviceMapping {
    fn drop(&mut self) {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        let bytes = self.bytes as usize;
        debug_assert!(self.arena.contains(self.base));
        // SAFETY: the range is this mapping's, and all code that accesses it holds the mapping.
        let reserved = unsafe {
            rustix::mm::mmap_anonymous(pointer(self.base).cast(), bytes, ProtFlags::empty(), flags)
        };
        if let Err(error) = reserved {
            // Log: a simulated GPU kept memory of its process.
            tracing::error!(%error, "cannot unmap memory of a fake device");
        }
    }
}

/// Device memory without addresses. Its name tells each process that opens it which GPU holds it.
pub(super) fn device_file(holder: u32, bytes: u64) -> io::Result<File> {
    let name = format!("{NAME}{holder}");
    let file = File::from(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?);
    file.set_len(bytes)?;
    Ok(file)
}

/// The number of the GPU that holds the memory of this file.
fn holder(file: &File) -> io::Result<u32> {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    let name = link.to_str().and_then(|link| link.strip_prefix("/memfd:")?.strip_suffix(" (deleted)"));
    let number = name.and_then(|name| name.strip_prefix(NAME)?.parse().ok());
    number.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "it is no memory of a fake GPU"))
}

/// Host memory of the fake.
#[derive(Debug)]
pub(super) struct HostMapping {
    pub(super) base: u64,
    bytes: u64,
}

impl HostMapping {
    pub(super) fn new(bytes: u64) -> io::Result<HostMapping> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel picks an unused range, so no memory of this process is replaced.
        let base = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes as usize, prot, MapFlags::PRIVATE)?
        };
        Ok(HostMapping { base: base.expose_provenance() as u64, bytes })
    }
}

impl Drop for HostMapping {
    fn drop(&mut self) {
        // SAFETY: base and length are those that mmap returned, and all code that accesses the range holds the mapping.
        let unmapped = unsafe { rustix::mm::munmap(pointer(self.base).cast(), self.bytes as usize) };
        if let Err(error) = unmapped {
            // Log: the simulation kept host memory of its process.
            tracing::error!(%error, "cannot unmap host memory of a fake device");
        }
    }
}

/// The memory at an address, whose mapping exposed its provenance.
pub(super) fn pointer(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address as usize)
}
