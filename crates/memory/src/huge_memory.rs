//! [`HugeMemory`]: private memory on transparent huge pages, for transfers that have to be long.
//!
//! The kernel builds a disk's requests from runs of physical memory. Pages of 4 KiB cut a transfer into pieces; in a huge page
//! 2 MiB lie together. Private memory gets them if `transparent_hugepage/enabled` is `madvise` or `always`, which is what most
//! distributions set. Shared memory, such as the pool, has a setting of its own that is off almost everywhere.

use std::ffi::c_void;
use std::io;
use std::ptr::NonNull;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::hugepages::{self, HUGE_BYTES};

/// Zeroed bytes, faulted in, that begin at a multiple of 2 MiB.
///
/// The kernel promises no huge pages: [`huge_bytes`](Self::huge_bytes) says how many it gave.
#[derive(Debug)]
pub struct HugeMemory {
    /// Start of the mapping, which may begin before `base` and end after it.
    mapped: NonNull<c_void>,
    mapped_bytes: usize,
    base: NonNull<u8>,
    bytes: usize,
    huge_bytes: u64,
}

// SAFETY: the mapping belongs to the process, not to a thread. Its bytes are reached through raw pointers only, and
// each such access is responsible for its own races.
unsafe impl Send for HugeMemory {}
// SAFETY: as above; a shared reference gives out the address and nothing else.
unsafe impl Sync for HugeMemory {}

impl HugeMemory {
    /// Maps and faults in this many bytes, rounded up to a multiple of 2 MiB.
    ///
    /// # Errors
    /// The kernel refuses the mapping, or has no memory for it. That it refuses huge pages is no error.
    pub fn new(bytes: usize) -> io::Result<HugeMemory> {
        let huge = HUGE_BYTES as usize;
        let refused = || io::Error::from(io::ErrorKind::OutOfMemory);
        let bytes = bytes.max(1).checked_next_multiple_of(huge).ok_or_else(refused)?;
        // Kernels before Linux 6.7 align no mapping to huge pages.
        let mapped_bytes = bytes.checked_add(huge).ok_or_else(refused)?;
        let (protection, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new mapping at an address that the kernel chooses touches nothing that exists.
        let mapped = unsafe { mmap_anonymous(std::ptr::null_mut(), mapped_bytes, protection, flags) }?;
        let mapped = NonNull::new(mapped).ok_or_else(refused)?;
        let ahead = mapped.cast::<u8>().align_offset(huge);
        // SAFETY: `ahead` is below 2 MiB, by which the mapping is longer than `bytes`.
        let base = unsafe { mapped.cast::<u8>().add(ahead) };
        let mut memory = HugeMemory { mapped, mapped_bytes, base, bytes, huge_bytes: 0 };
        // SAFETY: the range is inside the new mapping; the advice leaves its bytes alone. Kernels without huge pages
        // refuse the advice.
        let _ = unsafe { madvise(memory.base().cast(), bytes, Advice::LinuxHugepage) };
        // A dump of the daemon is to hold no blocks.
        // SAFETY: as above.
        let _ = unsafe { madvise(memory.base().cast(), bytes, Advice::LinuxDontDump) };
        memory.fault_in()?;
        memory.huge_bytes = hugepages::private_huge_bytes(memory.base() as u64, bytes as u64);
        Ok(memory)
    }

    fn fault_in(&self) -> io::Result<()> {
        loop {
            // SAFETY: the range lies inside the mapping; populating keeps the bytes of pages that exist.
            let populated = unsafe { madvise(self.base().cast(), self.bytes, Advice::LinuxPopulateWrite) };
            match populated {
                Err(Errno::INTR | Errno::AGAIN) => {}
                // Linux before 5.14 does not know the advice: write one byte to each page.
                Err(Errno::INVAL) => {
                    for at in (0..self.bytes).step_by(rustix::param::page_size()) {
                        // SAFETY: `at` is inside the mapping, which nobody else has yet.
                        unsafe { self.base().add(at).write_volatile(0) };
                    }
                    return Ok(());
                }
                populated => return Ok(populated?),
            }
        }
    }

    /// Address of the first byte, a multiple of 2 MiB.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Size in bytes, a multiple of 2 MiB.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes that were in huge pages once all memory was faulted in.
    pub fn huge_bytes(&self) -> u64 {
        self.huge_bytes
    }
}

impl Drop for HugeMemory {
    fn drop(&mut self) {
        // SAFETY: address and length are those of mmap, and only this unmaps them. Users keep this value alive while
        // they access the bytes.
        let _ = unsafe { munmap(self.mapped.as_ptr(), self.mapped_bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_zeroed_aligned_and_rounded_up() {
        let memory = HugeMemory::new((2 << 20) + 1).unwrap();
        assert_eq!(memory.bytes(), 4 << 20);
        assert!((memory.base() as usize).is_multiple_of(2 << 20));
        // SAFETY: the memory is mapped, and this test alone has it.
        let bytes = unsafe { std::slice::from_raw_parts_mut(memory.base(), memory.bytes()) };
        assert!(bytes.iter().all(|byte| *byte == 0));
        bytes.fill(7);
        assert!(memory.huge_bytes() <= 4 << 20);
    }

    #[test]
    fn more_than_can_be_mapped_is_an_error() {
        assert!(HugeMemory::new(usize::MAX - 5).is_err());
        assert!(HugeMemory::new(1 << 60).is_err());
    }
}
