//! Engines that move bytes between each other.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane_fabric::{
    Access, Engine, EngineOptions, FabricError, Failure, Handle, Mistrust, Op, Options, Pages, PeerId,
    Pieces, Place, Run, ShapeError, Transfer, Transport,
};
use proptest::collection::vec;
use proptest::prelude::*;

const PATIENCE: Duration = Duration::from_secs(30);

/// An engine with one region.
struct Side {
    engine: Engine,
    region: u32,
    memory: Vec<u8>,
}

impl Side {
    fn new(bytes: usize, access: Access, options: EngineOptions) -> Side {
        let engine = Engine::new(options).unwrap();
        let mut memory = vec![0u8; bytes];
        // SAFETY: the engine is dropped first, as the first field.
        let region = unsafe { engine.register(memory.as_mut_ptr(), bytes as u64, access).unwrap() };
        Side { engine, region, memory }
    }

    fn of(bytes: usize) -> Side {
        Side::new(bytes, Access::ReadWrite, EngineOptions::default())
    }

    fn peer(&self, other: &Side) -> PeerId {
        self.engine.connect(&other.engine.describe().unwrap()).unwrap()
    }

    fn run(&self, local: u64, other: &Side, remote: u64, len: u64) -> Run {
        let local = Place { region: self.region, offset: local };
        Run { local, remote: Place { region: other.region, offset: remote }, len }
    }

    fn fill(&mut self, seed: u64) {
        let mut word = seed | 1;
        for byte in &mut self.memory {
            word = word.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            *byte = (word >> 33) as u8;
        }
    }
}

fn done(handle: &Handle) {
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Ok(())));
}

#[test]
fn bytes_go_both_ways_and_the_counter_counts_after_them() {
    let (mut here, mut there) = (Side::of(1 << 20), Side::of(1 << 20));
    here.fill(1);
    let wanted = here.memory.clone();
    let peer = here.peer(&there);
    let generation = there.engine.open_counter(7);
    let pieces = Pieces::Contiguous(here.run(0, &there, 0, 1 << 20));
    let write = Transfer { immediate: Some((7, generation)), ..Transfer::write(pieces.clone()) };
    done(&here.engine.begin(peer, write).unwrap());
    assert!(there.engine.wait_count(7, generation, 1, Some(PATIENCE)));
    assert!(there.memory == wanted);
    there.fill(2);
    done(&here.engine.begin(peer, Transfer::read(pieces)).unwrap());
    assert!(here.memory == there.memory);
    assert_eq!(there.engine.count(7, generation), 1);
}

/// What a transfer moves in the test below: where from, where to, how much.
fn runs() -> impl Strategy<Value = Vec<(u64, u64, u64)>> {
    let len = prop_oneof![1..40u64, 1..9000u64, Just(8191), Just(8193), Just(16385)];
    vec((0..200_000u64, 0..20_000u64, len), 0..60).prop_map(|runs| {
        let mut free = 0;
        let place = |(far, gap, len): (u64, u64, u64)| {
            let at = free + gap;
            free = at + len;
            (far, at, len)
        };
        runs.into_iter().map(place).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn lists_of_any_runs_arrive_as_they_are(
        runs in runs(), op in prop_oneof![Just(Op::Write), Just(Op::Read)],
        chunk_bytes in 1000..200_000u64, chunk_runs in 1..300usize, connections in 1..4usize,
    ) {
        const BYTES: usize = 2 << 20;
        let transfers = Options { chunk_bytes, chunk_runs, ..Options::default() };
        let options = EngineOptions { transfers, connections, ..EngineOptions::default() };
        let mut here = Side::new(BYTES, Access::ReadWrite, options);
        let mut there = Side::of(BYTES);
        here.fill(3);
        there.fill(4);
        let peer = here.peer(&there);
        let (from, mut expected) = match op {
            Op::Write => (here.memory.clone(), there.memory.clone()),
            Op::Read => (there.memory.clone(), here.memory.clone()),
        };
        let mut list = Vec::new();
        for (source, target, len) in runs {
            expected[target as usize..(target + len) as usize]
                .copy_from_slice(&from[source as usize..(source + len) as usize]);
            list.push(match op {
                Op::Write => here.run(source, &there, target, len),
                Op::Read => here.run(target, &there, source, len),
            });
        }
        let transfer = Transfer { op, ..Transfer::write(Pieces::Runs(list)) };
        done(&here.engine.begin(peer, transfer).unwrap());
        let arrived = match op { Op::Write => &there.memory, Op::Read => &here.memory };
        prop_assert!(*arrived == expected);
    }
}

#[test]
fn a_hundred_thousand_pages_go_in_one_call() {
    const PAGE: u64 = 64;
    const PAGES: u32 = 100_000;
    let bytes = (PAGE * u64::from(PAGES) * 2) as usize;
    let (mut here, there) = (Side::of(bytes), Side::of(bytes));
    here.fill(5);
    let peer = here.peer(&there);
    // Every second page, the other way round: no two are adjacent.
    let pages = |region, indices: Arc<[u32]>| Pages { region, offset: 0, stride: PAGE, indices };
    let local = pages(here.region, (0..PAGES).map(|page| page * 2).collect());
    let remote = pages(there.region, (0..PAGES).map(|page| (PAGES - 1 - page) * 2).collect());
    let pieces = Pieces::Paged { page_bytes: PAGE, local, remote };
    done(&here.engine.begin(peer, Transfer::write(pieces)).unwrap());
    for page in [0, 1, PAGES / 2, PAGES - 1] {
        let at = |page: u32| (u64::from(page) * 2 * PAGE) as usize;
        let (from, to) = (at(page), at(PAGES - 1 - page));
        assert!(
            there.memory[to..to + PAGE as usize] == here.memory[from..from + PAGE as usize],
            "page {page}"
        );
        assert!(there.memory[to + PAGE as usize..][..PAGE as usize].iter().all(|byte| *byte == 0));
    }
}

#[test]
fn what_a_peer_did_not_share_is_refused_and_the_next_transfer_works() {
    let here = Side::of(100);
    let there = Side::new(100, Access::Read, EngineOptions::default());
    let peer = here.peer(&there);
    let run = here.run(0, &there, 0, 100);
    let begin = |transfer| here.engine.begin(peer, transfer);
    let wait = |handle: Handle| handle.wait(Some(PATIENCE)).unwrap();
    assert_eq!(
        wait(begin(Transfer::write(Pieces::Contiguous(run))).unwrap()),
        Err(Failure::Refused),
        "only to be read"
    );
    done(&begin(Transfer::read(Pieces::Contiguous(run))).unwrap());
    let long = Run { len: 101, ..run };
    assert!(matches!(
        begin(Transfer::read(Pieces::Contiguous(long))),
        Err(FabricError::Shape(ShapeError::OutOfBounds { .. }))
    ));
    // Registered anew under the same number: what was described before is refused, unless the peer has heard of the new
    // memory already, which it is then about.
    there.engine.unregister(there.region).unwrap();
    let mut other = vec![9u8; 100];
    // SAFETY: the memory outlives the engine's use: it is unregistered below.
    let again = unsafe { there.engine.register(other.as_mut_ptr(), 100, Access::Read).unwrap() };
    assert_eq!(again, there.region);
    let before = here.memory.clone();
    let outcome = wait(begin(Transfer::read(Pieces::Contiguous(run))).unwrap());
    assert!(matches!(outcome, Ok(()) | Err(Failure::Refused)), "{outcome:?}");
    assert_eq!(here.memory, if outcome.is_ok() { vec![9; 100] } else { before });
    here.engine.update(peer, &there.engine.describe().unwrap()).unwrap();
    done(&begin(Transfer::read(Pieces::Contiguous(run))).unwrap());
    assert_eq!(here.memory, vec![9; 100]);
    there.engine.unregister(again).unwrap();
    assert!(matches!(there.engine.unregister(again), Err(FabricError::NoSuchRegion(_))));
}

#[test]
fn without_the_token_nothing_is_moved() {
    let with = |token: &str| EngineOptions { token: token.into(), ..EngineOptions::default() };
    let quick = |token: &str| {
        let transfers = Options { peer_patience: Duration::from_millis(200), ..Options::default() };
        EngineOptions { transfers, ..with(token) }
    };
    let mut there = Side::new(100, Access::ReadWrite, with("secret"));
    there.fill(6);
    let plain = Side::of(100);
    let refused = plain.engine.connect(&there.engine.describe().unwrap());
    assert!(matches!(refused, Err(FabricError::Mistrust(Mistrust::TokenThere))), "{refused:?}");
    let refused = there.engine.connect(&plain.engine.describe().unwrap());
    assert!(matches!(refused, Err(FabricError::Mistrust(Mistrust::TokenHere))), "{refused:?}");
    for (token, outcome) in [("other", Err(Failure::PeerLost)), ("secret", Ok(()))] {
        let here = Side::new(100, Access::ReadWrite, quick(token));
        let read = Transfer::read(Pieces::Contiguous(here.run(0, &there, 0, 100)));
        let peer = here.peer(&there);
        let handle = here.engine.begin(peer, read).unwrap();
        assert_eq!(handle.wait(Some(PATIENCE)), Some(outcome), "with {token:?}");
        assert_eq!(here.memory == there.memory, outcome.is_ok());
        let paths = here.engine.paths(peer);
        let path = paths.iter().find(|path| path.carrier == "control").unwrap();
        let has_moved = paths.iter().any(|path| path.bytes_per_second.is_some());
        assert_eq!((path.is_up, has_moved), (outcome.is_ok(), outcome.is_ok()));
        assert_eq!(
            path.trouble.as_ref().is_some_and(|why| why.contains("token")),
            outcome.is_err(),
            "{path:?}"
        );
    }
    let open: SocketAddr = "0.0.0.0:0".parse().unwrap();
    let options = EngineOptions { listen: vec![open], ..EngineOptions::default() };
    assert!(matches!(Engine::new(options), Err(FabricError::NoToken(_))));
}

#[test]
fn a_peer_that_speaks_something_else_is_left_alone_and_others_are_served() {
    let (here, there) = (Side::of(100), Side::of(100));
    let text = there.engine.describe().unwrap().addresses[0].bytes.clone();
    let address: SocketAddr = String::from_utf8(text).unwrap().parse().unwrap();
    let mut stranger = TcpStream::connect(address).unwrap();
    stranger.set_read_timeout(Some(PATIENCE)).unwrap();
    stranger.write_all(&[0x47; 4096]).unwrap();
    let mut answer = Vec::new();
    // The challenge, then the end: a reset counts as one.
    let _ = stranger.read_to_end(&mut answer);
    assert_eq!(answer.len(), 24);
    let transfer = Transfer::write(Pieces::Contiguous(here.run(0, &there, 0, 100)));
    done(&here.engine.begin(here.peer(&there), transfer).unwrap());
}

#[test]
fn a_cancelled_transfer_touches_nothing_once_it_is_over() {
    const BYTES: usize = 64 << 20;
    let (mut here, there) = (Side::of(BYTES), Side::of(BYTES));
    here.fill(7);
    let peer = here.peer(&there);
    let write = |from: &Side| Transfer::write(Pieces::Contiguous(from.run(0, &there, 0, BYTES as u64)));
    let handle = here.engine.begin(peer, write(&here)).unwrap();
    handle.cancel();
    let outcome = handle.wait(Some(PATIENCE)).unwrap();
    assert_eq!(outcome, Err(Failure::Cancelled));
    let after = there.memory.clone();
    assert!(after != here.memory, "it was given up before its end");
    // A whole other transfer over the same path: what was on its way before it would have arrived by now.
    let other = Side::of(100);
    done(
        &here
            .engine
            .begin(here.peer(&other), Transfer::write(Pieces::Contiguous(here.run(0, &other, 0, 100))))
            .unwrap(),
    );
    let read = Transfer::read(Pieces::Contiguous(here.run(0, &there, 0, 100)));
    done(&here.engine.begin(peer, read).unwrap());
    assert!(there.memory == after, "a late write");
}

#[test]
fn a_transfer_that_cannot_end_in_time_is_given_up() {
    let here = Side::of(100);
    let there = Side::of(100);
    let description = there.engine.describe().unwrap();
    let transfer = Transfer {
        timeout: Some(Duration::from_millis(100)),
        ..Transfer::write(Pieces::Contiguous(here.run(0, &there, 0, 100)))
    };
    drop(there);
    let peer = here.engine.connect(&description).unwrap();
    let begun = Instant::now();
    let handle = here.engine.begin(peer, transfer).unwrap();
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Err(Failure::DeadlineExceeded)));
    assert!(begun.elapsed() >= Duration::from_millis(100));
    assert_eq!(handle.outcome(), Some(Err(Failure::DeadlineExceeded)));
    here.engine.disconnect(peer);
    let again = Transfer::write(Pieces::Runs(Vec::new()));
    assert!(matches!(here.engine.begin(peer, again), Err(FabricError::NoSuchPeer)));
}

#[test]
fn each_connection_to_a_peer_counts_its_immediates_anew() {
    let (here, there) = (Side::of(100), Side::of(100));
    let generation = there.engine.open_counter(1);
    let first = here.peer(&there);
    let tell = |peer| {
        let nothing = Transfer::write(Pieces::Runs(Vec::new()));
        done(&here.engine.begin(peer, Transfer { immediate: Some((1, generation)), ..nothing }).unwrap());
    };
    tell(first);
    tell(first);
    let second = here.peer(&there);
    tell(second);
    here.engine.disconnect(first);
    let third = here.peer(&there);
    tell(third);
    tell(second);
    assert!(there.engine.wait_count(1, generation, 5, Some(PATIENCE)));
    assert_eq!(there.engine.count(1, generation), 5);
    assert_eq!(there.engine.retire_counter(1, generation), generation + 1);
    assert!(!there.engine.wait_count(1, generation, 6, None), "nobody counts for this use any more");
}

/// Accepts for a peer, and lets nothing through before it is told.
struct Gate {
    address: SocketAddr,
    open: std::sync::mpsc::Sender<()>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Gate {
    fn before(to: SocketAddr) -> Gate {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (open, opened) = std::sync::mpsc::channel();
        let forward = move || {
            let (from, _) = listener.accept().unwrap();
            // Told, or dropped: then nobody connects either.
            if opened.recv().is_err() {
                return;
            }
            let to = TcpStream::connect(to).unwrap();
            let back = (to.try_clone().unwrap(), from.try_clone().unwrap());
            let pump = |(mut from, mut to): (TcpStream, TcpStream)| {
                let _ = std::io::copy(&mut from, &mut to);
                let _ = to.shutdown(std::net::Shutdown::Both);
            };
            let other = std::thread::spawn(move || pump(back));
            pump((from, to));
            other.join().unwrap();
        };
        Gate { address, open, threads: vec![std::thread::spawn(forward)] }
    }
}

#[test]
fn a_transfer_is_for_the_memory_that_was_described_when_it_began() {
    let (mut here, mut there) = (Side::of(100), Side::of(100));
    here.fill(8);
    let address = |side: &Side| {
        let text = side.engine.describe().unwrap().addresses[0].bytes.clone();
        String::from_utf8(text).unwrap().parse().unwrap()
    };
    let gate = Gate::before(address(&there));
    let mut description = there.engine.describe().unwrap();
    description.addresses[0].bytes = gate.address.to_string().into_bytes();
    let peer = here.engine.connect(&description).unwrap();
    let run = here.run(0, &there, 0, 100);
    let write = || Transfer::write(Pieces::Contiguous(run));
    let before = here.engine.begin(peer, write()).unwrap();
    // Other memory has the number now, and the peer is told so while the transfer waits for its connection.
    there.engine.unregister(there.region).unwrap();
    // SAFETY: as for the first registration.
    let again = unsafe { there.engine.register(there.memory.as_mut_ptr(), 100, Access::ReadWrite).unwrap() };
    assert_eq!(again, there.region);
    here.engine.update(peer, &there.engine.describe().unwrap()).unwrap();
    gate.open.send(()).unwrap();
    assert_eq!(before.wait(Some(PATIENCE)), Some(Err(Failure::Refused)));
    assert_eq!(there.memory, [0; 100]);
    done(&here.engine.begin(peer, write()).unwrap());
    assert!(there.memory == here.memory);
    drop(here);
    gate.threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn limits_that_let_nothing_move_or_do_not_fit_a_frame_are_told() {
    let usual = Options::default();
    for transfers in [
        Options { chunk_runs: 513, ..usual.clone() },
        Options { chunk_bytes: (64 << 20) + 1, ..usual.clone() },
        Options { chunk_bytes: 0, ..usual.clone() },
        Options { credits: 0, ..usual.clone() },
        Options { bulk_every: 1, ..usual },
    ] {
        let wrong = Engine::new(EngineOptions { transfers, ..EngineOptions::default() });
        assert!(matches!(wrong, Err(FabricError::Limit(_))));
    }
    for threads in [0, 65] {
        let wrong = Engine::new(EngineOptions { copy_threads: threads, ..EngineOptions::default() });
        assert!(matches!(wrong, Err(FabricError::Limit(_))));
        let wrong = Engine::new(EngineOptions { socket_threads: threads, ..EngineOptions::default() });
        assert!(matches!(wrong, Err(FabricError::Limit(_))));
    }
    let listen = vec!["0.0.0.0:0".parse().unwrap()];
    let options = EngineOptions { listen, token: "secret".into(), ..EngineOptions::default() };
    assert!(matches!(Engine::new(options.clone()), Err(FabricError::NoAddressToTell(_))));
    let advertise = vec!["127.0.0.1:4000".parse().unwrap()];
    let engine = Engine::new(EngineOptions { advertise, ..options }).unwrap();
    assert_eq!(engine.describe().unwrap().addresses[0].bytes, b"127.0.0.1:4000");
}

/// More than one turn takes, all in one call of the peer's: what is left must not wait for more to come.
#[test]
fn many_small_transfers_at_once_are_over_at_once() {
    let transfers = Options { credits: 4096, ..Options::default() };
    let here = Side::new(100, Access::ReadWrite, EngineOptions { transfers, ..EngineOptions::default() });
    let there = Side::of(100);
    let peer = here.peer(&there);
    let begin = || {
        let write = Transfer::write(Pieces::Contiguous(here.run(0, &there, 0, 1)));
        here.engine.begin(peer, write).unwrap()
    };
    done(&begin());
    let (mut at_once, mut one_by_one) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..20 {
        let begun = Instant::now();
        let handles: Vec<Handle> = (0..500).map(|_| begin()).collect();
        handles.iter().for_each(done);
        at_once += begun.elapsed();
        let begun = Instant::now();
        (0..500).for_each(|_| done(&begin()));
        one_by_one += begun.elapsed();
    }
    // Were the rest of each taken with the next ping only, this would take five seconds more, on a machine however busy.
    let most = one_by_one + Duration::from_millis(2500);
    assert!(at_once < most, "{at_once:?} at once, {one_by_one:?} one by one");
}

#[test]
fn memory_in_use_is_not_given_back() {
    let here = Side::of(100);
    let there = Side::of(100);
    let description = there.engine.describe().unwrap();
    let write = Transfer::write(Pieces::Contiguous(here.run(0, &there, 0, 100)));
    drop(there);
    let peer = here.engine.connect(&description).unwrap();
    let handle = here.engine.begin(peer, write).unwrap();
    assert!(matches!(
        here.engine.unregister(here.region),
        Err(FabricError::RegionInUse { transfers: 1, .. })
    ));
    handle.cancel();
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Err(Failure::Cancelled)));
    here.engine.unregister(here.region).unwrap();
}

/// Rounds in which one side waits for something, gets it, and then does nothing while more comes. How long they took.
fn rounds_of_waiting(transport: Transport, rounds: u64) -> Duration {
    let options = || EngineOptions { transport: Some(transport), ..EngineOptions::default() };
    let (here, there) =
        (Side::new(64, Access::ReadWrite, options()), Side::new(64, Access::ReadWrite, options()));
    let peer = here.peer(&there);
    let generation = there.engine.open_counter(1);
    let write = |immediate| {
        let pieces = Pieces::Runs(vec![here.run(0, &there, 0, 8)]);
        here.engine.begin(peer, Transfer { immediate, ..Transfer::write(pieces) }).unwrap()
    };
    done(&write(None));
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let (next, wanted) = std::sync::mpsc::channel();
        let there = &there.engine;
        scope.spawn(move || {
            for target in wanted {
                assert!(there.wait_count(1, generation, target, Some(PATIENCE)));
            }
        });
        for round in 1..=rounds {
            // Until nothing happens, everybody sleeps.
            std::thread::sleep(Duration::from_millis(1));
            next.send(2 * round).unwrap();
            let told = [write(Some((1, generation))), write(Some((1, generation)))];
            told.iter().for_each(done);
            done(&write(None));
        }
        drop(next);
    });
    begun.elapsed()
}

/// Whoever waited took the wake that was meant for the thread behind, which then slept on for up to half a second, with no
/// other wake to come.
#[test]
fn what_comes_after_somebody_has_waited_is_heard_at_once() {
    let by_sockets = rounds_of_waiting(Transport::TCP, 300);
    let by_rings = rounds_of_waiting(Transport::CMA, 300);
    assert!(by_rings < 5 * by_sockets + Duration::from_secs(5), "{by_rings:?}, by sockets {by_sockets:?}");
}
