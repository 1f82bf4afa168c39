//! Two processes with GPU memory, one of which is killed. Their bytes go through slots.

use std::time::{Duration, Instant};

use kvlane_fabric::{EngineOptions, Failure, Op, Options, Transport};

use crate::side::{CANARY, On, Side, done, driver, pattern};
use crate::support::{MIB, PATIENCE, Process};

const BYTES: usize = 8 * MIB;

fn impatient() -> EngineOptions {
    let transfers = Options { peer_patience: Duration::from_secs(1), ..Options::default() };
    EngineOptions { transfers, transport: Some(Transport::TCP), ..EngineOptions::default() }
}

/// Waits until this is so.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn memory_of_gpus_of_two_processes_goes_both_ways() {
    let driver = driver();
    for setup in ["", "tcp"] {
        let mut other = Process::with(BYTES, setup);
        let here = Side::of(&driver, On::Gpu(1), BYTES);
        let theirs = other.descriptor();
        let (peer, region) = (here.engine.connect(&theirs).unwrap(), theirs.regions[0].number);
        here.memory.put(0, &pattern(BYTES, 3));
        done(&here.move_all(peer, Op::Write, region));
        other.order("check 3");
        other.order("scribble 4");
        done(&here.move_all(peer, Op::Read, region));
        assert!(here.memory.get(0, BYTES) == pattern(BYTES, 4));
    }
}

#[test]
fn a_process_that_is_killed_in_the_middle_fails_its_transfers_and_no_other() {
    let driver = driver();
    for op in [Op::Write, Op::Read] {
        let here = Side::new(&driver, On::Gpu(0), BYTES, impatient());
        let (mut doomed, mut living) = (Process::with(BYTES, "tcp"), Process::with(BYTES, "tcp"));
        let (doomed_one, living_one) = (doomed.descriptor(), living.descriptor());
        let lost = here.engine.connect(&doomed_one).unwrap();
        let kept = here.engine.connect(&living_one).unwrap();
        done(&here.move_all(lost, op, doomed_one.regions[0].number));
        let before = here.engine.staged();
        doomed.order("slow 200");
        let handle = here.move_all(lost, op, doomed_one.regions[0].number);
        until("it moves", || {
            let staged = here.engine.staged();
            staged.from_gpus + staged.to_gpus > before.from_gpus + before.to_gpus
        });
        assert_eq!(handle.outcome(), None, "it is not over yet");
        doomed.kill();
        assert_eq!(handle.wait(Some(PATIENCE)), Some(Err(Failure::PeerLost)));
        here.memory.put(0, &pattern(BYTES, 6));
        done(&here.move_all(kept, Op::Write, living_one.regions[0].number));
        living.order("check 6");
        here.engine.unregister(here.region).unwrap();
        here.memory.fill(CANARY);
        assert!(here.memory.is_all(CANARY));
    }
}

#[test]
fn a_writer_that_is_killed_leaves_a_gpu_alone() {
    let driver = driver();
    let here = Side::of(&driver, On::Gpu(0), BYTES);
    let mut doomed = Process::with(BYTES, "tcp");
    driver.slow_down(Duration::from_millis(20));
    let ours = here.descriptor().to_text().unwrap();
    doomed.order(&format!("move write {ours} {}", here.region));
    until("it moves", || here.engine.staged().to_gpus > 0);
    doomed.kill();
    here.engine.unregister(here.region).unwrap();
    here.memory.fill(CANARY);
    // As long as anything of it could take.
    std::thread::sleep(Duration::from_millis(200));
    assert!(here.memory.is_all(CANARY), "a late write");
}

#[test]
fn a_stopped_reader_of_a_gpu_holds_up_nobody_else() {
    let driver = driver();
    let here = Side::of(&driver, On::Gpu(0), BYTES);
    here.memory.put(0, &pattern(BYTES, 7));
    let (mut stopped, mut other) = (Process::with(BYTES, "tcp"), Process::with(BYTES, "tcp"));
    let ours = here.descriptor().to_text().unwrap();
    stopped.order("slow 200");
    // More parts than there are slots.
    (0..3).for_each(|_| stopped.order(&format!("move read {ours} {}", here.region)));
    until("it reads", || here.engine.staged().from_gpus > 0);
    stopped.pause();
    other.order(&format!("move read {ours} {}", here.region));
    other.order("await");
    other.order("check 7");
    stopped.resume();
    stopped.order("await");
    stopped.order("check 7");
}
