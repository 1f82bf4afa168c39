//! Sizes that the kernels can hold.

/// Most ranks on GPUs of one host.
pub const GPU_RANKS_MAX: usize = 16;
/// Most tokens of a dispatch on a GPU.
pub const GPU_TOKENS_MAX: usize = 1 << 14;
/// Most experts of an all-to-all on GPUs.
pub const GPU_EXPERTS_MAX: usize = 1 << 12;

/// Threads of a block.
pub(super) const THREADS: u32 = 512;
/// Threads of a block of the plan's own launch.
pub(super) const PLAN_THREADS: u32 = 1024;
