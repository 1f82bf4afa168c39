//! Memory that blocks are read into and written from.
#![expect(unsafe_code, reason = "who implements the trait answers for the memory")]

/// The pool.
///
/// # Safety
/// `bytes` bytes from `base`, which begins a page of 4096 bytes, are mapped, readable and writable, and faulted in or
/// able to be, as long as the value lives. Both functions always answer the same.
pub unsafe trait Memory: Send + Sync {
    /// Address of the first byte.
    fn base(&self) -> *mut u8;
    /// Size in bytes.
    fn bytes(&self) -> u64;
}

// SAFETY: an arena is one shared mapping with fixed base and length, unmapped when it is dropped.
unsafe impl Memory for kvlane_memory::Arena {
    fn base(&self) -> *mut u8 {
        kvlane_memory::Arena::base(self)
    }

    fn bytes(&self) -> u64 {
        kvlane_memory::Arena::bytes(self)
    }
}
