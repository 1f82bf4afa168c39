//! Engines of processes of one host, which read each other's memory: what arrives, and what does not when one of them is
//! killed, stopped, closed, or forbidden to read.
//!
//! The other processes are this test binary, started again: see [`a_process_of_the_tests_below`].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use kvlane_fabric::{
    Access, Address, Descriptor, Engine, EngineOptions, Failure, Handle, Op, Options, Pages, PathStatus,
    PeerId, Pieces, Place, Run, Transfer, Transport,
};

mod support;

use support::{MIB, Memory, PATIENCE, Process, Random, numbers, play, say, settled};

/// How long a transfer may take to end whose peer is gone.
const SOON: Duration = Duration::from_secs(5);
const CANARY: u8 = 0x55;
/// Of memory that no transfer has any more: nobody is to see it.
const POISON: u8 = 0xee;
/// The counter that transfers name.
const COUNTER: u32 = 3;

/// An engine with one region.
struct Side {
    engine: Engine,
    region: u32,
    memory: Memory,
}

/// Somebody's region, as an engine knows it.
#[derive(Clone, Copy)]
struct Peer {
    id: PeerId,
    region: u32,
}

impl Side {
    fn new(bytes: usize, options: EngineOptions) -> Side {
        let engine = Engine::new(options).unwrap();
        let memory = Memory::new(bytes);
        let mut side = Side { engine, region: 0, memory };
        side.register();
        side
    }

    fn of(bytes: usize) -> Side {
        Side::new(bytes, EngineOptions::default())
    }

    fn register(&mut self) {
        let Memory { base, len } = self.memory;
        // SAFETY: the engine is dropped before its memory, as the first field.
        self.region = unsafe { self.engine.register(base, len as u64, Access::ReadWrite) };
    }

    fn descriptor(&self) -> Descriptor {
        self.engine.describe().unwrap()
    }

    fn meet(&self, descriptor: &Descriptor) -> Peer {
        Peer { id: self.engine.connect(descriptor).unwrap(), region: descriptor.regions[0].number }
    }

    fn run(&self, peer: Peer, local: usize, remote: usize, len: usize) -> Run {
        let local = Place { region: self.region, offset: local as u64 };
        Run { local, remote: Place { region: peer.region, offset: remote as u64 }, len: len as u64 }
    }

    fn begin(&self, peer: Peer, op: Op, runs: Vec<Run>) -> Handle {
        let transfer = Transfer { op, ..Transfer::write(Pieces::Runs(runs)) };
        self.engine.begin(peer.id, transfer).unwrap()
    }

    /// The same bytes on both sides.
    fn write(&self, peer: Peer, at: usize, len: usize) -> Handle {
        self.begin(peer, Op::Write, vec![self.run(peer, at, at, len)])
    }

    fn read(&self, peer: Peer, at: usize, len: usize) -> Handle {
        self.begin(peer, Op::Read, vec![self.run(peer, at, at, len)])
    }

    /// One transfer that moves all bytes again and again, in order, so that it takes seconds.
    fn long(&self, peer: Peer, op: Op) -> Handle {
        let all = self.run(peer, 0, 0, self.memory.len);
        self.begin(peer, op, vec![all; 128])
    }

    fn path(&self, peer: Peer) -> PathStatus {
        self.engine.paths(peer.id).remove(0)
    }

    /// Waits until the peer is met, and by cma.
    fn is_neighbour(&self, peer: Peer) {
        self.reach(peer);
        assert_eq!((self.path(peer).transport, self.path(peer).fallback), (Transport::Cma, None));
    }

    /// Waits until a peer takes something, also one that was lost, or could not be met in time on a busy machine.
    fn reach(&self, peer: Peer) {
        let begun = Instant::now();
        while self.write(peer, 0, 1).wait(Some(PATIENCE)) != Some(Ok(())) {
            assert!(begun.elapsed() < PATIENCE, "the peer stays lost");
            // Nobody tells when a peer is there again.
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn done(handle: &Handle) {
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Ok(())));
}

/// A transfer fails so, soon, and remains so.
fn lost(handle: &Handle) {
    let begun = Instant::now();
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Err(Failure::PeerLost)));
    assert!(begun.elapsed() < SOON, "after {:?}", begun.elapsed());
    assert_eq!(handle.outcome(), Some(Err(Failure::PeerLost)), "it is over only once");
}

fn impatient() -> EngineOptions {
    let transfers = Options { peer_patience: Duration::from_millis(500), ..Options::default() };
    EngineOptions { transfers, ..EngineOptions::default() }
}

// ---- Other processes ----

/// What another process does, and what it answers.
struct Role {
    side: Side,
    generation: u32,
    peer: Option<Peer>,
    transfer: Option<Handle>,
    /// Small ones beside the first.
    others: Memory,
}

/// No test: started with its part in the environment, this owns an engine, obeys the lines that it is told, and
/// answers each with one.
#[test]
fn a_process_of_the_tests_below() {
    play(Role::new, Role::obey);
}

impl Role {
    /// `setup`: "tcp" for nothing else, "forbidden" if it may read no memory of others, "no-memfd" if it cannot make rings,
    /// "no-getfd" if it cannot take those of others.
    fn new(bytes: usize, setup: &str) -> Role {
        match setup {
            "forbidden" => forbid_process_vm(),
            "no-memfd" => forbid(libc::SYS_memfd_create, libc::SYS_memfd_create),
            "no-getfd" => forbid(libc::SYS_pidfd_getfd, libc::SYS_pidfd_getfd),
            _ => {}
        }
        let transport = (setup == "tcp").then_some(Transport::Tcp);
        let side = Side::new(bytes, EngineOptions { transport, ..EngineOptions::default() });
        let generation = side.engine.open_counter(COUNTER);
        Role { side, generation, peer: None, transfer: None, others: Memory::new(MIB) }
    }

    fn obey(&mut self, what: &str, rest: &[&str]) -> String {
        let number = |index: usize| rest[index].parse::<usize>().unwrap();
        let is_so = |is_so: bool, else_say: String| if is_so { "done".into() } else { else_say };
        let Side { engine, region, memory } = &self.side;
        match what {
            "describe" => return self.side.descriptor().to_text().unwrap(),
            "fill" => memory.fill(number(0), number(1), number(2) as u8),
            "scribble" => memory.put(&scribbled(number(0) as u64, memory.len)),
            "await" => memory.wait_for(number(0)),
            "check" => {
                let found = memory.other_than(number(0), number(1), number(2) as u8);
                return is_so(found.is_none(), format!("{found:?} is another byte"));
            }
            "absent" => {
                let found = memory.find(number(0) as u8);
                return is_so(found.is_none(), format!("{found:?} is that byte"));
            }
            "expect" => return self.expect(rest[0], number(1) as u64, number(2) as u64),
            "unregister" => engine.unregister(*region).unwrap(),
            "register" => self.side.register(),
            "revoke" => return self.revoke(Duration::from_micros(number(0) as u64)),
            "meet" => self.peer = Some(self.side.meet(&rest[0].parse().unwrap())),
            "write" => done(&self.side.write(self.peer.unwrap(), number(0), number(1))),
            "disconnect" => engine.disconnect(self.peer.unwrap().id),
            "read" => done(&self.side.read(self.peer.unwrap(), number(0), number(1))),
            "write-on" => {
                self.transfer = Some(self.side.long(self.peer.unwrap(), Op::Write));
            }
            "path" => {
                let path = self.side.path(self.peer.unwrap());
                return format!("{} {}", path.transport.name(), path.fallback.unwrap_or_default());
            }
            "no-rings" => return format!("{:?}", self.side.path(self.peer.unwrap()).no_rings),
            "without-rings" => return engine.connections_without_rings().to_string(),
            "outcome" => return format!("{:?}", self.transfer.as_ref().unwrap().outcome()),
            "lost" => lost(self.transfer.as_ref().unwrap()),
            "forbid" => forbid_process_vm(),
            "end-first-thread" => end_first_thread(),
            "close" => engine.close(),
            "reopen" => self.side = Side::of(memory.len),
            "secret" => {
                self.others.fill(0, self.others.len, number(0) as u8);
                return self.others.base.addr().to_string();
            }
            "regions" => {
                // Each is a byte of the others.
                for at in 0..number(0) {
                    // SAFETY: the engine goes before the memory: it is a field before it.
                    unsafe { engine.register(self.others.at(at, 1), 1, Access::ReadWrite) };
                }
            }
            "cycle" => return self.cycle(&rest[0].parse().unwrap(), number(1)),
            "count" => return numbers(settled(None)),
            "recount" => return numbers(settled(Some([number(0), number(1), number(2)]))),
            _ => panic!("{what}?"),
        }
        "done".into()
    }

    /// Says that it is ready; then, when so many transfers were counted, whether all bytes are there, and no others.
    fn expect(&self, shape: &str, seed: u64, count: u64) -> String {
        let Side { engine, memory, .. } = &self.side;
        memory.fill(0, memory.len, CANARY);
        let image = image(shape, seed, memory.len);
        say("ready");
        let is_counted = engine.wait_count(COUNTER, self.generation, count, Some(PATIENCE));
        let is_right = memory.bytes(0, memory.len) == image;
        match (is_counted, is_right, engine.count(COUNTER, self.generation)) {
            (true, true, counted) if counted == count => "done".into(),
            other => format!("counted, right, count: {other:?}"),
        }
    }

    /// Gives the memory back after this time, and uses it otherwise at once. Whether it had it for itself then.
    fn revoke(&self, after: Duration) -> String {
        let Side { engine, region, memory } = &self.side;
        let begun = Instant::now();
        while begun.elapsed() < after {
            std::thread::yield_now();
        }
        engine.unregister(*region).unwrap();
        for _ in 0..5 {
            memory.fill(0, memory.len, CANARY);
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_micros(300) {
                std::thread::yield_now();
            }
            if let Some(at) = memory.other_than(0, memory.len, CANARY) {
                return format!("byte {at} was written to {}", memory.byte(at));
            }
        }
        "done".into()
    }

    /// Connects an engine to one of another process, moves something both ways and ends it, so many times. Answers what
    /// is open soon after the beginning, and at the end.
    fn cycle(&self, descriptor: &Descriptor, rounds: usize) -> String {
        const WARM: usize = 10;
        let mut before = [0; 3];
        for round in 0..WARM + rounds {
            if round == WARM {
                before = settled(None);
            }
            let goes = Side::of(MIB);
            let peer = goes.meet(descriptor);
            goes.is_neighbour(peer);
            done(&goes.write(peer, 0, MIB));
            done(&goes.read(peer, 0, MIB));
            if round % 2 == 0 {
                goes.engine.disconnect(peer.id);
            }
        }
        format!("{} {}", numbers(before), numbers(settled(Some(before))))
    }
}

/// From now on this process gets EPERM where it would read or write the memory of another one.
fn forbid_process_vm() {
    forbid(libc::SYS_process_vm_readv, libc::SYS_process_vm_writev);
}

/// From now on this process gets EPERM for two system calls.
fn forbid(one: libc::c_long, other: libc::c_long) {
    let step = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let is =
        |call: libc::c_long, jt: u8| step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, jt, 0, call as u32);
    let answer = |what: u32| step(libc::BPF_RET | libc::BPF_K, 0, 0, what);
    let mut filter = [
        // The call's number, the first word of what a filter sees.
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        is(one, 2),
        is(other, 1),
        answer(libc::SECCOMP_RET_ALLOW),
        answer(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: it takes numbers.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    let (mode, flags) = (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_TSYNC);
    // SAFETY: the filter is read only during the call.
    let set = unsafe { libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

/// From now on whoever asks for this process by its id finds a thread that has ended, although others go on.
fn end_first_thread() {
    extern "C" fn end(_: libc::c_int) {
        // SAFETY: it ends this thread only, which does nothing any more.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
    let end: extern "C" fn(libc::c_int) = end;
    let first = std::process::id() as libc::pid_t;
    // SAFETY: what handles the signal makes one system call and touches nothing.
    unsafe { libc::signal(libc::SIGUSR1, end as libc::sighandler_t) };
    // SAFETY: it takes numbers.
    assert_eq!(unsafe { libc::syscall(libc::SYS_tgkill, first, first, libc::SIGUSR1) }, 0);
    let begun = Instant::now();
    let has_ended = || std::fs::read_to_string("/proc/self/stat").unwrap().contains(") Z ");
    while !has_ended() {
        assert!(begun.elapsed() < PATIENCE, "the first thread does not end");
        std::thread::yield_now();
    }
}

// ---- Bytes ----

/// Bytes of both sides' regions.
const REGION: usize = 22 * MIB;
const PAGE: usize = 4096;
const PAGES: usize = 4096;

/// What moves, for both processes to know: from where, to where, how much.
fn shape(name: &str) -> Vec<(usize, usize, usize)> {
    let mut random = Random(0x1234_5678_9abc_def1);
    match name.parse::<usize>() {
        Ok(len) => vec![(1_001, 4_099, len)],
        // Two halves that change places, each in a few pieces.
        Err(_) if name == "halves" => {
            let piece = |half: usize, at: usize, len: usize| {
                (half * 6 * MIB + at, (1 - half) * 6 * MIB + 77 * (1 + half) + at, len)
            };
            let cuts = [0, 1, 4_096, 70_001, MIB, 3 * MIB + 5, 4 * MIB, 5 * MIB];
            let cut = |half: usize| cuts.windows(2).map(move |cut| piece(half, cut[0], cut[1] - cut[0]));
            [0, 1].into_iter().flat_map(cut).rev().collect()
        }
        Err(_) if name == "pages" => {
            let slots = REGION / PAGE;
            let (from, to) = (random.order(slots), random.order(slots));
            from.into_iter().zip(to).take(PAGES).map(|(from, to)| (from * PAGE, to * PAGE, PAGE)).collect()
        }
        Err(_) => {
            let (count, slot) = (100_000, 220);
            let (from, to) = (random.order(count), random.order(count));
            let piece = |(from, to): (usize, usize)| (from * slot, to * slot + 13, 1 + from * 7 % 200);
            from.into_iter().zip(to).map(piece).collect()
        }
    }
}

/// Bytes that tell where they are from.
fn scribbled(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Random(seed);
    let words: Vec<u64> = (0..len.div_ceil(8)).map(|_| random.word()).collect();
    // SAFETY: the words have at least so many bytes, which may be anything.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast::<u8>(), len) }.to_vec()
}

/// How memory looks that was full of canaries, and got the bytes of a shape.
fn image(name: &str, seed: u64, len: usize) -> Vec<u8> {
    let (source, mut image) = (scribbled(seed, len), vec![CANARY; len]);
    for (from, to, len) in shape(name) {
        image[to..to + len].copy_from_slice(&source[from..from + len]);
    }
    image
}

/// A shape of this side and the peer's.
fn pieces(here: &Side, peer: Peer, name: &str, op: Op) -> Pieces {
    let places = shape(name).into_iter().map(|(from, to, len)| match op {
        Op::Write => (from, to, len),
        Op::Read => (to, from, len),
    });
    if name != "pages" {
        return Pieces::Runs(places.map(|(local, remote, len)| here.run(peer, local, remote, len)).collect());
    }
    let (local, remote): (Vec<u32>, Vec<u32>) =
        places.map(|(local, remote, _)| ((local / PAGE) as u32, (remote / PAGE) as u32)).unzip();
    let pages = |region: u32, indices: Vec<u32>| Pages {
        region,
        offset: 0,
        stride: PAGE as u64,
        indices: indices.into(),
    };
    Pieces::Paged {
        page_bytes: PAGE as u64,
        local: pages(here.region, local),
        remote: pages(peer.region, remote),
    }
}

#[test]
fn bytes_of_any_shape_arrive_both_ways_and_are_counted_once_when_they_are_there() {
    let here = Side::of(REGION);
    let mut there = Process::new(REGION);
    let peer = here.meet(&there.descriptor());
    here.is_neighbour(peer);
    let sizes = [0, 1, 4095, 4096, 8191, 8193, 16_385, MIB + 3].map(|size| size.to_string());
    let names = sizes.iter().map(String::as_str).chain(["halves", "pages", "pieces"]);
    let mut counted = 0;
    for (seed, name) in (1..).zip(names) {
        for op in [Op::Write, Op::Read] {
            counted += 1;
            let seed = 2 * seed + u64::from(op == Op::Read);
            let begin = || {
                let transfer = Transfer {
                    op,
                    immediate: Some((COUNTER, 0)),
                    ..Transfer::write(pieces(&here, peer, name, op))
                };
                here.engine.begin(peer.id, transfer).unwrap()
            };
            match op {
                Op::Write => {
                    here.memory.put(&scribbled(seed, REGION));
                    assert_eq!(there.ask(&format!("expect {name} {seed} {counted}")), "ready");
                    let handle = begin();
                    assert_eq!(there.hear(), "done", "a write of {name}");
                    done(&handle);
                }
                Op::Read => {
                    there.order(&format!("scribble {seed}"));
                    here.memory.fill(0, REGION, CANARY);
                    done(&begin());
                    let is_right = here.memory.bytes(0, REGION) == image(name, seed, REGION);
                    assert!(is_right, "a read of {name}");
                }
            }
        }
    }
    // What is counted late would be counted by now.
    here.is_neighbour(peer);
    assert_eq!(there.ask(&format!("expect 0 1 {counted}")), "ready");
    assert_eq!(there.hear(), "done", "each is counted once");
}

// ---- Processes that are killed ----

const LARGE: usize = 16 * MIB;

/// Again and again the other process is killed, each time when the transfers have come another way.
fn killed_in_the_middle(op: Op) {
    const ROUNDS: usize = 20;
    let mut random = Random(0x0f1e_2d3c_4b5a_6978);
    let mut here = Side::new(LARGE, impatient());
    let mailbox = Side::of(PAGE);
    for round in 0..ROUNDS {
        let mut there = Process::new(LARGE);
        let descriptor = there.descriptor();
        // A process that was started again is reached.
        mailbox.is_neighbour(mailbox.meet(&descriptor));
        if round > 0 {
            assert_eq!(here.memory.other_than(0, LARGE, CANARY), None, "late bytes of round {round}");
            here.register();
        }
        let peer = here.meet(&descriptor);
        here.is_neighbour(peer);
        here.memory.fill(0, LARGE, 7 * u8::from(op == Op::Write));
        there.order(&format!("fill 0 {LARGE} {}", 7 * u8::from(op == Op::Read)));
        let at = random.below(LARGE);
        let handles: Vec<Handle> = (0..3).map(|_| here.long(peer, op)).collect();
        match op {
            Op::Write => there.order(&format!("await {at}")),
            Op::Read => here.memory.wait_for(at),
        }
        assert_eq!(here.path(peer).transport, Transport::Cma);
        there.kill();
        handles.iter().for_each(lost);
        here.engine.disconnect(peer.id);
        here.engine.unregister(here.region).unwrap();
        here.memory.fill(0, LARGE, CANARY);
    }
}

#[test]
fn writes_to_a_process_that_is_killed_while_it_takes_them_are_lost_and_the_next_process_is_reached() {
    killed_in_the_middle(Op::Write);
}

#[test]
fn reads_from_a_process_that_is_killed_meanwhile_are_lost_and_the_next_process_is_reached() {
    killed_in_the_middle(Op::Read);
}

#[test]
fn a_process_whose_writers_are_killed_serves_others_and_gets_its_memory_back() {
    let mut random = Random(0x1f2e_3d4c_5b6a_7988);
    let mut here = Side::of(LARGE);
    let mut witness = Process::new(LARGE);
    for _ in 0..20 {
        let mut doomed = Process::new(LARGE);
        here.memory.fill(0, LARGE, 0);
        let descriptor = here.descriptor().to_text().unwrap();
        witness.order(&format!("meet {descriptor}"));
        witness.order("write 0 1");
        doomed.order(&format!("fill 0 {LARGE} 7"));
        doomed.order(&format!("meet {descriptor}"));
        doomed.order("write-on");
        here.memory.wait_for(random.below(LARGE));
        doomed.kill();
        witness.order("read 0 1");
        here.engine.unregister(here.region).unwrap();
        here.memory.fill(0, LARGE, CANARY);
        here.register();
        witness.order(&format!("meet {}", here.descriptor().to_text().unwrap()));
        witness.order(&format!("read 0 {LARGE}"));
        witness.order(&format!("check 0 {LARGE} {CANARY}"));
        assert_eq!(here.memory.other_than(0, LARGE, CANARY), None, "a late write");
    }
}

// ---- Processes that are stopped ----

/// Longer than a connection may be silent, and than a connection's lease.
const STOPPED: Duration = Duration::from_secs(4);

#[derive(Clone, Copy, PartialEq)]
enum Stopped {
    /// Before the write begins, which has a time limit.
    Before,
    /// While it takes the bytes of the write, which is cancelled then.
    Amid,
}

/// A write to a process that was stopped: it may be about to read our memory when it goes on.
fn written_to_a_stopped_process(stopped: Stopped) -> (Side, Peer, Process, Handle, Failure) {
    let here = Side::new(LARGE, impatient());
    here.memory.fill(0, LARGE, 7);
    let mut there = Process::new(LARGE);
    let peer = here.meet(&there.descriptor());
    here.is_neighbour(peer);
    there.order("fill 0 1 0");
    let (handle, failure) = match stopped {
        Stopped::Before => {
            there.pause();
            let pieces = Pieces::Contiguous(here.run(peer, 0, 0, LARGE));
            let timeout = Some(Duration::from_millis(300));
            let transfer = Transfer { timeout, ..Transfer::write(pieces) };
            (here.engine.begin(peer.id, transfer).unwrap(), Failure::DeadlineExceeded)
        }
        Stopped::Amid => {
            let handle = here.long(peer, Op::Write);
            there.order(&format!("await {}", MIB + 12_345));
            there.pause();
            handle.cancel();
            (handle, Failure::Cancelled)
        }
    };
    assert_eq!(handle.wait(Some(STOPPED)), None, "it is over while its memory may still be read");
    (here, peer, there, handle, failure)
}

fn a_write_to_a_stopped_process_is_over_when_that_goes_on(stopped: Stopped) {
    let (here, peer, mut there, handle, failure) = written_to_a_stopped_process(stopped);
    there.resume();
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Err(failure)));
    here.memory.fill(0, LARGE, POISON);
    here.memory.fill(0, 1, 7);
    here.reach(peer);
    assert_eq!(here.path(peer).transport, Transport::Cma);
    for _ in 0..100 {
        there.order(&format!("absent {POISON}"));
        done(&here.write(peer, 0, 1));
    }
    assert_eq!(handle.outcome(), Some(Err(failure)), "it is over only once");
}

#[test]
fn a_write_to_a_stopped_process_that_is_out_of_time_is_over_when_that_goes_on() {
    a_write_to_a_stopped_process_is_over_when_that_goes_on(Stopped::Before);
}

#[test]
fn a_cancelled_write_to_a_process_that_was_stopped_amid_it_is_over_when_that_goes_on() {
    a_write_to_a_stopped_process_is_over_when_that_goes_on(Stopped::Amid);
}

#[test]
fn a_write_to_a_stopped_process_is_over_when_that_is_killed() {
    for stopped in [Stopped::Before, Stopped::Amid] {
        let (mut here, _, mut there, handle, failure) = written_to_a_stopped_process(stopped);
        there.kill();
        assert_eq!(handle.wait(Some(SOON)), Some(Err(failure)));
        here.engine.unregister(here.region).unwrap();
        here.register();
    }
}

#[test]
fn a_stopped_process_is_read_until_it_has_been_silent_for_too_long() {
    let here = Side::new(LARGE, impatient());
    let mut there = Process::new(LARGE);
    there.order(&format!("fill 0 {LARGE} 9"));
    let peer = here.meet(&there.descriptor());
    here.is_neighbour(peer);
    there.order("fill 0 1 9");
    there.pause();
    done(&here.read(peer, 0, LARGE));
    assert_eq!(here.memory.other_than(0, LARGE, 9), None);
    let begun = Instant::now();
    while here.path(peer).is_up {
        assert!(begun.elapsed() < PATIENCE, "it stays up");
        std::thread::yield_now();
    }
    here.memory.fill(0, LARGE, CANARY);
    lost(&here.read(peer, 0, LARGE));
    assert_eq!(here.memory.other_than(0, LARGE, CANARY), None, "of a transfer that failed");
    there.resume();
    here.reach(peer);
    done(&here.read(peer, 1, LARGE - 1));
    assert_eq!(here.memory.other_than(1, LARGE - 1, 9), None);
}

// ---- Memory that is given back ----

#[test]
fn memory_that_is_given_back_is_not_written_and_what_is_read_of_it_does_not_count() {
    const BYTES: usize = 2 * MIB;
    const ROUNDS: usize = 60;
    const BEFORE: u8 = 0x11;
    const WRITTEN: u8 = 0x22;
    let mut random = Random(0x5a5a_1234_9876_0f0f);
    let here = Side::new(8 * BYTES, EngineOptions::default());
    here.memory.fill(0, BYTES, WRITTEN);
    let mut there = Process::new(BYTES);
    let peer = here.meet(&there.descriptor());
    here.is_neighbour(peer);
    there.order("unregister");
    let mut outcomes = [0; 2];
    for round in 0..ROUNDS {
        there.order(&format!("fill 0 {BYTES} {BEFORE}"));
        there.order("register");
        here.engine.update(peer.id, &there.descriptor()).unwrap();
        there.tell(&format!("revoke {}", random.below(4_000)));
        let begin = |slot: usize| match slot {
            0 => here.write(peer, 0, BYTES),
            slot => here.begin(peer, Op::Read, vec![here.run(peer, slot * BYTES, 0, BYTES)]),
        };
        let mut handles: Vec<(usize, Handle)> = (0..4).map(|slot| (slot, begin(slot))).collect();
        let is_right = |byte: &u8| matches!(*byte, BEFORE | WRITTEN);
        let mut revoked = None;
        while !handles.is_empty() {
            let (slot, handle) = handles.remove(0);
            match handle.wait(Some(PATIENCE)) {
                Some(Ok(())) if slot == 0 => outcomes[0] += 1,
                Some(Ok(())) => {
                    outcomes[0] += 1;
                    let strange = here.memory.find_other(slot * BYTES, BYTES, is_right);
                    assert_eq!(strange, None, "read after it was given back, in round {round}");
                }
                Some(Err(Failure::Refused)) => outcomes[1] += 1,
                other => panic!("{other:?} in round {round}"),
            }
            revoked = revoked.or_else(|| there.has_said());
            if revoked.is_none() {
                handles.push((slot, begin(slot)));
            }
        }
        assert_eq!(revoked.as_deref(), Some("done"), "in round {round}");
        handles.extend((0..4).map(|slot| (slot, begin(slot))));
        for (_, handle) in handles {
            assert_eq!(
                handle.wait(Some(PATIENCE)),
                Some(Err(Failure::Refused)),
                "begun after it was given back"
            );
        }
    }
    assert!(outcomes.iter().all(|count| *count > ROUNDS), "done, refused: {outcomes:?}");
    assert_eq!(here.path(peer).transport, Transport::Cma);
    assert_eq!(here.path(peer).trouble, None, "all of it over one connection");
}

// ---- Where memory cannot be read ----

#[test]
fn what_may_not_be_read_goes_by_tcp_and_the_path_says_why() {
    let here = Side::of(LARGE);
    here.memory.put(&scribbled(5, LARGE));
    let moves = |there: &mut Process, peer: Peer| {
        there.order(&format!("fill 0 {LARGE} 0"));
        done(&here.write(peer, 0, 5 * MIB));
        done(&here.begin(peer, Op::Read, vec![here.run(peer, 6 * MIB, 0, 5 * MIB)]));
        assert!(here.memory.bytes(0, 5 * MIB) == here.memory.bytes(6 * MIB, 5 * MIB), "other bytes");
        let PathStatus { transport, fallback, .. } = here.path(peer);
        assert_eq!(transport, Transport::Tcp);
        fallback
    };
    let mut forbidden = Process::with(LARGE, "forbidden");
    let peer = here.meet(&forbidden.descriptor());
    let why = moves(&mut forbidden, peer).unwrap();
    assert!(why.contains("the peer may not read this process's memory"), "{why}");
    let mut by_tcp = Process::with(LARGE, "tcp");
    let peer = here.meet(&by_tcp.descriptor());
    assert_eq!(moves(&mut by_tcp, peer).as_deref(), Some("the peer goes by TCP only"));
    // The other way: it is not the peer that may not.
    forbidden.order(&format!("meet {}", here.descriptor().to_text().unwrap()));
    forbidden.order(&format!("fill 0 {LARGE} 6"));
    forbidden.order(&format!("write 0 {}", 5 * MIB));
    assert_eq!(here.memory.other_than(0, 5 * MIB, 6), None);
    let why = forbidden.ask("path");
    let is_right = why.starts_with("tcp this process may not read the peer's memory: ");
    assert!(is_right && why.contains("seccomp"), "{why}");
}

/// Bytes go by cma as ever. That the rest goes through the socket was said in the log only.
#[test]
fn where_rings_cannot_be_had_the_path_says_why_and_it_is_counted() {
    let here = Side::of(LARGE);
    here.memory.fill(0, LARGE, 7);
    for (setup, is_asked, why) in [
        ("no-getfd", true, "the peer cannot use our shared memory"),
        ("no-memfd", false, "this process cannot share memory: Operation not permitted"),
    ] {
        let mut there = Process::with(LARGE, setup);
        let before = here.engine.connections_without_rings();
        let peer = here.meet(&there.descriptor());
        done(&here.write(peer, 0, 64));
        done(&here.write(peer, 64, LARGE - 64));
        there.order(&format!("check 0 {LARGE} 7"));
        let PathStatus { transport, fallback, no_rings, .. } = here.path(peer);
        assert_eq!((transport, fallback), (Transport::Cma, None));
        assert_eq!(no_rings.is_some_and(|no_rings| no_rings.contains(why)), is_asked, "{setup}");
        assert_eq!(here.engine.connections_without_rings() - before, u64::from(is_asked));
        assert_eq!(
            there.ask("without-rings"),
            u64::from(is_asked).to_string(),
            "{setup}: it took none of ours"
        );
        // And the other way.
        there.order(&format!("meet {}", here.descriptor().to_text().unwrap()));
        there.order("write 0 64");
        there.order(&format!("read 64 {}", LARGE - 64));
        let says = there.ask("no-rings");
        assert_eq!(says.contains(why), !is_asked, "{setup}: {says}");
    }
}

#[test]
fn a_process_that_may_read_others_no_more_goes_on_by_tcp() {
    let mut here = Side::of(LARGE);
    here.memory.fill(0, LARGE, 9);
    let mut forbidden = Process::new(LARGE);
    forbidden.order(&format!("meet {}", here.descriptor().to_text().unwrap()));
    forbidden.order("read 0 4096");
    assert_eq!(forbidden.ask("path").trim(), "cma");
    forbidden.order("forbid");
    forbidden.order(&format!("read 0 {LARGE}"));
    forbidden.order(&format!("check 0 {LARGE} 9"));
    assert!(forbidden.ask("path").starts_with("tcp this process may not read"));
    // What it asks of us, it cannot do itself any more.
    let peer = here.meet(&forbidden.descriptor());
    done(&here.write(peer, 0, LARGE));
    here.engine.unregister(here.region).unwrap();
    here.register();
}

/// By its id it looks as if it were gone. That does not keep its other threads from reading.
#[test]
fn a_write_to_a_stopped_process_whose_first_thread_has_ended_is_over_when_that_goes_on() {
    let here = Side::new(LARGE, impatient());
    here.memory.fill(0, LARGE, 7);
    let mut there = Process::new(LARGE);
    let peer = here.meet(&there.descriptor());
    here.is_neighbour(peer);
    there.order("end-first-thread");
    there.order("fill 0 1 0");
    let handle = here.long(peer, Op::Write);
    there.order(&format!("await {}", MIB + 12_345));
    there.pause();
    handle.cancel();
    assert_eq!(handle.wait(Some(STOPPED)), None, "it is over while its memory may still be read");
    there.resume();
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Err(Failure::Cancelled)));
    here.memory.fill(0, LARGE, POISON);
    here.memory.fill(0, 1, 7);
    here.reach(peer);
    done(&here.read(peer, 0, LARGE));
    assert_eq!(here.memory.find(POISON), None);
    assert_eq!(here.path(peer).transport, Transport::Tcp, "it cannot be read any more by its id");
}

/// It cannot see any more whether the peer is there. That does not keep the peer from reading it.
#[test]
fn a_write_of_a_process_that_may_read_others_no_more_is_not_over_while_the_peer_is_stopped() {
    let (mut writer, mut taker) = (Process::new(LARGE), Process::new(LARGE));
    writer.order(&format!("meet {}", taker.descriptor().to_text().unwrap()));
    writer.order("write 0 1");
    writer.order(&format!("fill 0 {LARGE} 7"));
    writer.order("write-on");
    taker.order(&format!("await {}", MIB + 12_345));
    taker.pause();
    writer.order("forbid");
    writer.order("disconnect");
    std::thread::sleep(STOPPED);
    assert_eq!(writer.ask("outcome"), "None", "over while its memory may still be read");
    taker.resume();
    writer.order("lost");
}

#[test]
fn who_wants_cma_only_does_not_reach_those_without_it_and_hears_why() {
    let here = Side::new(MIB, EngineOptions { transport: Some(Transport::Cma), ..impatient() });
    for (setup, why) in [("forbidden", "may not read"), ("tcp", "the peer goes by TCP only")] {
        let mut there = Process::with(MIB, setup);
        let peer = here.meet(&there.descriptor());
        lost(&here.write(peer, 0, MIB));
        let PathStatus { is_up, trouble, .. } = here.path(peer);
        let trouble = trouble.unwrap();
        assert!(!is_up && trouble.contains("cma is required") && trouble.contains(why), "{trouble}");
        there.order(&format!("check 0 {MIB} 0"));
    }
    let mut there = Process::new(MIB);
    here.is_neighbour(here.meet(&there.descriptor()));
}

#[test]
fn who_wants_tcp_only_gets_it() {
    let options = EngineOptions { transport: Some(Transport::Tcp), ..EngineOptions::default() };
    let here = Side::new(MIB, options);
    here.memory.fill(0, MIB, 6);
    let mut there = Process::new(MIB);
    let peer = here.meet(&there.descriptor());
    done(&here.write(peer, 0, MIB));
    there.order(&format!("check 0 {MIB} 6"));
    assert_eq!((here.path(peer).transport, here.path(peer).fallback), (Transport::Tcp, None));
}

// ---- Transfers that are given up ----

/// Once each is over, its memory is filled with what the other side, or this one, is not to see there.
fn what_is_given_up_leaves_memory_alone(transfers: Options) {
    const SLOT: usize = 2 * MIB;
    const SLOTS: usize = 32;
    const THEIRS: u8 = 0x33;
    let mut random = Random(0x7777_1234_aaaa_0001);
    let here =
        Side::new(SLOTS * SLOT, EngineOptions { transfers, connections: 2, ..EngineOptions::default() });
    let mut there = Process::new(SLOTS * SLOT);
    let peer = here.meet(&there.descriptor());
    here.is_neighbour(peer);
    let mut outcomes = [0; 2];
    for round in 0..12 {
        here.memory.fill(0, SLOTS * SLOT, 7);
        there.order(&format!("fill 0 {} {THEIRS}", SLOTS * SLOT));
        let mut under_way: Vec<(Op, usize, Handle)> = Vec::new();
        let mut end = |(op, slot, handle): (Op, usize, Handle)| {
            match handle.wait(Some(PATIENCE)) {
                Some(Ok(())) => outcomes[0] += 1,
                Some(Err(Failure::Cancelled)) => outcomes[1] += 1,
                other => panic!("{other:?} in round {round}"),
            }
            // The memory is ours again.
            here.memory.fill(slot * SLOT, SLOT, if op == Op::Write { POISON } else { CANARY });
        };
        let slots = random.order(SLOTS);
        for slot in &slots {
            let op = if slot % 2 == 0 { Op::Write } else { Op::Read };
            let at = slot * SLOT;
            // In a few pieces of any size.
            let mut cuts: Vec<usize> = (0..6).map(|_| random.below(SLOT)).chain([0, SLOT]).collect();
            cuts.sort_unstable();
            let run = |cut: &[usize]| here.run(peer, at + cut[0], at + cut[0], cut[1] - cut[0]);
            under_way.push((op, *slot, here.begin(peer, op, cuts.windows(2).map(run).collect())));
            let begun = Instant::now();
            let pause = Duration::from_micros(random.below(1_500) as u64);
            while begun.elapsed() < pause {
                std::thread::yield_now();
            }
            if random.below(8) > 0 {
                let (op, slot, handle) = under_way.swap_remove(random.below(under_way.len()));
                handle.cancel();
                end((op, slot, handle));
            }
        }
        under_way.iter().for_each(|(_, _, handle)| handle.cancel());
        under_way.into_iter().for_each(end);
        assert_eq!(
            there.ask(&format!("absent {POISON}")),
            "done",
            "a late read of our memory in round {round}"
        );
        for slot in slots.iter().filter(|slot| **slot % 2 == 1) {
            let touched = here.memory.other_than(slot * SLOT, SLOT, CANARY);
            assert_eq!(touched, None, "a late write in round {round}");
        }
    }
    assert!(outcomes.iter().all(|count| *count > 20), "done, cancelled: {outcomes:?}");
    assert_eq!(here.path(peer).transport, Transport::Cma);
}

#[test]
fn what_is_given_up_leaves_the_memory_of_both_sides_alone_once_it_is_over() {
    what_is_given_up_leaves_memory_alone(Options { chunk_bytes: 128 << 10, ..Options::default() });
}

#[test]
fn what_is_given_up_with_its_connections_leaves_the_memory_of_both_sides_alone_once_it_is_over() {
    let (drain_patience, backoff) = (Duration::ZERO, Duration::from_millis(1));
    let transfers = Options { chunk_bytes: 128 << 10, drain_patience, backoff, ..Options::default() };
    what_is_given_up_leaves_memory_alone(transfers);
}

/// Carries connections to an engine, and of the first, while it is held, nothing that the connecting side says.
#[derive(Default)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    is_held: bool,
    /// Bytes of the first connection.
    came: usize,
    is_first_over: bool,
}

impl Gate {
    /// Before the peer; and how it is reached through this.
    fn before(descriptor: &Descriptor) -> (Arc<Gate>, Descriptor) {
        let target = String::from_utf8(descriptor.addresses[0].bytes.clone()).unwrap();
        // Reached from another address, so that what is said goes through the socket.
        let listener = TcpListener::bind("127.0.0.2:0").unwrap();
        let bytes = listener.local_addr().unwrap().to_string().into_bytes();
        let gate = Arc::new(Gate::default());
        // These threads end with the connections, and the last with the tests.
        std::thread::spawn({
            let gate = Arc::clone(&gate);
            move || {
                for (number, socket) in listener.incoming().take(1_000).map_while(Result::ok).enumerate() {
                    let Ok(other) = TcpStream::connect(&target) else { return };
                    let (mut from, mut to) = (other.try_clone().unwrap(), socket.try_clone().unwrap());
                    std::thread::spawn(move || std::io::copy(&mut from, &mut to));
                    let (gate, (give, take)) = (Arc::clone(&gate), channel::<Vec<u8>>());
                    std::thread::spawn({
                        let gate = Arc::clone(&gate);
                        move || gate.take_in(number, socket, give)
                    });
                    std::thread::spawn(move || gate.carry_on(number, take, other));
                }
            }
        });
        (gate, Descriptor { addresses: vec![Address { kind: 1, bytes }], ..descriptor.clone() })
    }

    fn take_in(&self, number: usize, mut from: TcpStream, to: Sender<Vec<u8>>) {
        let mut bytes = vec![0; 64 << 10];
        while let Ok(len @ 1..) = from.read(&mut bytes) {
            self.change(|state| state.came += if number == 0 { len } else { 0 });
            // Its end is told by the other side.
            let _ = to.send(bytes[..len].to_vec());
        }
    }

    fn carry_on(&self, number: usize, from: Receiver<Vec<u8>>, mut to: TcpStream) {
        for bytes in from {
            if number == 0 {
                self.wait(|state| !state.is_held);
            }
            // It has ended if this fails.
            let _ = to.write_all(&bytes);
        }
        // The first is left for the engine to end: an end would make it forget what it has not done yet.
        if number > 0 {
            let _ = to.shutdown(Shutdown::Write);
        }
        // Until then nobody hears what it says.
        let _ = std::io::copy(&mut to, &mut std::io::sink());
        self.change(|state| state.is_first_over |= number == 0);
    }

    fn change<T>(&self, change: impl FnOnce(&mut GateState) -> T) -> T {
        let answer = change(&mut self.state.lock().unwrap());
        self.changed.notify_all();
        answer
    }

    fn wait(&self, is_so: impl Fn(&GateState) -> bool) {
        let state = self.state.lock().unwrap();
        let waited = self.changed.wait_timeout_while(state, PATIENCE, |state| !is_so(state)).unwrap();
        assert!(!waited.1.timed_out());
    }
}

#[test]
fn what_a_slow_connection_holds_back_is_not_read_after_the_write_was_cancelled() {
    let (drain_patience, backoff) = (Duration::ZERO, Duration::from_millis(1));
    let transfers = Options { drain_patience, backoff, ..Options::default() };
    let here = Side::new(LARGE, EngineOptions { transfers, ..EngineOptions::default() });
    here.memory.fill(0, LARGE, 7);
    let mut there = Process::new(LARGE);
    let (gate, descriptor) = Gate::before(&there.descriptor());
    let peer = here.meet(&descriptor);
    here.is_neighbour(peer);
    done(&here.write(peer, 0, MIB));
    // A part of it is asked for by 64 bytes, and pings are no longer.
    let wanted = gate.change(|state| {
        state.is_held = true;
        state.came + 4 * 64
    });
    let handle = here.write(peer, 0, LARGE);
    gate.wait(|state| state.came >= wanted);
    handle.cancel();
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Err(Failure::Cancelled)));
    here.memory.fill(0, LARGE, POISON);
    gate.change(|state| state.is_held = false);
    gate.wait(|state| state.is_first_over);
    there.order(&format!("absent {POISON}"));
    here.memory.fill(0, 1, 7);
    here.reach(peer);
    there.order(&format!("absent {POISON}"));
    assert_eq!(here.path(peer).transport, Transport::Cma);
}

// ---- Engines that are closed ----

#[test]
fn what_goes_to_an_engine_that_is_closed_ends_soon_although_its_process_lives() {
    let here = Side::new(LARGE, impatient());
    here.memory.fill(0, LARGE, 7);
    let mut there = Process::new(LARGE);
    for _ in 0..5 {
        let peer = here.meet(&there.descriptor());
        here.is_neighbour(peer);
        there.order(&format!("fill 0 {LARGE} 0"));
        // What is read has nothing of what is waited for below.
        let half = here.run(peer, LARGE / 2, LARGE / 2, LARGE / 2);
        let read = here.begin(peer, Op::Read, vec![half; 256]);
        let handles = [here.long(peer, Op::Write), read, here.long(peer, Op::Write)];
        there.order(&format!("await {}", MIB + 12_345));
        there.order("close");
        for handle in &handles {
            let outcome = handle.wait(Some(SOON));
            // Some ask for memory of which the closed engine says no more than that it has none.
            assert!(matches!(outcome, Some(Err(Failure::PeerLost | Failure::Refused))), "{outcome:?}");
            assert_eq!(handle.outcome(), outcome, "it is over only once");
        }
        here.engine.disconnect(peer.id);
        there.order("reopen");
    }
}

#[test]
fn an_engine_that_is_closed_amid_its_writes_is_read_no_more_and_tells_who_waits() {
    let mut there = Process::new(LARGE);
    let descriptor = there.descriptor();
    for _ in 0..20 {
        let here = Side::new(LARGE, impatient());
        here.memory.fill(0, LARGE, 7);
        let peer = here.meet(&descriptor);
        here.is_neighbour(peer);
        there.order(&format!("fill 0 {LARGE} 0"));
        let handles: Vec<Handle> = (0..3).map(|_| here.long(peer, Op::Write)).collect();
        there.order(&format!("await {}", MIB + 12_345));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| handles[0].wait(Some(PATIENCE)));
            here.engine.close();
            here.memory.fill(0, LARGE, POISON);
            assert_eq!(waits.join().unwrap(), Some(Err(Failure::PeerLost)));
        });
        let outcomes: Vec<_> = handles.iter().map(Handle::outcome).collect();
        assert_eq!(outcomes, [Some(Err(Failure::PeerLost)); 3]);
        there.order(&format!("absent {POISON}"));
    }
}

#[test]
fn an_engine_that_is_closed_while_a_process_is_stopped_that_it_writes_to_tells_who_waits() {
    let here = Side::new(LARGE, impatient());
    let mut there = Process::new(LARGE);
    let peer = here.meet(&there.descriptor());
    here.is_neighbour(peer);
    there.order("fill 0 1 0");
    there.pause();
    let handle = here.long(peer, Op::Write);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| handle.wait(Some(PATIENCE)));
        here.engine.close();
        assert_eq!(waits.join().unwrap(), Some(Err(Failure::PeerLost)));
    });
}

// ---- Descriptors that say something else ----

/// The same, but the region lies elsewhere.
fn moved(descriptor: &Descriptor, base: u64) -> Descriptor {
    let mut descriptor = descriptor.clone();
    descriptor.regions[0].base = base;
    descriptor
}

/// What the kernel lets a process read of another, it can read; where memory lies is no secret that protects it. What
/// is written is written by its owner, who knows better.
#[test]
fn a_descriptor_of_memory_elsewhere_reads_what_is_there_and_writes_what_was_registered() {
    let here = Side::of(MIB);
    here.memory.fill(0, MIB, 7);
    let mut there = Process::new(MIB);
    let descriptor = there.descriptor();
    let elsewhere = there.ask("secret 77").parse().unwrap();
    let peer = here.meet(&moved(&descriptor, elsewhere));
    here.is_neighbour(peer);
    done(&here.write(peer, 0, MIB));
    there.order(&format!("check 0 {MIB} 7"));
    done(&here.read(peer, 0, MIB));
    assert_eq!(here.memory.other_than(0, MIB, 77), None);
}

#[test]
fn a_descriptor_of_memory_that_is_not_there_is_refused_and_the_path_stays() {
    const BYTES: usize = 4 * MIB;
    // A part of it takes more than one turn.
    let transfers = Options { chunk_bytes: BYTES as u64, ..Options::default() };
    let here = Side::new(BYTES, EngineOptions { transfers, ..EngineOptions::default() });
    let mut there = Process::new(BYTES);
    let descriptor = there.descriptor();
    let peer = here.meet(&descriptor);
    here.is_neighbour(peer);
    // Nowhere, at the end of all addresses, behind what processes have, over the end of what is there.
    let end = descriptor.regions[0].base + (BYTES - MIB) as u64;
    for base in [0, 4096, u64::MAX, u64::MAX - 4096, u64::MAX - BYTES as u64, 1 << 63, 1 << 47, end] {
        here.engine.update(peer.id, &moved(&descriptor, base)).unwrap();
        let outcome = here.read(peer, 0, BYTES).wait(Some(PATIENCE));
        assert_eq!(outcome, Some(Err(Failure::Refused)), "at {base:#x}");
    }
    here.engine.update(peer.id, &descriptor).unwrap();
    done(&here.read(peer, 0, BYTES));
    assert_eq!((here.path(peer).is_up, here.path(peer).trouble), (true, None));
}

#[test]
fn a_former_generation_is_refused_both_ways_and_the_path_stays() {
    let here = Side::of(MIB);
    let mut there = Process::new(MIB);
    let former = there.descriptor();
    let peer = here.meet(&former);
    here.is_neighbour(peer);
    there.order("unregister");
    there.order("register");
    let now = there.descriptor();
    assert_eq!(now.regions[0].number, former.regions[0].number);
    for op in [Op::Write, Op::Read] {
        let handle = here.begin(peer, op, vec![here.run(peer, 0, 0, MIB)]);
        assert_eq!(handle.wait(Some(PATIENCE)), Some(Err(Failure::Refused)), "{op:?}");
    }
    here.engine.update(peer.id, &now).unwrap();
    done(&here.write(peer, 0, MIB));
    assert_eq!((here.path(peer).is_up, here.path(peer).trouble), (true, None));
}

#[test]
fn regions_that_the_card_has_no_place_for_are_read_over_tcp() {
    const PLACES: usize = 4096;
    let here = Side::of(MIB);
    let mut there = Process::new(MIB);
    there.ask("secret 77");
    there.order(&format!("regions {}", PLACES + 1));
    let mut descriptor = there.descriptor();
    // By cma nothing would be found there: their owner finds them.
    descriptor.regions.iter_mut().for_each(|region| region.base = 4096);
    let peer = here.meet(&descriptor);
    here.is_neighbour(peer);
    let read = |number: usize| {
        let remote = Place { region: number as u32, offset: 0 };
        let local = Place { region: here.region, offset: number as u64 };
        here.begin(peer, Op::Read, vec![Run { local, remote, len: 1 }]).wait(Some(PATIENCE))
    };
    assert_eq!(read(PLACES - 1), Some(Err(Failure::Refused)));
    for number in [PLACES, PLACES + 1] {
        assert_eq!(read(number), Some(Ok(())));
        assert_eq!(here.memory.byte(number), 77);
    }
    assert_eq!(here.path(peer).transport, Transport::Cma);
}

// ---- Much at once, and often ----

#[test]
fn a_read_of_very_many_very_short_pieces_lets_others_have_their_turn() {
    const PIECES: usize = 500_000;
    let here = Side::of(2 * PIECES);
    let mut there = Process::new(2 * PIECES);
    let peer = here.meet(&there.descriptor());
    here.is_neighbour(peer);
    // No two of them continue each other.
    let runs = (0..PIECES).map(|at| here.run(peer, 2 * at, at, 1)).collect();
    let handle = here.begin(peer, Op::Read, runs);
    handle.cancel();
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Err(Failure::Cancelled)), "all of it was done at a stretch");
    here.is_neighbour(peer);
}

#[test]
fn neighbours_that_come_and_go_leave_nothing_open() {
    let rounds = std::env::var("KVLANE_TEST_ROUNDS").map_or(50, |rounds| rounds.parse().unwrap());
    let (mut stays, mut goes) = (Process::new(MIB), Process::new(PAGE));
    let descriptor = stays.descriptor().to_text().unwrap();
    let all = |text: &str| -> Vec<usize> { text.split(' ').map(|count| count.parse().unwrap()).collect() };
    let before = stays.ask("count");
    goes.tell(&format!("cycle {descriptor} {rounds}"));
    let patience = PATIENCE + Duration::from_millis(500) * rounds;
    let of_goes = all(&goes.hear_within(patience));
    let of_stays = [all(&before), all(&stays.ask(&format!("recount {before}")))].concat();
    for counts in [of_goes, of_stays] {
        let [descriptors, threads, mappings] = [0, 1, 2].map(|index| (counts[index], counts[index + 3]));
        assert!(descriptors.1 <= descriptors.0, "descriptors: {descriptors:?}");
        assert!(threads.1 <= threads.0, "threads: {threads:?}");
        // The allocator may have some more for itself, not one a round.
        assert!(mappings.1 <= mappings.0 + 16, "mappings: {mappings:?}");
    }
}
