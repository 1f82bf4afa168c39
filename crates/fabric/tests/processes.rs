//! Engines of several processes, some of which are killed, stopped or starved, and connections that break
//! between them.
//!
//! The other processes are this test binary, started again: see [`a_process_of_the_tests_below`].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::collections::VecDeque;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvlane_fabric::{
    Access, Address, Descriptor, Engine, EngineOptions, FabricError, Failure, Handle, InboxOptions,
    MESSAGE_BYTES_MAX, Op, Options, PeerId, Pieces, Place, Run, SendOptions, Transfer, Transport,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::net::sockopt::set_socket_linger;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

mod support;

use support::{MIB, Memory, PATIENCE, Process, Random, numbers, play, settled};

/// How late something may be on a busy machine.
const MARGIN: Duration = Duration::from_secs(2);
/// Silence after which an engine gives a connection up.
const SILENT: Duration = Duration::from_secs(5);
/// A part of each region, its last bytes, for small transfers beside those that a test looks at.
const MAILBOX: usize = 4096;

/// An engine with one region, a mailbox at its end.
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
    mailbox: u64,
}

impl Side {
    /// Of so many bytes and a mailbox.
    fn new(bytes: usize, options: EngineOptions) -> Side {
        let engine = Engine::new(options).unwrap();
        let memory = Memory::new(bytes + MAILBOX);
        // SAFETY: the engine is dropped first, as the first field.
        let region = unsafe { engine.register(memory.base, memory.len as u64, Access::ReadWrite) };
        Side { engine, region, memory }
    }

    fn with(bytes: usize, transfers: Options) -> Side {
        Side::new(bytes, EngineOptions { transfers, ..by_tcp() })
    }

    fn of(bytes: usize) -> Side {
        Side::with(bytes, Options::default())
    }

    fn descriptor(&self) -> Descriptor {
        self.engine.describe().unwrap()
    }

    fn meet(&self, descriptor: &Descriptor) -> Peer {
        let region = descriptor.regions[0];
        let id = self.engine.connect(descriptor).unwrap();
        Peer { id, region: region.number, mailbox: region.len - MAILBOX as u64 }
    }

    fn run(&self, peer: Peer, local: usize, remote: usize, len: usize) -> Run {
        let local = Place { region: self.region, offset: local as u64 };
        Run { local, remote: Place { region: peer.region, offset: remote as u64 }, len: len as u64 }
    }

    fn begin(&self, peer: Peer, op: Op, run: Run) -> Handle {
        let transfer = Transfer { op, ..Transfer::write(Pieces::Contiguous(run)) };
        self.engine.begin(peer.id, transfer).unwrap()
    }

    /// The same bytes on both sides.
    fn write(&self, peer: Peer, at: usize, len: usize) -> Handle {
        self.begin(peer, Op::Write, self.run(peer, at, at, len))
    }

    /// From this mailbox into the peer's.
    fn post(&self, peer: Peer) -> Handle {
        let local = self.memory.len - MAILBOX;
        self.begin(peer, Op::Write, self.run(peer, local, peer.mailbox as usize, MAILBOX))
    }

    /// Waits until a peer that was lost takes something again.
    fn reach(&self, peer: Peer) {
        let begun = Instant::now();
        while self.post(peer).wait(Some(PATIENCE)) != Some(Ok(())) {
            assert!(begun.elapsed() < PATIENCE, "the peer stays lost");
            // Nobody tells when a peer is there again.
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn done(handle: &Handle) {
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Ok(())));
}

/// What breaks here is a connection's: neighbours have tests of their own.
fn by_tcp() -> EngineOptions {
    EngineOptions { transport: Some(Transport::Tcp), ..EngineOptions::default() }
}

fn impatient() -> Options {
    Options { peer_patience: Duration::from_secs(1), ..Options::default() }
}

// ---- Other processes ----

/// What another process does, and what it answers.
struct Role {
    side: Side,
    peer: Option<Peer>,
    transfer: Option<Handle>,
    /// Descriptors that nobody else can have.
    hoard: Vec<File>,
}

/// No test: started with its part in the environment, this owns an engine, obeys the lines that it is told, and
/// answers each with one.
#[test]
fn a_process_of_the_tests_below() {
    play(Role::new, Role::obey);
}

impl Role {
    /// `setup`: where it listens, if that matters.
    fn new(bytes: usize, setup: &str) -> Role {
        let options = by_tcp();
        let listen = match setup {
            "" => options.listen,
            address => vec![address.parse().unwrap()],
        };
        let side = Side::new(bytes, EngineOptions { listen, ..by_tcp() });
        Role { side, peer: None, transfer: None, hoard: Vec::new() }
    }

    fn obey(&mut self, what: &str, rest: &[&str]) -> String {
        let number = |index: usize| rest[index].parse::<usize>().unwrap();
        let Side { engine, region, memory } = &self.side;
        match what {
            "describe" => return self.side.descriptor().to_text().unwrap(),
            "where" => return memory.base.addr().to_string(),
            "fill" => memory.fill(number(0), number(1), number(2) as u8),
            "await" => memory.wait_for(number(0)),
            "check" => {
                if let Some(at) = memory.other_than(number(0), number(1), number(2) as u8) {
                    return format!("byte {at} is {}", memory.byte(at));
                }
            }
            "count" => {
                let is_other = |byte: &&u8| **byte != number(2) as u8;
                return memory.bytes(number(0), number(1)).iter().filter(is_other).count().to_string();
            }
            "unregister" => engine.unregister(*region).unwrap(),
            "write" => {
                let peer = self.side.meet(&rest[0].parse().unwrap());
                self.transfer = Some(self.side.write(peer, number(1), number(2)));
                self.peer = Some(peer);
            }
            "exhaust" => {
                let limit = getrlimit(Resource::Nofile);
                let current = Some(open_descriptors() as u64 + 16);
                setrlimit(Resource::Nofile, Rlimit { current, ..limit }).unwrap();
                while let Ok(file) = File::open("/dev/null") {
                    self.hoard.push(file);
                }
            }
            "release" => self.hoard.clear(),
            "spend" => {
                let before = cpu_time();
                std::thread::sleep(Duration::from_millis(number(0) as u64));
                return (cpu_time() - before).as_millis().to_string();
            }
            "befriend" => return befriend(number(0) as u64),
            "cycle" => return cycle(number(0)),
            _ => panic!("{what}?"),
        }
        "done".into()
    }
}

/// What this process has used of all processors.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: it is written only during the call.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn open_descriptors() -> usize {
    // One of them is of this look.
    std::fs::read_dir("/proc/self/fd").unwrap().count() - 1
}

/// Milliseconds of processors that two engines take which are connected both ways and do nothing for so long.
fn befriend(idle: u64) -> String {
    let (one, other) = (Side::of(MIB), Side::of(MIB));
    let (there, here) = (one.meet(&other.descriptor()), other.meet(&one.descriptor()));
    done(&one.write(there, 0, MIB));
    done(&other.write(here, 0, MIB));
    let before = cpu_time();
    std::thread::sleep(Duration::from_millis(idle));
    let spent = (cpu_time() - before).as_millis();
    done(&one.write(there, 0, MIB));
    spent.to_string()
}

/// Connects an engine to one that stays and back, moves something both ways and ends it, so many times.
/// Answers how many descriptors, threads and mappings there were soon after the beginning, and at the end.
fn cycle(rounds: usize) -> String {
    const WARM: usize = 10;
    let stays = Side::of(MIB);
    let mut before = [0; 3];
    for round in 0..WARM + rounds {
        if round == WARM {
            before = settled(None);
        }
        let goes = Side::of(MIB);
        done(&goes.write(goes.meet(&stays.descriptor()), 0, MIB));
        let peer = stays.meet(&goes.descriptor());
        done(&stays.write(peer, 0, MIB));
        drop(goes);
        stays.engine.disconnect(peer.id);
    }
    let after = settled(Some(before));
    format!("{} {}", numbers(before), numbers(after))
}

// ---- Connections that break ----

/// Bytes that a proxy keeps of one direction of a connection.
const KEEPS: usize = 256 << 10;

/// Carries connections to an engine, and does to them what networks do. One thread, ended when this goes.
struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    /// Bytes went through, or connections are gone.
    changed: Condvar,
    /// The state is another one.
    wake: OwnedFd,
}

#[derive(Debug, Clone, Default)]
struct State {
    new: New,
    /// Connections with a lower number move no bytes on; what has come from either side stays under way.
    held_below: usize,
    /// How often all connections are to be reset.
    cuts: usize,
    /// So many bytes go through in all, and then no more.
    limit: Option<u64>,
    /// Each portion takes so long, and has so many bytes at the most.
    delay: Duration,
    portion: Option<usize>,
    stop: bool,
    /// So many connections were accepted.
    accepted: usize,
    /// The numbers of those that are there.
    there: Vec<usize>,
    forwarded: u64,
    /// Of what the connecting sides sent, what they do not have to send again and nobody has got.
    kept: usize,
    cuts_made: usize,
}

/// What becomes of those who connect.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum New {
    #[default]
    Carried,
    /// Nobody listens any more, for ever.
    Refused,
    /// Somebody listens, and resets them at once.
    Reset,
}

struct Pair {
    number: usize,
    ends: [TcpStream; 2],
    /// What came from each end.
    came: [VecDeque<u8>; 2],
    /// Nothing comes any more from this end.
    closed: [bool; 2],
    /// This end was told that nothing comes any more.
    told: [bool; 2],
}

impl Proxy {
    /// To the first address.
    fn to(descriptor: &Descriptor) -> Proxy {
        let target = String::from_utf8(descriptor.addresses[0].bytes.clone()).unwrap().parse().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let state = Mutex::new(State::default());
        let shared = Arc::new(Shared { state, changed: Condvar::new(), wake });
        let thread = std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.carry(listener, target)
        });
        Proxy { address, shared, thread: Some(thread) }
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let answer = change(&mut self.shared.state.lock().unwrap());
        rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes()).unwrap();
        answer
    }

    fn wait(&self, what: &str, mut is_so: impl FnMut(&State) -> bool) {
        let state = self.shared.state.lock().unwrap();
        let waited = self.shared.changed.wait_timeout_while(state, PATIENCE, |state| !is_so(state)).unwrap();
        let (is_late, state) = (waited.1.timed_out(), waited.0.clone());
        drop(waited);
        assert!(!is_late, "{what}: {state:?}");
    }

    /// Resets all connections, once.
    fn cut(&self) {
        let cuts = self.change(|state| {
            state.cuts += 1;
            state.cuts
        });
        self.wait("connections are cut", |state| state.cuts_made >= cuts);
    }

    /// Connections from now on.
    fn take_new(&self, new: New) {
        self.change(|state| state.new = new);
    }

    /// The connections that are there stop; those to come do not.
    fn hold(&self) {
        self.change(|state| state.held_below = state.accepted);
    }

    /// All connections stop, those to come too.
    fn hold_all(&self) {
        self.change(|state| state.held_below = usize::MAX);
    }

    fn release(&self) {
        self.change(|state| state.held_below = 0);
    }

    /// Waits until the first connection is gone: its ends have taken all that was under way.
    fn wait_until_the_first_is_gone(&self) {
        self.wait("the first connection goes", |state| !state.there.contains(&0));
    }

    /// Waits until so many bytes are under way.
    fn wait_until_it_keeps(&self, bytes: usize) {
        self.wait("bytes are under way", |state| state.kept >= bytes);
    }

    /// Waits until so many bytes went through in all.
    fn wait_for(&self, bytes: u64) {
        self.wait("bytes go through", |state| state.forwarded >= bytes);
    }

    /// Waits until so many more bytes went through.
    fn wait_for_more(&self, bytes: u64) {
        let before = self.change(|state| state.forwarded);
        self.wait_for(before + bytes);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.change(|state| state.stop = true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn carry(&self, listener: TcpListener, target: SocketAddr) {
        let mut listener = Some(listener);
        let mut pairs: Vec<Pair> = Vec::new();
        let mut accepted = 0;
        let mut forwarded = 0;
        loop {
            let state = {
                let mut state = self.state.lock().unwrap();
                if state.cuts_made < state.cuts {
                    pairs.drain(..).for_each(Pair::reset);
                    state.cuts_made = state.cuts;
                }
                (state.accepted, state.forwarded) = (accepted, forwarded);
                state.kept = pairs.iter().map(|pair| pair.came[0].len()).sum();
                state.there = pairs.iter().map(|pair| pair.number).collect();
                self.changed.notify_all();
                state.clone()
            };
            if state.stop {
                return;
            }
            if state.new == New::Refused {
                listener = None;
            }
            let is_at_limit = state.limit.is_some_and(|limit| forwarded >= limit);
            let is_held = |pair: &Pair| is_at_limit || pair.number < state.held_below;
            self.wait_for_something(listener.as_ref(), &pairs, is_held);
            while let Some(Ok((socket, _))) = listener.as_ref().map(TcpListener::accept) {
                if state.new == New::Reset {
                    reset(socket);
                    continue;
                }
                // The engine is gone: so is the connection to it.
                if let Ok(other) = TcpStream::connect(target) {
                    pairs.push(Pair::new(accepted, [socket, other]));
                    accepted += 1;
                }
            }
            for pair in &mut pairs {
                let left = state.limit.map_or(u64::MAX, |limit| limit.saturating_sub(forwarded));
                forwarded += pair.carry(is_held(pair), state.delay, state.portion, left);
            }
            pairs.retain(|pair| !pair.is_over());
        }
    }

    fn wait_for_something(
        &self,
        listener: Option<&TcpListener>,
        pairs: &[Pair],
        is_held: impl Fn(&Pair) -> bool,
    ) {
        let mut events = vec![PollFd::new(&self.wake, PollFlags::IN)];
        events.extend(listener.map(|listener| PollFd::new(listener, PollFlags::IN)));
        for pair in pairs {
            for (end, wanted) in pair.ends.iter().zip(pair.wanted(is_held(pair))) {
                // Without a wish it would be told of an end that is known.
                if !wanted.is_empty() {
                    events.push(PollFd::new(end, wanted));
                }
            }
        }
        // An interrupted call brought nothing.
        let _ = poll(&mut events, None);
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut count);
    }
}

impl Pair {
    fn new(number: usize, ends: [TcpStream; 2]) -> Pair {
        for end in &ends {
            end.set_nonblocking(true).unwrap();
            end.set_nodelay(true).unwrap();
        }
        Pair { number, ends, came: Default::default(), closed: [false; 2], told: [false; 2] }
    }

    fn wanted(&self, is_held: bool) -> [PollFlags; 2] {
        [0, 1].map(|end| {
            let takes = !self.closed[end] && self.came[end].len() < self.keeps(is_held);
            let gives = !is_held && !self.came[1 - end].is_empty();
            let mut wanted = PollFlags::empty();
            wanted.set(PollFlags::IN, takes);
            wanted.set(PollFlags::OUT, gives);
            wanted
        })
    }

    /// What is held is read on, so that an end that closes has nothing unsent.
    fn keeps(&self, is_held: bool) -> usize {
        if is_held { 64 * MIB } else { KEEPS }
    }

    /// Moves what can be moved now. Answers the bytes.
    fn carry(&mut self, is_held: bool, delay: Duration, most: Option<usize>, left: u64) -> u64 {
        let mut portion = vec![0; KEEPS];
        let mut moved = 0;
        for end in [0, 1] {
            if !self.closed[end] && self.came[end].len() < self.keeps(is_held) {
                match (&self.ends[end]).read(&mut portion) {
                    Ok(0) => self.closed[end] = true,
                    Ok(len) => self.came[end].extend(&portion[..len]),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(_) => self.closed[end] = true,
                }
            }
            if is_held {
                continue;
            }
            let (to, came) = (1 - end, &mut self.came[end]);
            if !came.is_empty() {
                std::thread::sleep(delay);
                let next = came.as_slices().0;
                let may = most.map_or(left - moved, |most| (left - moved).min(most as u64));
                match (&self.ends[to]).write(&next[..(next.len() as u64).min(may) as usize]) {
                    Ok(len) => {
                        came.drain(..len);
                        moved += len as u64;
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(_) => {
                        came.clear();
                        self.closed = [true; 2];
                    }
                }
            }
            if self.closed[end] && came.is_empty() && !self.told[to] {
                self.told[to] = true;
                // It is gone already if this fails.
                let _ = self.ends[to].shutdown(Shutdown::Write);
            }
        }
        moved
    }

    /// Both ends have ended, and got what came before.
    fn is_over(&self) -> bool {
        self.told == [true; 2]
    }

    fn reset(self) {
        self.ends.into_iter().for_each(reset);
    }
}

fn reset(socket: TcpStream) {
    set_socket_linger(&socket, Some(Duration::ZERO)).unwrap();
}

/// The same process, by other addresses.
fn through(descriptor: &Descriptor, proxies: &[&Proxy]) -> Descriptor {
    let address = |proxy: &&Proxy| Address { kind: 1, bytes: proxy.address.to_string().into_bytes() };
    Descriptor { addresses: proxies.iter().map(address).collect(), ..descriptor.clone() }
}

// ---- Processes that are killed, restarted, stopped ----

/// So far must a transfer have come before something happens to it, and so far it goes.
const BEGUN: usize = 4 * MIB;
const LARGE: usize = 1 << 30;

fn a_killed_peer_fails_its_transfer_and_no_other(op: Op) {
    const MORE: usize = 128 * MIB;
    let here = Side::with(LARGE + MORE, impatient());
    let (mut doomed, mut living) = (Process::new(LARGE), Process::new(LARGE + MORE));
    let (lost, kept) = (here.meet(&doomed.descriptor()), here.meet(&living.descriptor()));
    match op {
        Op::Write => here.memory.fill(0, BEGUN + 1, 7),
        Op::Read => doomed.order(&format!("fill 0 {} 7", BEGUN + 1)),
    }
    here.memory.fill(LARGE, MORE, 9);
    let handle = here.begin(lost, op, here.run(lost, 0, 0, LARGE));
    match op {
        Op::Write => doomed.order(&format!("await {BEGUN}")),
        Op::Read => here.memory.wait_for(BEGUN),
    }
    let other = here.write(kept, LARGE, MORE);
    assert_eq!(handle.outcome(), None, "it is not over yet");
    doomed.kill();
    let begun = Instant::now();
    let one_more = here.write(kept, LARGE, MORE);
    done(&other);
    done(&one_more);
    living.order(&format!("check {LARGE} {MORE} 9"));
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Err(Failure::PeerLost)));
    assert!(begun.elapsed() < Duration::from_secs(5) + MARGIN, "after {:?}", begun.elapsed());
    done(&here.post(kept));
    assert_eq!(handle.outcome(), Some(Err(Failure::PeerLost)), "it is over only once");
    here.engine.unregister(here.region).unwrap();
}

#[test]
fn a_write_to_a_killed_process_fails_and_others_go_on() {
    a_killed_peer_fails_its_transfer_and_no_other(Op::Write);
}

#[test]
fn a_read_from_a_killed_process_fails_and_others_go_on() {
    a_killed_peer_fails_its_transfer_and_no_other(Op::Read);
}

#[test]
fn a_process_whose_writer_is_killed_serves_others_and_gets_its_memory_back() {
    let here = Side::of(LARGE);
    let mut doomed = Process::new(LARGE);
    let other = Side::of(MIB);
    let peer = other.meet(&here.descriptor());
    doomed.order(&format!("fill 0 {} 7", BEGUN + 1));
    doomed.order(&format!("write {} 0 {LARGE}", here.descriptor().to_text().unwrap()));
    here.memory.wait_for(BEGUN);
    done(&other.post(peer));
    assert_eq!(here.memory.byte(LARGE - 1), 0);
    doomed.kill();
    done(&other.post(peer));
    here.engine.unregister(here.region).unwrap();
    here.memory.fill(0, 64 * MIB, 0x55);
    assert_eq!(other.post(peer).wait(Some(PATIENCE)), Some(Err(Failure::Refused)));
    // SAFETY: the engine goes before its memory.
    let region = unsafe { here.engine.register(here.memory.base, here.memory.len as u64, Access::ReadWrite) };
    assert_eq!(region, here.region);
    done(&other.post(other.meet(&here.descriptor())));
    assert_eq!(here.memory.other_than(0, 64 * MIB, 0x55), None, "a late write");
}

#[test]
fn a_restarted_process_gets_nothing_that_was_meant_for_the_former_one() {
    let here = Side::with(LARGE, impatient());
    here.memory.fill(0, BEGUN + 1, 7);
    let mut former = Process::new(LARGE);
    let old = former.descriptor();
    let listen = String::from_utf8(old.addresses[0].bytes.clone()).unwrap();
    let peer = here.meet(&old);
    let handle = here.write(peer, 0, LARGE);
    former.order(&format!("await {BEGUN}"));
    assert_eq!(handle.outcome(), None, "it is not over yet");
    former.kill();
    let mut next = Process::with(LARGE, &listen);
    let new = next.descriptor();
    assert_eq!(new.addresses, old.addresses);
    let begun = Instant::now();
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Err(Failure::PeerLost)));
    assert!(begun.elapsed() < Duration::from_secs(5) + MARGIN, "after {:?}", begun.elapsed());
    let again = here.meet(&old);
    assert_eq!(here.write(again, 0, LARGE).wait(Some(PATIENCE)), Some(Err(Failure::PeerLost)));
    assert_eq!(here.write(peer, 0, LARGE).wait(Some(PATIENCE)), Some(Err(Failure::PeerLost)));
    assert!(matches!(here.engine.update(peer.id, &new), Err(FabricError::NoSuchPeer)));
    next.order(&format!("check 0 {} 0", 64 * MIB));
    let known = here.meet(&new);
    done(&here.write(known, 0, BEGUN));
    next.order(&format!("check 0 {BEGUN} 7"));
    next.order(&format!("check {BEGUN} {} 0", 64 * MIB));
}

/// A process is stopped during a write, and goes on after the write has failed; once it can be reached again, as
/// the same peer or a new one, it uses the memory otherwise.
fn a_stopped_process_takes_no_late_bytes(transfers: Options, is_new_peer: bool) {
    const BYTES: usize = 64 * MIB;
    let patience = SILENT + transfers.peer_patience;
    let here = Side::with(BYTES, transfers);
    here.memory.fill(0, BYTES, 7);
    let mut there = Process::new(BYTES);
    // The memory is there: to use it otherwise takes no longer than late bytes do.
    there.order(&format!("fill 0 {BYTES} 0"));
    let descriptor = there.descriptor();
    let peer = here.meet(&descriptor);
    done(&here.post(peer));
    let handle = here.write(peer, 0, BYTES);
    there.order(&format!("await {MIB}"));
    there.pause();
    let begun = Instant::now();
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Err(Failure::PeerLost)));
    assert!(begun.elapsed() < patience + MARGIN, "after {:?}", begun.elapsed());
    let again = if is_new_peer { here.meet(&descriptor) } else { peer };
    there.resume();
    here.reach(again);
    there.order(&format!("fill 0 {} 85", BYTES));
    for _ in 0..100 {
        done(&here.post(again));
    }
    there.order(&format!("check 0 {} 85", BYTES));
    assert_eq!(handle.outcome(), Some(Err(Failure::PeerLost)), "it is over only once");
}

#[test]
fn a_stopped_process_takes_no_late_bytes_once_it_is_reached_again() {
    a_stopped_process_takes_no_late_bytes(impatient(), false);
}

#[test]
fn a_stopped_process_takes_no_late_bytes_once_it_is_connected_anew() {
    a_stopped_process_takes_no_late_bytes(impatient(), true);
}

#[test]
fn a_stopped_process_takes_no_late_bytes_of_many_small_posts() {
    let many = Options { chunk_bytes: 8192, credits: 1024, ..impatient() };
    a_stopped_process_takes_no_late_bytes(many, false);
}

/// A process is stopped while it places what its socket has. Its peer cannot reach it, and the write has failed when it
/// goes on: by then its memory is used otherwise.
#[test]
fn a_process_that_was_stopped_in_the_middle_of_a_write_goes_on_without_it() {
    const BYTES: usize = 16 * MIB;
    const POST: usize = 8192;
    // Many calls for what is under way: it is stopped when it has made only some of them.
    let here = Side::with(BYTES, Options { chunk_bytes: POST as u64, credits: 1024, ..impatient() });
    here.memory.fill(0, BYTES, 7);
    let mut there = Process::new(BYTES);
    there.order(&format!("fill 0 {BYTES} 0"));
    let address = there.ask("where").parse().unwrap();
    let proxy = Proxy::to(&there.descriptor());
    let peer = here.meet(&through(&there.descriptor(), &[&proxy]));
    done(&here.post(peer));
    proxy.hold();
    let handle = here.write(peer, 0, BYTES);
    proxy.wait_until_it_keeps(4 * MIB);
    proxy.release();
    there.order(&format!("await {}", MIB / 2));
    there.pause();
    proxy.hold_all();
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Err(Failure::PeerLost)));
    there.overwrite(address, BYTES, CANARY);
    there.resume();
    proxy.release();
    here.reach(peer);
    let late: usize = there.ask(&format!("count 0 {BYTES} {CANARY}")).parse().unwrap();
    // Once in a few hundred times it is stopped between its look at the clock and the call that places a post.
    assert!(late <= POST, "{late} bytes were written late");
}

// ---- Bytes that are under way for long ----

const CANARY: u8 = 0x55;
const HELD: usize = 64 * MIB;

fn quick() -> Options {
    Options {
        post_patience: Duration::from_millis(300),
        drain_patience: Duration::from_millis(100),
        peer_patience: Duration::from_millis(500),
        backoff: Duration::from_millis(5),
        backoff_max: Duration::from_millis(50),
        ..Options::default()
    }
}

/// A write whose first connection the network holds back for a while.
struct HeldBack {
    here: Side,
    there: Side,
    peer: Peer,
    handle: Handle,
}

impl HeldBack {
    /// Over the proxies that are made, of which the first holds back.
    fn begin(proxies: impl Fn(&Descriptor) -> Vec<Proxy>) -> (HeldBack, Vec<Proxy>) {
        let (here, there) = (Side::with(HELD, quick()), Side::of(HELD));
        here.memory.fill(0, HELD, 7);
        let proxies = proxies(&there.descriptor());
        let peer = here.meet(&through(&there.descriptor(), &proxies.iter().collect::<Vec<_>>()));
        // One that is not known yet takes only one post.
        let begun = Instant::now();
        while here.engine.paths(peer.id).iter().any(|path| path.bytes_per_second.is_none()) {
            assert!(begun.elapsed() < PATIENCE, "a way stays unknown");
            here.reach(peer);
        }
        proxies[0].hold();
        let handle = here.write(peer, 0, HELD);
        proxies[0].wait_until_it_keeps(400 << 10);
        (HeldBack { here, there, peer, handle }, proxies)
    }

    /// The transfer is over and the peer can be reached. Now the network delivers what it had.
    fn deliver_late(&self, proxy: &Proxy) {
        self.there.memory.fill(0, HELD, CANARY);
        proxy.release();
        proxy.wait_until_the_first_is_gone();
        done(&self.here.post(self.peer));
        assert_eq!(self.there.memory.other_than(0, HELD, CANARY), None, "a late write");
    }
}

fn one(descriptor: &Descriptor) -> Vec<Proxy> {
    vec![Proxy::to(descriptor)]
}

fn two(descriptor: &Descriptor) -> Vec<Proxy> {
    vec![Proxy::to(descriptor), Proxy::to(descriptor)]
}

#[test]
fn what_a_slow_connection_holds_back_does_not_arrive_after_the_write_was_done_over_another() {
    let (held, proxies) = HeldBack::begin(one);
    done(&held.handle);
    assert_eq!(held.there.memory.other_than(0, HELD, 7), None);
    held.deliver_late(&proxies[0]);
}

#[test]
fn what_a_slow_connection_holds_back_does_not_arrive_after_the_write_was_cancelled() {
    let (held, proxies) = HeldBack::begin(one);
    held.handle.cancel();
    assert_eq!(held.handle.wait(Some(PATIENCE)), Some(Err(Failure::Cancelled)));
    held.deliver_late(&proxies[0]);
}

#[test]
fn what_a_slow_connection_holds_back_does_not_arrive_after_a_lost_peer_is_reached_again() {
    let (held, proxies) = HeldBack::begin(one);
    proxies[0].take_new(New::Reset);
    assert_eq!(held.handle.wait(Some(PATIENCE)), Some(Err(Failure::PeerLost)));
    proxies[0].take_new(New::Carried);
    held.here.reach(held.peer);
    held.deliver_late(&proxies[0]);
}

#[test]
fn what_a_slow_connection_holds_back_does_not_arrive_after_a_peer_was_disconnected_and_connected_again() {
    let (mut held, proxies) = HeldBack::begin(one);
    held.here.engine.disconnect(held.peer.id);
    assert_eq!(held.handle.wait(Some(PATIENCE)), Some(Err(Failure::PeerLost)));
    held.peer = held.here.meet(&through(&held.there.descriptor(), &[&proxies[0]]));
    held.here.reach(held.peer);
    held.deliver_late(&proxies[0]);
}

/// That bytes come does not say that somebody still sends them.
#[test]
fn what_a_slow_connection_delivers_bit_by_bit_does_not_arrive_after_the_write_has_failed() {
    let (held, proxies) = HeldBack::begin(one);
    let proxy = &proxies[0];
    // Nobody can confirm anything.
    proxy.take_new(New::Reset);
    proxy.change(|state| (state.delay, state.portion) = (Duration::from_millis(50), Some(4096)));
    proxy.release();
    assert_eq!(held.handle.wait(Some(PATIENCE)), Some(Err(Failure::PeerLost)));
    held.there.memory.fill(0, HELD, CANARY);
    let before = proxy.change(|state| state.forwarded);
    let is_gone = |state: &State| !state.there.contains(&0);
    proxy.wait("more arrives", |state| is_gone(state) || state.forwarded >= before + (64 << 10));
    proxy.take_new(New::Carried);
    held.here.reach(held.peer);
    assert_eq!(held.there.memory.other_than(0, HELD, CANARY), None, "a late write");
}

#[test]
fn what_a_slow_connection_holds_back_does_not_arrive_after_its_address_refuses_connections() {
    let (held, proxies) = HeldBack::begin(two);
    proxies[0].take_new(New::Refused);
    done(&held.handle);
    assert_eq!(held.there.memory.other_than(0, HELD, 7), None);
    held.deliver_late(&proxies[0]);
}

// ---- Connections that are cut under load ----

/// Many transfers both ways, each with an immediate for one counter.
struct Load {
    here: Side,
    there: Side,
    generation: u32,
    handles: Vec<Handle>,
    wanted: [Vec<u8>; 2],
}

impl Load {
    const COUNT: usize = 48;
    const EACH: usize = 2 * MIB + 12_345;
    const COUNTER: u32 = 3;

    fn begin(there: Side, descriptor: &Descriptor, options: EngineOptions) -> Load {
        let bytes = Load::COUNT * Load::EACH;
        let here = Side::new(bytes, options);
        here.memory.scribble(0, bytes, 11);
        there.memory.scribble(0, bytes, 12);
        let mut wanted = [&here, &there].map(|side| side.memory.bytes(0, bytes));
        let generation = there.engine.open_counter(Load::COUNTER);
        let peer = here.meet(descriptor);
        let mut transfers = Vec::new();
        for index in 0..Load::COUNT {
            let (op, to) = if index % 3 == 0 { (Op::Read, 0) } else { (Op::Write, 1) };
            let at = index * Load::EACH;
            let source = wanted[1 - to][at..at + Load::EACH].to_vec();
            wanted[to][at..at + Load::EACH].copy_from_slice(&source);
            let pieces = Pieces::Contiguous(here.run(peer, at, at, Load::EACH));
            let immediate = Some((Load::COUNTER, generation));
            let transfer = Transfer { op, immediate, ..Transfer::write(pieces) };
            transfers.push(transfer);
        }
        let begin = |transfer| here.engine.begin(peer.id, transfer).unwrap();
        let handles = transfers.into_iter().map(begin).collect();
        Load { here, there, generation, handles, wanted }
    }

    fn is_over(&self) -> bool {
        self.handles.iter().all(|handle| handle.outcome().is_some())
    }

    /// All of it is done, with the right bytes, and each immediate counted once.
    fn end(self) {
        let until = Instant::now() + PATIENCE;
        let left = || Some(until.saturating_duration_since(Instant::now()));
        let outcomes: Vec<_> = self.handles.iter().map(|handle| handle.wait(left())).collect();
        assert!(outcomes.iter().all(|outcome| *outcome == Some(Ok(()))), "{outcomes:?}");
        let bytes = Load::COUNT * Load::EACH;
        for (side, wanted) in [&self.here, &self.there].into_iter().zip(&self.wanted) {
            assert!(side.memory.bytes(0, bytes) == *wanted, "other bytes than the right ones");
        }
        let count = self.there.engine.count(Load::COUNTER, self.generation);
        assert_eq!(count, Load::COUNT as u64, "each immediate counts once");
    }
}

#[test]
fn connections_that_are_cut_again_and_again_lose_nothing_and_count_nothing_twice() {
    for connections in [1, 3] {
        let there = Side::of(Load::COUNT * Load::EACH);
        let proxy = Proxy::to(&there.descriptor());
        let descriptor = through(&there.descriptor(), &[&proxy]);
        // A machine that is busy takes longer than the other patience to connect again.
        let transfers = Options { breaks_max: 100, peer_patience: PATIENCE, ..quick() };
        let options = EngineOptions { connections, transfers, ..by_tcp() };
        let load = Load::begin(there, &descriptor, options);
        for cut in 0..20 {
            // Not all at the same byte of a post.
            proxy.wait_for_more(MIB as u64 + cut * 54_321);
            proxy.cut();
        }
        assert!(!load.is_over(), "nothing was under way any more");
        load.end();
    }
}

#[test]
fn slow_connections_that_stop_for_a_while_lose_nothing() {
    let there = Side::of(Load::COUNT * Load::EACH);
    let proxy = Proxy::to(&there.descriptor());
    let descriptor = through(&there.descriptor(), &[&proxy]);
    proxy.change(|state| state.delay = Duration::from_micros(200));
    // Only what is held for longer than the patience of a post breaks.
    let transfers = Options { breaks_max: 100, peer_patience: PATIENCE, ..quick() };
    let options = EngineOptions { connections: 2, transfers, ..by_tcp() };
    let load = Load::begin(there, &descriptor, options);
    for pause in [10, 100, 600, 50, 400, 10] {
        proxy.wait_for_more(4 * MIB as u64);
        proxy.hold_all();
        std::thread::sleep(Duration::from_millis(pause));
        proxy.release();
    }
    assert!(!load.is_over(), "nothing was under way any more");
    load.end();
}

/// Of two ways to a peer one ends for good under load.
fn one_of_two_ways_ends(end: impl Fn(&Proxy)) {
    let there = Side::of(Load::COUNT * Load::EACH);
    let proxies = two(&there.descriptor());
    let slow = Duration::from_millis(1);
    proxies.iter().for_each(|proxy| proxy.change(|state| state.delay = slow));
    let descriptor = through(&there.descriptor(), &[&proxies[0], &proxies[1]]);
    // As above.
    let transfers = Options { peer_patience: PATIENCE, ..quick() };
    let load = Load::begin(there, &descriptor, EngineOptions { transfers, ..by_tcp() });
    proxies.iter().for_each(|proxy| proxy.wait_for(4 * MIB as u64));
    end(&proxies[0]);
    assert!(!load.is_over(), "nothing was under way any more");
    load.end();
}

#[test]
fn with_two_ways_all_goes_over_one_when_the_other_is_cut_and_refuses() {
    one_of_two_ways_ends(|proxy| {
        proxy.take_new(New::Refused);
        proxy.cut();
    });
}

#[test]
fn with_two_ways_all_goes_over_one_when_the_other_is_cut_and_resets_whoever_connects() {
    one_of_two_ways_ends(|proxy| {
        proxy.take_new(New::Reset);
        proxy.cut();
    });
}

#[test]
fn with_two_ways_all_goes_over_one_when_the_other_swallows_everything() {
    one_of_two_ways_ends(Proxy::hold_all);
}

#[test]
fn messages_are_delivered_once_although_their_connections_break() {
    const UNDER_WAY: usize = 64;
    let inbox = InboxOptions { messages: 16, ..InboxOptions::default() };
    let there = Side::new(0, EngineOptions { inbox, ..by_tcp() });
    let proxies = two(&there.descriptor());
    let transfers = Options { breaks_max: 1000, ..quick() };
    let here = Side::new(0, EngineOptions { connections: 2, transfers, ..by_tcp() });
    let peer = here.engine.connect(&through(&there.descriptor(), &[&proxies[0], &proxies[1]])).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let mut random = Random(17);
            let options = SendOptions { timeout: PATIENCE, ..SendOptions::default() };
            let mut under_way = VecDeque::new();
            for index in 0u64.. {
                if stop.load(Ordering::Acquire) {
                    under_way.iter().for_each(done);
                    return index;
                }
                let mut bytes = index.to_le_bytes().to_vec();
                bytes.resize(8 + random.below(MESSAGE_BYTES_MAX - 7), index as u8);
                under_way.push_back(here.engine.send(peer, bytes, options.clone()).unwrap());
                if under_way.len() == UNDER_WAY {
                    done(&under_way.pop_front().unwrap());
                }
            }
            unreachable!()
        });
        let receiver = scope.spawn(|| {
            let mut counts: Vec<u32> = Vec::new();
            while let Some(message) = there.engine.receive(None) {
                let (index, rest) = message.bytes.split_first_chunk().unwrap();
                let index = u64::from_le_bytes(*index) as usize;
                assert!(rest.iter().all(|byte| *byte == index as u8));
                counts.resize(counts.len().max(index + 1), 0);
                counts[index] += 1;
            }
            counts
        });
        for cut in 0..40 {
            // Not all at the same byte of a message.
            let proxy = &proxies[cut % 2];
            proxy.wait_for_more(200_000 + cut as u64 * 7_654);
            proxy.cut();
        }
        stop.store(true, Ordering::Release);
        let sent = sender.join().unwrap();
        // All that was done has arrived, and can still be taken.
        there.engine.close();
        let counts = receiver.join().unwrap();
        let other: Vec<_> = counts.iter().enumerate().filter(|(_, count)| **count != 1).collect();
        assert!(counts.len() as u64 == sent && other.is_empty(), "{sent} sent; {} {other:?}", counts.len());
    });
}

#[test]
fn the_room_of_a_message_whose_connection_breaks_in_the_middle_comes_free() {
    let inbox = InboxOptions { messages: 1, ..InboxOptions::default() };
    let there = Side::new(0, EngineOptions { inbox, ..by_tcp() });
    let here = Side::with(0, quick());
    let proxy = Proxy::to(&there.descriptor());
    let peer = here.engine.connect(&through(&there.descriptor(), &[&proxy])).unwrap();
    for byte in 0..3 {
        let limit = proxy.change(|state| {
            let limit = state.forwarded + MESSAGE_BYTES_MAX as u64 / 2;
            state.limit = Some(limit);
            limit
        });
        let options = SendOptions { timeout: PATIENCE, ..SendOptions::default() };
        let handle = here.engine.send(peer, vec![byte; MESSAGE_BYTES_MAX], options).unwrap();
        proxy.wait_for(limit);
        proxy.cut();
        proxy.change(|state| state.limit = None);
        done(&handle);
        assert!(there.engine.receive(Some(PATIENCE)).unwrap().bytes == vec![byte; MESSAGE_BYTES_MAX]);
    }
    assert_eq!(there.engine.receive(Some(Duration::ZERO)), None);
}

#[test]
fn immediates_count_again_for_a_peer_that_was_disconnected_and_connected_again() {
    let (here, there) = (Side::of(MIB), Side::of(MIB));
    let generation = there.engine.open_counter(5);
    let tell = |peer: Peer| {
        let pieces = Pieces::Contiguous(here.run(peer, 0, 0, 100));
        let transfer = Transfer { immediate: Some((5, generation)), ..Transfer::write(pieces) };
        done(&here.engine.begin(peer.id, transfer).unwrap());
    };
    let peer = here.meet(&there.descriptor());
    tell(peer);
    tell(peer);
    assert_eq!(there.engine.count(5, generation), 2);
    here.engine.disconnect(peer.id);
    let again = here.meet(&there.descriptor());
    tell(again);
    tell(again);
    assert_eq!(there.engine.count(5, generation), 4);
}

// ---- Many transfers, and many engines ----

/// Writes of any shape are given up at any time; as soon as each is over the peer uses the memory otherwise.
fn cancelled_writes_leave_the_memory_alone(transfers: Options) {
    const BYTES: usize = 8 * MIB;
    const ROUNDS: usize = 300;
    let mut random = Random(0x1234_5678_9abc_def1);
    let options = EngineOptions { transfers, connections: 2, ..by_tcp() };
    let here = Side::new(BYTES, options);
    here.memory.fill(0, BYTES, 0xff);
    let mut there = Process::new(BYTES);
    let peer = here.meet(&there.descriptor());
    done(&here.post(peer));
    let mut cancelled = 0;
    for round in 0..ROUNDS {
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

#[test]
fn engines_that_come_and_go_leave_nothing_open() {
    let rounds = std::env::var("KVLANE_TEST_ROUNDS").map_or(200, |rounds| rounds.parse().unwrap());
    let mut process = Process::new(0);
    process.tell(&format!("cycle {rounds}"));
    let patience = PATIENCE + Duration::from_millis(100) * rounds;
    let answer = process.hear_within(patience);
    let counts: Vec<usize> = answer.split(' ').map(|count| count.parse().unwrap()).collect();
    let [descriptors, threads, mappings] = [0, 1, 2].map(|index| (counts[index], counts[index + 3]));
    assert!(descriptors.1 <= descriptors.0, "descriptors: {descriptors:?}");
    assert!(threads.1 <= threads.0, "threads: {threads:?}");
    // The allocator may have some more for itself, not one a round.
    assert!(mappings.1 <= mappings.0 + 16, "mappings: {mappings:?}");
}

// ---- Processes that have nothing, or nothing to do ----

#[test]
fn a_process_without_descriptors_for_more_connections_serves_those_it_has_and_does_not_spin() {
    let here = Side::of(MIB);
    let mut there = Process::new(MIB);
    let descriptor = there.descriptor();
    let known = here.meet(&descriptor);
    done(&here.post(known));
    there.order("exhaust");
    let address = String::from_utf8(descriptor.addresses[0].bytes.clone()).unwrap();
    let mut stranger = TcpStream::connect(&address).unwrap();
    let spent: u64 = there.ask("spend 1000").parse().unwrap();
    done(&here.post(known));
    there.order("release");
    let other = Side::of(MIB);
    done(&other.post(other.meet(&descriptor)));
    stranger.set_read_timeout(Some(PATIENCE)).unwrap();
    stranger.read_exact(&mut [0; 24]).expect("who waited is welcome too");
    assert!(spent < 200, "{spent} ms of a processor in a second");
}

#[test]
fn idle_engines_that_are_connected_take_no_processor() {
    let mut process = Process::new(0);
    let spent: u64 = process.ask("befriend 2000").parse().unwrap();
    assert!(spent < 50, "{spent} ms of a processor in two seconds");
}

// ---- Sizes ----

#[test]
fn transfers_of_any_size_move_their_bytes_and_no_others() {
    const BYTES: usize = 64 << 10;
    let (here, there) = (Side::of(BYTES), Side::of(BYTES));
    let peer = here.meet(&there.descriptor());
    for len in [0, 1, 8191, 8193, 16385] {
        for (op, from, to) in [(Op::Write, &here, &there), (Op::Read, &there, &here)] {
            from.memory.scribble(0, BYTES, len as u64 + 1);
            to.memory.fill(0, BYTES, CANARY);
            let (source, target) = (1_001, 4_099);
            let run = match op {
                Op::Write => here.run(peer, source, target, len),
                Op::Read => here.run(peer, target, source, len),
            };
            done(&here.begin(peer, op, run));
            assert!(to.memory.bytes(target, len) == from.memory.bytes(source, len), "{op:?} of {len} bytes");
            assert_eq!(to.memory.other_than(0, target, CANARY), None);
            assert_eq!(to.memory.other_than(target + len, BYTES - target - len, CANARY), None);
        }
    }
}

/// Takes 4 GiB of memory: the source is written at few places only.
#[test]
fn transfers_around_four_gibibytes_move_all_their_bytes() {
    const LIMIT: usize = 1 << 32;
    let (here, there) = (Side::of(LIMIT + MIB), Side::of(LIMIT + MIB));
    let peer = here.meet(&there.descriptor());
    for (mark, len) in (1..).zip([LIMIT - 1, LIMIT, LIMIT + 1]) {
        let places = [0, 1, 512 << 10, (1 << 31) - 1, 1 << 31, (1 << 31) + 12_345, len - 2, len - 1];
        places.iter().for_each(|place| here.memory.set(*place, mark));
        let behind = there.memory.byte(len);
        // Seconds where nothing else runs, a minute where others build.
        let moved = here.write(peer, 0, len).wait(Some(10 * PATIENCE));
        assert_eq!(moved, Some(Ok(())), "{len} bytes");
        for place in places {
            assert_eq!(there.memory.byte(place), mark, "byte {place} of {len}");
        }
        assert_eq!(there.memory.byte(len), behind, "behind {len} bytes");
        assert_eq!(there.memory.other_than(2, 1000, 0), None);
    }
}
