//! [`Mapping`]: a shared mapping of a file that unmaps itself when dropped.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags};

/// The first `bytes` bytes of a file, mapped shared as long as this lives.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    bytes: u64,
}

// SAFETY: the mapping belongs to the process, not to a thread. Its bytes are reached through raw pointers only, and
// each such access is responsible for its own races.
unsafe impl Send for Mapping {}
// SAFETY: as above; a shared reference gives out the address and nothing else.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `bytes` bytes. Touching a page behind the file's end is SIGBUS. So before mapping a file of
    /// another process, the caller makes sure that it is long enough and stays so.
    pub fn new(fd: BorrowedFd<'_>, bytes: u64, writable: bool) -> io::Result<Mapping> {
        let prot = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: without MAP_FIXED the kernel picks an unused range, so no memory of this process is replaced.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes as usize, prot, MapFlags::SHARED, fd, 0)? };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { base, bytes })
    }

    /// Address of the first byte, which begins a page. Writing there faults unless it was mapped writable.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Size of the mapping in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and length are those of mmap, and only this unmaps them. Users keep this value alive while they
        // access the bytes.
        let unmapped = unsafe { rustix::mm::munmap(self.base().cast(), self.bytes as usize) };
        if let Err(error) = unmapped {
            // Log: memory that is no longer used stays mapped until the process ends. Do: report it, with the
            // log.
            tracing::error!(%error, bytes = self.bytes, "unmapping shared memory failed");
        }
    }
}
