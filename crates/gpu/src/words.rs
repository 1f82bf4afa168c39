//! Words by which streams of several GPUs wait for each other.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::device::Gpu;
use crate::error::GpuError;
use crate::pinned::HostBuffer;

const WORD_BYTES: u64 = 4;
/// More than any number that is waited for.
const ENOUGH: u32 = i32::MAX as u32;

/// Words in pinned memory. An event of a GPU that is lost never comes, and nobody can end the wait of another GPU for it;
/// a word can be written by the host, too.
#[derive(Debug)]
pub(crate) struct Words {
    buffer: HostBuffer,
    count: usize,
}

impl Words {
    /// So many words, all 0.
    pub(crate) fn new(gpu: &Gpu, count: usize) -> Result<Words, GpuError> {
        let words = Words { buffer: HostBuffer::new(gpu, count as u64 * WORD_BYTES)?, count };
        (0..count).for_each(|index| words.set(index, 0));
        Ok(words)
    }

    /// Of a word, the same on host and devices.
    pub(crate) fn address(&self, index: usize) -> u64 {
        self.buffer.address() + index as u64 * WORD_BYTES
    }

    /// Writes a word from here, after what this thread wrote before.
    pub(crate) fn set(&self, index: usize, value: u32) {
        assert!(index < self.count, "word {index} of {}", self.count);
        let word: *mut u32 = self.buffer.as_ptr().cast();
        // SAFETY: the word is in the buffer, which is page-aligned; everybody accesses it as a whole.
        unsafe { AtomicU32::from_ptr(word.add(index)) }.store(value, Ordering::SeqCst);
    }

    /// What a word is. Whoever sees what a stream wrote sees what the stream had done before.
    pub(crate) fn get(&self, index: usize) -> u32 {
        assert!(index < self.count, "word {index} of {}", self.count);
        let word: *mut u32 = self.buffer.as_ptr().cast();
        // SAFETY: as in `set`.
        unsafe { AtomicU32::from_ptr(word.add(index)) }.load(Ordering::SeqCst)
    }

    /// Whatever is waited for has come.
    pub(crate) fn release(&self, index: usize) {
        self.set(index, ENOUGH);
    }
}
