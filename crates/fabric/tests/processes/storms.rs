//! Storms of WRITEs that are cancelled.

use std::time::{Duration, Instant};

use kvlane_fabric::{EngineOptions, Failure, Options, Pieces, Transfer};

use crate::side::{Side, by_tcp, done};
use crate::support::{MIB, PATIENCE, Process, Random};

/// Writes of any shape are given up at any time; as soon as each is over the peer uses the memory otherwise.
fn cancelled_writes_leave_the_memory_alone(transfers: Options) {
    const BYTES: usize = 8 * MIB;
    let rounds = std::env::var("KVLANE_TEST_ROUNDS").map_or(100, |rounds| rounds.parse().unwrap());
    let mut random = Random(0x1234_5678_9abc_def1);
    let options = EngineOptions { transfers, connections: 2, socket_threads: 3, ..by_tcp() };
    let here = Side::new(BYTES, options);
    here.memory.fill(0, BYTES, 0xff);
    let mut there = Process::new(BYTES);
    let peer = here.meet(&there.descriptor());
    done(&here.post(peer));
    let mut cancelled = 0;
    for round in 0..rounds {
        let mut runs = Vec::new();
        let most = [100, 5_000, 200_000, BYTES][random.below(4)];
        let mut at = 0;
        while runs.len() < 2_000 {
            at += random.below(most);
            let len = 1 + random.below(most);
            if at + len > BYTES {
                break;
            }
            runs.push(here.run(peer, random.below(BYTES - len), at, len));
            at += len;
        }
        let handle = here.engine.begin(peer.id, Transfer::write(Pieces::Runs(runs))).unwrap();
        let begun = Instant::now();
        let pause = Duration::from_micros(random.below(3_000) as u64);
        while begun.elapsed() < pause {
            std::thread::yield_now();
        }
        handle.cancel();
        match handle.wait(Some(PATIENCE)) {
            Some(Ok(())) => {}
            Some(Err(Failure::Cancelled)) => cancelled += 1,
            other => panic!("{other:?} in round {round}"),
        }
        let canary = round % 128;
        there.order(&format!("fill 0 {BYTES} {canary}"));
        done(&here.post(peer));
        assert_eq!(there.ask(&format!("check 0 {BYTES} {canary}")), "done", "in round {round}");
    }
    assert!(cancelled > 0);
}

#[test]
fn a_storm_of_cancelled_writes_leaves_the_memory_alone() {
    cancelled_writes_leave_the_memory_alone(Options::default());
}

#[test]
fn a_storm_of_cancelled_writes_that_end_their_connections_leaves_the_memory_alone() {
    let (drain_patience, backoff) = (Duration::ZERO, Duration::from_millis(1));
    cancelled_writes_leave_the_memory_alone(Options { drain_patience, backoff, ..Options::default() });
}
