//! The kernels of `kernels/*.cu`.

use kvlane_gpu::{Kernel, Module, compiled};

use super::limits::{PLAN_THREADS, THREADS};

static MODULE: Module = compiled!("moe", "../../kernels/moe");
pub(super) static CAST: Kernel = Kernel { module: &MODULE, entry: c"kvlane_moe_cast", threads: THREADS };
pub(super) static PLAN: Kernel = Kernel { module: &MODULE, entry: c"kvlane_moe_plan", threads: PLAN_THREADS };
pub(super) static DISPATCH: Kernel =
    Kernel { module: &MODULE, entry: c"kvlane_moe_dispatch", threads: THREADS };
/// Combines, exact ones and reduced ones, each for bf16, f16 and f32.
pub(super) static EXACT: [Kernel; 3] = [
    Kernel { module: &MODULE, entry: c"kvlane_moe_exact_bf16", threads: THREADS },
    Kernel { module: &MODULE, entry: c"kvlane_moe_exact_f16", threads: THREADS },
    Kernel { module: &MODULE, entry: c"kvlane_moe_exact_f32", threads: THREADS },
];
pub(super) static REDUCED: [Kernel; 3] = [
    Kernel { module: &MODULE, entry: c"kvlane_moe_reduced_bf16", threads: THREADS },
    Kernel { module: &MODULE, entry: c"kvlane_moe_reduced_f16", threads: THREADS },
    Kernel { module: &MODULE, entry: c"kvlane_moe_reduced_f32", threads: THREADS },
];

#[cfg(test)]
mod tests {
    use super::super::limits::GPU_RANKS_MAX;
    use super::*;

    macro_rules! sources {
        ($($name:literal),*) => { [$(($name, include_str!(concat!("../../kernels/", $name)))),*] };
    }

    const SOURCES: [(&str, &str); 9] = sources![
        "moe.cu",
        "cast.cuh",
        "combine.cuh",
        "dispatch.cuh",
        "group.cuh",
        "machine.cuh",
        "parameters.cuh",
        "plan.cuh",
        "wait.cuh"
    ];

    #[test]
    fn the_kernels_were_compiled_from_these_sources() {
        let digest = |bytes: &[u8]| format!("{:032x}", xxhash_rust::xxh3::xxh3_128(bytes));
        kvlane_gpu::assert_is_compiled_from(
            &MODULE,
            include_str!("../../kernels/moe.json"),
            &SOURCES,
            digest,
        );
    }

    #[test]
    fn the_kernels_have_the_names_and_the_sizes_that_we_give_them() {
        for kernel in [&CAST, &PLAN, &DISPATCH].into_iter().chain(&EXACT).chain(&REDUCED) {
            assert!(MODULE.ptx.contains(&format!(".entry {}(", kernel.entry.to_str().unwrap())));
        }
        let parameters = SOURCES[6].1;
        for (name, value) in [
            ("kThreads", THREADS as usize),
            ("kPlanThreads", PLAN_THREADS as usize),
            ("kRanks", GPU_RANKS_MAX),
            ("kTopK", crate::TOP_K_MAX),
        ] {
            assert!(parameters.contains(&format!("{name} = {value};")), "{name}");
        }
    }
}
