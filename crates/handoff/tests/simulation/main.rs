//! Engines hand prompts over to each other in simulated time, with all four state machines of each. The network is late and
//! loses messages, READs copy at any moment, and engines reuse blocks as soon as they may. Some READs are sent by the owner of
//! the blocks. Others their reader copies by itself, and engines reuse the blocks in the middle of that.
//! `KVLANE_TEST_SEEDS` sets the number of seeds, `KVLANE_TEST_SEED` the first one, which is random otherwise.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail like tests")]

mod agents;
mod dice;
mod engine;
mod faults;
mod going_on;
mod network;
mod prompts;
mod reads;
mod world;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::faults::Fault;
use crate::world::{Seen, World};

const SEEDS: u64 = 10_000;
const CONTROL_SEEDS: u64 = 2000;
const CAUGHT_MIN: usize = 20;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

/// Each seed by itself, dealt to the processors; what all have seen.
fn play(first: u64, count: u64) -> Seen {
    let next = AtomicU64::new(first);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let player = || {
        let mut seen = Seen::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= first + count {
                return seen;
            }
            let mut world = World::new(seed, Fault::None);
            if let Err(wrong) = world.run() {
                panic!("seed {seed}: {wrong}");
            }
            seen.add(&world.seen);
        }
    };
    std::thread::scope(|scope| {
        let players: Vec<_> = (0..threads).map(|_| scope.spawn(player)).collect();
        let mut seen = Seen::default();
        players.into_iter().for_each(|player| seen.add(&player.join().unwrap()));
        seen
    })
}

#[test]
fn whatever_breaks_what_arrived_is_right_and_all_blocks_come_back_in_time() {
    let first = number("KVLANE_TEST_SEED").unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        // Room for all that follow, and short enough to be typed.
        now.as_micros() as u64 % 1_000_000_000_000
    });
    println!("seeds from {first} on");
    let seen = play(first, number("KVLANE_TEST_SEEDS").unwrap_or(SEEDS));
    println!("{seen:?}");
    // The seeds see every way to end, and what they are for.
    if number("KVLANE_TEST_SEEDS").is_none() {
        for end in [
            "Landed",
            "Refused(Unknown)",
            "Refused(OtherContent)",
            "Refused(OtherShape)",
            "Refused(Full)",
            "Refused(Ended)",
            "Unreachable",
            "Unheard",
            "Stalled",
            "TooLong",
            "PeerLost",
            "GivenUp",
        ] {
            assert!(seen.ends.get(end).is_some_and(|count| *count > 20), "{end}: {seen:?}");
        }
        let rare = [seen.failed, seen.cancelled, seen.closed_amid, seen.refused, seen.losses, seen.restarts];
        assert!(rare.iter().all(|count| *count > 100), "{seen:?}");
        assert!(seen.stale > seen.refused && seen.of_dead > 5, "{seen:?}");
        assert!(seen.passed > SEEDS / 8 && seen.early_hashes > SEEDS / 10, "{seen:?}");
        assert!(seen.cached > SEEDS && seen.hashes > SEEDS / 2, "{seen:?}");
    }
}

/// Each defect, and what is said of it.
const CONTROLS: [(Fault, &[&str]); 11] = [
    (Fault::ReadsLate, &["after it was unpinned"]),
    (Fault::LooksBefore, &["bytes count"]),
    (Fault::ClearsLate, &["bytes count"]),
    (Fault::FailsAsRead, &["has a wrong byte"]),
    (Fault::UnpinsEarly, &["after it was unpinned"]),
    (Fault::FreesEarly, &["a block was written"]),
    (Fault::RecyclesEarly, &["has a wrong byte"]),
    (Fault::LosesClose, &["not over", "ended late"]),
    (Fault::LosesStop, &["not over", "ended late"]),
    (Fault::LosesReads, &["not over", "ended late"]),
    (Fault::ShiftsHashes, &["whose it is not"]),
];

#[test]
fn what_is_done_wrong_on_purpose_is_seen() {
    for (fault, said) in CONTROLS {
        let is_seen = |seed: &u64| {
            let wrong = World::new(*seed, fault).run().err();
            wrong.is_some_and(|wrong| said.iter().any(|said| wrong.contains(said)))
        };
        let caught = (0..CONTROL_SEEDS).filter(is_seen).take(CAUGHT_MIN);
        let last = caught.enumerate().map(|(before, seed)| (before + 1, seed)).last();
        println!("{fault:?}: times and last seed: {last:?}");
        assert!(last.is_some_and(|(count, _)| count == CAUGHT_MIN), "{fault:?} is seen too rarely: {last:?}");
    }
}
