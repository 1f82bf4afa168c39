//! Loads of ranks that hold the same blocks share the links: the bytes come up once, and every GPU gets them all.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use kvlane_client::{Hit, JobKind, Tool};
use kvlane_fake_gpu::FakeDriver;
use kvlane_proto::Address;

use crate::{
    daemon::GpuDaemon,
    engine::{BLOCK_BYTES, Engine, LAYER_BYTES, LAYERS, Place, RANKS, assert_ended, content, driver},
    rank_process::RankProcess,
    support::{PATIENCE, address, settle},
};

/// A load of two blocks takes about a tenth of a second, for the rings and for those who read them.
const SLOW: u64 = 80_000;
/// No rank is late.
const ALL_COME: Duration = PATIENCE;

/// Each link has brought a quarter of so many blocks, once for all ranks.
fn assert_shared(links: &BTreeMap<u32, u64>, blocks: usize) {
    let total = blocks * BLOCK_BYTES;
    assert_eq!(links.values().sum::<u64>(), total as u64, "{links:?}");
    for (link, bytes) in links {
        let percent = *bytes as f64 * 100.0 / total as f64;
        assert!((percent - 25.0).abs() <= 5.0, "{percent} % over link {link}");
    }
    assert_eq!(links.len(), RANKS as usize);
}

/// An engine that has saved so many blocks, and the promise to load them.
fn saved(address: &Address, driver: &Arc<FakeDriver>, blocks: u32) -> (Engine, Hit) {
    let mut engine = Engine::new(address, "engine", Place::Gpus(driver), RANKS, RANKS);
    assert_ended(&engine.save(0..blocks), JobKind::Save, blocks.into());
    settle(address);
    let hit = engine.look_up(blocks.into());
    (engine, hit)
}

#[test]
fn each_link_brings_a_quarter_and_every_rank_has_all_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let (address, driver) = (address(&folder), driver());
    let daemon = GpuDaemon::start_sharing(&address, 0, ALL_COME);
    let (mut engine, hit) = saved(&address, &driver, 4);
    let used = Tool::connect(&address, PATIENCE).unwrap().status().unwrap().used_bytes;
    let ratio = used as f64 / (4 * BLOCK_BYTES) as f64;
    assert!((1.0..1.02).contains(&ratio), "{ratio} copies in the pool");
    engine.start_load(&hit, 6..10, false);
    let ends = engine.finished();
    assert_ended(&ends, JobKind::Load, 4);
    assert!(ends.iter().all(|end| end.bytes == 4 * BLOCK_BYTES as u64));
    engine.check(6..10);
    drop(engine);
    assert_shared(&daemon.stop(), 4);
}

#[test]
fn a_rank_whose_siblings_do_not_come_loads_alone_and_so_does_one_that_is_late() {
    let folder = tempfile::tempdir().unwrap();
    let (address, driver) = (address(&folder), driver());
    let daemon = GpuDaemon::start_sharing(&address, 0, Duration::from_millis(20));
    let (mut engine, hit) = saved(&address, &driver, 2);
    engine.jobs += 1;
    let load = |engine: &Engine, rank: usize| {
        let pages = engine.pages(&hit, rank as u32);
        engine.ranks[rank].load(engine.jobs, hit.boot, 6..8, pages, false);
    };
    (0..3).for_each(|rank| load(&engine, rank));
    let ends: Vec<_> = engine.ranks[..3].iter().map(|rank| rank.finished()).collect();
    assert_ended(&ends, JobKind::Load, 2);
    load(&engine, 3);
    assert_ended(&[engine.ranks[3].finished()], JobKind::Load, 2);
    engine.check(6..8);
    drop(engine);
    let links = daemon.stop();
    assert_eq!(links.values().sum::<u64>(), u64::from(RANKS) * 2 * BLOCK_BYTES as u64, "{links:?}");
}

#[test]
fn ranks_that_load_different_blocks_do_not_share() {
    let folder = tempfile::tempdir().unwrap();
    let (address, driver) = (address(&folder), driver());
    let daemon = GpuDaemon::start_sharing(&address, 0, Duration::from_millis(20));
    let (engine, hit) = saved(&address, &driver, 2);
    // Two ranks both blocks, and two the first one.
    for (number, rank) in (0..).zip(&engine.ranks) {
        let blocks = if number < 2 { 2 } else { 1 };
        let pages =
            engine.pages(&hit, number).chunks(2).flat_map(|slice| &slice[..blocks]).copied().collect();
        rank.load(2, hit.boot, 6..6 + blocks as u32, pages, false);
    }
    let ends = engine.finished();
    assert_ended(&ends[..2], JobKind::Load, 2);
    assert_ended(&ends[2..], JobKind::Load, 1);
    engine.ranks[..2].iter().enumerate().for_each(|(number, rank)| rank.check(number, 6..8));
    engine.ranks[2..].iter().enumerate().for_each(|(number, rank)| rank.check(2 + number, 6..7));
    drop(engine);
    assert_eq!(daemon.stop().values().sum::<u64>(), 6 * BLOCK_BYTES as u64);
}

/// Waits until a rank has got the first layer of block 6, and not yet the last.
fn wait_until_under_way(engine: &Engine, rank: usize) {
    let memory = &engine.ranks[rank].memory;
    let deadline = Instant::now() + PATIENCE;
    while memory.layer(6, 0) != content(0)[..LAYER_BYTES] {
        assert!(Instant::now() < deadline, "the load does not begin");
        std::thread::yield_now();
    }
    let last = (LAYERS - 1) * LAYER_BYTES;
    assert!(memory.layer(7, LAYERS - 1) != content(1)[last..], "it was not under way: the test is too slow");
}

#[test]
fn a_rank_that_gives_up_under_way_ends_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (address, driver) = (address(&folder), driver());
    let daemon = GpuDaemon::start_sharing(&address, 10 * SLOW, ALL_COME);
    let (mut engine, hit) = saved(&address, &driver, 2);
    engine.start_load(&hit, 6..8, false);
    wait_until_under_way(&engine, 0);
    let mut last = engine.ranks.pop().unwrap();
    // It raises its fence, and comes back when nothing is written to its memory any more.
    last.worker.close();
    assert!(!last.finished().ok);
    drop(last);
    assert_ended(&engine.finished(), JobKind::Load, 2);
    engine.check(6..8);
    assert!(engine.ranks.iter().all(|rank| rank.worker.refusal().is_empty()));
    drop(engine);
    assert_shared(&daemon.stop(), 2);
}

#[test]
fn a_rank_that_is_killed_under_way_ends_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (address, driver) = (address(&folder), driver());
    let daemon = GpuDaemon::start_sharing(&address, 10 * SLOW, ALL_COME);
    let mut last = RankProcess::start(&address);
    let mut engine = Engine::with_ranks(&address, "engine", Place::Gpus(&driver), RANKS, RANKS, 0..RANKS - 1);
    last.save();
    assert_ended(&engine.save(0..2), JobKind::Save, 2);
    settle(&address);
    let hit = engine.look_up(2);
    engine.start_load(&hit, 6..8, false);
    last.load(&engine, &hit);
    wait_until_under_way(&engine, 0);
    last.kill();
    assert_ended(&engine.finished(), JobKind::Load, 2);
    engine.check(6..8);
    drop(engine);
    assert_shared(&daemon.stop(), 2);
}

#[test]
fn a_flag_of_a_shared_load_says_that_all_layers_up_to_it_are_there() {
    let folder = tempfile::tempdir().unwrap();
    let (address, driver) = (address(&folder), driver());
    let daemon = GpuDaemon::start_sharing(&address, SLOW, ALL_COME);
    let (mut engine, hit) = saved(&address, &driver, 2);
    engine.start_load(&hit, 6..8, true);
    for released in engine.finished() {
        assert_eq!((released.kind, released.ok), (JobKind::Released, true), "{released:?}");
    }
    for layer in 0..LAYERS {
        for (number, rank) in engine.ranks.iter().enumerate() {
            rank.wait_for_loads(Some(layer as u32));
            for (index, block) in [(0, 6), (1, 7)] {
                let wanted = &content(index)[layer * LAYER_BYTES..][..LAYER_BYTES];
                assert!(rank.memory.layer(block, layer) == wanted, "layer {layer} of rank {number}");
            }
        }
    }
    assert_ended(&engine.finished(), JobKind::Load, 2);
    engine.check(6..8);
    drop(engine);
    assert_shared(&daemon.stop(), 2);
}

#[test]
fn a_shared_load_that_fails_arrives_from_the_mapping_and_the_next_by_the_daemon() {
    const INVALID_VALUE: u32 = 1;
    let folder = tempfile::tempdir().unwrap();
    let (address, driver) = (address(&folder), driver());
    let daemon = GpuDaemon::start_failing(&address, INVALID_VALUE);
    let (mut engine, hit) = saved(&address, &driver, 2);
    engine.start_load(&hit, 6..8, false);
    assert_ended(&engine.finished(), JobKind::Load, 2);
    engine.check(6..8);
    engine.start_load(&hit, 8..10, false);
    assert_ended(&engine.finished(), JobKind::Load, 2);
    engine.check(8..10);
    drop(engine);
    let links = daemon.stop();
    assert_shared(&links, 2);
}

#[test]
fn when_the_daemon_loses_a_gpu_the_ranks_load_by_themselves_and_nothing_is_written_late() {
    const ILLEGAL_ADDRESS: u32 = 700;
    let folder = tempfile::tempdir().unwrap();
    let (address, driver) = (address(&folder), driver());
    let daemon = GpuDaemon::start_failing(&address, ILLEGAL_ADDRESS);
    let (mut engine, hit) = saved(&address, &driver, 2);
    engine.start_load(&hit, 6..8, false);
    for end in engine.finished() {
        // Loaded, while the daemon may still come to it; or the daemon has said that it failed.
        assert!(end.ok, "{end:?}");
    }
    engine.check(6..8);
    daemon.kill();
    engine.check(6..8);
}
