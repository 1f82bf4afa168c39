//! [`Memory`]: the mapping below a [`Heap`](crate::heap::Heap), its words and its bytes.

#![allow(unsafe_code, reason = "words and bytes at offsets of a mapping")]

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use kvlane_memory::Mapping;
use rustix::fs::{MemfdFlags, SealFlags};

use crate::sync::{AtomicU64, Ordering};

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// A rank's memory, as this process maps it.
#[derive(Debug)]
pub(crate) struct Memory {
    mapping: Mapping,
}

impl Memory {
    /// Makes memory of zeros, whose size nobody can change, and the descriptor by which others map it.
    pub(crate) fn create(bytes: usize) -> io::Result<(Memory, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memfd = rustix::fs::memfd_create("kvlane-moe", flags)?;
        rustix::fs::ftruncate(&memfd, bytes as u64)?;
        rustix::fs::fcntl_add_seals(&memfd, SEALS)?;
        Ok((Memory { mapping: Mapping::new(memfd.as_fd(), bytes as u64, true)? }, memfd))
    }

    /// Maps a peer's memory.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if it has another size, or could be shrunk: touching it could end this process. Errors of
    /// the kernel.
    pub(crate) fn open(memfd: &OwnedFd, bytes: usize) -> io::Result<Memory> {
        let refused = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why);
        let seals = rustix::fs::fcntl_get_seals(memfd).map_err(|_| refused("its memory is no memfd"))?;
        if !seals.contains(SEALS) {
            return Err(refused("its memory could be shrunk"));
        }
        if rustix::fs::fstat(memfd)?.st_size as u64 != bytes as u64 {
            return Err(refused("its memory has another size"));
        }
        Ok(Memory { mapping: Mapping::new(memfd.as_fd(), bytes as u64, true)? })
    }

    /// The address of `len` bytes.
    ///
    /// # Panics
    /// If they are not all in the mapping.
    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        let end = offset.checked_add(len);
        assert!(end.is_some_and(|end| end as u64 <= self.mapping.bytes()), "bytes outside of the memory");
        self.mapping.base().wrapping_add(offset)
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8), "a word begins at a multiple of its size");
        let word = self.at(offset, 8).cast::<u64>();
        // SAFETY: the word lies in the mapping, which lives as long as self, and is aligned, as the mapping begins with a page.
        // All processes access it atomically.
        unsafe { AtomicU64::from_ptr(word) }
    }

    pub(crate) fn store(&self, offset: usize, value: u64, order: Ordering) {
        self.word(offset).store(value, order);
    }

    pub(crate) fn load(&self, offset: usize, order: Ordering) -> u64 {
        self.word(offset).load(order)
    }

    /// Copies bytes in.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        let to = self.at(offset, bytes.len());
        // SAFETY: the target lies in the mapping, which is writable. It is memory of no Rust object, so it does not overlap
        // the source. By the protocol nobody else accesses it now; a peer that does so changes bytes that are checked.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
    }

    /// Copies bytes out.
    pub(crate) fn read(&self, offset: usize, bytes: &mut [u8]) {
        let from = self.at(offset, bytes.len());
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) }
    }
}
