//! [`Memory`] for models of loom: threads of the model share it, and no other process is involved.

#![allow(unsafe_code, reason = "copies between memory that was promised to be valid and the ring")]

use std::sync::Arc;

use loom::cell::UnsafeCell;

use crate::header::Header;

/// A ring that threads of a model share. Loom reports an access to a byte that is not ordered after the one before.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct Memory(Arc<(Header, Vec<UnsafeCell<u8>>)>);

// SAFETY: threads of a model agree by the header on the owner of each byte, and loom reports those that do not.
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
            // SAFETY: valid by the caller's promise; loom checks that no other thread accesses the byte.
            byte.with_mut(|byte| unsafe { byte.write(from.add(index).read()) });
        }
    }

    /// # Safety
    /// `to` is valid for writes of `len` bytes.
    pub(crate) unsafe fn copy_out(&self, at: usize, to: *mut u8, len: usize) {
        for (index, byte) in self.0.1[at..at + len].iter().enumerate() {
            // SAFETY: valid by the caller's promise; loom checks that no other thread writes the byte.
            byte.with(|byte| unsafe { to.add(index).write(byte.read()) });
        }
    }
}
