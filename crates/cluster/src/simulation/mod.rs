//! Hosts that ask each other and lend each other blocks, in one thread and in simulated time: real stores, and the crate's own
//! questions, breakers, leases and messages.
//!
//! Messages are lost, late, repeated and out of order; networks are cut; owners evict, restart, are slow, and have blocks
//! whose bytes changed. The agents that borrow and lend are the simulation's, because the real ones need a fabric engine.
//! [`CONTROLS`] lists the defects that the simulation must find.
//!
//! `KVLANE_TEST_SEEDS` sets how many seeds run. `KVLANE_TEST_SEED` sets the first one, which otherwise differs each time.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail like tests")]

mod asking;
mod borrowing;
mod dice;
mod faults;
mod lending;
mod net;
mod pool;
mod world;

use std::time::{SystemTime, UNIX_EPOCH};

use self::faults::Fault;
use self::net::Seen;
use self::world::World;

const SEEDS: u64 = 200;
/// Seeds tried per defect.
const CONTROL_SEEDS: u64 = 1000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

#[test]
fn whatever_breaks_lookups_end_once_and_in_time_and_no_hit_has_a_wrong_byte() {
    let first = number("KVLANE_TEST_SEED").unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        now.as_micros() as u64 % 1_000_000_000_000
    });
    println!("seeds from {first} on");
    let mut seen = Seen::default();
    for seed in first..first + number("KVLANE_TEST_SEEDS").unwrap_or(SEEDS) {
        match World::new(seed, Fault::None).run() {
            Ok(more) => seen.add(&more),
            Err(wrong) => panic!("seed {seed}: {wrong}"),
        }
    }
    println!("{seen:?}");
    // The seeds must see every event that they exist for.
    if number("KVLANE_TEST_SEEDS").is_none() {
        assert!(seen.counts().into_iter().all(|count| count > 5), "{seen:?}");
    }
}

/// Each defect with words of the report that must follow.
const CONTROLS: [(Fault, &str); 7] = [
    (Fault::LeaseFromItsArrival, "its reader still counted"),
    (Fault::NoChecksums, "has wrong bytes"),
    (Fault::AnyLease, "has wrong bytes"),
    (Fault::AnswersInOrder, "never said"),
    (Fault::GivesBackEarly, "was reused"),
    (Fault::LoansWithoutEnd, "not over at rest: a loan"),
    (Fault::QuestionsWithoutEnd, "ended late"),
];

#[test]
fn what_is_done_wrong_on_purpose_is_seen() {
    for (fault, said) in CONTROLS {
        let is_seen = |seed: &u64| World::new(*seed, fault).run().is_err_and(|wrong| wrong.contains(said));
        let seed = (0..CONTROL_SEEDS).find(is_seen);
        println!("{fault:?}: seed {seed:?}");
        assert!(seed.is_some(), "{fault:?} is not seen in {CONTROL_SEEDS} seeds");
    }
}
