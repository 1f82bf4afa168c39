//! The program `kvlane` that users get.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    kvlane::main(kvlane_gpu::driver_named)
}
