//! Engines with TLS, and connections that must not be let in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod certificates;
#[path = "support/deadline.rs"]
mod deadline;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use certificates::{Authority, Files};
use deadline::Deadline;
use kvlane_fabric::{
    Access, Descriptor, Engine, EngineOptions, FabricError, Failure, Handle, Op, Options, Pages, PeerId,
    Pieces, Place, Run, Tls, Transfer,
};
use rcgen::ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(30);
const MIB: usize = 1 << 20;
/// For the process that [`a_process_of_the_tests_below`] is: its certificate, key and authority.
const FILES: &str = "KVLANE_TEST_TLS_FILES";
const SAYS: &str = "says: ";

/// An authority and a folder for what it signs.
struct Ours {
    folder: TempDir,
    authority: Authority,
}

impl Ours {
    fn new() -> Ours {
        Ours::named("ours")
    }

    fn named(name: &str) -> Ours {
        Ours { folder: tempfile::tempdir().unwrap(), authority: Authority::new(name) }
    }

    fn tls(&self, name: &str) -> Option<Tls> {
        tls(self.authority.files(self.folder.path(), name))
    }

    fn options(&self, name: &str) -> EngineOptions {
        EngineOptions { tls: self.tls(name), ..EngineOptions::default() }
    }

    fn sides(&self, bytes: usize) -> (Side, Side) {
        (Side::new(bytes, self.options("here")), Side::new(bytes, self.options("there")))
    }
}

fn tls((certificate, key, authority): Files) -> Option<Tls> {
    Some(Tls { certificate, key, authority })
}

/// An engine with one region.
struct Side {
    engine: Engine,
    region: u32,
    memory: Vec<u8>,
}

impl Side {
    fn new(bytes: usize, options: EngineOptions) -> Side {
        let engine = Engine::new(options).unwrap();
        let mut memory = vec![0u8; bytes];
        // SAFETY: the engine is dropped first, as the first field.
        let region =
            unsafe { engine.register(memory.as_mut_ptr(), bytes as u64, Access::ReadWrite).unwrap() };
        Side { engine, region, memory }
    }

    fn peer(&self, other: &Side) -> PeerId {
        self.engine.connect(&other.engine.describe().unwrap()).unwrap()
    }

    fn begin(&self, peer: PeerId, op: Op, region: u32, at: usize, len: usize) -> Handle {
        let place = |region| Place { region, offset: at as u64 };
        let run = Run { local: place(self.region), remote: place(region), len: len as u64 };
        self.engine.begin(peer, Transfer { op, ..Transfer::write(Pieces::Contiguous(run)) }).unwrap()
    }

    fn address(&self) -> SocketAddr {
        let text = self.engine.describe().unwrap().addresses[0].bytes.clone();
        String::from_utf8(text).unwrap().parse().unwrap()
    }

    fn fill(&mut self, seed: u64) {
        let mut word = seed | 1;
        for byte in &mut self.memory {
            word = word.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            *byte = (word >> 33) as u8;
        }
    }

    /// What is wrong with the only path to a peer, once something is.
    fn trouble(&self, peer: PeerId) -> String {
        let begun = Instant::now();
        loop {
            let [path] = &self.engine.paths(peer)[..] else { panic!("one address, one connection") };
            assert!(!path.is_up, "{path:?}");
            if let Some(trouble) = &path.trouble {
                return trouble.clone();
            }
            assert!(begun.elapsed() < PATIENCE, "nothing is wrong");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn done(handle: &Handle) {
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Ok(())));
}

#[test]
fn bytes_of_any_length_go_both_ways_and_count_after_them() {
    let (mut here, mut there) = Ours::new().sides(8 * MIB);
    let peer = here.peer(&there);
    let generation = there.engine.open_counter(7);
    let lens = [0, 1, 64, 8191, 8193, 16_383, 16_384, 16_385, 65_537, MIB, 5 * MIB + 1, 8 * MIB];
    for (count, len) in (1..).zip(lens) {
        here.fill(count);
        let place = |region| Place { region, offset: 0 };
        let run = Run { local: place(here.region), remote: place(there.region), len: len as u64 };
        let pieces = Pieces::Contiguous(run);
        let write = Transfer { immediate: Some((7, generation)), ..Transfer::write(pieces.clone()) };
        let before = there.memory[len..].to_vec();
        done(&here.engine.begin(peer, write).unwrap());
        assert!(there.engine.wait_count(7, generation, count, Some(PATIENCE)));
        assert!(there.memory[..len] == here.memory[..len], "{len} bytes written");
        assert!(there.memory[len..] == before, "behind {len} bytes");
        there.fill(count + 100);
        done(&here.engine.begin(peer, Transfer::read(pieces)).unwrap());
        assert!(there.memory[..len] == here.memory[..len], "{len} bytes read");
    }
    let paths = here.engine.paths(peer);
    let carriers: Vec<&str> = paths.iter().map(|path| path.carrier).collect();
    assert_eq!(carriers, ["control", "tcp"], "what is encrypted goes by TCP, over one address");
    assert!(paths.iter().all(|path| path.is_up && path.trouble.is_none()), "{paths:?}");
}

#[test]
fn pages_arrive_at_the_pages_they_are_for() {
    const PAGES: u32 = 20_000;
    for page_bytes in [64u64, 1000] {
        let bytes = page_bytes as usize * PAGES as usize * 2;
        let (mut here, there) = Ours::new().sides(bytes);
        here.fill(5);
        let peer = here.peer(&there);
        // Every second page, the other way round: no two are adjacent.
        let pages = |region, indices: Arc<[u32]>| Pages { region, offset: 0, stride: page_bytes, indices };
        let local = pages(here.region, (0..PAGES).map(|page| page * 2).collect());
        let remote = pages(there.region, (0..PAGES).map(|page| (PAGES - 1 - page) * 2).collect());
        done(&here.engine.begin(peer, Transfer::write(Pieces::Paged { page_bytes, local, remote })).unwrap());
        let page = page_bytes as usize;
        for index in 0..PAGES as usize {
            let (from, to) = (index * 2 * page, (PAGES as usize - 1 - index) * 2 * page);
            assert!(there.memory[to..to + page] == here.memory[from..from + page], "page {index}");
            assert!(there.memory[to + page..to + 2 * page].iter().all(|byte| *byte == 0));
        }
    }
}

/// What turns leave in our own buffers does not wait until the peer says something again.
#[test]
fn a_frame_of_many_turns_is_taken_at_once() {
    const BYTES: usize = 64 * MIB;
    let ours = Ours::new();
    let transfers = Options { chunk_bytes: BYTES as u64, ..Options::default() };
    let mut here = Side::new(BYTES, EngineOptions { transfers, ..ours.options("here") });
    let there = Side::new(BYTES, ours.options("there"));
    let peer = here.peer(&there);
    done(&here.begin(peer, Op::Write, there.region, 0, 1));
    here.fill(9);
    let deadline = Deadline::after(Duration::from_secs(4));
    done(&here.begin(peer, Op::Write, there.region, 0, BYTES));
    deadline.assert_kept();
    assert!(here.memory == there.memory);
}

/// Outcome of one write, and what is wrong with the path.
fn refused(here: EngineOptions, there: EngineOptions) -> String {
    let transfers = Options { peer_patience: Duration::from_millis(200), ..Options::default() };
    let mut here = Side::new(100, EngineOptions { transfers, ..here });
    here.fill(1);
    let there = Side::new(100, there);
    let peer = here.peer(&there);
    let write = here.begin(peer, Op::Write, there.region, 0, 100);
    assert_eq!(write.wait(Some(PATIENCE)), Some(Err(Failure::PeerLost)));
    assert_eq!(there.memory, [0; 100], "nothing arrives");
    here.trouble(peer)
}

#[test]
fn a_certificate_that_is_not_ours_is_refused_on_both_sides_and_says_why() {
    let (ours, theirs) = (Ours::new(), Ours::named("theirs"));
    let stranger = || theirs.tls("stranger").unwrap();
    let authority = |name| ours.tls(name).unwrap().authority;
    let folder = ours.folder.path();
    let with = |tls| EngineOptions { tls, ..EngineOptions::default() };
    // It trusts us, but we do not trust it.
    let unknown = || with(Some(Tls { authority: authority("any"), ..stranger() }));
    let expired = || with(tls(ours.authority.files_for(folder, "old", &[ServerAuth, ClientAuth], 2020)));
    let only = |purpose| with(tls(ours.authority.files_for(folder, "half", &[purpose], 4000)));
    let good = || ours.options("good");
    for (there, why) in
        [(unknown(), "UnknownIssuer"), (expired(), "Expired"), (only(ClientAuth), "InvalidPurpose")]
    {
        let trouble = refused(good(), there);
        assert!(trouble.contains("certificate is not accepted") && trouble.contains(why), "{trouble}");
    }
    for here in [unknown(), expired(), only(ServerAuth)] {
        let trouble = refused(here, good());
        assert!(trouble.contains("does not accept our certificate"), "{trouble}");
    }
    let token = |token: &str| EngineOptions { token: token.into(), ..good() };
    let trouble = refused(token("one"), token("other"));
    assert!(trouble.contains("token"), "{trouble}");
}

#[test]
fn with_tls_on_one_side_only_nothing_moves_and_both_are_told() {
    let ours = Ours::new();
    let trouble = refused(ours.options("here"), EngineOptions::default());
    assert!(trouble.contains("the peer does not speak TLS"), "{trouble}");
    let trouble = refused(EngineOptions::default(), ours.options("there"));
    assert!(trouble.contains("the peer wants TLS"), "{trouble}");
}

#[test]
fn what_is_no_handshake_is_left_alone_in_time_and_others_are_served() {
    let ours = Ours::new();
    let (here, there) = ours.sides(100);
    let stranger = || {
        let stranger = TcpStream::connect(there.address()).unwrap();
        stranger.set_read_timeout(Some(PATIENCE)).unwrap();
        stranger
    };
    // Until the other side ends it, whatever it says.
    let end = |stranger: &mut TcpStream| {
        let _ = stranger.read_to_end(&mut Vec::new());
    };
    let deadline = Deadline::after(PATIENCE);
    let mut noise = Vec::new();
    let mut word = 1u64;
    for _ in 0..MIB / 8 {
        word = word.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        noise.extend(word.to_le_bytes());
    }
    let hello = [&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3][..], &[0; 64]].concat();
    for says in [&noise, &[&[0x16, 3, 1, 0x40, 0][..], &noise].concat(), &[0x17; 4096].to_vec(), &hello] {
        let mut stranger = stranger();
        let _ = stranger.write_all(says);
        end(&mut stranger);
    }
    // One says nothing, and one a byte now and then: a greeting has its time as a whole.
    let mut silent = stranger();
    end(&mut silent);
    let mut slow = stranger();
    slow.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let is_over = |byte: &u8| slow.write_all(&[*byte]).is_err() || slow.read(&mut [0; 64]).is_ok();
    assert!(hello.iter().any(is_over), "it was let go on for ever");
    deadline.assert_kept();
    done(&here.begin(here.peer(&there), Op::Write, there.region, 0, 100));
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let ours = Ours::new();
    let good = ours.tls("good").unwrap();
    let missing = ours.folder.path().join("missing.pem");
    let empty = ours.folder.path().join("empty.pem");
    std::fs::write(&empty, "nothing").unwrap();
    let other = ours.tls("other").unwrap();
    let with = |tls: Tls| match Engine::new(EngineOptions { tls: Some(tls), ..EngineOptions::default() }) {
        Err(FabricError::Tls(error)) => (error.file.clone(), error.to_string()),
        other => panic!("{other:?}"),
    };
    let cases = [
        (Tls { certificate: missing.clone(), ..good.clone() }, &missing, "No such file"),
        (Tls { key: missing.clone(), ..good.clone() }, &missing, "No such file"),
        (Tls { authority: empty.clone(), ..good.clone() }, &empty, "a certificate, as PEM"),
        (Tls { key: empty.clone(), ..good.clone() }, &empty, "a private key"),
        (Tls { key: good.certificate.clone(), ..good.clone() }, &good.certificate, "a private key"),
        (Tls { key: other.key.clone(), ..good.clone() }, &good.certificate, "not that of this certificate"),
    ];
    for (tls, wanted, why) in cases {
        let (file, sentence) = with(tls);
        assert_eq!(&file, wanted);
        assert!(sentence.contains(&*wanted.to_string_lossy()) && sentence.contains(why), "{sentence}");
    }
}

/// What a proxy does to the bytes of one direction.
#[derive(Clone, Copy)]
enum Harm {
    Cut,
    Change,
}

/// Forwards; the first connections are harmed after so many bytes from either side.
fn proxy(to: SocketAddr, harm: Harm, connections: usize, after: usize) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let harmed = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&harmed);
    std::thread::spawn(move || {
        for (number, from) in listener.incoming().enumerate() {
            let (Ok(from), Ok(to)) = (from, TcpStream::connect(to)) else { return };
            let back = (to.try_clone().unwrap(), from.try_clone().unwrap());
            for (mut from, mut to) in [(from, to), back] {
                let harmed = (number < connections).then(|| Arc::clone(&count));
                std::thread::spawn(move || {
                    let mut bytes = vec![0; 16 << 10];
                    let mut passed = 0;
                    while let Ok(read @ 1..) = from.read(&mut bytes) {
                        let is_due = passed <= after && passed + read > after;
                        if let (true, Some(harmed)) = (is_due, &harmed) {
                            harmed.fetch_add(1, Ordering::AcqRel);
                            match harm {
                                Harm::Cut => break,
                                Harm::Change => bytes[after - passed] ^= 1,
                            }
                        }
                        passed += read;
                        if to.write_all(&bytes[..read]).is_err() {
                            break;
                        }
                    }
                    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                });
            }
        }
    });
    (address, harmed)
}

fn over(description: Descriptor, address: SocketAddr) -> Descriptor {
    let mut description = description;
    description.addresses[0].bytes = address.to_string().into_bytes();
    description
}

/// Also in the handshake, in the greeting, and where bytes are changed on the way: they never arrive.
#[test]
fn what_was_cut_or_changed_on_the_way_comes_over_another_connection() {
    const BYTES: usize = 16 * MIB;
    let ours = Ours::new();
    for (harm, after) in [
        (Harm::Cut, 100),
        (Harm::Cut, 1200),
        (Harm::Cut, 5 * MIB + 77),
        (Harm::Change, 300),
        (Harm::Change, MIB + 1),
        (Harm::Change, 9 * MIB),
    ] {
        let (mut here, mut there) = ours.sides(BYTES);
        let (address, harmed) = proxy(there.address(), harm, 2, after);
        let peer = here.engine.connect(&over(there.engine.describe().unwrap(), address)).unwrap();
        here.fill(after as u64);
        done(&here.begin(peer, Op::Write, there.region, 0, BYTES));
        assert!(here.memory == there.memory, "written, {after}");
        there.fill(after as u64 + 1);
        done(&here.begin(peer, Op::Read, there.region, 0, BYTES));
        assert!(here.memory == there.memory, "read, {after}");
        assert!(harmed.load(Ordering::Acquire) > 0);
    }
}

/// Not a test of its own: the process that the test below kills.
#[test]
fn a_process_of_the_tests_below() {
    let Ok(files) = std::env::var(FILES) else { return };
    let mut files = files.split(':').map(|file| Path::new(file).to_owned());
    let mut next = || files.next().unwrap();
    let options = EngineOptions { tls: tls((next(), next(), next())), ..EngineOptions::default() };
    let side = Side::new(64 * MIB, options);
    let description = side.engine.describe().unwrap().to_bytes().unwrap();
    let hex: String = description.iter().map(|byte| format!("{byte:02x}")).collect();
    println!("{SAYS}{hex}");
    // Until it is killed, or nobody is left to do so.
    let _ = std::io::stdin().read(&mut [0]);
}

#[test]
fn transfers_with_a_peer_that_is_killed_end_and_other_peers_go_on() {
    let ours = Ours::new();
    // Longer than a busy machine keeps the child from running.
    let transfers = Options { peer_patience: Duration::from_secs(3), ..Options::default() };
    let mut here = Side::new(64 * MIB, EngineOptions { transfers, ..ours.options("here") });
    here.fill(3);
    let Tls { certificate, key, authority } = ours.tls("child").unwrap();
    let files = [certificate, key, authority].map(|file| file.to_string_lossy().into_owned()).join(":");
    for wait in [0, 3, 20] {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_process_of_the_tests_below", "--nocapture"])
            .env(FILES, &files)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let said = |line: Result<String, _>| Some(line.ok()?.split_once(SAYS)?.1.to_owned());
        let hex = output.lines().find_map(said).expect("the process says nothing");
        let bytes: Vec<u8> =
            (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect();
        let description = Descriptor::from_bytes(&bytes).unwrap();
        let region = description.regions[0].number;
        let peer = here.engine.connect(&description).unwrap();
        done(&here.begin(peer, Op::Write, region, 0, MIB));
        let before = here.memory.clone();
        let writes: Vec<Handle> = (0..8).map(|_| here.begin(peer, Op::Write, region, 0, 64 * MIB)).collect();
        std::thread::sleep(Duration::from_millis(wait));
        child.kill().unwrap();
        child.wait().unwrap();
        let outcomes: Vec<_> = writes.iter().map(|write| write.wait(Some(PATIENCE))).collect();
        assert_eq!(outcomes.last(), Some(&Some(Err(Failure::PeerLost))), "{outcomes:?}");
        assert!(outcomes.iter().all(|outcome| matches!(outcome, Some(Ok(()) | Err(Failure::PeerLost)))));
        assert!(here.memory == before);
        let other = Side::new(MIB, ours.options("other"));
        done(&here.begin(here.peer(&other), Op::Write, other.region, 0, MIB));
        assert!(other.memory == here.memory[..MIB]);
    }
}
