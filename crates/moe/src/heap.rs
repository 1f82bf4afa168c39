//! [`Heap`]: memory of one rank that all ranks of a host map.
//!
//! A peer's process may write anything there at any time. Bytes are copied in and out and never borrowed, and whoever reads
//! them checks what they say. Words are atomic.

#![allow(unsafe_code, reason = "words and bytes at offsets of a mapping")]

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use kvlane_memory::Mapping;
use rustix::fs::{MemfdFlags, SealFlags};

use crate::layout::STATE;

/// The word [`STATE`] is 0 while a rank takes part. Above this bit it has the rank because of which it left, plus one.
const LEFT: u64 = 1;
const BECAUSE_SHIFT: u32 = 8;
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// The memory of each peer, and its process; None for this rank.
pub(crate) type Peers = Vec<Option<(Heap, OwnedFd)>>;

/// A rank's memory, as this process maps it.
#[derive(Debug)]
pub(crate) struct Heap {
    mapping: Mapping,
}

impl Heap {
    /// Makes memory of zeros, whose size nobody can change, and the descriptor by which others map it.
    pub(crate) fn create(bytes: usize) -> io::Result<(Heap, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memfd = rustix::fs::memfd_create("kvlane-moe", flags)?;
        rustix::fs::ftruncate(&memfd, bytes as u64)?;
        rustix::fs::fcntl_add_seals(&memfd, SEALS)?;
        Ok((Heap { mapping: Mapping::new(memfd.as_fd(), bytes as u64, true)? }, memfd))
    }

    /// Maps a peer's memory.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if it has another size, or could be shrunk: touching it could end this process. Errors of
    /// the kernel.
    pub(crate) fn open(memfd: &OwnedFd, bytes: usize) -> io::Result<Heap> {
        let refused = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why);
        let seals = rustix::fs::fcntl_get_seals(memfd).map_err(|_| refused("its memory is no memfd"))?;
        if !seals.contains(SEALS) {
            return Err(refused("its memory could be shrunk"));
        }
        if rustix::fs::fstat(memfd)?.st_size as u64 != bytes as u64 {
            return Err(refused("its memory has another size"));
        }
        Ok(Heap { mapping: Mapping::new(memfd.as_fd(), bytes as u64, true)? })
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

    /// Sets a word. A process that reads it sees the bytes written before.
    pub(crate) fn set(&self, offset: usize, value: u64) {
        self.word(offset).store(value, Ordering::Release);
    }

    /// The value of a word.
    pub(crate) fn get(&self, offset: usize) -> u64 {
        self.word(offset).load(Ordering::Acquire)
    }

    /// Notes that its rank takes no part any more, and the rank because of which.
    pub(crate) fn leave(&self, because: Option<usize>) {
        self.set(STATE, LEFT | because.map_or(0, |rank| rank as u64 + 1) << BECAUSE_SHIFT);
    }

    /// Whether its rank has left, and the rank because of which. A peer wrote that: it may be no rank.
    pub(crate) fn left(&self) -> Option<Option<usize>> {
        let state = self.get(STATE);
        let because = (state >> BECAUSE_SHIFT).checked_sub(1).map(|rank| rank as usize);
        (state & LEFT != 0).then_some(because)
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn what_one_process_writes_another_mapping_has() {
        let (one, memfd) = Heap::create(4096).unwrap();
        let other = Heap::open(&memfd, 4096).unwrap();
        one.write(100, b"row");
        one.set(8, 7);
        let mut read = [0; 3];
        assert_eq!(other.get(8), 7);
        other.read(100, &mut read);
        assert_eq!(&read, b"row");
    }

    #[test]
    fn memory_that_could_be_shrunk_or_has_another_size_is_refused() {
        let plain = rustix::fs::memfd_create("kvlane-test", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&plain, 4096).unwrap();
        assert!(Heap::open(&plain, 4096).unwrap_err().to_string().contains("could be shrunk"));
        let (_, memfd) = Heap::create(4096).unwrap();
        assert!(Heap::open(&memfd, 8192).unwrap_err().to_string().contains("another size"));
        assert!(rustix::fs::ftruncate(&memfd, 0).is_err());
    }

    #[test]
    #[should_panic(expected = "outside")]
    fn bytes_outside_are_a_bug() {
        let (heap, _memfd) = Heap::create(4096).unwrap();
        heap.write(4090, b"too long");
    }
}
