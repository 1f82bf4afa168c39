//! What a peer tells of its regions, and what a carrier says to its like.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| kvlane_fabric::fuzzing::words(bytes));
