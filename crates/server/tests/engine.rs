//! What an engine sees: saves, hits, loads, restarts.

#![allow(clippy::unwrap_used, reason = "a test may fail here")]

mod support;

use std::time::{Duration, Instant};

use kvlane_client::{SaveMethod, Tool};
use support::*;

fn round_trip(method: SaveMethod) {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = start(&address);
    let mut engine = Engine::start(&address, "a", method);
    let saved = engine.save(0, 0..8);
    assert!(saved.ok && saved.blocks == 8 && saved.bytes == 8 * BLOCK_BYTES as u64, "{saved:?}");
    settle(&address);
    let hit = engine.look_up(0, 12);
    assert_eq!(hit.tokens, 8 * u64::from(TOKENS));
    let wanted: Vec<Vec<u8>> = (0..8).map(|id| engine.block(id)).collect();
    let loaded = engine.load(&hit, 40..48);
    assert!(loaded.ok && loaded.bytes == 8 * BLOCK_BYTES as u64, "{loaded:?}");
    for (id, bytes) in wanted.iter().enumerate() {
        assert!(engine.block(40 + id) == *bytes, "block {id} came back changed");
    }
    engine.scheduler.release(hit.boot, hit.lease);
    // Saving again copies nothing.
    let again = engine.save(0, 0..8);
    assert_eq!((again.blocks, again.present), (0, 8));
    assert_eq!(engine.worker.method().0, if method == SaveMethod::Mapped { "mapped" } else { "process_vm" });
    drop(engine);
    assert!(daemon.stop(PATIENCE));
}

#[test]
fn blocks_come_back_as_they_were_by_process_vm() {
    round_trip(SaveMethod::Auto);
}

#[test]
fn blocks_come_back_as_they_were_by_mapping() {
    round_trip(SaveMethod::Mapped);
}

#[test]
fn a_second_engine_hits_what_the_first_saved_and_after_the_first_left() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let _daemon = start(&address);
    let mut first = Engine::start(&address, "a", SaveMethod::Auto);
    first.save(0, 0..4);
    settle(&address);
    let wanted = first.block(2);
    drop(first);
    let mut second = Engine::start(&address, "b", SaveMethod::Auto);
    second.memory.fill(0);
    let hit = second.look_up(0, 4);
    assert_eq!(hit.tokens, 64);
    assert!(second.load(&hit, 10..14).ok);
    assert!(second.block(12) == wanted);
}

/// A worker that mapped the pool after the first prompt had been looked up was heard of with the next prompt only, and
/// nothing was saved until then.
#[test]
fn a_scheduler_hears_that_its_workers_are_ready_while_no_new_request_comes() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let _daemon = start(&address);
    let mut early = scheduler(&address, "a", PATIENCE);
    assert!(early.is_connected());
    assert_eq!(early.lookup(&[hashes(0, 4)], 64, PATIENCE).tokens, 0);
    assert!(!early.is_ready());
    let mut engine = Engine::with_scheduler(&address, "a", early);
    let deadline = Instant::now() + PATIENCE;
    while !engine.scheduler.is_ready() {
        assert!(Instant::now() < deadline, "not ready: {}", engine.worker.refusal());
        engine.scheduler.tick();
        std::thread::yield_now();
    }
    assert!(engine.save(0, 0..4).ok);
}

#[test]
fn a_promised_load_arrives_although_the_daemon_is_gone() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = start(&address);
    let mut engine = Engine::start(&address, "a", SaveMethod::Auto);
    engine.save(0, 0..4);
    settle(&address);
    let hit = engine.look_up(0, 4);
    daemon.stop(PATIENCE);
    let wanted = engine.block(3);
    let loaded = engine.load(&hit, 20..24);
    assert!(loaded.ok, "{}", loaded.detail);
    assert!(engine.block(23) == wanted);
    // Without a daemon: misses, and saves that end without effect.
    assert_eq!(engine.look_up(0, 4).tokens, 0);
    assert!(!engine.save(4, 4..6).ok);
}

#[test]
fn after_a_restart_the_engine_registers_by_itself_and_hits_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = start(&address);
    let mut engine = Engine::start(&address, "a", SaveMethod::Auto);
    engine.save(0, 0..4);
    settle(&address);
    let old = engine.look_up(0, 4);
    daemon.stop(PATIENCE);
    let daemon = start(&address);
    engine.wait_connected();
    // The new pool is empty, and the promise of the old one still holds.
    assert!(engine.load(&old, 30..34).ok);
    assert!(engine.block(31) == engine.block(1));
    assert_eq!(engine.look_up(0, 4).tokens, 0);
    assert_eq!(engine.save(0, 0..4).blocks, 4);
    settle(&address);
    assert_ne!(engine.look_up_until(0, 4, 64).boot, old.boot);
    drop(engine);
    daemon.stop(PATIENCE);
}

#[test]
fn leases_are_freed_when_the_engine_leaves_and_blocks_are_evicted_after() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let _daemon = kvlane_server::Daemon::start(&options(&address, 1 << 20), &|_| {}).unwrap();
    let mut engine = Engine::start(&address, "a", SaveMethod::Auto);
    engine.save(0, 0..16);
    settle(&address);
    let hit = engine.look_up(0, 16);
    assert_eq!(hit.tokens, 256);
    let mut tool = Tool::connect(&address, PATIENCE).unwrap();
    assert_eq!(tool.status().unwrap().leased_blocks, 16);
    drop(engine);
    let mut other = Engine::start(&address, "b", SaveMethod::Auto);
    assert_eq!(tool.status().unwrap().leased_blocks, 0);
    // More than fits: the oldest make room.
    for round in 0..8 {
        assert!(other.save(1000 * (round + 1), 0..16).ok);
    }
    settle(&address);
    assert!(other.look_up(0, 16).tokens < 256);
}

#[test]
fn a_lookup_that_gets_no_answer_is_a_miss_in_time() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    // Somebody listens and never answers.
    let kvlane_proto::Address::Unix(path) = &address else { unreachable!() };
    let _silent = std::os::unix::net::UnixListener::bind(path).unwrap();
    let timeout = Duration::from_millis(50);
    let mut engine = Engine::with_timeouts(&address, "a", SaveMethod::Auto, timeout, timeout);
    engine.scheduler.lookup_start("r", &[hashes(0, 4)], 64);
    let start = std::time::Instant::now();
    assert_eq!(engine.scheduler.lookup_poll("r", PATIENCE).unwrap().tokens, 0);
    assert!(start.elapsed() < PATIENCE / 2);
    assert_eq!(engine.scheduler.take_stats().timeouts, 1);
    assert!(!engine.save(0, 0..1).ok);
}

#[test]
fn a_block_whose_bytes_changed_in_the_pool_is_dropped_by_the_scrub() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let mut with_scrub = options(&address, 4 << 20);
    with_scrub.scrub_bytes_per_s = 1 << 30;
    let _daemon = kvlane_server::Daemon::start(&with_scrub, &|_| {}).unwrap();
    let mut engine = Engine::start(&address, "a", SaveMethod::Auto);
    engine.save(0, 0..4);
    settle(&address);
    let hit = engine.look_up(0, 4);
    let page = u32::from_le_bytes(hit.pages(0, 0)[8..12].try_into().unwrap());
    engine.scheduler.release(hit.boot, hit.lease);
    Tool::connect(&address, PATIENCE).unwrap().write_pool(u64::from(page) * 4096 + 77, b"!").unwrap();
    // Block 2 goes, and what follows it cannot be reached.
    engine.look_up_until(0, 4, 32);
}

#[test]
fn dropping_a_namespace_makes_it_a_miss() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let _daemon = start(&address);
    let mut engine = Engine::start(&address, "a", SaveMethod::Auto);
    engine.save(0, 0..4);
    settle(&address);
    assert!(engine.scheduler.drop_namespaces(PATIENCE));
    assert_eq!(engine.look_up(0, 4).tokens, 0);
    let error = Tool::connect(&address, PATIENCE).unwrap().drop_namespaces(&[[9; 16]]).unwrap_err();
    assert!(error.to_string().contains("09090909"), "{error}");
}
