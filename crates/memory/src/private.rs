//! [`PrivateMemory`]: private memory straight from the kernel. Dropping it returns all of it, where an allocator would
//! keep some.

use std::{ffi::c_void, io, ptr::NonNull, slice};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Zeroed bytes. A page takes memory once it is written.
#[derive(Debug)]
pub struct PrivateMemory {
    base: NonNull<c_void>,
    bytes: usize,
}

// SAFETY: The mapping belongs to this value alone, and is reached through it only.
unsafe impl Send for PrivateMemory {}
// SAFETY: The same; shared references only read.
unsafe impl Sync for PrivateMemory {}

impl PrivateMemory {
    /// Maps this many bytes, at least one.
    ///
    /// # Errors
    /// The kernel refuses the mapping.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let (protection, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: A new mapping at an address that the kernel chooses touches nothing that exists.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, flags) }?;
        let base = NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?;
        // If huge pages are `always` on, one written byte would take 2 MiB. A kernel without them refuses the advice.
        // SAFETY: The mapping is new and has these bytes; the advice changes no contents.
        let _ = unsafe { madvise(base.as_ptr(), bytes, Advice::LinuxNoHugepage) };
        // Prompts and blocks do not belong into a dump.
        // SAFETY: The same.
        let _ = unsafe { madvise(base.as_ptr(), bytes, Advice::LinuxDontDump) };
        Ok(Self { base, bytes })
    }

    /// All bytes, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: The mapping has these bytes, which the kernel has zeroed, and `self` is borrowed alone.
        unsafe { slice::from_raw_parts_mut(self.base.as_ptr().cast(), self.bytes) }
    }
}

impl AsRef<[u8]> for PrivateMemory {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: As above; a writer has to borrow `self` alone.
        unsafe { slice::from_raw_parts(self.base.as_ptr().cast(), self.bytes) }
    }
}

impl Drop for PrivateMemory {
    fn drop(&mut self) {
        // SAFETY: The mapping is this value's, and no reference to it outlives the value.
        let unmapped = unsafe { munmap(self.base.as_ptr(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn it_is_zeroed_and_keeps_what_is_written() {
        let mut memory = PrivateMemory::new(5000).unwrap();
        assert!(memory.as_ref().iter().all(|byte| *byte == 0));
        memory.bytes_mut()[4999] = 7;
        assert_eq!((memory.as_ref().len(), memory.as_ref()[4999]), (5000, 7));
        assert!(PrivateMemory::new(0).is_err());
    }
}
