//! [`Memory`]: the memory of a ring, which two processes share. Copies bytes in and out within bounds.

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
    /// Keeps the memory mapped while this lives.
    _keeper: Arc<dyn Any + Send + Sync>,
}

// SAFETY: another process has the memory anyway. The header is atomics. One writer and one reader access the bytes, and
// agree by the header on the owner of each.
unsafe impl Send for Memory {}

impl Memory {
    /// A ring with its header at `base` and `capacity` bytes behind it, a power of two.
    ///
    /// # Safety
    /// `HEADER_BYTES + capacity` bytes from `base` on are valid for reads and writes while `keeper` lives, and
    /// `base` is aligned for a header. At most one process writes to the ring and at most one reads it. Nothing else in
    /// this process touches the memory.
    ///
    /// # Panics
    /// If the capacity is not a power of two.
    pub unsafe fn at(base: *mut u8, capacity: usize, keeper: Arc<dyn Any + Send + Sync>) -> Memory {
        assert!(capacity.is_power_of_two(), "a ring of {capacity} bytes");
        debug_assert!(base.cast::<Header>().is_aligned());
        Memory { base, capacity, _keeper: keeper }
    }

    pub(crate) fn header(&self) -> &Header {
        // SAFETY: the header is valid, aligned and kept, as promised to `at`. It is made of atomics, for which every
        // bit pattern is valid. A peer that writes to it meanwhile may make it wrong, but not unsound.
        unsafe { &*self.base.cast::<Header>() }
    }

    /// Bytes of the ring, a power of two.
    pub(crate) fn capacity(&self) -> u64 {
        self.capacity as u64
    }

    /// Copies `len` bytes into the ring, from offset `at` on.
    ///
    /// # Safety
    /// `from` is valid for reads of `len` bytes, none of which is in the ring.
    ///
    /// # Panics
    /// If the bytes do not fit between `at` and the ring's end.
    pub(crate) unsafe fn copy_in(&self, at: usize, from: *const u8, len: usize) {
        let to = self.bytes(at, len);
        // SAFETY: both are valid for that many bytes and do not overlap. No reference to the ring's bytes exists, and a
        // peer that accesses them meanwhile spoils only those bytes.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
    }

    /// Copies `len` bytes out of the ring, from offset `at` on.
    ///
    /// # Safety
    /// `to` is valid for writes of `len` bytes, none of which is in the ring.
    ///
    /// # Panics
    /// If the bytes are not between `at` and the ring's end.
    pub(crate) unsafe fn copy_out(&self, at: usize, to: *mut u8, len: usize) {
        let from = self.bytes(at, len);
        // SAFETY: both are valid for that many bytes and do not overlap. No reference to the ring's bytes exists. A
        // peer that writes them meanwhile decides which bytes are copied, as it does anyway; only the copy reads them
        // here.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
    }

    /// Address of `len` bytes of the ring, from offset `at` on.
    fn bytes(&self, at: usize, len: usize) -> *mut u8 {
        // Check again, although the caller has: once for each copy costs little.
        assert!(at <= self.capacity && len <= self.capacity - at, "{len} bytes at {at} of {}", self.capacity);
        // SAFETY: the address is inside the memory that was promised to `at`.
        unsafe { self.base.add(HEADER_BYTES + at) }
    }
}
