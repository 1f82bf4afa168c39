//! [`Memory`]: the pool, as the tier sees it. Blocks are written from it and read into it.
#![expect(unsafe_code, reason = "the implementer of the trait vouches for the memory")]

/// The pool that blocks are written from and read into.
///
/// # Safety
/// As long as the value lives, `bytes` bytes from `base` are mapped, readable and writable, and faulted in or able to
/// be. `base` is a multiple of 4096. Both functions always return the same.
pub unsafe trait Memory: Send + Sync {
    /// Address of the first byte, a multiple of 4096.
    fn base(&self) -> *mut u8;
    /// Size of the pool in bytes.
    fn bytes(&self) -> u64;
    /// Whether most of it is on huge pages.
    fn is_huge(&self) -> bool;
}

// SAFETY: an arena is one shared mapping with fixed base and length, unmapped when it is dropped.
unsafe impl Memory for kvlane_memory::Arena {
    fn base(&self) -> *mut u8 {
        kvlane_memory::Arena::base(self)
    }

    fn bytes(&self) -> u64 {
        kvlane_memory::Arena::bytes(self)
    }

    fn is_huge(&self) -> bool {
        kvlane_memory::Arena::is_huge(self)
    }
}
