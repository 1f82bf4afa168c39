//! [`limit_heaps`]: how much freed memory the C library's allocator may keep in this process.

/// By default glibc gives threads up to eight heaps a CPU. Memory that a thread frees stays in its heap, so a program with a thread
/// for each client grows as clients come and go. A few heaps hand it to the next thread instead.
const HEAPS_MAX: i32 = 4;
/// Larger pieces are mapped alone, and go back to the kernel when they are freed. By default glibc raises this bound to the largest
/// piece that was freed, up to 32 MiB, and keeps such pieces in its heaps from then on.
const MAPPED_FROM: i32 = 256 << 10;

/// Limits the heaps of this process, and what they keep. Call it before the process starts threads: heaps that exist are kept. Has
/// no effect with another C library than glibc.
///
/// Source: mallopt(3), `M_ARENA_MAX` and `M_MMAP_THRESHOLD`.
pub fn limit_heaps() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [(libc::M_ARENA_MAX, HEAPS_MAX), (libc::M_MMAP_THRESHOLD, MAPPED_FROM)] {
        // SAFETY: mallopt only writes parameters of the allocator, under the allocator's own lock.
        unsafe { libc::mallopt(parameter, value) };
    }
}
