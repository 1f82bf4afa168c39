//! A frame of the fabric: its head, its runs, its outcomes.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| kvlane_fabric::fuzzing::frame(bytes));
