//! Each parser reads the inputs in `corpus/`, and 10,000 more that are mutated from them. The seed is fixed, so a find here is
//! found by everyone; `make fuzz` looks further.

#![allow(clippy::expect_used, clippy::panic, reason = "a panic fails a test")]

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
};

use kvlane_fuzz_targets::{TARGETS, Target, target};

/// Mutated inputs of each target.
const INPUTS: usize = 10_000;
/// Longest mutated input.
const BYTES_MAX: usize = 2048;
/// Numbers at which lengths and counts turn.
const EDGES: [u64; 8] = [0, 1, 0x7f, 0xff, 0x7fff_ffff, 0xffff_ffff, 1 << 40, u64::MAX];

/// xorshift64*, by Vigna (2016): the same inputs on every machine.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }
}

fn corpus(target: Target) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
    let mut files: Vec<_> = fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.expect("the folder can be read").path())
        .collect();
    files.sort();
    files.iter().map(|file| fs::read(file).expect("the file can be read")).collect()
}

/// One to four changes of an input.
fn mutated(seeds: &[Vec<u8>], chance: &mut Chance) -> Vec<u8> {
    let mut bytes = seeds.get(chance.below(seeds.len() + 1)).cloned().unwrap_or_default();
    for _ in 0..=chance.below(4) {
        let at = chance.below(bytes.len() + 1);
        match chance.below(7) {
            0 if !bytes.is_empty() => {
                let at = at.min(bytes.len() - 1);
                bytes[at] ^= 1 << chance.below(8);
            }
            1 => bytes.truncate(at),
            2 => {
                let end = (at + chance.below(16)).min(bytes.len());
                drop(bytes.drain(at..end));
            }
            3 => {
                let end = (at + chance.below(64)).min(bytes.len());
                let again = bytes[at..end].to_vec();
                drop(bytes.splice(at..at, again));
            }
            4 => {
                let edge = EDGES[chance.below(EDGES.len())].to_le_bytes();
                let end = (at + (1 << chance.below(4))).min(bytes.len());
                bytes[at..end].copy_from_slice(&edge[..end - at]);
            }
            5 => {
                let other = seeds.get(chance.below(seeds.len())).map_or(&[][..], Vec::as_slice);
                bytes.truncate(at);
                bytes.extend_from_slice(&other[chance.below(other.len() + 1)..]);
            }
            _ => {
                let random: Vec<u8> = (0..chance.below(24)).map(|_| chance.next() as u8).collect();
                drop(bytes.splice(at..at, random));
            }
        }
    }
    bytes.truncate(BYTES_MAX);
    bytes
}

fn holds(name: &str) {
    let target = target(name).expect("a target has this name");
    let seeds = corpus(target);
    assert!(!seeds.is_empty(), "corpus/{name} is empty");
    // The seed differs by target.
    let seed = name.bytes().fold(1_u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)));
    let mut chance = Chance(seed);
    let more = (0..INPUTS).map(|_| mutated(&seeds, &mut chance)).collect::<Vec<_>>();
    for input in seeds.iter().chain(&more) {
        if catch_unwind(AssertUnwindSafe(|| (target.run)(input))).is_err() {
            panic!("{name} does not hold for {}", input.escape_ascii());
        }
    }
}

macro_rules! targets {
    ($($name:ident)*) => {
        $(#[test] fn $name() { holds(stringify!($name)) })*
        #[test]
        fn every_target_is_here() {
            assert_eq!(TARGETS.map(|each| each.name), [$(stringify!($name)),*]);
        }
    };
}

targets! {
    cluster_message fabric_descriptor fabric_frame fabric_greeting fabric_link fabric_words frame handoff_message
    kv_events otlp_answer request route_answer route_body route_control shard_layout ssd_file ssd_structure
    trace_file traceparent zmtp
}
