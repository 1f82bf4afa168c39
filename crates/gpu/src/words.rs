//! Words by which streams of several GPUs wait for each other.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::device::Gpu;
use crate::error::GpuError;
use crate::pinned::HostBuffer;

const WORD_BYTES: u64 = 4;
/// Larger than any value that a stream waits for.
const ENOUGH: u32 = i32::MAX as u32;

/// Words in pinned memory. They replace events, because no one can end a GPU's wait for an event of a lost GPU. The host can
/// write a word.
#[derive(Debug)]
pub(crate) struct Words {
    buffer: HostBuffer,
    count: usize,
}

impl Words {
    /// `count` words, all 0.
    pub(crate) fn new(gpu: &Gpu, count: usize) -> Result<Words, GpuError> {
        let words = Words { buffer: HostBuffer::new(gpu, count as u64 * WORD_BYTES)?, count };
        (0..count).for_each(|index| words.set(index, 0));
        Ok(words)
    }

    /// A word's address, the same on host and devices.
    pub(crate) fn address(&self, index: usize) -> u64 {
        self.buffer.address() + index as u64 * WORD_BYTES
    }

    /// Writes a word from the host, after this thread's earlier writes.
    pub(crate) fn set(&self, index: usize, value: u32) {
        assert!(index < self.count, "word {index} of {}", self.count);
        let word: *mut u32 = self.buffer.as_ptr().cast();
        // SAFETY: the word is in the buffer, which is page-aligned; all accesses are of the whole word.
        unsafe { AtomicU32::from_ptr(word.add(index)) }.store(value, Ordering::SeqCst);
    }

    /// A word's value. A reader that sees a stream's write also sees the stream's earlier work.
    pub(crate) fn get(&self, index: usize) -> u32 {
        assert!(index < self.count, "word {index} of {}", self.count);
        let word: *mut u32 = self.buffer.as_ptr().cast();
        // SAFETY: as in `set`.
        unsafe { AtomicU32::from_ptr(word.add(index)) }.load(Ordering::SeqCst)
    }

    /// Ends every wait for the word.
    pub(crate) fn release(&self, index: usize) {
        self.set(index, ENOUGH);
    }
}
