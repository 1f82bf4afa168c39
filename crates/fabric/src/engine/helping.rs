//! Tests of the threads that an engine has beside its first ([`EngineOptions::socket_threads`]).

#![allow(clippy::unwrap_used, unsafe_code, reason = "tests")]

use std::time::{Duration, Instant};

use super::{Engine, EngineOptions, Transfer, Transport};
use crate::{Access, Pieces, Place, Run};

const PATIENCE: Duration = Duration::from_secs(60);
const BYTES: usize = 64 << 20;
/// Nanoseconds that no helper takes without moving bytes. A READ takes 20 ms.
const RAN: u64 = 2_000_000;
const READS_MAX: usize = 200;

/// Nanoseconds on a processor of each thread that helps an engine of this process.
fn helpers() -> Vec<u64> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let helps = |path: &std::path::Path| {
        std::fs::read_to_string(path.join("comm")).is_ok_and(|name| name.trim() == "kvlane-sockets")
    };
    // No file: the thread has ended since it was listed.
    let ran = |path: std::path::PathBuf| {
        let times = std::fs::read_to_string(path.join("schedstat")).ok()?;
        Some(times.split(' ').next().unwrap().parse().unwrap())
    };
    tasks.map(|task| task.path()).filter(|path| helps(path)).filter_map(ran).collect()
}

fn poll_until(holds: impl Fn() -> bool) -> bool {
    let began = Instant::now();
    while !holds() {
        if began.elapsed() > PATIENCE {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

/// One connection is one job at a time, so there are two, and a READ goes over both.
#[test]
fn they_move_bytes_of_further_connections_and_end_with_their_engine() {
    let engine = || {
        Engine::new(EngineOptions {
            transport: Some(Transport::TCP),
            token: "of this test".into(),
            connections: 2,
            socket_threads: 2,
            ..EngineOptions::default()
        })
        .unwrap()
    };
    let (mut to, mut from) = (vec![0; BYTES], vec![7; BYTES]);
    let (here, there) = (engine(), engine());
    // SAFETY: both engines are dropped before the memory: below, or, after a failed assertion, because they come after it.
    let (local, remote) = unsafe {
        let local = here.register(to.as_mut_ptr(), BYTES as u64, Access::Read).unwrap();
        (local, there.register(from.as_mut_ptr(), BYTES as u64, Access::Read).unwrap())
    };
    let peer = here.connect(&there.describe().unwrap()).unwrap();
    let place = |region| Place { region, offset: 0 };
    let run = Run { local: place(local), remote: place(remote), len: BYTES as u64 };
    // A thread names itself, so it may have started and have no name yet.
    assert!(poll_until(|| helpers().len() == 2));
    let mut reads = 0;
    while helpers().iter().any(|ran| *ran < RAN) {
        assert!(reads < READS_MAX, "{:?} ns", helpers());
        reads += 1;
        let read = here.begin(peer, Transfer::read(Pieces::Contiguous(run))).unwrap();
        assert_eq!(read.wait(Some(PATIENCE)), Some(Ok(())));
    }
    drop((here, there));
    assert_eq!(to, from);
    // A thread that was joined is listed until the kernel has cleaned up.
    assert!(poll_until(|| helpers().is_empty()));
}
