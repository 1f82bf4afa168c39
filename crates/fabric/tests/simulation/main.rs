//! Transfers and messages over a simulated network that reorders, delays, breaks, refuses and repeats, with memory that
//! detects late and missing writes. `KVLANE_TEST_SEEDS` sets the number of seeds, `KVLANE_TEST_SEED` the first one, which is
//! random otherwise.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail like tests")]

#[path = "../../src/hub/simulation/dice.rs"]
mod dice;
mod memory;
mod network;
mod world;

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::network::Fault;
use crate::world::World;

const SEEDS: u64 = 5000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

#[test]
fn every_transfer_ends_once_rightly_told_and_nothing_is_written_late() {
    let first = number("KVLANE_TEST_SEED").unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        // Room for all that follow, and short enough to be typed.
        now.as_micros() as u64 % 1_000_000_000_000
    });
    println!("seeds from {first} on");
    let mut ends: BTreeMap<String, u64> = BTreeMap::new();
    let mut messages: BTreeMap<String, u64> = BTreeMap::new();
    let (mut posts, mut second_best) = (0, 0);
    for seed in first..first + number("KVLANE_TEST_SEEDS").unwrap_or(SEEDS) {
        let mut world = World::new(seed, Fault::None);
        if let Err(wrong) = world.run() {
            panic!("seed {seed}: {wrong}");
        }
        posts += world.network.posts;
        second_best += world.network.second_best;
        for known in world.ledger.known.values() {
            let ends = if known.is_message { &mut messages } else { &mut ends };
            *ends.entry(format!("{:?}", known.over.unwrap())).or_default() += 1;
        }
    }
    println!("{posts} posts, {second_best} over the second carrier; {ends:?}; messages: {messages:?}");
    // The seeds see every way to end.
    if number("KVLANE_TEST_SEEDS").is_none() {
        for end in [
            "Ok(())",
            "Err(Cancelled)",
            "Err(DeadlineExceeded)",
            "Err(Refused)",
            "Err(PeerLost)",
            "Err(PathsBreak)",
        ] {
            assert!(ends.get(end).is_some_and(|count| *count > 20), "{end}: {ends:?}");
            assert!(messages.get(end).is_some_and(|count| *count > 20), "{end}: {messages:?}");
        }
        assert!(ends.get("Err(Gpu)").is_some_and(|count| *count > 20), "{ends:?}");
        assert!(messages.get("Err(NoRoom)").is_some_and(|count| *count > 20), "{messages:?}");
    }
}

#[test]
fn a_receiver_that_takes_a_copy_for_a_new_message_is_caught() {
    let twice = |seed: &u64| {
        let wrong = World::new(*seed, Fault::ForgetsNumbers).run();
        wrong.is_err_and(|wrong| wrong.contains("was told 2 times"))
    };
    let caught = (0..1000).filter(twice).count();
    assert!(caught > 20, "{caught} times");
}

#[test]
fn a_network_that_writes_late_or_loses_what_it_has_confirmed_is_caught() {
    for (fault, said) in
        [(Fault::LateWrite, "after its transfer was over"), (Fault::LostWrite, "not in place")]
    {
        let caught =
            (0..500).filter(|seed| World::new(*seed, fault).run().is_err_and(|wrong| wrong.contains(said)));
        let caught = caught.count();
        assert!(caught > 20, "{caught} times: {said}");
    }
}
