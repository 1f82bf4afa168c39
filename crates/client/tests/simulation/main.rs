//! The scheduler's link of an engine against a simulated daemon that stops, dies, starts anew, refuses, answers late, twice or
//! wrongly, over connections that are cut within any frame. Workers stand in as saves that begin and end in the daemon. `KVLANE_TEST_SEEDS` sets how many seeds run, `KVLANE_TEST_SEED` the first,
//! which otherwise is another one each time.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail like tests")]

mod daemon;
mod defects;
mod dice;
mod scheduler;
mod wire;
mod world;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::defects::Defect;
use crate::world::World;

const SEEDS: u64 = 10_000;
const CONTROL_SEEDS: u64 = 1000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

fn first_seed() -> u64 {
    let first = number("KVLANE_TEST_SEED").unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        // Room for all that follow, and short enough to be typed.
        now.as_micros() as u64 % 1_000_000_000_000
    });
    println!("seeds from {first} on");
    first
}

/// Each seed by itself, dealt to the processors; what it told.
fn play<T: Send>(first: u64, count: u64, seed: impl Fn(u64) -> T + Sync) -> Vec<T> {
    let next = AtomicU64::new(first);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let player = || {
            let mut told = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= first + count {
                    return told;
                }
                told.push(seed(number));
            }
        };
        let players: Vec<_> = (0..threads).map(|_| scope.spawn(player)).collect();
        players.into_iter().flat_map(|player| player.join().unwrap()).collect()
    })
}

/// How many seeds a planted defect fails, each with the sentence of what it breaks.
fn caught(defect: Defect, said: &str) {
    let base = Instant::now();
    let is_caught = |seed| World::new(seed, defect, base).run().is_err_and(|wrong| wrong.contains(said));
    let caught = play(0, CONTROL_SEEDS, is_caught).into_iter().filter(|caught| *caught).count();
    println!("{defect:?}: {caught} of {CONTROL_SEEDS} seeds");
    assert!(caught >= 20, "{defect:?} was caught {caught} times: {said}");
}

#[test]
fn every_lookup_ends_in_time_leases_come_to_rest_and_no_cancelled_save_comes_back() {
    let (base, first) = (Instant::now(), first_seed());
    let all = play(first, number("KVLANE_TEST_SEEDS").unwrap_or(SEEDS), |seed| {
        let mut world = World::new(seed, Defect::None, base);
        world.run().map(|()| world.seen).map_err(|wrong| format!("KVLANE_TEST_SEED={seed}: {wrong}"))
    });
    let mut seen: BTreeMap<&str, u64> = BTreeMap::new();
    for of_seed in &all {
        match of_seed {
            Ok(of_seed) => of_seed.iter().for_each(|what| *seen.entry(what).or_default() += 1),
            Err(wrong) => panic!("{wrong}"),
        }
    }
    println!("{} seeds in {:.1} s: {seen:?}", all.len(), base.elapsed().as_secs_f64());
    // The seeds see every way to end.
    if number("KVLANE_TEST_SEEDS").is_none() {
        for what in [
            "hit",
            "miss",
            "timeout",
            "pending",
            "unavailable",
            "promised",
            "dropped",
            "cancelled",
            "not cancelled",
            "lost",
            "not connected",
            "closed",
        ] {
            assert!(seen.get(what).is_some_and(|count| *count > 50), "{what}: {seen:?}");
        }
    }
}

#[test]
fn a_lookup_that_is_answered_twice_is_caught() {
    caught(Defect::AnswersTwice, "S1: lookup");
}

#[test]
fn a_lookup_that_waits_beyond_its_bound_is_caught() {
    caught(Defect::ClockStands, "S2: lookup");
}

#[test]
fn a_promise_on_a_run_that_is_gone_is_caught() {
    caught(Defect::HidesLoss, "S3: a hit was promised");
}

#[test]
fn a_cancelled_save_that_becomes_a_block_is_caught() {
    caught(Defect::CancelsByItself, "S4: save");
}

#[test]
fn leases_that_are_not_given_back_are_caught() {
    caught(Defect::KeepsLeases, "S5: the daemon still has leases");
}

#[test]
fn a_daemon_that_serves_nobody_twice_is_caught() {
    caught(Defect::WelcomesOnce, "calm: ");
}
