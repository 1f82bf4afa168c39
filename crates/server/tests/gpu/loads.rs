//! Saves and loads, of healthy daemons and of one that is killed or stopped.

use std::time::{Duration, Instant};

use kvlane_client::{Hit, JobKind, Promises, Release};
use kvlane_gpu::{Priority, RailOptions, Stream};
use kvlane_proto::Address;

use crate::{
    daemon::Daemon,
    driver::{BLOCKS, LAYERS, VERY_SLOW, driver, engines_gpu, is_real, many, piece, skip},
    engine::{Gate, GpuEngine, POISON},
    support::{self, PATIENCE, address, settle},
};

/// A daemon whose loads come over two links, if there are two.
fn with_rails(address: &Address, microseconds: u64) -> Option<Daemon> {
    if driver().devices().unwrap().len() < 2 {
        skip("a load over two links", "there is one GPU");
        return None;
    }
    Some(Daemon::start_with_rails(address, microseconds))
}

#[test]
fn blocks_of_a_gpu_come_back_to_another_engine() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let mut daemon = Daemon::start(&address);
    blocks_come_back(&address);
    assert_eq!((daemon.relayed_bytes(), daemon.staged_bytes()), (0, 0));
    daemon.stop();
}

#[test]
fn blocks_of_short_pieces_come_back_through_a_ring_on_their_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let mut daemon = Daemon::start_staging(&address);
    blocks_come_back(&address);
    let short = piece() < RailOptions::default().stage_below;
    let expected = if short { 8 * LAYERS * piece() } else { 0 };
    assert_eq!((daemon.relayed_bytes(), daemon.staged_bytes()), (0, expected));
    daemon.stop();
}

#[test]
fn blocks_come_back_over_the_links_of_two_gpus() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let Some(mut daemon) = with_rails(&address, 0) else { return };
    blocks_come_back(&address);
    assert!(daemon.relayed_bytes() > 0);
    daemon.stop();
}

fn blocks_come_back(address: &Address) {
    let driver = driver();
    let mut first = GpuEngine::new(address, "first", &driver);
    assert_eq!(first.worker.method().0, "gpu");
    (0..8).for_each(|block| first.compute(block, block as u8 + 1));
    let saved = first.save(0, 0..8);
    assert!(saved.ok && saved.blocks == 8 && saved.bytes == 8 * LAYERS * piece(), "{saved:?}");
    settle(address);

    let mut second = GpuEngine::new(address, "second", &driver);
    let loaded = second.load(0, 20..28);
    assert!(loaded.ok && loaded.blocks == 8 && loaded.bytes == 8 * LAYERS * piece(), "{loaded:?}");
    second.assert_holds(20..28, 1);
    for block in (0..20).chain(28..BLOCKS) {
        assert!(second.holds(block, POISON), "nothing else was written");
    }
}

/// A part is 4 MiB. The second save is there before the first has ended, which then rests no more.
#[test]
fn saves_of_several_parts_come_back_whole() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start_slow(&address, VERY_SLOW / 20);
    let mut first = GpuEngine::new(&address, "first", &driver());
    (0..BLOCKS).for_each(|block| first.compute(block, block as u8 + 1));
    let jobs = [first.start_save(0, 0..24), first.start_save(100, 24..BLOCKS)];
    for (job, blocks) in jobs.into_iter().zip([24u32, BLOCKS - 24]) {
        let saved = first.end(job);
        assert!(saved.ok && saved.blocks == u64::from(blocks), "{saved:?}");
    }
    settle(&address);
    let mut second = GpuEngine::new(&address, "second", &driver());
    assert!(second.load(0, 4..28).ok);
    second.assert_holds(4..28, 1);
    assert!(second.load(100, 0..BLOCKS - 24).ok);
    second.assert_holds(0..BLOCKS - 24, 25);
    drop((first, second));
    daemon.stop();
}

#[test]
fn a_save_waits_for_what_the_stream_still_computes() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start(&address);
    let mut engine = GpuEngine::new(&address, "engine", &driver());
    // Held up until the save has long been asked for.
    let gate = Gate::across(&engine.stream);
    engine.compute(5, 77);
    let job = engine.start_save(0, 5..6);
    daemon.wait_until("saving", |status| status.claimed_blocks == 1);
    assert!(!engine.has_ended(job), "nothing to save has been computed");
    gate.open();
    let saved = engine.end(job);
    assert!(saved.ok && saved.blocks == 1, "{saved:?}");
    settle(&address);
    assert!(engine.load(0, 9..10).ok);
    engine.assert_holds(9..10, 77);
    drop(engine);
    daemon.stop();
}

/// It used to: the session did one after the other, so that a hit waited for the forward pass of another request.
#[test]
fn a_load_does_not_wait_behind_a_save_that_waits_for_the_engine() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start(&address);
    let mut engine = GpuEngine::new(&address, "engine", &driver());
    engine.compute_and_save(&address, 0, 0..4, 30);
    let hit = engine.look_up(0, 4);
    let gate = Gate::across(&engine.stream);
    engine.compute(5, 77);
    let saving = engine.start_save(100, 5..6);
    daemon.wait_until("saving", |status| status.claimed_blocks == 1);
    let other = Stream::new(engine.stream.gpu(), Priority::Normal).unwrap();
    let loading = engine.start_load_after(other.raw(), &hit, 10..14, Release::AtEnd);
    let loaded = engine.end(loading);
    assert!(loaded.ok && loaded.blocks == 4, "{loaded:?}");
    assert!(!engine.has_ended(saving));
    gate.open();
    assert!(engine.end(saving).ok);
    engine.assert_holds(10..14, 30);
    drop(engine);
    daemon.stop();
}

#[test]
fn a_promised_load_arrives_without_the_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start(&address);
    let mut engine = GpuEngine::new(&address, "engine", &driver());
    engine.compute_and_save(&address, 0, 0..4, 40);
    let hit = engine.look_up(0, 4);
    daemon.kill();
    let job = engine.start_load(&hit, 10..14, Release::AtEnd);
    let loaded = engine.end(job);
    assert!(loaded.ok && loaded.blocks == 4, "{loaded:?}");
    engine.assert_holds(10..14, 40);
}

/// Saves blocks and asks for an early load of them into those from 16 on; answers the job when it is released.
fn load_released(engine: &mut GpuEngine, address: &Address) -> u64 {
    engine.compute_and_save(address, 0, 0..many(), 50);
    let hit = engine.look_up(0, many());
    let job = engine.start_load(&hit, 16..16 + many(), Release::AtOnce);
    let released = engine.released(job);
    assert_eq!((released.kind, released.ok), (JobKind::Released, true), "{released:?}");
    assert!(!engine.worker.outstanding_loads().is_empty() || is_real());
    job
}

#[test]
fn a_stream_that_waits_for_a_released_load_sees_it_and_one_that_does_not_sees_what_was_before() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    a_released_load_is_waited_for(&address, Daemon::start_slow(&address, VERY_SLOW));
}

#[test]
fn a_released_load_over_two_links_is_waited_for_in_the_same_way() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let Some(daemon) = with_rails(&address, VERY_SLOW) else { return };
    a_released_load_is_waited_for(&address, daemon);
}

fn a_released_load_is_waited_for(address: &Address, daemon: Daemon) {
    let mut engine = GpuEngine::new(address, "engine", &driver());
    let job = load_released(&mut engine, address);
    let blocks = 16..16 + many();
    // A real GPU may be done by now.
    let last = (blocks.end - 1, 50 + many() as u8 - 1);
    assert!(is_real() || !engine.holds(last.0, last.1), "the control: this stream has not waited");
    // Region by region, as a model does.
    let layer_bytes = piece() as usize;
    for layer in 0..LAYERS as usize {
        engine.wait_for_loads(Some(layer as u32));
        for (seed, block) in (50..).zip(blocks.clone()) {
            let of_layer = layer * layer_bytes..(layer + 1) * layer_bytes;
            let wanted = crate::engine::content(seed, LAYERS * piece());
            assert!(
                engine.block(block)[of_layer.clone()] == wanted[of_layer],
                "layer {layer} of block {block}"
            );
        }
    }
    engine.assert_holds(blocks, 50);
    let ended = engine.end(job);
    assert_eq!((ended.ok, ended.blocks), (true, many().into()), "{ended:?}");
    assert!(engine.worker.outstanding_loads().is_empty());
    drop(engine);
    daemon.stop();
}

#[test]
fn a_released_load_arrives_although_the_daemon_is_killed_in_the_middle() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    a_released_load_arrives_without_the_daemon(&address, Daemon::start_slow(&address, VERY_SLOW));
}

#[test]
fn a_released_load_over_two_links_arrives_although_the_daemon_is_killed_in_the_middle() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let Some(daemon) = with_rails(&address, VERY_SLOW) else { return };
    a_released_load_arrives_without_the_daemon(&address, daemon);
}

fn a_released_load_arrives_without_the_daemon(address: &Address, daemon: Daemon) {
    let mut engine = GpuEngine::new(address, "engine", &driver());
    let job = load_released(&mut engine, address);
    engine.wait_for_loads(None);
    daemon.kill();
    engine.assert_holds(16..16 + many(), 50);
    let ended = engine.end(job);
    assert_eq!((ended.ok, ended.blocks), (true, many().into()), "{ended:?}");
}

/// A load that a stopped daemon cannot come to: the engine has it all the same, and its end comes with the daemon.
fn taken_over(release: Release) {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start(&address);
    let mut engine = GpuEngine::new(&address, "engine", &driver());
    engine.compute_and_save(&address, 0, 0..4, 60);
    let hit = engine.look_up(0, 4);
    daemon.pause();
    let job = engine.start_load(&hit, 10..14, release);
    let released = engine.released(job);
    assert!(released.ok, "{released:?}");
    engine.wait_for_loads(None);
    engine.assert_holds(10..14, 60);
    assert!(!engine.has_ended(job), "the daemon may still write: the blocks are not free yet");
    daemon.resume();
    let ended = engine.end(job);
    assert_eq!((ended.ok, ended.blocks), (true, 4), "{ended:?}");
    assert!(engine.worker.outstanding_loads().is_empty());
    engine.assert_holds(10..14, 60);
    drop(engine);
    daemon.stop();
}

#[test]
fn a_stopped_daemon_does_not_hold_up_a_released_load() {
    taken_over(Release::AtOnce);
}

#[test]
fn a_stopped_daemon_does_not_keep_a_load_for_ever() {
    taken_over(Release::AtEnd);
}

/// Nothing tells how long a load or a step takes, so the request computes when every byte is there.
#[test]
fn a_load_beside_other_requests_is_not_released_before_anything_is_known() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start(&address);
    let mut engine = GpuEngine::new(&address, "engine", &driver());
    engine.compute_and_save(&address, 0, 0..4, 60);
    let hit = engine.look_up(0, 4);
    let job = engine.start_load(&hit, 10..14, Release::WhenNear);
    assert!(engine.end(job).ok);
    assert!(!engine.was_released(job));
    drop(engine);
    daemon.stop();
}

/// The load waits for work of the engine that goes on for as long as the test wants; predicted it is from the load before.
#[test]
fn a_load_beside_other_requests_is_released_when_it_is_near() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start(&address);
    let mut engine = GpuEngine::new(&address, "engine", &driver());
    engine.compute_and_save(&address, 0, 0..4, 60);
    let hit = engine.look_up(0, 4);
    let before = engine.start_load(&hit, 20..24, Release::AtEnd);
    assert!(engine.end(before).ok);
    (0..2).for_each(|_| engine.worker.step_begins(true, Promises::default()));
    let other = Stream::new(engine.stream.gpu(), Priority::Normal).unwrap();
    let gate = Gate::across(&other);
    let job = engine.start_load_after(other.raw(), &hit, 10..14, Release::WhenNear);
    assert!(engine.released(job).ok);
    assert!(!engine.has_ended(job) && engine.worker.outstanding_loads() == [job]);
    gate.open();
    engine.wait_for_loads(None);
    engine.assert_holds(10..14, 60);
    assert!(engine.end(job).ok);
    drop(engine);
    daemon.stop();
}

/// Other requests decode, and a load takes ten steps on a slow link. A step that computes with the load waits for it, and so do the
/// decodes.
#[test]
fn loads_that_are_released_when_they_are_near_stall_few_decodes() {
    if is_real() {
        return skip("stalls beside a slow link", "a real link cannot be made slow");
    }
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start_slow(&address, VERY_SLOW);
    let mut engine = GpuEngine::new(&address, "engine", &driver());
    engine.compute_and_save(&address, 0, 0..many(), 60);
    let hit = engine.look_up(0, many());
    // A prediction needs a load and steps to learn from.
    let before = engine.start_load(&hit, 20..20 + many(), Release::AtEnd);
    assert!(engine.end(before).ok);
    let at_once = stalled(&mut engine, &hit, Release::AtOnce);
    let when_near = stalled(&mut engine, &hit, Release::WhenNear);
    assert!(at_once > 10 * when_near, "at once {at_once:?}, when near {when_near:?}");
    drop(engine);
    daemon.stop();
}

/// How long the steps of an engine waited for five loads.
fn stalled(engine: &mut GpuEngine, hit: &Hit, release: Release) -> Duration {
    let mut stalled = Duration::ZERO;
    for _ in 0..5 {
        (10..10 + many()).for_each(|block| engine.compute(block, POISON));
        let job = engine.start_load(hit, 10..10 + many(), release);
        loop {
            engine.worker.step_begins(true, Promises::default());
            let computes_with_it = engine.is_usable(job);
            let began = Instant::now();
            if computes_with_it {
                engine.wait_for_loads(None);
                engine.stream.synchronize().unwrap();
                stalled += began.elapsed();
                break;
            }
            // Plays the decodes of this step.
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(engine.end(job).ok);
        engine.assert_holds(10..10 + many(), 60);
    }
    stalled
}

#[test]
fn a_stopped_daemon_does_not_hold_up_a_load_that_was_released_when_it_was_near() {
    taken_over(Release::WhenNear);
}

#[test]
fn memory_of_a_gpu_is_refused_where_the_daemon_has_none() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = support::start(&address);
    // A small block, so that the pool is not what refuses it.
    let gpu = engines_gpu(&driver());
    let engine = GpuEngine::on(&gpu, &address, "engine", 64 << 10, PATIENCE).unwrap();
    assert!(!engine.worker.is_connected());
    assert!(engine.worker.refusal().contains("GPU"), "{}", engine.worker.refusal());
    drop(engine);
    assert!(daemon.stop(PATIENCE));
}
