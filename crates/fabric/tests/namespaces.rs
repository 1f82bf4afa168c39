//! Two processes in network namespaces of their own, with two wires between them, each of which is a path; wires are
//! cut and mended under load.
//!
//! Each test is started again by itself inside a user namespace, where it may make networks without any right outside;
//! it is one side, and starts the other one: see [`the_other_side_of_the_tests_below`]. Where the kernel does not let an
//! ordinary process do that, or `ip` is missing, a test says so and passes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::collections::VecDeque;
use std::ffi::CStr;
use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use kvlane_fabric::{
    Access, Descriptor, Engine, EngineOptions, Failure, Handle, Op, PathStatus, PeerId, Pieces, Place, Run,
    Transfer, Transport,
};
use rustix::fs::{Mode, OFlags, open};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use rustix::process::{Signal, getgid, getuid, set_parent_process_death_signal};

#[path = "support/deadline.rs"]
mod deadline;

use crate::deadline::Deadline;

/// How long anything may take that is to happen.
const PATIENCE: Duration = Duration::from_secs(30);
/// After so long without any way a peer is lost: 1.5 s of silence, which is looked for twice a second, and 2.9 s until what
/// was written is given back.
const LOST: Duration = Duration::from_secs(5);
/// How late something may be on an idle machine.
const MARGIN: Duration = Duration::from_secs(2);
const MIB: u64 = 1 << 20;
/// Transfers that are under way at a time, each with a place of its own.
const SLOTS: usize = 16;
const SLOT: usize = 512 << 10;
const COUNTER: u32 = 3;
const TOKEN: &str = "of these tests";
/// In the environment: this process is inside a namespace, as this side.
const INSIDE: &str = "KVLANE_TEST_INSIDE";
const SAYS: &str = "says: ";

// ---- Namespaces and wires ----

/// So that the process begins in new namespaces, with all rights in them if it gets a user namespace too.
fn unshare(command: &mut Command, namespaces: libc::c_int) {
    let (uid, gid) = (getuid().as_raw(), getgid().as_raw());
    let maps = [
        (c"/proc/self/setgroups", "deny".to_owned()),
        (c"/proc/self/uid_map", format!("0 {uid} 1")),
        (c"/proc/self/gid_map", format!("0 {gid} 1")),
    ];
    let enter = move || {
        // SAFETY: it takes no memory.
        if unsafe { libc::unshare(namespaces) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let maps = if namespaces & libc::CLONE_NEWUSER == 0 { &[] } else { maps.as_slice() };
        let map = |(path, text): &(&CStr, String)| {
            let file = open(*path, OFlags::WRONLY, Mode::empty())?;
            rustix::io::write(file, text.as_bytes())
        };
        // Who has the namespace may do this: were it refused, that would be a mistake here.
        let are_mapped = maps.iter().all(|each| map(each).is_ok());
        if are_mapped { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EPROTO)) }
    };
    // SAFETY: it makes system calls only.
    unsafe { command.pre_exec(enter) };
}

/// Runs a test inside, or says why that is not possible here.
fn inside(test: &str, scenario: fn(Network)) {
    if std::env::var_os(INSIDE).is_some() {
        set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
        match Network::new() {
            Ok(network) => scenario(network),
            Err(why) => println!("not tested: {test}: {why}"),
        }
        return;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(INSIDE, "near");
    unshare(&mut command, libc::CLONE_NEWUSER | libc::CLONE_NEWNET);
    match command.status() {
        Ok(status) => assert!(status.success(), "{status}: what happened inside stands above"),
        Err(error) => println!("not tested: {test}: {}", refusal(&error)),
    }
}

/// A sentence, if it is the kernel that does not want to.
fn refusal(error: &io::Error) -> String {
    assert!(is_refusal(error), "{error}");
    format!("the kernel has no namespaces for this process: {error}")
}

/// What the kernel answers who may not have namespaces, or no more of them, or does not have them.
fn is_refusal(error: &io::Error) -> bool {
    let number = error.raw_os_error().unwrap_or(0);
    let exist = ["user", "net"].iter().all(|kind| Path::new("/proc/self/ns").join(kind).exists());
    let refusals = [libc::EPERM, libc::EACCES, libc::ENOSPC, libc::EUSERS, libc::ENOSYS];
    refusals.contains(&number) || (number == libc::EINVAL && !exist)
}

/// `ip` with these arguments. Answers what it complains about.
fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip").args(arguments.split(' ')).stdin(Stdio::null()).output();
    match output {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!("ip {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim())),
        Err(error) if error.kind() == ErrorKind::NotFound => Err("ip, of iproute2, is not installed".into()),
        Err(error) => Err(format!("ip {arguments}: {error}")),
    }
}

/// Two processes and the wires between them: wire 0 and 1, whose ends are `near0`, `far0`, `near1`, `far1`.
struct Network {
    far: Far,
}

/// What happens to a wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// It has no carrier: who sends is told at once that there is no way.
    Down,
    /// What is sent over it goes to nobody, which nobody is told.
    Blackhole,
}

impl Network {
    /// An error where it cannot be made here, for a reason that is not the test's.
    fn new() -> Result<Network, String> {
        let far = Far::new()?;
        for wire in [0, 1] {
            let made =
                ip(&format!("link add near{wire} type veth peer name far{wire} netns {}", far.child.id()));
            if let Err(why) = made {
                // All else is a mistake of ours.
                let reasons = ["not installed", "Operation not permitted", "not supported", "Unknown device"];
                assert!(reasons.iter().any(|reason| why.contains(reason)), "{why}");
                return Err(why);
            }
        }
        let mut network = Network { far };
        network.near("link set lo up");
        for wire in [0, 1] {
            network.near(&format!("addr add 10.77.{wire}.1/24 dev near{wire}"));
            network.near(&format!("link set near{wire} up"));
            network.far.order(&format!("ip addr add 10.77.{wire}.2/24 dev far{wire}"));
            network.far.order(&format!("ip link set far{wire} up"));
        }
        Ok(network)
    }

    fn near(&self, arguments: &str) {
        ip(arguments).unwrap();
    }

    fn cut(&mut self, wire: usize, fault: Fault) {
        match fault {
            Fault::Down => self.near(&format!("link set near{wire} down")),
            // Each side sends to a card that is not there.
            Fault::Blackhole => {
                let nobody = "lladdr 02:00:00:00:00:99 nud permanent";
                self.near(&format!("neigh replace 10.77.{wire}.2 dev near{wire} {nobody}"));
                self.far.order(&format!("ip neigh replace 10.77.{wire}.1 dev far{wire} {nobody}"));
            }
        }
    }

    fn mend(&mut self, wire: usize, fault: Fault) {
        match fault {
            Fault::Down => self.near(&format!("link set near{wire} up")),
            Fault::Blackhole => {
                self.near(&format!("neigh del 10.77.{wire}.2 dev near{wire}"));
                self.far.order(&format!("ip neigh del 10.77.{wire}.1 dev far{wire}"));
            }
        }
    }
}

/// Bytes that came and went at this end of a wire.
fn carried(wire: usize) -> u64 {
    let table = std::fs::read_to_string("/proc/self/net/dev").unwrap();
    let name = format!("near{wire}:");
    let line = table.lines().find_map(|line| line.trim_start().strip_prefix(&name)).unwrap();
    let columns: Vec<u64> = line.split_whitespace().map(|column| column.parse().unwrap()).collect();
    columns[0] + columns[8]
}

// ---- Both sides ----

/// An engine with a region, a place in it for each slot.
struct Side {
    engine: Engine,
    region: u32,
    base: *mut u8,
}

impl Side {
    fn new(listen: &[SocketAddr]) -> Side {
        let (listen, token) = (listen.to_vec(), TOKEN.to_owned());
        // Two processes of one host would not use a wire for their bytes.
        let transport = Some(Transport::TCP);
        let options = EngineOptions { listen, token, transport, ..EngineOptions::default() };
        let engine = Engine::new(options).unwrap();
        let len = SLOTS * SLOT;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping overlaps nothing. It stays until the process ends.
        let base =
            unsafe { mmap_anonymous(std::ptr::null_mut(), len, protection, MapFlags::PRIVATE).unwrap() };
        // SAFETY: as above.
        let region = unsafe { engine.register(base.cast(), len as u64, Access::ReadWrite).unwrap() };
        Side { engine, region, base: base.cast() }
    }

    fn fill(&self, slot: usize, byte: u8) {
        // SAFETY: it is inside the mapping, and no transfer has it.
        unsafe { self.base.add(slot * SLOT).write_bytes(byte, SLOT) }
    }

    /// The first byte of a slot that is another one.
    fn other_than(&self, slot: usize, byte: u8) -> Option<usize> {
        let mut found = vec![0; SLOT];
        // SAFETY: as above, and the target is as long.
        unsafe { self.base.add(slot * SLOT).copy_to_nonoverlapping(found.as_mut_ptr(), SLOT) };
        (found != vec![byte; SLOT]).then(|| found.iter().position(|found| *found != byte).unwrap())
    }
}

/// The other side, a process of its own network namespace; killed at the latest when this goes.
struct Far {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Far {
    fn new() -> Result<Far, String> {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "the_other_side_of_the_tests_below", "--nocapture"]).env(INSIDE, "far");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        unshare(&mut command, libc::CLONE_NEWNET);
        let mut child = command.spawn().map_err(|error| refusal(&error))?;
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Ok(Far { child, input, output })
    }

    /// Tells something and hears the answer.
    fn ask(&mut self, words: &str) -> String {
        writeln!(self.input, "{words}").unwrap();
        loop {
            let mut line = String::new();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "{words}: the other side ended");
            // The harness does not end its line before the process speaks.
            if let Some((_, words)) = line.split_once(SAYS) {
                return words.trim_end().to_owned();
            }
        }
    }

    fn order(&mut self, words: &str) {
        assert_eq!(self.ask(words), "done", "{words}");
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        // Over already, if it failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// No test: started by one, this owns an engine once it is told to, obeys the lines that it is told, and answers each
/// with one.
#[test]
fn the_other_side_of_the_tests_below() {
    if std::env::var(INSIDE).as_deref() != Ok("far") {
        return;
    }
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let mut side = None;
    for line in io::stdin().lines() {
        let line = line.unwrap();
        println!("{SAYS}{}", obey(&mut side, &line));
    }
}

fn obey(side: &mut Option<(Side, u32)>, line: &str) -> String {
    if let Some(arguments) = line.strip_prefix("ip ") {
        return ip(arguments).err().unwrap_or("done".into());
    }
    if line == "open" {
        let opened = Side::new(&["10.77.0.2:0", "10.77.1.2:0"].map(|address| address.parse().unwrap()));
        let generation = opened.engine.open_counter(COUNTER);
        let bytes = opened.engine.describe().unwrap().to_bytes().unwrap();
        *side = Some((opened, generation));
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        return format!("{generation} {hex}");
    }
    let (side, generation) = side.as_ref().unwrap();
    let words: Vec<&str> = line.split(' ').collect();
    let number = |index: usize| words[index].parse::<usize>().unwrap();
    match words[0] {
        "fill" => side.fill(number(1), number(2) as u8),
        "check" => {
            if let Some(at) = side.other_than(number(1), number(2) as u8) {
                return format!("byte {at} is another one");
            }
        }
        "count" => return side.engine.count(COUNTER, *generation).to_string(),
        _ => panic!("{line}?"),
    }
    "done".into()
}

// ---- Load ----

/// Transfers one after the other both ways, many at a time, each with other bytes than the last one at its place, which
/// are looked at when it is over.
struct Load {
    network: Network,
    here: Side,
    peer: PeerId,
    region: u32,
    generation: u32,
    /// Those under way: place, byte, direction.
    begun: VecDeque<(usize, u8, Op, Handle)>,
    number: usize,
    /// How many were done, and how many failed.
    done: u64,
    failed: u64,
}

impl Load {
    fn begin(mut network: Network) -> Load {
        let here = Side::new(&["127.0.0.1:0".parse().unwrap()]);
        let answer = network.far.ask("open");
        let (generation, hex) = answer.split_once(' ').unwrap();
        let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        let bytes: Vec<u8> = (0..hex.len()).step_by(2).map(byte).collect();
        let descriptor = Descriptor::from_bytes(&bytes).unwrap();
        assert_eq!(descriptor.addresses.len(), 2);
        let peer = here.engine.connect(&descriptor).unwrap();
        let (region, generation) = (descriptor.regions[0].number, generation.parse().unwrap());
        let (begun, number, done, failed) = (VecDeque::new(), 0, 0, 0);
        Load { network, here, peer, region, generation, begun, number, done, failed }
    }

    fn paths(&self) -> Vec<PathStatus> {
        let mut paths = self.here.engine.paths(self.peer);
        paths.retain(|path| path.carrier == "tcp");
        paths.sort_by_key(|path| path.address);
        paths
    }

    /// One more is begun, which moves the same bytes to the same place so many times.
    fn add(&mut self, times: usize) {
        let (slot, byte) = (self.number % SLOTS, (1 + self.number % 251) as u8);
        let op = if slot.is_multiple_of(2) { Op::Write } else { Op::Read };
        self.number += 1;
        match op {
            Op::Write => self.here.fill(slot, byte),
            Op::Read => self.network.far.order(&format!("fill {slot} {byte}")),
        }
        let place = |region| Place { region, offset: (slot * SLOT) as u64 };
        let run = Run { local: place(self.here.region), remote: place(self.region), len: SLOT as u64 };
        let immediate = Some((COUNTER, self.generation));
        let transfer = Transfer { op, immediate, ..Transfer::write(Pieces::Runs(vec![run; times])) };
        let handle = self.here.engine.begin(self.peer, transfer).unwrap();
        self.begun.push_back((slot, byte, op, handle));
    }

    /// The oldest is over, and done.
    fn finish(&mut self) {
        let (slot, byte, op, handle) = self.begun.pop_front().unwrap();
        let outcome = handle.wait(Some(PATIENCE));
        assert_eq!(outcome, Some(Ok(())), "{op:?} {}: {:?}", self.done, self.paths());
        match op {
            Op::Write => self.network.far.order(&format!("check {slot} {byte}")),
            Op::Read => assert_eq!(self.here.other_than(slot, byte), None),
        }
        self.done += 1;
    }

    fn run_until(&mut self, what: &str, is_so: impl Fn(&Load) -> bool) {
        let begun = Instant::now();
        while !is_so(self) {
            assert!(begun.elapsed() < PATIENCE, "{what}: {:?}", self.paths());
            if self.begun.len() == SLOTS {
                self.finish();
            }
            // Enough that no path can have all of it under way: one that was slow once is left alone otherwise.
            self.add(8);
        }
    }

    /// Until so much went over each of these wires.
    fn run_over(&mut self, wires: &[usize], bytes: u64) {
        let before: Vec<u64> = wires.iter().map(|wire| carried(*wire)).collect();
        let went =
            |_: &Load| wires.iter().zip(&before).all(|(wire, before)| carried(*wire) >= before + bytes);
        self.run_until(&format!("bytes go over {wires:?}"), went);
    }

    /// All is done, and was counted once.
    fn end(mut self) {
        while !self.begun.is_empty() {
            self.finish();
        }
        let count: u64 = self.network.far.ask("count").parse().unwrap();
        // One that failed may have been placed and counted, if nobody could tell it to this side.
        assert!((self.done..=self.done + self.failed).contains(&count), "{count} of {}", self.done);
    }
}

fn one_wire_of_two(network: Network, fault: Fault) {
    let mut load = Load::begin(network);
    load.run_over(&[0, 1], 8 * MIB);
    for wire in [0, 1] {
        load.network.cut(wire, fault);
        load.run_until("the path is given up", |load| !load.paths()[wire].is_up);
        let before = carried(wire);
        load.run_over(&[1 - wire], 32 * MIB);
        assert!(carried(wire) - before < MIB, "nothing goes over a wire that is cut");
        load.network.mend(wire, fault);
        load.run_until("the path is there again", |load| load.paths()[wire].is_up);
        load.run_over(&[wire], 8 * MIB);
    }
    load.end();
}

fn both_wires(network: Network, fault: Fault) {
    let mut load = Load::begin(network);
    load.run_over(&[0, 1], 8 * MIB);
    while !load.begun.is_empty() {
        load.finish();
    }
    // Half a gibibyte each: they are not over before the wires are cut.
    (0..SLOTS).for_each(|_| load.add(1 << 10));
    let (begun, deadline) = (Instant::now(), Deadline::after(LOST + MARGIN));
    (0..2).for_each(|wire| load.network.cut(wire, fault));
    let under_way: Vec<_> = load.begun.drain(..).collect();
    let wait = |handle: &Handle| handle.wait(Some(PATIENCE)).expect("it is over some time");
    let outcomes: Vec<_> = under_way.iter().map(|(_, _, _, handle)| wait(handle)).collect();
    println!("lost after {:?}", begun.elapsed());
    deadline.assert_kept();
    let lost = outcomes.iter().filter(|outcome| **outcome == Err(Failure::PeerLost)).count();
    let done = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
    assert_eq!(lost + done, SLOTS, "{outcomes:?}");
    assert!(lost > 0, "nothing was under way any more");
    (load.done, load.failed) = (load.done + done as u64, load.failed + lost as u64);
    assert!(load.paths().iter().all(|path| !path.is_up && path.trouble.is_some()), "{:?}", load.paths());

    load.add(1);
    let (.., late) = load.begun.pop_back().unwrap();
    assert_eq!(wait(&late), Err(Failure::PeerLost));
    load.failed += 1;
    (0..2).for_each(|wire| load.network.mend(wire, fault));
    let begun = Instant::now();
    while load.here.engine.paths(load.peer).iter().any(|path| !path.is_up) {
        assert!(begun.elapsed() < PATIENCE, "the peer stays lost: {:?}", load.paths());
        // Nobody tells when a path is there again.
        std::thread::sleep(Duration::from_millis(5));
    }
    load.run_over(&[0, 1], 8 * MIB);
    let again: Vec<_> = under_way.iter().map(|(_, _, _, handle)| wait(handle)).collect();
    assert_eq!(again, outcomes, "each is over only once");
    load.end();
}

#[test]
fn when_a_wire_goes_down_all_goes_over_the_other_and_over_both_once_it_is_up() {
    inside("when_a_wire_goes_down_all_goes_over_the_other_and_over_both_once_it_is_up", |network| {
        one_wire_of_two(network, Fault::Down);
    });
}

#[test]
fn when_a_wire_swallows_everything_all_goes_over_the_other_and_over_both_once_it_does_not() {
    inside(
        "when_a_wire_swallows_everything_all_goes_over_the_other_and_over_both_once_it_does_not",
        |network| one_wire_of_two(network, Fault::Blackhole),
    );
}

#[test]
fn when_both_wires_go_down_the_peer_is_lost_in_time_and_back_once_they_are_up() {
    inside("when_both_wires_go_down_the_peer_is_lost_in_time_and_back_once_they_are_up", |network| {
        both_wires(network, Fault::Down);
    });
}

#[test]
fn when_both_wires_swallow_everything_the_peer_is_lost_in_time_and_back_once_they_do_not() {
    inside(
        "when_both_wires_swallow_everything_the_peer_is_lost_in_time_and_back_once_they_do_not",
        |network| {
            both_wires(network, Fault::Blackhole);
        },
    );
}
