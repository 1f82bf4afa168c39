//! An engine's links against a simulated daemon that stops, dies, restarts, refuses, answers late, twice or wrongly, over
//! connections that are cut within any frame. One half plays the schedulers' links, while the daemon's model begins and ends the
//! workers' saves. The other half plays the workers' links, with a stand-in for their scheduler.
//!
//! `KVLANE_TEST_SEEDS` sets the number of seeds of each half, `KVLANE_TEST_SEED` the first one, which is random otherwise. For
//! each property defects.rs has a defect that the seeds must catch.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail like tests")]

mod copies;
mod daemon;
mod defects;
mod dice;
mod engine;
mod scheduler;
mod wire;
mod worker;
mod world;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::defects::Defect;
use crate::world::{Half, World};

const SEEDS: u64 = 2500;
const CONTROL_SEEDS: u64 = 1000;
const CAUGHT_MIN: u64 = 20;

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

/// A planted defect fails at least 20 of 1,000 seeds, each with the sentence of what it breaks. Goes on beyond the 20th only
/// where many seeds are wanted.
fn caught(half: Half, defect: Defect, said: &str) {
    let (base, count) = (Instant::now(), AtomicU64::new(0));
    let wants_all = number("KVLANE_TEST_SEEDS").is_some();
    let played = play(0, CONTROL_SEEDS, |seed| {
        let goes_on = wants_all || count.load(Ordering::Relaxed) < CAUGHT_MIN;
        if goes_on && World::new(half, seed, defect, base).run().is_err_and(|wrong| wrong.contains(said)) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        goes_on
    });
    let (count, played) = (count.into_inner(), played.into_iter().filter(|played| *played).count());
    println!("{defect:?}: {count} of {played} seeds");
    assert!(count >= CAUGHT_MIN, "{defect:?} was caught {count} times: {said}");
}

/// All seeds of a half are well, and see every way to end.
fn all_are_well(half: Half, ends: &[&str]) {
    let (base, first) = (Instant::now(), first_seed());
    let all = play(first, number("KVLANE_TEST_SEEDS").unwrap_or(SEEDS), |seed| {
        let mut world = World::new(half, seed, Defect::None, base);
        world.run().map(|()| world.seen).map_err(|wrong| format!("KVLANE_TEST_SEED={seed}: {wrong}"))
    });
    let mut seen: BTreeMap<&str, u64> = BTreeMap::new();
    all.iter().flatten().flatten().for_each(|what| *seen.entry(what).or_default() += 1);
    println!("{} seeds in {:.1} s: {seen:?}", all.len(), base.elapsed().as_secs_f64());
    let wrong: Vec<&String> = all.iter().filter_map(|of_seed| of_seed.as_ref().err()).collect();
    let some = wrong.iter().take(5).map(|wrong| format!("\n{wrong}")).collect::<String>();
    assert!(wrong.is_empty(), "{} of {} seeds are wrong, among them:{some}", wrong.len(), all.len());
    // The seeds see every way to end. The rarest comes about 30 times on average, and the seeds differ from run to run: a
    // bound near that average would fail by chance.
    if number("KVLANE_TEST_SEEDS").is_none() {
        for what in ends {
            assert!(seen.get(*what).is_some_and(|count| *count > 5), "{what}: {seen:?}");
        }
    }
}

#[test]
fn every_lookup_ends_in_time_leases_come_to_rest_no_cancelled_save_comes_back_and_what_went_is_heard_of() {
    let ends = [
        "hit",
        "miss",
        "timeout",
        "pending",
        "waits",
        "waits longer",
        "waited",
        "unavailable",
        "promised",
        "dropped",
        "cancelled",
        "not cancelled",
        "lost",
        "not connected",
        "closed",
        "told of an end",
        "told to start again",
    ];
    all_are_well(Half::Schedulers, &ends);
}

#[test]
fn every_job_ends_once_a_promised_load_comes_and_nothing_writes_after_its_end() {
    let ends = [
        "saved",
        "save without daemon",
        "save lost",
        "save given up",
        "save refused",
        "save cancelled",
        "claim handed back",
        "write failed",
        "loaded",
        "load failed",
        "own copy, not served",
        "own copy, refused",
        "own copy, daemon lost",
        "own copy, daemon silent",
        "own copy, once more",
        "released",
        "released early",
        "registered",
        "lost",
        "not connected",
        "closed",
    ];
    all_are_well(Half::Workers, &ends);
}

#[test]
fn a_lookup_that_is_answered_twice_is_caught() {
    caught(Half::Schedulers, Defect::AnswersTwice, "S1: lookup");
}

#[test]
fn a_lookup_that_waits_beyond_its_bound_is_caught() {
    caught(Half::Schedulers, Defect::ClockStands, "S2: lookup");
}

#[test]
fn a_promise_on_a_run_that_is_gone_is_caught() {
    caught(Half::Schedulers, Defect::HidesLoss, "S3: a hit was promised");
}

#[test]
fn a_cancelled_save_that_becomes_a_block_is_caught() {
    caught(Half::Schedulers, Defect::CancelsByItself, "S4: save");
}

#[test]
fn leases_that_are_not_given_back_are_caught() {
    caught(Half::Schedulers, Defect::KeepsLeases, "S5: the daemon still has leases");
}

#[test]
fn an_engine_that_takes_for_stored_what_is_gone_is_caught() {
    caught(Half::Schedulers, Defect::HearsOfNoEnds, "S6: ");
}

#[test]
fn a_wait_for_another_engine_whose_end_moves_without_a_word_is_caught() {
    caught(Half::Schedulers, Defect::SaysOnce, "calm: nothing goes wrong, and yet a lookup is a miss");
}

#[test]
fn a_wait_for_another_engine_that_never_ends_is_caught() {
    caught(Half::Schedulers, Defect::WaitsForEver, "S7: ");
}

#[test]
fn a_daemon_that_serves_nobody_twice_is_caught() {
    caught(Half::Schedulers, Defect::WelcomesOnce, "calm: ");
}

#[test]
fn a_job_that_ends_twice_is_caught() {
    caught(Half::Workers, Defect::EndsTwice, "W1: ");
}

#[test]
fn a_worker_that_does_not_look_at_its_clock_is_caught() {
    caught(Half::Workers, Defect::NeverTicks, "W2: ");
}

#[test]
fn a_load_that_brings_nothing_is_caught() {
    caught(Half::Workers, Defect::CopiesNothing, "W3: block");
}

#[test]
fn a_pool_that_is_let_go_while_loads_are_promised_is_caught() {
    caught(Half::Workers, Defect::UnmapsAtLoss, "W3b: ");
}

#[test]
fn a_daemon_that_writes_after_the_end_of_a_load_is_caught() {
    caught(Half::Workers, Defect::EndsWithItsConnection, "W4: ");
}

#[test]
fn a_save_that_counts_although_its_blocks_were_given_up_is_caught() {
    caught(Half::Workers, Defect::LowFence, "W5: ");
}

#[test]
fn a_stream_that_waits_for_ever_is_caught() {
    caught(Half::Workers, Defect::KeepsFlags, "W6: ");
}

#[test]
fn a_copy_that_waits_for_a_stream_that_waits_for_it_is_caught() {
    caught(Half::Workers, Defect::WritesFlagsLate, "W10: ");
}

#[test]
fn a_greeting_of_a_worker_that_writes_is_caught() {
    caught(Half::Workers, Defect::WritesGoOn, "W7: ");
}

#[test]
fn a_pool_that_stays_mapped_is_caught() {
    caught(Half::Workers, Defect::NeverUnmaps, "W8: ");
}

#[test]
fn a_job_that_never_ends_is_caught() {
    caught(Half::Workers, Defect::LosesEnds, "W8: ");
}

#[test]
fn a_storm_of_connections_is_caught() {
    caught(Half::Workers, Defect::TicksAhead, "W9: ");
}

#[test]
fn a_daemon_that_serves_no_worker_twice_is_caught() {
    caught(Half::Workers, Defect::WelcomesOnce, "calm: ");
}
