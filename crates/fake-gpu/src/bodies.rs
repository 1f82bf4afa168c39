//! Kernels as a fake runs them: their own source, compiled for this machine with one thread a block.

use std::ffi::{CStr, c_void};

/// A kernel's code for a CPU. It does one block of a launch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Body(
    #[cfg_attr(not(has_bodies), allow(dead_code))] unsafe extern "C" fn(*const c_void, u32, u32),
);

impl Body {
    /// Runs all blocks of a launch, each in a thread: one may wait for another.
    ///
    /// # Safety
    /// The bytes are the kernel's parameters, and all that they name may be used.
    pub(super) unsafe fn run(self, parameters: &[u8], blocks: u32) {
        // Aligned as the structs of parameters are.
        let mut aligned = vec![0u64; parameters.len().div_ceil(size_of::<u64>())];
        for (word, bytes) in aligned.iter_mut().zip(parameters.chunks(size_of::<u64>())) {
            let mut all = [0; size_of::<u64>()];
            all[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(all);
        }
        std::thread::scope(|scope| {
            let run = |block| {
                // SAFETY: the caller's promise; the parameters are only read.
                unsafe { (self.0)(aligned.as_ptr().cast(), block, blocks) };
            };
            for block in 1..blocks {
                scope.spawn(move || run(block));
            }
            run(0);
        });
    }
}

/// Why there may be none.
pub(super) const WHY_NONE: &str = "a C++ compiler has to be there when kvlane-fake-gpu is built";

#[cfg(has_bodies)]
mod moe {
    use std::ffi::c_void;

    unsafe extern "C" {
        pub(super) fn kvlane_moe_cast_on_a_cpu(parameters: *const c_void, block: u32, blocks: u32);
        pub(super) fn kvlane_moe_plan_on_a_cpu(parameters: *const c_void, block: u32, blocks: u32);
        pub(super) fn kvlane_moe_dispatch_on_a_cpu(parameters: *const c_void, block: u32, blocks: u32);
        pub(super) fn kvlane_moe_exact_bf16_on_a_cpu(parameters: *const c_void, block: u32, blocks: u32);
        pub(super) fn kvlane_moe_exact_f16_on_a_cpu(parameters: *const c_void, block: u32, blocks: u32);
        pub(super) fn kvlane_moe_exact_f32_on_a_cpu(parameters: *const c_void, block: u32, blocks: u32);
        pub(super) fn kvlane_moe_reduced_bf16_on_a_cpu(parameters: *const c_void, block: u32, blocks: u32);
        pub(super) fn kvlane_moe_reduced_f16_on_a_cpu(parameters: *const c_void, block: u32, blocks: u32);
        pub(super) fn kvlane_moe_reduced_f32_on_a_cpu(parameters: *const c_void, block: u32, blocks: u32);
    }
}

/// The code of a kernel, by its entry.
#[cfg(has_bodies)]
pub(super) fn body_of(entry: &CStr) -> Option<Body> {
    Some(Body(match entry.to_bytes() {
        b"kvlane_moe_cast" => moe::kvlane_moe_cast_on_a_cpu,
        b"kvlane_moe_plan" => moe::kvlane_moe_plan_on_a_cpu,
        b"kvlane_moe_dispatch" => moe::kvlane_moe_dispatch_on_a_cpu,
        b"kvlane_moe_exact_bf16" => moe::kvlane_moe_exact_bf16_on_a_cpu,
        b"kvlane_moe_exact_f16" => moe::kvlane_moe_exact_f16_on_a_cpu,
        b"kvlane_moe_exact_f32" => moe::kvlane_moe_exact_f32_on_a_cpu,
        b"kvlane_moe_reduced_bf16" => moe::kvlane_moe_reduced_bf16_on_a_cpu,
        b"kvlane_moe_reduced_f16" => moe::kvlane_moe_reduced_f16_on_a_cpu,
        b"kvlane_moe_reduced_f32" => moe::kvlane_moe_reduced_f32_on_a_cpu,
        _ => return None,
    }))
}

#[cfg(not(has_bodies))]
pub(super) fn body_of(_entry: &CStr) -> Option<Body> {
    None
}
