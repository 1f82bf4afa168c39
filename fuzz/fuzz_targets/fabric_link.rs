//! A connection of the fabric, over which a stream comes that is cut anywhere.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (Vec<u8>, Vec<u8>)| kvlane_fabric::fuzzing::link(&input.0, &input.1));
