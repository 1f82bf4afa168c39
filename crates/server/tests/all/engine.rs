//! The daemon as an engine sees it: saves, hits, loads, restarts.

#![allow(clippy::unwrap_used, reason = "a test may fail here")]

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

use crate::support::*;
use kvlane_block::{Position, Rank};
use kvlane_client::{LookupRequest, SaveMethod, Tool};
use kvlane_memory::PoolPage;
use kvlane_proto::{
    Address, FrameReader, encode_frame,
    v1::{self, reply::Body as Answer, request::Body as Ask},
};

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
    engine.scheduler.lookup_start(&LookupRequest::named("r"), &[hashes(0, 4)], 64, None, 0);
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
    let page = PoolPage(u32::from_le_bytes(hit.pages(0, Rank(0))[8..12].try_into().unwrap()));
    engine.scheduler.release(hit.boot, hit.lease);
    let inside = page.offset().after(77).unwrap();
    Tool::connect(&address, PATIENCE).unwrap().write_pool(inside, b"!").unwrap();
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
    Tool::connect(&address, PATIENCE).unwrap().drop_namespaces(&[[3; 16]]).unwrap();
    assert_eq!(engine.look_up(0, 4).tokens, 0);
    let error = Tool::connect(&address, PATIENCE).unwrap().drop_namespaces(&[[9; 16]]).unwrap_err();
    assert!(error.to_string().contains("09090909"), "{error}");
}

/// The answer had come, nobody had asked for it yet, and the daemon died: the hit was promised to the engine when the
/// workers had let the pool go already.
#[test]
fn an_answer_of_a_daemon_that_is_gone_is_a_miss() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = start(&address);
    let mut engine = Engine::start(&address, "a", SaveMethod::Auto);
    engine.save(0, 0..4);
    settle(&address);
    for request in ["first", "second"] {
        engine.scheduler.lookup_start(&LookupRequest::named(request), &[hashes(0, 4)], u64::MAX, None, 0);
    }
    // Answers come in the order of the questions.
    let second = engine.scheduler.lookup_poll("second", PATIENCE).unwrap();
    assert_eq!(second.tokens, 4 * u64::from(TOKENS));
    daemon.stop(Duration::ZERO);
    while engine.scheduler.is_connected() {
        engine.scheduler.tick();
    }
    assert_eq!(engine.scheduler.gone().collect::<Vec<_>>(), [second.boot]);
    assert_eq!(engine.scheduler.lookup_poll("first", Duration::ZERO).unwrap().tokens, 0);
}

/// vLLM resets its cache only when nobody holds a block, and then overwrites them: a save that is still under way must not
/// become a block with what comes next in its place.
#[test]
fn a_cancelled_save_does_not_become_a_block() {
    for method in [SaveMethod::Auto, SaveMethod::Mapped] {
        let folder = tempfile::tempdir().unwrap();
        let address = address(&folder);
        let _daemon = start(&address);
        let mut engine = Engine::start(&address, "a", method);
        assert!(engine.save(0, 0..4).ok);
        // Two saves are on their way to the daemon, let us say: jobs 2 and 3.
        assert!(engine.scheduler.cancel_saves(4, PATIENCE));
        for first in [1000, 2000] {
            let end = engine.save(first, 4..8);
            assert!(!end.ok || end.blocks == 0, "{end:?}");
        }
        assert_eq!(engine.save(3000, 4..8).blocks, 4);
        settle(&address);
        assert_eq!(engine.look_up(0, 4).tokens, 64, "what was complete stays");
        assert_eq!([1000, 2000].map(|first| engine.look_up(first, 4).tokens), [0, 0]);
        assert_eq!(engine.look_up(3000, 4).tokens, 64);
        // Coming back, the scheduler says it again; a new one begins anew.
        drop(engine);
        let mut engine = Engine::start(&address, "a", method);
        assert_eq!(engine.save(1000, 0..4).blocks, 4);
    }
}

/// A worker that writes by itself may have read its blocks after they were given away.
#[test]
fn a_claim_that_was_cancelled_cannot_be_committed() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let _daemon = start(&address);
    let mut engine = scheduler(&address, "raw", PATIENCE);
    let Address::Unix(path) = &address else { unreachable!() };
    let mut worker = Wire::connect(path);
    let hello = v1::Hello {
        wire_min: 1,
        wire_max: 1,
        role: v1::hello::Role::Worker.into(),
        engine_id: "raw".into(),
        process_nonce: vec![7; 16].into(),
        ..Default::default()
    };
    assert!(matches!(worker.ask(Ask::Hello(hello)), Answer::Welcome(_)));
    let region =
        v1::Region { base: 4096, block_stride: 4096, blocks: 8, piece_bytes: 4096, piece_offsets: vec![0] };
    let group = v1::WorkerGroup {
        namespace: vec![3; 16].into(),
        layout: vec![4; 16].into(),
        regions: vec![region],
        ..Default::default()
    };
    let register = v1::RegisterWorker {
        workers: 1,
        groups: vec![group],
        method: v1::register_worker::Method::Mapped.into(),
        ..Default::default()
    };
    assert!(matches!(worker.ask(Ask::RegisterWorker(register)), Answer::WorkerRegistered(_)));
    assert_eq!(worker.ask(Ask::PoolMapped(v1::PoolMapped {})), Answer::Done(v1::Done::default()));
    let claim = |job| {
        let hashes: Vec<u8> = hashes(0, 2).iter().flat_map(|hash| hash.0).collect();
        let group = v1::SaveGroup { hashes: hashes.into(), block_ids: vec![0, 1], ..Default::default() };
        Ask::Claim(v1::Claim { groups: vec![group], job })
    };
    let commit = |claim| Ask::Commit(v1::Commit { claim, written: true });
    let Answer::ClaimResult(granted) = worker.ask(claim(5)) else { panic!("no claim") };
    assert_eq!(granted.outcome.as_ref(), [0, 0]);
    assert!(engine.cancel_saves(6, PATIENCE), "nobody but the worker reads its blocks");
    let Answer::Refused(refused) = worker.ask(commit(granted.claim)) else { panic!("it was committed") };
    assert_eq!(refused.reason(), v1::refused::Reason::Cancelled);
    assert!(matches!(worker.ask(claim(5)), Answer::Refused(_)));
    settle(&address);
    assert_eq!(engine.lookup(&[hashes(0, 2)], u64::MAX, PATIENCE).tokens, 0);
    // They are free to be saved anew.
    let Answer::ClaimResult(granted) = worker.ask(claim(6)) else { panic!("no claim") };
    assert_eq!(granted.outcome.as_ref(), [0, 0]);
    assert_eq!(worker.ask(commit(granted.claim)), Answer::Done(v1::Done::default()));
    settle(&address);
    assert_eq!(engine.lookup(&[hashes(0, 2)], u64::MAX, PATIENCE).tokens, 2 * u64::from(TOKENS));
    engine.close();
}

/// A connection that says what the test wants.
struct Wire {
    stream: UnixStream,
    reader: FrameReader,
    next_id: u64,
}

impl Wire {
    fn connect(path: &std::path::Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { stream, reader: FrameReader::default(), next_id: 0 }
    }

    fn ask(&mut self, body: Ask) -> Answer {
        self.next_id += 1;
        let request = v1::Request { id: self.next_id, body: Some(body) };
        self.stream.write_all(&encode_frame(&request)).unwrap();
        loop {
            if let Some(reply) = self.reader.next_message::<v1::Reply>().unwrap() {
                return reply.body.unwrap();
            }
            let mut bytes = [0; 4096];
            let count = self.stream.read(&mut bytes).unwrap();
            assert!(count > 0, "the daemon hung up");
            self.reader.push(&bytes[..count]);
        }
    }
}
