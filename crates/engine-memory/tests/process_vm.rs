//! Copies between real processes, and every way in which the kernel refuses them.
//!
//! This binary starts itself again as an engine or a reader: see [`plays_the_role_it_was_started_for`].
#![allow(clippy::unwrap_used, clippy::panic)]

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Arc;

use kvlane_block::{BlockId, PoolOffset, Region};
use kvlane_engine_memory::{CopyError, HostFence, ProcessVm, Runs};
use kvlane_memory::{Arena, ArenaOptions, HugePages, Numa, ProbeError, pidfd_exited};
use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions};

const NONCE: [u8; 16] = *b"nonce of engine.";
/// Where a fence starts.
const EPOCH: u64 = 1;
const DATA_BYTES: usize = 3 << 20;
const NOBODY: u32 = 65534;
const ROLE: &str = "KVLANE_TEST_ROLE";

fn pattern(byte: usize) -> u8 {
    (byte * 31 + byte / 4096) as u8
}

fn pidfd(pid: u32) -> OwnedFd {
    rustix::process::pidfd_open(Pid::from_raw(pid as i32).unwrap(), PidfdFlags::empty()).unwrap()
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

// ---- children ----

/// A child of this binary that plays a role; it ends when its input does.
struct Role {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Role {
    fn start(role: &str, arguments: &[(&str, String)], input: Stdio) -> Role {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "plays_the_role_it_was_started_for", "--nocapture"])
            .env(ROLE, role)
            .envs(arguments.iter().map(|(name, value)| (name, value)))
            .stdin(input)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Role { child, output }
    }

    /// The next line that the role said; the test harness says things too.
    fn line(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "the child ended without a word");
            if let Some((_, said)) = line.split_once("kvlane: ") {
                return said.trim().to_owned();
            }
        }
    }

    fn end(mut self) -> ExitStatus {
        drop(self.child.stdin.take());
        self.child.wait().unwrap()
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended
        let _ = self.child.wait();
    }
}

fn say(line: &str) {
    println!("kvlane: {line}");
    std::io::stdout().flush().unwrap();
}

#[test]
fn plays_the_role_it_was_started_for() {
    match std::env::var(ROLE).as_deref() {
        Ok("engine") => be_engine(),
        Ok("reader") => be_reader(),
        Ok("copier") => be_copier(),
        Ok(role) => panic!("no role {role}"),
        // Started as a test: the parent's half of the protocol is to see what a role says.
        Err(_) => {
            let mut engine = Engine::start(&[]);
            assert_eq!(engine.pid, engine.role.child.id());
            assert!(engine.role.child.try_wait().unwrap().is_none(), "it lives until its input ends");
            assert!(engine.role.end().success());
        }
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

/// Drops to another user for good; with that go all capabilities.
fn become_user(uid: u32) {
    // SAFETY: plain system calls on numbers.
    unsafe {
        assert_eq!(libc::setgroups(0, std::ptr::null()), 0);
        assert_eq!(libc::setresgid(uid, uid, uid), 0);
        assert_eq!(libc::setresuid(uid, uid, uid), 0);
    }
}

fn set_dumpable(dumpable: u64) {
    // SAFETY: PR_SET_DUMPABLE takes a number.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, dumpable, 0, 0, 0) }, 0);
}

/// Readers are siblings that do not run yet, so a process whose Yama asks cannot name them.
fn allow_ptrace_by_anyone() {
    // SAFETY: PR_SET_PTRACER takes a number. It fails where there is no Yama, which then asks nobody.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::c_ulong::MAX, 0, 0, 0) };
}

/// Makes the kernel refuse process_vm_readv to this thread with EPERM, as container runtimes do.
fn forbid_process_vm() {
    let instruction = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut filter = [
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0), // the number of the call
        instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_process_vm_readv as u32),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program and its instructions are live; the kernel checks and copies them.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program, 0, 0), 0);
    }
}

/// Holds a fence and a pattern until its input ends.
fn be_engine() {
    if let Some(uid) = number("UID") {
        become_user(uid as u32);
        set_dumpable(1); // changing users cleared it
    }
    if let Some(dumpable) = number("DUMPABLE") {
        set_dumpable(dumpable);
    }
    let data: Vec<u8> = (0..DATA_BYTES).map(pattern).collect();
    let fence = HostFence::new(NONCE);
    allow_ptrace_by_anyone();
    say(&format!("{} {}", fence.address(), data.as_ptr().expose_provenance()));
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    assert_eq!(data[DATA_BYTES - 1], pattern(DATA_BYTES - 1));
}

/// Probes one process, with less than this test's rights, and says what came of it.
fn be_reader() {
    let target = number("TARGET").unwrap() as u32;
    let pidfd = pidfd(target);
    if let Some(uid) = number("UID") {
        become_user(uid as u32);
    }
    if number("SECCOMP").is_some() {
        forbid_process_vm();
    }
    match ProcessVm::probe(target, pidfd, number("FENCE").unwrap(), NONCE) {
        Ok(_) => say("allowed"),
        Err(ProbeError::NotPermitted { errno, hint }) => {
            say(&format!("refused {} {hint}", errno.raw_os_error()))
        }
        Err(error) => say(&format!("{error:?}")),
    }
}

/// Copies from its parent into a pool, far longer than any test waits, and says when the first copy has arrived.
fn be_copier() {
    let target = number("TARGET").unwrap() as u32;
    let process = ProcessVm::probe(target, pidfd(target), number("FENCE").unwrap(), NONCE).unwrap();
    let pool = pool();
    // That runs share pool bytes only leaves open which copy wins, and all hold the same bytes.
    let forever = vec![(BlockId(0), PoolOffset(0)); 2_000_000];
    let runs = Runs::plan(&[pieces(number("DATA").unwrap(), DATA_BYTES, 1, 0)], &forever, &pool).unwrap();
    let ended = std::thread::scope(|scope| {
        let copier = scope.spawn(|| process.copy_out(&runs, EPOCH));
        while byte(&pool, DATA_BYTES - 1) != pattern(DATA_BYTES - 1) {
            assert!(!copier.is_finished(), "the copy ended early");
            std::thread::yield_now();
        }
        say("begun");
        copier.join().unwrap()
    });
    say(&format!("{ended:?}"));
}

fn pool() -> Arc<Arena> {
    let options =
        ArenaOptions { bytes: DATA_BYTES as u64, hugepages: HugePages::Off, numa: Numa::Off, threads: 1 };
    Arc::new(Arena::create(&options, &|_| {}).unwrap())
}

/// A byte of the pool, which others may be writing.
fn byte(pool: &Arena, at: usize) -> u8 {
    assert!(at < DATA_BYTES);
    // SAFETY: the byte is inside the pool; it is read as volatile.
    unsafe { pool.base().add(at).read_volatile() }
}

/// `blocks` blocks of one piece each, so far apart.
fn pieces(base: u64, bytes: usize, blocks: u64, stride: u64) -> Region {
    let piece_bytes = bytes as u64;
    Region { base, block_stride: stride, blocks, piece_bytes, piece_offsets: vec![0] }
}

// ---- what the tests see of them ----

struct Engine {
    role: Role,
    pid: u32,
    fence: u64,
    data: u64,
}

impl Engine {
    fn start(arguments: &[(&str, String)]) -> Engine {
        let mut role = Role::start("engine", arguments, Stdio::piped());
        let line = role.line();
        let (fence, data) = line.split_once(' ').unwrap();
        let pid = role.child.id();
        Engine { role, pid, fence: fence.parse().unwrap(), data: data.parse().unwrap() }
    }

    fn probe(&self) -> Result<ProcessVm, ProbeError> {
        ProcessVm::probe(self.pid, pidfd(self.pid), self.fence, NONCE)
    }

    /// What a reader with these restrictions finds.
    fn read_by(&self, arguments: &[(&str, String)]) -> String {
        let target = [("TARGET", self.pid.to_string()), ("FENCE", self.fence.to_string())];
        let mut reader = Role::start("reader", &[&target, arguments].concat(), Stdio::null());
        let found = reader.line();
        assert!(reader.end().success());
        found
    }

    /// All of its bytes, to the beginning of the pool.
    fn all(&self, pool: &Arc<Arena>) -> Runs {
        Runs::plan(&[pieces(self.data, DATA_BYTES, 1, 0)], &[(BlockId(0), PoolOffset(0))], pool).unwrap()
    }
}

fn uid(uid: u32) -> (&'static str, String) {
    ("UID", uid.to_string())
}

fn assert_refused(found: &str) {
    assert!(found.starts_with(&format!("refused {} ", libc::EPERM)), "{found}");
    assert!(found.len() > "refused 1 ".len(), "with a hint: {found}");
}

/// Users for an engine and its readers: as root, users without its rights; else there is only this one.
fn unprivileged() -> Vec<(&'static str, String)> {
    if is_root() { vec![uid(NOBODY)] } else { vec![] }
}

/// Runs a test as root of a user namespace with many users, where this machine lets us have one.
fn in_a_user_namespace(test: &str) {
    let enter = || {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--map-auto", "--"]);
        command
    };
    let refusal = match enter().arg("true").output() {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Some(error.to_string()),
    };
    if let Some(why) = refusal {
        let wanted = "be root, or have newuidmap, a range in /etc/subuid and util-linux 2.38";
        return println!("not tested: {test}: {wanted} ({why})");
    }
    let status = enter().arg(std::env::current_exe().unwrap()).args(["--exact", test]).status().unwrap();
    assert!(status.success(), "{status}: what happened in the namespace stands above");
}

// ---- tests ----

#[test]
fn a_live_process_is_read() {
    let engine = Engine::start(&[]);
    let process = engine.probe().unwrap();
    assert_eq!((process.pid(), process.fence()), (engine.pid, Ok(EPOCH)));
    let pool = pool();
    // Scattered pieces in more than one batch, backwards in the engine, then one long run.
    let place = |i: u32| (BlockId(2999 - i), PoolOffset(u64::from(i) * 350));
    let places: Vec<_> = (0..3000).map(place).collect();
    let scattered = Runs::plan(&[pieces(engine.data, 350, 3000, 700)], &places, &pool).unwrap();
    assert_eq!(scattered.as_slice().len(), 3000);
    process.copy_out(&scattered, EPOCH).unwrap();
    for i in 0..3000usize {
        let found = |at: usize| byte(&pool, i * 350 + at) == pattern((2999 - i) * 700 + at);
        assert!((0..350).all(found), "piece {i}");
    }
    process.copy_out(&engine.all(&pool), EPOCH).unwrap();
    assert!((0..DATA_BYTES).all(|at| byte(&pool, at) == pattern(at)));
    process.copy_out(&Runs::none(&pool), EPOCH).unwrap();
    assert!(engine.role.end().success());
}

#[test]
fn a_wrong_address_fails_the_copy_and_not_the_process() {
    let engine = Engine::start(&[]);
    let process = engine.probe().unwrap();
    let regions = [pieces(engine.data, 4096, 1, 0), pieces(4096, 4096, 1, 0)];
    let runs = Runs::plan(&regions, &[(BlockId(0), PoolOffset(0))], &pool()).unwrap();
    let error = process.copy_out(&runs, EPOCH).unwrap_err();
    assert_eq!(error, CopyError::Refused { pid: engine.pid, address: 4096, errno: rustix::io::Errno::FAULT });
    assert!(error.to_string().contains("0x1000"), "{error}");
}

#[test]
fn another_nonce_or_address_is_another_process() {
    let engine = Engine::start(&[]);
    let probe = |fence, nonce| ProcessVm::probe(engine.pid, pidfd(engine.pid), fence, nonce).unwrap_err();
    assert_eq!(probe(engine.fence, [0; 16]), ProbeError::WrongNonce);
    assert_eq!(probe(engine.data, NONCE), ProbeError::WrongNonce);
    assert_eq!(probe(8, NONCE), ProbeError::WrongNonce);
    let invisible = ProcessVm::probe(0, pidfd(engine.pid), engine.fence, NONCE);
    assert!(matches!(invisible, Err(ProbeError::Unsupported(_))), "{invisible:?}");
}

#[test]
fn an_exited_process_is_gone() {
    let mut engine = Engine::start(&[]);
    let process = engine.probe().unwrap();
    let runs = engine.all(&pool());
    let gone = CopyError::Gone { pid: engine.pid };
    engine.role.child.kill().unwrap();
    // First the zombie, whose pid still names it, then nothing.
    rustix::event::poll(&mut [PollFd::new(process.pidfd(), PollFlags::IN)], None).unwrap();
    for _ in 0..2 {
        assert_eq!(process.fence(), Err(gone.clone()));
        assert_eq!(process.copy_out(&runs, EPOCH), Err(gone.clone()));
        let pidfd = process.pidfd().try_clone().unwrap();
        assert!(pidfd_exited(&pidfd));
        let again = ProcessVm::probe(engine.pid, pidfd, engine.fence, NONCE);
        assert!(matches!(again, Err(ProbeError::Gone)), "{again:?}");
        engine.role.child.wait().unwrap();
    }
}

#[test]
fn a_given_up_copy_is_cancelled_before_it_starts() {
    let fence = HostFence::new(NONCE);
    let me = std::process::id();
    let process = ProcessVm::probe(me, pidfd(me), fence.address(), NONCE).unwrap();
    fence.raise_to(EPOCH + 1);
    let source = [1u8; 64];
    let pool = pool();
    let source = source.as_ptr().expose_provenance() as u64;
    let runs = Runs::plan(&[pieces(source, 64, 1, 0)], &[(BlockId(0), PoolOffset(0))], &pool).unwrap();
    assert_eq!(process.copy_out(&runs, EPOCH), Err(CopyError::Cancelled { asked: EPOCH, found: EPOCH + 1 }));
    assert!((0..64).all(|at| byte(&pool, at) == 0), "nothing was copied");
}

#[test]
fn a_copy_that_was_stopped_midway_sees_that_it_was_given_up() {
    // This process is the engine; its daemon is stopped in the middle of a copy.
    let fence = HostFence::new(NONCE);
    let data: Vec<u8> = (0..DATA_BYTES).map(pattern).collect();
    let arguments = [
        ("TARGET", std::process::id().to_string()),
        ("FENCE", fence.address().to_string()),
        ("DATA", (data.as_ptr().expose_provenance()).to_string()),
    ];
    allow_ptrace_by_anyone();
    let mut copier = Role::start("copier", &arguments, Stdio::null());
    let pid = Pid::from_child(&copier.child);

    assert_eq!(copier.line(), "begun", "its last byte has arrived once");
    rustix::process::kill_process(pid, Signal::STOP).unwrap();
    let (_, status) = rustix::process::waitpid(Some(pid), WaitOptions::UNTRACED).unwrap().unwrap();
    assert!(status.stopped());
    fence.raise_to(EPOCH + 1);
    rustix::process::kill_process(pid, Signal::CONT).unwrap();
    let expected = Err::<(), _>(CopyError::Cancelled { asked: EPOCH, found: EPOCH + 1 });
    assert_eq!(copier.line(), format!("{expected:?}"));
    assert!(copier.end().success());
}

#[test]
fn another_user_is_refused() {
    if !is_root() {
        assert_refused(&Engine::start(&[("DUMPABLE", "0".into())]).read_by(&[]));
        return in_a_user_namespace("another_user_is_refused");
    }
    let engine = Engine::start(&[uid(NOBODY - 1)]);
    assert_eq!(engine.read_by(&[uid(NOBODY - 1)]), "allowed", "the same user is not what is refused");
    assert_refused(&engine.read_by(&[uid(NOBODY)]));
    assert_refused(&Engine::start(&[]).read_by(&[uid(NOBODY)]));
}

#[test]
fn a_process_that_is_not_dumpable_is_refused() {
    let user = unprivileged();
    assert_eq!(Engine::start(&user).read_by(&user), "allowed", "a dumpable one is read");
    let hidden = Engine::start(&[&user[..], &[("DUMPABLE", "0".into())]].concat());
    assert_refused(&hidden.read_by(&user));
}

#[test]
fn a_seccomp_filter_is_a_refusal() {
    let engine = Engine::start(&[]);
    assert_eq!(engine.read_by(&[]), "allowed");
    assert_refused(&engine.read_by(&[("SECCOMP", "1".into())]));
}
