//! libFuzzer over one of the targets in crates/fuzz-targets, named by the variable KVLANE_FUZZ_TARGET.
#![no_main]

use std::{env, process, sync::LazyLock};

use libfuzzer_sys::fuzz_target;

static RUN: LazyLock<fn(&[u8])> = LazyLock::new(|| {
    let name = env::var("KVLANE_FUZZ_TARGET").unwrap_or_default();
    let Some(target) = kvlane_fuzz_targets::target(&name) else {
        eprintln!("KVLANE_FUZZ_TARGET=\"{name}\" names no target");
        process::exit(2);
    };
    target.run
});

fuzz_target!(|bytes: &[u8]| RUN(bytes));
