//! Who is at the other end of a connection of the fabric.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| kvlane_fabric::fuzzing::greeting(bytes));
