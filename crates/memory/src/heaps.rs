//! [`limit_heaps`]: how many heaps the C library's allocator may keep in this process.

/// By default glibc gives threads up to eight heaps a CPU. Memory that a thread frees stays in its heap, so a program with a thread
/// for each client grows as clients come and go. A few heaps hand it to the next thread instead.
const HEAPS_MAX: i32 = 4;

/// Limits the heaps of this process. Call it before the process starts threads: heaps that exist are kept. Has no effect
/// with another C library than glibc.
///
/// Source: mallopt(3), `M_ARENA_MAX`.
pub fn limit_heaps() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt only writes parameters of the allocator, under the allocator's own lock.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, HEAPS_MAX);
    }
}
