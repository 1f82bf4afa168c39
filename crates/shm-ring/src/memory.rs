//! The memory of a ring, which two processes share.

#![allow(unsafe_code, reason = "copies out of memory that another process writes, and into it")]

use std::any::Any;
use std::sync::Arc;

use crate::header::{HEADER_BYTES, Header};

/// The memory of one ring: a header in [`HEADER_BYTES`], then the ring's bytes.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct Memory {
    base: *mut u8,
    capacity: usize,
    /// Keeps the memory where it is.
    _keeper: Arc<dyn Any + Send + Sync>,
}

// SAFETY: it is shared with another process anyway. The header is atomics; the bytes are reached by one writer and
// one reader, which agree by the header on what is whose.
unsafe impl Send for Memory {}

impl Memory {
    /// A ring whose header is at `base` and which holds `capacity` bytes, a power of two.
    ///
    /// # Safety
    /// `HEADER_BYTES + capacity` bytes from `base` on are valid for reads and writes while `keeper` lives, and
    /// `base` is aligned for a header. Of all processes at most one writes to the ring and one reads it, and nothing
    /// of this process touches the memory otherwise.
    ///
    /// # Panics
    /// If the capacity is no power of two.
    pub unsafe fn at(base: *mut u8, capacity: usize, keeper: Arc<dyn Any + Send + Sync>) -> Memory {
        assert!(capacity.is_power_of_two(), "a ring of {capacity} bytes");
        debug_assert!(base.cast::<Header>().is_aligned());
        Memory { base, capacity, _keeper: keeper }
    }

    pub(crate) fn header(&self) -> &Header {
        // SAFETY: it is valid, aligned and kept, as promised to `at`. It is made of atomics, of which every value
        // is one: what others write to it meanwhile may be wrong, but not unsound.
        unsafe { &*self.base.cast::<Header>() }
    }

    /// Bytes of the ring.
    pub(crate) fn capacity(&self) -> u64 {
        self.capacity as u64
    }

    /// Copies `len` bytes into the ring, to those from `at` on.
    ///
    /// # Safety
    /// `from` is valid for reads of `len` bytes, none of which is of the ring.
    ///
    /// # Panics
    /// If they do not fit between `at` and the ring's end.
    pub(crate) unsafe fn copy_in(&self, at: usize, from: *const u8, len: usize) {
        let to = self.bytes(at, len);
        // SAFETY: both are valid for that many bytes and do not overlap. No reference to the ring's bytes exists,
        // and a peer that reads or writes them meanwhile spoils nothing but them.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
    }

    /// Copies `len` bytes of the ring, those from `at` on.
    ///
    /// # Safety
    /// `to` is valid for writes of `len` bytes, none of which is of the ring.
    ///
    /// # Panics
    /// If they are not between `at` and the ring's end.
    pub(crate) unsafe fn copy_out(&self, at: usize, to: *mut u8, len: usize) {
        let from = self.bytes(at, len);
        // SAFETY: both are valid for that many bytes and do not overlap. No reference to the ring's bytes exists. A
        // peer that writes them meanwhile decides what is copied, which it does anyway; nothing here looks at them
        // but the copy.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
    }

    /// Where bytes of the ring are.
    fn bytes(&self, at: usize, len: usize) -> *mut u8 {
        // Once for each copy, so it may be asked once more what the caller has made sure of.
        assert!(at <= self.capacity && len <= self.capacity - at, "{len} bytes at {at} of {}", self.capacity);
        // SAFETY: it is inside the memory that was promised to `at`.
        unsafe { self.base.add(HEADER_BYTES + at) }
    }
}
