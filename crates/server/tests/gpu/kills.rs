//! Engines and daemons that are killed or stopped in the middle of saves and loads.

use std::time::{Duration, Instant};

use kvlane_client::Release;
use kvlane_proto::Address;

use crate::{
    daemon::Daemon,
    driver::{BLOCKS, VERY_SLOW, driver, engines_gpu, is_real, many, piece, skip},
    engine::{GpuEngine, start_process},
    support::{address, settle},
};

/// A load whose daemon is killed or stopped may hold up its engine's stream for about a second; machines are busy.
const HELD_UP: Duration = Duration::from_secs(3);

/// What became of an engine does not concern another one, nor the next engine of the same name.
fn others_go_on(address: &Address, other: &mut GpuEngine, killed: &str) {
    let loaded = other.load(0, 16..16 + many());
    assert!(loaded.ok, "{loaded:?}");
    other.assert_holds(16..16 + many(), 1);
    let mut next = start_process(address, killed);
    assert_eq!(next.ask(&format!("ask-for-a-load 0 {}", many())), "asked");
    assert_eq!(next.ask("wait-for-the-first-layer"), "there");
    next.end();
}

#[test]
fn an_engine_that_is_killed_in_the_middle_of_a_load_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start_slow(&address, VERY_SLOW);
    let mut other = GpuEngine::new(&address, "other", &driver());
    other.compute_and_save(&address, 0, 0..many(), 1);
    let mut victim = start_process(&address, "victim");
    assert_eq!(victim.ask(&format!("ask-for-a-load 0 {}", many())), "asked");
    assert_eq!(victim.ask("wait-for-the-first-layer"), "there");
    victim.kill();
    daemon.wait_until_gone(&["victim"]);
    others_go_on(&address, &mut other, "victim");
    drop(other);
    daemon.stop();
}

#[test]
fn of_an_engine_that_is_killed_in_the_middle_of_a_save_only_whole_blocks_are_left() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start_slow(&address, VERY_SLOW);
    let mut other = GpuEngine::new(&address, "other", &driver());
    other.compute_and_save(&address, 0, 0..4, 1);
    let mut victim = start_process(&address, "victim");
    assert_eq!(victim.ask("save 100 4 20"), "saved");
    let before = daemon.wait_until("quiet", |status| status.claimed_blocks == 0).blocks;
    assert_eq!(victim.ask(&format!("ask-for-a-save 200 {} 60", many())), "asked");
    daemon.wait_until("saving", |status| status.claimed_blocks > 0 || is_real() && status.blocks > before);
    victim.kill();
    daemon.wait_until_gone(&["victim"]);
    let visible = other.visible(200, many());
    assert!(visible == 0 || is_real(), "{visible} blocks were not saved entirely, but are visible");
    if visible > 0 {
        assert!(other.load(200, 16..16 + visible).ok);
        other.assert_holds(16..16 + visible, 60);
    }
    assert!(other.load(100, 8..12).ok);
    other.assert_holds(8..12, 20);
    drop(other);
    daemon.stop();
}

/// Its GPU work ends with its process, and so what the daemon was to wait for never happens.
#[test]
fn an_engine_that_is_killed_before_its_gpu_came_to_a_save_leaves_nothing_behind() {
    killed_while_hanging(|victim, daemon| {
        assert_eq!(victim.ask("ask-for-a-save 200 4 60"), "asked");
        daemon.wait_until("saving", |status| status.claimed_blocks > 0);
    });
}

#[test]
fn an_engine_that_is_killed_before_its_gpu_came_to_a_load_leaves_nothing_behind() {
    killed_while_hanging(|victim, daemon| {
        assert_eq!(victim.ask(&format!("ask-for-a-load 0 {}", many())), "asked");
        daemon.wait_until("loading", |status| status.leased_blocks > 0);
    });
}

fn killed_while_hanging(ask: impl FnOnce(&mut crate::process::Process, &Daemon)) {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start(&address);
    let mut other = GpuEngine::new(&address, "other", &driver());
    other.compute_and_save(&address, 0, 0..many(), 1);
    let mut victim = start_process(&address, "victim");
    assert_eq!(victim.ask("hang"), "hanging");
    ask(&mut victim, &daemon);
    victim.kill();
    daemon.wait_until_gone(&["victim"]);
    assert_eq!(other.visible(200, 4), 0);
    others_go_on(&address, &mut other, "victim");
    drop(other);
    daemon.stop();
}

/// The event of the second load stands behind the flags of the first one. The worker used to wait for it before it wrote these, and
/// the engine stood still for ever.
#[test]
fn a_daemon_that_is_killed_in_the_middle_of_two_loads_does_not_stop_the_engine() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start_slow(&address, VERY_SLOW);
    let mut engine = GpuEngine::new(&address, "engine", &driver());
    engine.compute_and_save(&address, 0, 0..many(), 1);
    let hit = engine.look_up(0, many());
    let few = engine.look_up(0, 2);
    let first = engine.start_load(&hit, 16..16 + many(), Release::AtOnce);
    assert!(engine.released(first).ok);
    // The step that computes with it.
    engine.wait_for_loads(None);
    let second = engine.start_load(&few, 4..6, Release::AtEnd);
    daemon.kill();
    engine.synchronize();
    for job in [first, second] {
        let loaded = engine.end(job);
        assert!(loaded.ok, "{loaded:?}");
    }
    engine.assert_holds(16..16 + many(), 1);
    engine.assert_holds(4..6, 1);
}

#[test]
fn a_daemon_that_is_killed_in_the_middle_of_a_load_and_of_saves_costs_the_saves_only() {
    let folder = tempfile::tempdir().unwrap();
    let (address, driver) = (address(&folder), driver());
    let daemon = Daemon::start_slow(&address, VERY_SLOW);
    let mut loading = GpuEngine::new(&address, "loading", &driver);
    let mut saving = GpuEngine::new(&address, "saving", &driver);
    loading.compute_and_save(&address, 0, 0..many(), 1);
    let hit = loading.look_up(0, many());
    (0..12).for_each(|block| saving.compute(block, 100 + block as u8));
    saving.synchronize();
    let save = saving.start_save(200, 0..12);
    daemon.wait_until("saving", |status| status.claimed_blocks > 0 || is_real());
    let load = loading.start_load(&hit, 16..16 + many(), Release::AtOnce);
    // Behind the load, in the same session.
    let queued = loading.start_save(300, 12..14);
    assert!(loading.released(load).ok);
    loading.wait_for_loads(Some(0));
    loading.synchronize();
    let start = Instant::now();
    daemon.kill();
    loading.wait_for_loads(None);
    loading.synchronize();
    let held_up = start.elapsed();
    println!("the engine's stream waited {held_up:?}");
    assert!(held_up < HELD_UP, "the engine's stream was held up for {held_up:?}");
    loading.assert_holds(16..16 + many(), 1);
    let loaded = loading.end(load);
    assert_eq!((loaded.ok, loaded.blocks), (true, many().into()), "{loaded:?}");
    for (engine, job) in [(&mut saving, save), (&mut loading, queued)] {
        let saved = engine.end(job);
        assert!(!saved.ok && saved.detail.contains("daemon") || is_real(), "{saved:?}");
    }
    // Another one takes over.
    let daemon = Daemon::start(&address);
    for engine in [&mut loading, &mut saving] {
        engine.wait_connected();
    }
    loading.compute_and_save(&address, 0, 0..4, 1);
    assert!(saving.load(0, BLOCKS - 4..BLOCKS).ok);
    saving.assert_holds(BLOCKS - 4..BLOCKS, 1);
    drop((loading, saving));
    daemon.stop();
}

#[test]
fn a_daemon_that_is_stopped_in_the_middle_of_a_load_writes_nothing_after_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start_slow(&address, VERY_SLOW);
    let mut engine = GpuEngine::new(&address, "engine", &driver());
    engine.compute_and_save(&address, 0, 0..many(), 1);
    let hit = engine.look_up(0, many());
    let blocks = 16..16 + many();
    let job = engine.start_load(&hit, blocks.clone(), Release::AtOnce);
    assert!(engine.released(job).ok);
    engine.wait_for_loads(Some(0));
    engine.synchronize();
    daemon.pause();
    let start = Instant::now();
    engine.wait_for_loads(None);
    engine.synchronize();
    let held_up = start.elapsed();
    println!("the engine's stream waited {held_up:?}");
    assert!(held_up < HELD_UP, "the engine's stream was held up for {held_up:?}");
    engine.assert_holds(blocks.clone(), 1);
    // A real GPU may have been faster than the stop.
    assert!(!engine.has_ended(job) || is_real(), "the daemon may still write: the blocks are not free yet");
    daemon.resume();
    let loaded = engine.end(job);
    assert_eq!((loaded.ok, loaded.blocks), (true, many().into()), "{loaded:?}");
    // Now they are, and another request computes in them.
    (200..).zip(blocks.clone()).for_each(|(seed, block)| engine.compute(block, seed));
    engine.synchronize();
    let loaded = engine.load(0, 0..many());
    assert!(loaded.ok, "{loaded:?}");
    engine.assert_holds(blocks, 200);
    drop(engine);
    daemon.stop();
}

/// The daemon looks at the fence before and after it copies. Without the second look it took for saved what the engine had
/// computed in the blocks since it gave the save up.
#[test]
fn a_save_that_is_given_up_while_it_is_copied_never_becomes_visible() {
    if is_real() {
        return skip("a save given up in the middle", "a real GPU is done before its worker gives up");
    }
    // 4 MiB: of a longer save the next part begins with a look at the fence.
    const PROMPT: u32 = 8;
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    // A prompt takes 0.4 s, so that the worker gives up when the daemon has begun and has not ended.
    let daemon = Daemon::start_slow(&address, VERY_SLOW);
    let impatient = Duration::from_millis(150);
    let gpu = engines_gpu(&driver());
    let mut engine = GpuEngine::on(&gpu, &address, "engine", piece(), impatient).unwrap();
    for prompt in 0..3 {
        (1..).zip(0..PROMPT).for_each(|(seed, block)| engine.compute(block, seed));
        engine.synchronize();
        let saved = engine.save(prompt, 0..PROMPT);
        assert!(!saved.ok, "{saved:?}");
        (100..).zip(0..PROMPT).for_each(|(seed, block)| engine.compute(block, seed));
        engine.synchronize();
        daemon.wait_until("done with the save", |status| status.claimed_blocks == 0);
        settle(&address);
        assert_eq!(engine.visible(prompt, PROMPT), 0, "blocks of a save that was given up");
    }
    // The control: who waits for it has it.
    let mut patient = GpuEngine::new(&address, "patient", &driver());
    patient.compute_and_save(&address, 100, 0..PROMPT, 1);
    assert_eq!(patient.visible(100, PROMPT), PROMPT);
    drop((engine, patient));
    daemon.stop();
}
