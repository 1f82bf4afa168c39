//! One structure of an SSD tier's file, of any kind.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| kvlane_ssd::fuzzing::structure(bytes));
