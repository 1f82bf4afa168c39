//! A shared mapping of a descriptor that unmaps itself.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags};

/// `bytes` bytes of a file, mapped shared from its start, for as long as this lives.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    bytes: u64,
}

// SAFETY: the mapping belongs to the process, not to a thread; its bytes are reached through raw pointers only, and
// each such access answers for its own races.
unsafe impl Send for Mapping {}
// SAFETY: as above; a shared reference gives out the address and nothing else.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `bytes` bytes. Touching what the file does not have is SIGBUS: whoever maps a file of somebody
    /// else makes sure before that it is long enough and stays so.
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

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and length are those that mmap returned, and nothing unmaps them but this. Users keep their
        // owner alive while they access it.
        let unmapped = unsafe { rustix::mm::munmap(self.base().cast(), self.bytes as usize) };
        if let Err(error) = unmapped {
            tracing::error!(%error, bytes = self.bytes, "cannot unmap shared memory");
        }
    }
}
