//! Tests that peers which come and go, and control connections which break, leave nothing behind.

#![allow(clippy::unwrap_used, clippy::panic, unsafe_code, reason = "tests")]

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::control::Control;
use crate::{
    Access, Engine, EngineOptions, Handle, Op, Options, PathStatus, PeerId, Pieces, Place, Run, Transfer,
    Transport,
};

const PATIENCE: Duration = Duration::from_secs(60);
const BYTES: usize = 4 << 20;
/// Rounds of peers that come and go, and control connections that are cut. `KVLANE_TEST_ROUNDS` raises both for a soak.
const ROUNDS: usize = 200;
const CUTS: usize = 25;
/// Set in a process that runs only the test below.
const ALONE: &str = "KVLANE_TEST_ALONE";

struct TestEngine {
    engine: Engine,
    region: u32,
    _memory: Vec<u8>,
}

impl TestEngine {
    fn new(transport: Option<Transport>) -> TestEngine {
        // Broken connections are soon made again.
        let transfers = Options { backoff_max: Duration::from_millis(20), ..Options::default() };
        let token = "of this test".into();
        let options = EngineOptions { transport, token, transfers, ..EngineOptions::default() };
        let engine = Engine::new(options).unwrap();
        let mut memory = vec![0u8; BYTES];
        // SAFETY: the engine is dropped before its memory, as the first field.
        let region =
            unsafe { engine.register(memory.as_mut_ptr(), BYTES as u64, Access::ReadWrite).unwrap() };
        TestEngine { engine, region, _memory: memory }
    }

    fn address(&self) -> SocketAddr {
        let descriptor = self.engine.describe().unwrap();
        String::from_utf8(descriptor.addresses[0].bytes.clone()).unwrap().parse().unwrap()
    }

    fn meet(&self, there: &TestEngine) -> PeerId {
        self.engine.connect(&there.engine.describe().unwrap()).unwrap()
    }

    fn begin(&self, peer: PeerId, there: &TestEngine, op: Op, len: usize) -> Handle {
        let place = |region| Place { region, offset: 0 };
        let run = Run { local: place(self.region), remote: place(there.region), len: len as u64 };
        let transfer = Transfer { op, ..Transfer::write(Pieces::Contiguous(run)) };
        self.engine.begin(peer, transfer).unwrap()
    }

    /// Waits until all paths to a peer are up, and returns their carriers.
    fn wait_for_paths(&self, peer: PeerId) -> Vec<&'static str> {
        let begun = Instant::now();
        loop {
            let paths = self.engine.paths(peer);
            let carriers = paths.iter().map(|path| path.carrier).collect::<Vec<_>>();
            let is_up = |carrier| paths.iter().any(|path: &PathStatus| path.carrier == carrier && path.is_up);
            if paths.iter().all(|path| path.is_up) && is_up("control") && is_up("tcp") {
                return carriers;
            }
            assert!(begun.elapsed() < PATIENCE, "{paths:?}");
            std::thread::yield_now();
        }
    }

    /// Breaks the control connection to a peer, and waits until it is gone.
    fn cut(&self, peer: PeerId) {
        let channel = || self.engine.hold().hub.outside.channel_of.get(&peer).copied();
        let cut = channel().unwrap();
        let mut hold = self.engine.hold();
        let now = hold.hub.now();
        hold.hub.outside.control.end(now, cut, "cut by the test");
        drop(hold);
        let begun = Instant::now();
        while channel() == Some(cut) {
            assert!(begun.elapsed() < PATIENCE);
            std::thread::yield_now();
        }
    }

    /// Sizes of everything that remembers peers, sessions, paths, connections and posts. Parts that hold maps of their own
    /// count the structs that they print.
    fn sizes(&self) -> [usize; 11] {
        let hold = self.engine.hold();
        let outside = &hold.hub.outside;
        let structs = |printed: String| printed.matches('{').count();
        [
            outside.peers.len(),
            outside.leaving.len(),
            outside.sessions.len(),
            outside.channels.len(),
            outside.channel_of.len(),
            outside.paths.len(),
            outside.posted.len(),
            structs(format!("{:?}", outside.fences)),
            structs(format!("{:?}", outside.peers)),
            structs(format!("{:?}", hold.hub.transfers)),
            structs(format!("{:?}", outside.carriers)),
        ]
    }
}

fn done(handle: &Handle) {
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Ok(())));
}

/// Open descriptors and threads of this process.
fn descriptors_and_threads() -> [usize; 2] {
    ["/proc/self/fd", "/proc/self/task"].map(|path| std::fs::read_dir(path).unwrap().count())
}

/// Waits until nothing is more than before.
fn settles<const N: usize>(what: &str, before: [usize; N], count: impl Fn() -> [usize; N]) {
    let begun = Instant::now();
    loop {
        let now = count();
        if now.iter().zip(before).all(|(now, before)| *now <= before) {
            return;
        }
        assert!(begun.elapsed() < PATIENCE / 4, "{what}: {before:?} before, {now:?} after");
        // No event tells that the last connection has ended.
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn peers_that_come_and_go_leave_nothing() {
    if std::env::var_os(ALONE).is_some() {
        return come_and_go();
    }
    // Other tests of this process have descriptors and threads too.
    let (_, module) = module_path!().split_once("::").unwrap();
    let test = format!("{module}::peers_that_come_and_go_leave_nothing");
    let mut alone = Command::new(std::env::current_exe().unwrap());
    let output = alone.args(["--exact", &test, "--nocapture"]).env(ALONE, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

fn come_and_go() {
    let there = TestEngine::new(None);
    let sides = [TestEngine::new(None), TestEngine::new(Some(Transport::TCP))];
    // These stay connected, so that the numbers to compare with are not 0.
    let stays = sides.each_ref().map(|here| here.meet(&there));
    for (here, peer) in sides.iter().zip(stays) {
        here.wait_for_paths(peer);
        for op in [Op::Write, Op::Read] {
            done(&here.begin(peer, &there, op, BYTES));
        }
    }
    let round = |round: usize| {
        let here = &sides[round % 2];
        let peer = match round / 2 % 2 {
            0 => here.meet(&there),
            _ => here.engine.connect_to(there.address(), PATIENCE).unwrap(),
        };
        for op in [Op::Write, Op::Read] {
            done(&here.begin(peer, &there, op, 8192));
        }
        here.engine.disconnect(peer);
    };
    (0..20).for_each(round);
    let all = [&there, &sides[0], &sides[1]];
    settles("sessions", [sides.len()], || [there.engine.hold().hub.outside.sessions.len()]);
    let (open, known) = (descriptors_and_threads(), all.map(TestEngine::sizes));
    let rounds = std::env::var("KVLANE_TEST_ROUNDS").map_or(ROUNDS, |rounds| rounds.parse().unwrap());
    (0..rounds).for_each(round);
    let settle = |what: &str| {
        for (side, before) in all.into_iter().zip(known) {
            settles(what, before, || side.sizes());
        }
        settles(what, open, descriptors_and_threads);
    };
    settle("peers");
    for (here, peer) in sides.iter().zip(stays) {
        let carriers = here.wait_for_paths(peer);
        for _ in 0..CUTS.max(rounds / 10) {
            let read = here.begin(peer, &there, Op::Read, BYTES);
            here.cut(peer);
            done(&read);
            assert_eq!(here.wait_for_paths(peer).len(), carriers.len());
        }
    }
    settle("control connections");
}
