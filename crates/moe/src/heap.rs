//! [`Heap`]: memory of one rank that all ranks of a host map.
//!
//! A peer's process may write anything there at any time. Bytes are copied in and out and never borrowed, and whoever reads
//! them checks what they say. Words are atomic.

#[cfg(not(loom))]
use std::io;
use std::os::fd::OwnedFd;

use crate::layout::STATE;
use crate::memory::Memory;
use crate::sync::Ordering;

/// The word [`STATE`] is 0 while a rank takes part. Above this bit it has the rank because of which it left, plus one.
const LEFT: u64 = 1;
const BECAUSE_SHIFT: u32 = 8;

/// The memory of each peer, and its process; None for this rank.
pub(crate) type Peers = Vec<Option<(Heap, OwnedFd)>>;

/// A rank's memory, as this process maps it.
#[derive(Debug)]
pub(crate) struct Heap {
    memory: Memory,
}

impl From<Memory> for Heap {
    fn from(memory: Memory) -> Heap {
        Heap { memory }
    }
}

#[cfg(not(loom))]
impl Heap {
    /// Makes memory of zeros, whose size nobody can change, and the descriptor by which others map it.
    pub(crate) fn create(bytes: usize) -> io::Result<(Heap, OwnedFd)> {
        let (memory, memfd) = Memory::create(bytes)?;
        Ok((memory.into(), memfd))
    }

    /// Maps a peer's memory.
    ///
    /// # Errors
    /// Those of [`Memory::open`].
    pub(crate) fn open(memfd: &OwnedFd, bytes: usize) -> io::Result<Heap> {
        Memory::open(memfd, bytes).map(Heap::from)
    }
}

impl Heap {
    /// Sets a word. A process that reads it sees the bytes written before.
    pub(crate) fn set(&self, offset: usize, value: u64) {
        self.memory.store(offset, value, Ordering::Release);
    }

    /// The value of a word.
    pub(crate) fn get(&self, offset: usize) -> u64 {
        self.memory.load(offset, Ordering::Acquire)
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
        self.memory.write(offset, bytes);
    }

    /// Copies bytes out.
    pub(crate) fn read(&self, offset: usize, bytes: &mut [u8]) {
        self.memory.read(offset, bytes);
    }
}

#[cfg(all(test, not(loom)))]
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
        let plain = rustix::fs::memfd_create("kvlane-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
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
