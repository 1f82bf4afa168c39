//! Compiles kernels of CUDA C++ for this machine, so that a fake runs the code that a GPU runs. Without a C++ compiler the crate
//! is built without them, and tests that need them say so.

fn main() {
    println!("cargo::rustc-check-cfg=cfg(has_bodies)");
    println!("cargo::rerun-if-changed=../moe/kernels");
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        // The sources are named .cu, of which the compiler knows nothing.
        .flag("-xc++")
        // Products and sums are rounded one after the other, as the kernels ask of a GPU.
        .flag("-ffp-contract=off")
        // An optimised one for tests, too: they move megabytes.
        .opt_level(2)
        .warnings_into_errors(true)
        .extra_warnings(true)
        .file("../moe/kernels/moe.cu");
    let compiler = build.try_get_compiler().map(|compiler| compiler.to_command().arg("--version").output());
    if compiler.is_ok_and(|told| told.is_ok_and(|told| told.status.success())) {
        build.compile("kvlane_kernels");
        println!("cargo::rustc-cfg=has_bodies");
    } else {
        println!("cargo::warning=no kernels in this fake: there is no C++ compiler");
    }
}
