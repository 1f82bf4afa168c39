//! A carrier from outside of the crate: [`toy::Toy`] is one, and a new carrier has to pass these tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod slow;
#[path = "../support/mod.rs"]
mod support;
mod toy;
mod watcher;
mod wire;

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use kvlane_fabric::{
    Access, Engine, EngineOptions, FabricError, Failure, Handle, NewCarrier, Op, Options, PathStatus, PeerId,
    Pieces, Place, RegisterError, Run, Transfer, Transport, WindowRange,
};

use crate::support::{MIB, Memory, PATIENCE, Random};
use crate::toy::Toy;
use crate::watcher::Watcher;
use crate::wire::Wire;

/// Small, so that a transfer is many posts.
const CHUNK: usize = 64 << 10;

struct Side {
    engine: Engine,
    memory: Memory,
    region: u32,
}

impl Side {
    fn new(wire: &Arc<Wire>) -> Side {
        Side::by(wire, None)
    }

    fn by(wire: &Arc<Wire>, transport: Option<Transport>) -> Side {
        let transfers = Options {
            chunk_bytes: CHUNK as u64,
            post_patience: Duration::from_millis(300),
            ..Options::default()
        };
        let options = EngineOptions { transfers, transport, ..EngineOptions::default() };
        let engine = Engine::with_carriers(options, vec![toy(wire)]).unwrap();
        let memory = Memory::new(8 * MIB);
        // SAFETY: the engine is dropped before its memory, as the first field.
        let region = unsafe { engine.register(memory.base, memory.len as u64, Access::ReadWrite).unwrap() };
        Side { engine, memory, region }
    }

    fn meet(&self, there: &Side) -> PeerId {
        self.engine.connect(&there.engine.describe().unwrap()).unwrap()
    }

    fn path(&self, peer: PeerId, carrier: &str) -> Option<PathStatus> {
        self.engine.paths(peer).into_iter().find(|path| path.carrier == carrier)
    }

    /// Waits until a path is as wanted.
    fn wait_for(&self, peer: PeerId, carrier: &str, is_wanted: impl Fn(&PathStatus) -> bool) {
        let begun = Instant::now();
        while !self.path(peer, carrier).as_ref().is_some_and(&is_wanted) {
            assert!(begun.elapsed() < PATIENCE, "{:?}", self.engine.paths(peer));
            // Nobody tells when a path is up.
            std::thread::yield_now();
        }
    }

    fn has_carried(&self, peer: PeerId, carrier: &str) -> bool {
        self.path(peer, carrier).is_some_and(|path| path.bytes_per_second.is_some())
    }

    fn begin(&self, peer: PeerId, op: Op, runs: Vec<Run>) -> Handle {
        self.engine.begin(peer, Transfer { op, ..Transfer::write(Pieces::Runs(runs)) }).unwrap()
    }

    /// All bytes, to the same places.
    fn all(&self, there: &Side) -> Vec<Run> {
        pieces(self, there, &[(0, 0, self.memory.len)])
    }
}

fn toy(wire: &Arc<Wire>) -> NewCarrier<'static> {
    let wire = Arc::clone(wire);
    NewCarrier::new("toy", move |_| Ok(Box::new(Toy::new(&wire))))
}

/// Each from where here, to where there, and how many bytes.
fn pieces(here: &Side, there: &Side, pieces: &[(usize, usize, usize)]) -> Vec<Run> {
    let place = |region, offset: usize| Place { region, offset: offset as u64 };
    let run = |(local, remote, len): &(usize, usize, usize)| Run {
        local: place(here.region, *local),
        remote: place(there.region, *remote),
        len: *len as u64,
    };
    pieces.iter().map(run).collect()
}

/// Two engines at one wire, of which the first has a path over it to the second.
fn connected() -> (Arc<Wire>, Side, Side, PeerId) {
    let wire = Arc::new(Wire::new());
    let (here, there) = (Side::new(&wire), Side::new(&wire));
    let peer = here.meet(&there);
    for carrier in ["toy", "tcp"] {
        here.wait_for(peer, carrier, |path| path.is_up);
    }
    here.memory.scribble(0, 8 * MIB, 0x1234_5678_9abc_def1);
    (wire, here, there, peer)
}

fn done(handle: &Handle) {
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Ok(())));
}

#[test]
fn it_takes_no_more_than_150_lines() {
    let is_code = |line: &&str| !line.trim().is_empty() && !line.trim().starts_with("//");
    let lines = include_str!("toy.rs").lines().filter(is_code).count();
    assert!(lines <= 150, "{lines} lines");
}

#[test]
fn many_pieces_go_both_ways_over_it_and_over_nothing_else() {
    let (wire, here, there, peer) = connected();
    wire.breaks_after(1_000_000);
    let mut random = Random(77);
    let order = random.order(1000);
    let list: Vec<_> = order.iter().enumerate().map(|(at, other)| (at * 7001, other * 7001, 7000)).collect();
    done(&here.begin(peer, Op::Write, pieces(&here, &there, &list)));
    for (local, remote, len) in &list {
        assert!(here.memory.bytes(*local, *len) == there.memory.bytes(*remote, *len));
        assert_eq!(there.memory.byte(remote + len), 0, "between two pieces");
    }
    there.memory.scribble(0, 8 * MIB, 0x0dd0_5eed);
    done(&here.begin(peer, Op::Read, pieces(&here, &there, &list)));
    for (local, remote, len) in &list {
        assert!(here.memory.bytes(*local, *len) == there.memory.bytes(*remote, *len));
    }
    assert!(1_000_000 - wire.left() >= 2 * 7_000_000 / CHUNK as i64);
    assert!(here.has_carried(peer, "toy"));
    assert!(
        !here.has_carried(peer, "tcp") && !here.has_carried(peer, "cma"),
        "{:?}",
        here.engine.paths(peer)
    );
}

#[test]
fn where_it_is_required_nothing_else_carries_bytes() {
    let wire = Arc::new(Wire::new());
    let transport = Some(Transport(&["toy"]));
    let (here, there) = (Side::by(&wire, transport), Side::by(&wire, transport));
    let peer = here.meet(&there);
    here.memory.fill(0, MIB, 7);
    done(&here.begin(peer, Op::Write, pieces(&here, &there, &[(0, 0, MIB)])));
    assert_eq!(there.memory.other_than(0, MIB, 7), None);
    let paths = here.engine.paths(peer);
    let mut carriers: Vec<&str> = paths.iter().map(|path| path.carrier).collect();
    carriers.sort_unstable();
    assert_eq!(carriers, ["control", "toy"]);
}

#[test]
fn a_name_that_no_carrier_has_or_two_have_is_refused() {
    let wire = Arc::new(Wire::new());
    let by = |transport| EngineOptions { transport, ..EngineOptions::default() };
    let unknown = Engine::with_carriers(by(Some(Transport(&["toy", "rdma"]))), vec![toy(&wire)]);
    let why = "no carrier is called rdma: this engine has cuda, cma, tcp, tcp-slots, toy";
    assert_eq!(unknown.unwrap_err().to_string(), why);
    let twice = Engine::with_carriers(by(None), vec![toy(&wire), toy(&wire)]);
    assert!(matches!(twice, Err(FabricError::SameCarrier("toy"))), "{twice:?}");
    assert_eq!(wire.count(), 0);
}

/// Without a watch of its own the first of two carriers had the place in the list that the second one's descriptors named.
#[test]
fn what_a_carrier_watches_is_told_to_it_and_to_no_other() {
    let (told, was_told) = channel();
    let watcher = NewCarrier::new("watcher", move |watch| Ok(Box::new(Watcher::new(watch, told)?)));
    let more = vec![toy(&Arc::new(Wire::new())), watcher];
    let engine = Engine::with_carriers(EngineOptions::default(), more).unwrap();
    assert_eq!(was_told.recv_timeout(PATIENCE), Ok(77));
    drop(engine);
}

#[test]
fn what_a_wire_that_breaks_has_not_carried_goes_another_way() {
    for op in [Op::Write, Op::Read] {
        let (wire, here, there, peer) = connected();
        wire.breaks_after(20);
        let handle = here.begin(peer, op, here.all(&there));
        done(&handle);
        assert!(here.memory.bytes(0, 8 * MIB) == there.memory.bytes(0, 8 * MIB), "other bytes");
        assert!(wire.left() < 0, "it has broken");
        assert_eq!(here.path(peer, "toy"), None);
        done(&here.begin(peer, op, here.all(&there)));
    }
}

#[test]
fn a_path_on_which_nothing_moves_is_closed_and_the_rest_goes_another_way() {
    let (wire, here, there, peer) = connected();
    wire.sticks_after(20);
    done(&here.begin(peer, Op::Write, here.all(&there)));
    assert!(here.memory.bytes(0, 8 * MIB) == there.memory.bytes(0, 8 * MIB), "other bytes");
    assert!(wire.is_stuck());
    assert_eq!(here.path(peer, "toy"), None);
}

#[test]
fn where_it_is_refused_bytes_go_another_way_and_the_path_says_why() {
    let (here, there) = (Side::new(&Arc::new(Wire::new())), Side::new(&Arc::new(Wire::new())));
    let peer = here.meet(&there);
    here.memory.fill(0, MIB, 9);
    done(&here.begin(peer, Op::Write, pieces(&here, &there, &[(0, 0, MIB)])));
    assert_eq!(there.memory.other_than(0, MIB, 9), None);
    here.wait_for(peer, "toy", |path| !path.is_up && path.trouble.is_some());
    let why = here.path(peer, "toy").unwrap().trouble.unwrap();
    assert_eq!(why, "the peer is at another wire");
}

#[test]
fn memory_that_it_cannot_reach_is_not_registered_and_nothing_of_it_is_left() {
    let (wire, here, there, peer) = connected();
    let (known, laid) = (there.engine.describe().unwrap().regions, wire.count());
    wire.refuses_more_than(MIB as u64);
    let more = Memory::new(2 * MIB);
    // SAFETY: the memory outlives both engines' use: it is given back below.
    let register = |len: usize| unsafe { there.engine.register(more.base, len as u64, Access::ReadWrite) };
    let refused = register(2 * MIB);
    let Err(FabricError::Register(RegisterError { carrier, why })) = refused else { panic!("{refused:?}") };
    assert_eq!((carrier, &why[..]), ("toy", "a region of 2097152 bytes, and 1048576 are the most"));
    assert_eq!((there.engine.describe().unwrap().regions, wire.count()), (known.clone(), laid));
    // Its number is free, and not for what was to be registered.
    let number = register(MIB).unwrap();
    let now = there.engine.describe().unwrap().regions;
    assert_eq!((now.len(), now[1].number, now[1].generation), (2, number, 1));
    here.engine.update(peer, &there.engine.describe().unwrap()).unwrap();
    here.memory.fill(0, MIB, 3);
    let run = Run {
        local: Place { region: here.region, offset: 0 },
        remote: Place { region: number, offset: 0 },
        len: MIB as u64,
    };
    done(&here.begin(peer, Op::Write, vec![run]));
    assert_eq!((more.other_than(0, MIB, 3), more.other_than(MIB, MIB, 0)), (None, None));
    there.engine.unregister(number).unwrap();
    assert_eq!((there.engine.describe().unwrap().regions, wire.count()), (known, laid));
}

#[test]
fn what_a_window_shows_is_read_over_it_until_that_is_closed() {
    let (wire, here, there, peer) = connected();
    wire.breaks_after(1_000_000);
    there.memory.scribble(0, 8 * MIB, 0x77);
    let range = |offset: usize, len: usize| WindowRange {
        region: there.region,
        offset: offset as u64,
        len: len as u64,
    };
    let window = there.engine.open_window(here.engine.id(), vec![range(MIB, 5), range(77, MIB)]).unwrap();
    let read = || {
        let local = Place { region: here.region, offset: 0 };
        let run = Run { local, remote: Place { region: window.number, offset: 2 }, len: MIB as u64 };
        here.engine.begin(peer, Transfer::read_through(window, Pieces::Contiguous(run)))
    };
    done(&read().unwrap());
    let shown = [there.memory.bytes(MIB + 2, 3), there.memory.bytes(77, MIB - 3)].concat();
    assert!(here.memory.bytes(0, MIB) == shown);
    assert!(wire.left() < 1_000_000);
    there.engine.close_window(&window).unwrap();
    let refused = |handle: Handle| handle.wait(Some(PATIENCE)) == Some(Err(Failure::Refused));
    assert!(
        read()
            .map_or_else(|error| matches!(error, FabricError::WindowClosed | FabricError::Shape(_)), refused)
    );
}

#[test]
fn memory_that_was_given_back_is_touched_no_more() {
    // On a busy machine all writes may have come before the memory is given back.
    let was_in_time = (0..10).any(|_| {
        let (_, here, there, peer) = connected();
        let handles: Vec<Handle> = (0..64).map(|_| here.begin(peer, Op::Write, here.all(&there))).collect();
        there.memory.wait_for(0);
        there.engine.unregister(there.region).unwrap();
        there.memory.fill(0, 8 * MIB, 0x55);
        let outcomes: Vec<_> = handles.iter().map(|handle| handle.wait(Some(PATIENCE)).unwrap()).collect();
        let is_expected = |outcome: &_| matches!(outcome, Ok(()) | Err(Failure::Refused));
        assert!(outcomes.iter().all(is_expected), "{outcomes:?}");
        assert_eq!(there.memory.other_than(0, 8 * MIB, 0x55), None);
        outcomes.contains(&Err(Failure::Refused))
    });
    assert!(was_in_time, "no write was refused");
}

#[test]
fn an_engine_that_is_closed_is_touched_no_more_and_its_peer_is_lost() {
    // On a busy machine all writes may have come before the engine is closed.
    let was_in_time = (0..10).any(|_| {
        let (wire, here, there, peer) = connected();
        let handles: Vec<Handle> = (0..64).map(|_| here.begin(peer, Op::Write, here.all(&there))).collect();
        there.memory.wait_for(0);
        let Side { engine, memory, .. } = there;
        drop(engine);
        memory.fill(0, 8 * MIB, 0x55);
        let last = handles.last().unwrap().wait(Some(PATIENCE)).unwrap();
        assert!(matches!(last, Ok(()) | Err(Failure::PeerLost)), "{last:?}");
        assert_eq!(memory.other_than(0, 8 * MIB, 0x55), None);
        assert_eq!(wire.count(), 1);
        here.engine.close();
        assert_eq!(wire.count(), 0);
        last == Err(Failure::PeerLost)
    });
    assert!(was_in_time, "no write was lost with its engine");
}
