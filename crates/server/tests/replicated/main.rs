//! Four workers of one engine that hold the same blocks, as with latent attention: each saves a quarter, each loads all.
#![allow(unreachable_pub, reason = "a test binary has no other crates")]
#![allow(clippy::unwrap_used, reason = "a test may fail here")]

mod daemon;
mod engine;
mod rank_process;
mod shared_loads;
#[path = "../support/mod.rs"]
mod support;

use std::sync::Arc;

use daemon::GpuDaemon;
use engine::{
    BLOCK_BYTES, Engine, LAYER_BYTES, LAYERS, POOL_BYTES, Place, RANKS, assert_ended, content, driver,
};
use kvlane_client::{JobKind, SaveMethod, Tool};
use kvlane_fake_gpu::FakeDriver;
use kvlane_proto::Address;
use support::{PATIENCE, address, hashes, options, settle};

/// Bytes of the pool that an engine's save takes, in a daemon of its own, and the bytes that each rank saved.
fn saved(method: SaveMethod, workers: u32, replicas: u32) -> (u64, Vec<u64>) {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = kvlane_server::Daemon::start(&options(&address, POOL_BYTES), &|_| {}).unwrap();
    let mut engine = Engine::new(&address, "engine", Place::Host(method), workers, replicas);
    let ends = engine.save(0..4);
    assert_ended(&ends, JobKind::Save, 4);
    settle(&address);
    let used = Tool::connect(&address, PATIENCE).unwrap().status().unwrap().used_bytes;
    drop(engine);
    assert!(daemon.stop(PATIENCE));
    (used, ends.iter().map(|end| end.bytes).collect())
}

#[test]
fn four_workers_take_as_much_of_the_pool_as_one_and_save_a_quarter_each() {
    for method in [SaveMethod::Auto, SaveMethod::Mapped] {
        let (alone, _) = saved(method, 1, 1);
        let (shared, by_rank) = saved(method, RANKS, RANKS);
        let ratio = shared as f64 / alone as f64;
        // Each slice ends with a page of its own.
        let rounding = f64::from(RANKS) * 4096.0 / BLOCK_BYTES as f64;
        assert!((ratio - 1.0).abs() <= rounding && rounding < 0.02, "{ratio:.4} of the pool of one worker");
        assert_eq!(by_rank.iter().sum::<u64>(), 4 * BLOCK_BYTES as u64);
        for bytes in by_rank {
            let percent = bytes as f64 * 100.0 / (4 * BLOCK_BYTES) as f64;
            assert!((percent - 25.0).abs() < 1.0, "{percent} % by one rank");
        }
        // The control: workers that do not share.
        let (apart, _) = saved(method, RANKS, 1);
        assert!(apart as f64 / alone as f64 > 3.9);
    }
}

fn round_trip(address: &Address, place: Place<'_>, method: &str) {
    let mut first = Engine::new(address, "first", place, RANKS, RANKS);
    assert_eq!(first.ranks[3].worker.method().0, method);
    assert_ended(&first.save(0..4), JobKind::Save, 4);
    settle(address);
    drop(first);

    let mut second = Engine::new(address, "second", place, RANKS, RANKS);
    let hit = second.look_up(4);
    second.start_load(&hit, 6..10, false);
    let ends = second.finished();
    assert_ended(&ends, JobKind::Load, 4);
    assert!(ends.iter().all(|end| end.bytes == 4 * BLOCK_BYTES as u64));
    second.check(6..10);
    assert_eq!(second.ranks[0].worker.refusal(), "");
    second.scheduler.release(hit.boot, hit.lease);
    // In pairs they are another cut, whose blocks these are not.
    let mut pairs = Engine::new(address, "pairs", place, RANKS, 2);
    assert_eq!(pairs.scheduler.lookup(&[hashes(0, 4)], u64::MAX, PATIENCE).tokens, 0);
    assert_ended(&pairs.save(0..2), JobKind::Save, 2);
    settle(address);
    let hit = pairs.look_up(2);
    pairs.start_load(&hit, 6..8, false);
    assert_ended(&pairs.finished(), JobKind::Load, 2);
    pairs.check(6..8);
}

#[test]
fn every_rank_loads_the_slices_of_all_by_process_vm() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let _daemon = kvlane_server::Daemon::start(&options(&address, POOL_BYTES), &|_| {}).unwrap();
    round_trip(&address, Place::Host(SaveMethod::Auto), "process_vm");
}

#[test]
fn every_rank_loads_the_slices_of_all_by_mapping() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let _daemon = kvlane_server::Daemon::start(&options(&address, POOL_BYTES), &|_| {}).unwrap();
    round_trip(&address, Place::Host(SaveMethod::Mapped), "mapped");
}

#[test]
fn a_load_with_the_pages_of_one_slice_ends_as_failed() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let _daemon = kvlane_server::Daemon::start(&options(&address, POOL_BYTES), &|_| {}).unwrap();
    let mut engine = Engine::new(&address, "engine", Place::Host(SaveMethod::Auto), RANKS, RANKS);
    engine.save(0..1);
    settle(&address);
    let hit = engine.look_up(1);
    engine.replicas = 1;
    engine.start_load(&hit, 6..7, false);
    for end in engine.finished() {
        assert!(!end.ok && end.detail.contains("4 slices"), "{end:?}");
    }
}

/// A load of two blocks takes a fifth of a second: long enough to meet it under way, and shorter than the time after
/// which a worker carries it out itself.
const VERY_SLOW: u64 = 100_000;

#[test]
fn every_rank_loads_the_slices_of_all_into_its_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let (address, driver) = (address(&folder), driver());
    let daemon = GpuDaemon::start(&address, 0);
    round_trip(&address, Place::Gpus(&driver), "gpu");
    daemon.stop();
}

/// An engine with an early load of two blocks into 6 and 7 that is released in every rank and under way.
fn released(address: &Address, driver: &Arc<FakeDriver>) -> Engine {
    let mut engine = Engine::new(address, "engine", Place::Gpus(driver), RANKS, RANKS);
    assert_ended(&engine.save(0..2), JobKind::Save, 2);
    settle(address);
    let hit = engine.look_up(2);
    engine.start_load(&hit, 6..8, true);
    for released in engine.finished() {
        assert_eq!((released.kind, released.ok), (JobKind::Released, true), "{released:?}");
    }
    engine
}

#[test]
fn a_flag_says_that_all_layers_up_to_it_are_there_whichever_slices_they_are_of() {
    let folder = tempfile::tempdir().unwrap();
    let (address, driver) = (address(&folder), driver());
    let daemon = GpuDaemon::start(&address, VERY_SLOW);
    let engine = released(&address, &driver);
    let last = engine.ranks.last().unwrap();
    assert!(last.memory.layer(7, LAYERS - 1) != content(1)[(LAYERS - 1) * LAYER_BYTES..], "the control");
    for layer in 0..LAYERS {
        for (number, rank) in engine.ranks.iter().enumerate() {
            rank.wait_for_loads(Some(layer as u32));
            for (index, block) in [(0, 6), (1, 7)] {
                let wanted = &content(index)[layer * LAYER_BYTES..][..LAYER_BYTES];
                assert!(
                    rank.memory.layer(block, layer) == wanted,
                    "layer {layer} of {block} in rank {number}"
                );
            }
        }
    }
    assert_ended(&engine.finished(), JobKind::Load, 2);
    engine.check(6..8);
    let refusals: Vec<String> = engine.ranks.iter().map(|rank| rank.worker.refusal()).collect();
    assert!(refusals.iter().all(String::is_empty), "the daemon has carried them out, not {refusals:?}");
    drop(engine);
    daemon.stop();
}

#[test]
fn a_worker_takes_all_slices_from_its_mapping_when_the_daemon_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let (address, driver) = (address(&folder), driver());
    let daemon = GpuDaemon::start(&address, VERY_SLOW);
    let engine = released(&address, &driver);
    for rank in &engine.ranks {
        rank.wait_for_loads(None);
    }
    daemon.kill();
    engine.check(6..8);
    assert_ended(&engine.finished(), JobKind::Load, 2);
}

#[test]
fn a_promised_load_of_all_slices_arrives_after_the_daemon_is_gone() {
    let folder = tempfile::tempdir().unwrap();
    let (address, driver) = (address(&folder), driver());
    let daemon = GpuDaemon::start(&address, 0);
    let mut engine = Engine::new(&address, "engine", Place::Gpus(&driver), RANKS, RANKS);
    assert_ended(&engine.save(0..2), JobKind::Save, 2);
    settle(&address);
    let hit = engine.look_up(2);
    daemon.kill();
    engine.start_load(&hit, 6..8, false);
    let ends: Vec<_> = engine.ranks.iter().map(|rank| rank.ended()).collect();
    assert_ended(&ends, JobKind::Load, 2);
    engine.check(6..8);
}
