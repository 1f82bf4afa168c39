//! What a process tells its peers about its memory.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| kvlane_fabric::fuzzing::descriptor(bytes));
