//! Memory that transfers touch, and numbers that look random.

use std::time::Instant;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::{MIB, PATIENCE};

/// Memory that takes room only where it was written.
pub(crate) struct Memory {
    pub(crate) base: *mut u8,
    pub(crate) len: usize,
}

// SAFETY: its bytes are read and written only as memory may be that others write meanwhile.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    pub(crate) fn new(len: usize) -> Memory {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping overlaps nothing.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, flags).unwrap() };
        Memory { base: base.cast(), len }
    }

    pub(crate) fn at(&self, at: usize, len: usize) -> *mut u8 {
        assert!(at + len <= self.len, "{len} bytes from {at} of {}", self.len);
        self.base.wrapping_add(at)
    }

    pub(crate) fn byte(&self, at: usize) -> u8 {
        // SAFETY: it is inside the mapping.
        unsafe { self.at(at, 1).read_volatile() }
    }

    pub(crate) fn set(&self, at: usize, byte: u8) {
        // SAFETY: it is inside the mapping.
        unsafe { self.at(at, 1).write_volatile(byte) }
    }

    pub(crate) fn fill(&self, at: usize, len: usize, byte: u8) {
        // SAFETY: they are inside the mapping.
        unsafe { self.at(at, len).write_bytes(byte, len) }
    }

    /// Bytes that tell where they are from.
    pub(crate) fn scribble(&self, at: usize, len: usize, seed: u64) {
        let mut random = Random(seed);
        let words: Vec<u64> = (0..len.div_ceil(8)).map(|_| random.word()).collect();
        // SAFETY: they are inside the mapping, and the source is as long.
        unsafe { self.at(at, len).copy_from_nonoverlapping(words.as_ptr().cast(), len) }
    }

    pub(crate) fn put(&self, bytes: &[u8]) {
        // SAFETY: they are inside the mapping, and the source is as long.
        unsafe { self.at(0, bytes.len()).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
    }

    pub(crate) fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // SAFETY: they are inside the mapping, and the target is as long.
        unsafe { self.at(at, len).copy_to_nonoverlapping(bytes.as_mut_ptr(), len) }
        bytes
    }

    /// The first byte that is another one.
    pub(crate) fn other_than(&self, at: usize, len: usize, byte: u8) -> Option<usize> {
        let wanted = vec![byte; MIB];
        (at..at + len).step_by(MIB).find_map(|from| {
            let found = self.bytes(from, MIB.min(at + len - from));
            let differs = found != wanted[..found.len()];
            differs.then(|| from + found.iter().position(|found| *found != byte).unwrap())
        })
    }

    /// The first byte for which this is not so.
    pub(crate) fn find_other(&self, at: usize, len: usize, is_so: impl Fn(&u8) -> bool) -> Option<u8> {
        // Most are as the first one.
        let bytes = self.bytes(at, len);
        let first = self.other_than(at, len, bytes[0]);
        first
            .and_then(|_| bytes.iter().find(|byte| !is_so(byte)).copied())
            .or((!is_so(&bytes[0])).then(|| bytes[0]))
    }

    /// The first byte that is this one.
    pub(crate) fn find(&self, byte: u8) -> Option<usize> {
        // SAFETY: the search stays inside the mapping.
        let found = unsafe { libc::memchr(self.base.cast(), byte.into(), self.len) };
        (!found.is_null()).then(|| found.addr() - self.base.addr())
    }

    /// Waits until a byte is no longer 0.
    pub(crate) fn wait_for(&self, at: usize) {
        let begun = Instant::now();
        while self.byte(at) == 0 {
            assert!(begun.elapsed() < PATIENCE, "byte {at} did not come");
            std::thread::yield_now();
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: nobody has a pointer into it any more.
        unsafe { munmap(self.base.cast(), self.len).unwrap() }
    }
}

pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn word(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.word() % end as u64) as usize
    }

    /// All numbers below `end`, in some order.
    pub(crate) fn order(&mut self, end: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..end).collect();
        (1..end).rev().for_each(|at| order.swap(at, self.below(at + 1)));
        order
    }
}
