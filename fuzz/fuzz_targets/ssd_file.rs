//! A whole file of an SSD tier, opened.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|tape: &[u8]| kvlane_ssd::fuzzing::file(tape));
