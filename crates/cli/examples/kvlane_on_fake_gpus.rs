//! The program `kvlane` with a fake GPU driver besides, which KVLANE_GPU_DRIVER=fake chooses: tests run on it.
//! `scripts/environment.py` packs it as `kvlane` into the wheel for tests.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    kvlane::main(kvlane_fake_gpu::driver_named)
}
