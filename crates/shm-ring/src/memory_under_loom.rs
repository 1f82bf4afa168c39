//! The memory of a ring in a model of loom: no process is at the other side, and threads of the model share it.

#![allow(unsafe_code, reason = "copies between memory that was promised to be valid and the ring")]

use std::sync::Arc;

use loom::cell::UnsafeCell;

use crate::header::Header;

/// A ring that threads of a model share. Loom finds an access to a byte that is not ordered with one before.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct Memory(Arc<(Header, Vec<UnsafeCell<u8>>)>);

// SAFETY: threads of a model agree by the header on who has which byte, and loom finds those that do not.
unsafe impl Send for Memory {}

impl Memory {
    pub(crate) fn new(header: Header, capacity: usize) -> Memory {
        assert!(capacity.is_power_of_two(), "a ring of {capacity} bytes");
        Memory(Arc::new((header, (0..capacity).map(|_| UnsafeCell::new(0)).collect())))
    }

    pub(crate) fn header(&self) -> &Header {
        &self.0.0
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.0.1.len() as u64
    }

    /// # Safety
    /// `from` is valid for reads of `len` bytes.
    pub(crate) unsafe fn copy_in(&self, at: usize, from: *const u8, len: usize) {
        for (index, byte) in self.0.1[at..at + len].iter().enumerate() {
            // SAFETY: valid by the caller's promise; loom checks that nobody else has the byte.
            byte.with_mut(|byte| unsafe { byte.write(from.add(index).read()) });
        }
    }

    /// # Safety
    /// `to` is valid for writes of `len` bytes.
    pub(crate) unsafe fn copy_out(&self, at: usize, to: *mut u8, len: usize) {
        for (index, byte) in self.0.1[at..at + len].iter().enumerate() {
            // SAFETY: valid by the caller's promise; loom checks that nobody writes the byte.
            byte.with(|byte| unsafe { to.add(index).write(byte.read()) });
        }
    }
}
