//! Meetings that go wrong: each gives one sentence, and bytes go through pinned memory of the host.

use std::fs::{create_dir, set_permissions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use kvlane_fabric::{EngineOptions, Op};
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, Uid, utimensat};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use rustix::thread::set_thread_res_uid;

use crate::side::{Kind, Side, done, pattern};
use crate::support::{MIB, Process};

const LEN: usize = 4 * MIB;
const CANNOT_READ: &str = "this process's GPU cannot read the peer's GPU memory: ";
const NOT_SHARED: &str = "the peer's GPU memory was not shared: ";

fn lies(kind: &str) -> Vec<(&'static str, String)> {
    let refused = |what: &str| format!("{CANNOT_READ}{what}");
    let odd = |what: &str| format!("{NOT_SHARED}{what}");
    match kind {
        "whole" => vec![
            ("no-card", odd("a descriptor is missing")),
            ("odd-card", odd("the peer's card is no memfd")),
            ("odd-verdict", odd("an answer of no known kind")),
            ("other-region", odd("it names another region")),
            ("many-parts", odd("a region of no known kind")),
            ("more-parts", odd("it ended too early")),
            ("elsewhere", odd("the peer's parts are not the bytes of its region")),
            ("larger", refused("an export of 4198400 bytes maps 4194304 bytes")),
            ("smaller", odd("the peer's parts are not the bytes of its region")),
            ("zeros", refused("cuIpcOpenMemHandle: CUDA error 400 (CUDA_ERROR_INVALID_HANDLE)")),
            ("freed", refused("cuIpcOpenMemHandle: CUDA error 205 (CUDA_ERROR_MAP_FAILED)")),
            ("cut", odd("it ended too early")),
            ("unlink", "this process does not see the peer's socket: it is on another host".into()),
        ],
        _ => vec![
            ("larger-chunk", refused("cuMemImportFromShareableHandle: CUDA error 1 (")),
            ("smaller-chunk", refused("cuMemImportFromShareableHandle: CUDA error 1 (")),
            ("larger", refused("cuMemAddressReserve: CUDA error 1 (")),
            ("no-chunk", odd("a descriptor is missing")),
            ("odd-chunk", refused("cuMemImportFromShareableHandle: CUDA error 1 (")),
            ("elsewhere", odd("the peer's parts are not the bytes of its region")),
        ],
    }
}

#[test]
fn a_peer_that_lies_about_its_memory_is_read_through_slots() {
    for kind in ["whole", "chunks"] {
        let here = Side::of(0, LEN);
        let own = here.mapped();
        for (how, why) in lies(kind) {
            let mut there = Process::with(LEN, &format!("1 {kind}"));
            there.order("pattern 7");
            there.order(&format!("lie {how}"));
            let (descriptor, staged) = (there.descriptor(), here.staged());
            let (peer, region) = (here.connect(&descriptor), descriptor.regions[0].number);
            here.memory.fill(0);
            done(&here.move_all(peer, Op::Read, region));
            assert!(here.memory.all() == pattern(LEN, 7), "{how}");
            assert!(here.trouble(peer).starts_with(&why), "{how}: {}", here.trouble(peer));
            assert_eq!(here.staged() - staged, LEN as u64, "{how}");
            here.unmaps_down_to(own);
            here.engine.disconnect(peer);
        }
    }
}

/// The handles say where the bytes are, so a false name does no harm.
#[test]
fn a_peer_that_names_another_gpu_is_read_by_cuda() {
    let here = Side::of(0, LEN);
    for how in ["not-at-all", "other-gpu"] {
        let mut there = Process::with(LEN, "1 whole");
        there.order("pattern 7");
        there.order(&format!("lie {how}"));
        let descriptor = there.descriptor();
        let (peer, region) = (here.meet(&descriptor), descriptor.regions[0].number);
        done(&here.move_all(peer, Op::Read, region));
        assert!(here.memory.all() == pattern(LEN, 7), "{how}");
        assert_eq!(here.staged(), 0, "{how}");
    }
}

#[test]
fn a_peer_that_hangs_at_its_meeting_place_holds_up_no_other() {
    let (here, mut other) = (Side::of(0, LEN), Process::with(LEN, "1 whole"));
    other.order("pattern 5");
    let descriptor = other.descriptor();
    let (known, region) = (here.meet(&descriptor), descriptor.regions[0].number);
    done(&here.move_all(known, Op::Read, region));
    let mut there = Process::with(LEN, "1 whole");
    there.order("pattern 7");
    there.order("lie hang");
    let hanging = there.descriptor();
    let peer = here.engine.connect(&hanging).unwrap();
    for _ in 0..20 {
        done(&here.move_all(known, Op::Read, region));
    }
    assert!(here.memory.all() == pattern(LEN, 5));
    assert_eq!(here.staged(), 0);
    done(&here.move_all(peer, Op::Read, hanging.regions[0].number));
    assert!(here.memory.all() == pattern(LEN, 7));
    assert_eq!(here.trouble(peer), "the peer does not send the handles of its GPU memory");
}

/// Each byte came within 5 s of the one before it, and meanwhile no other peer's memory was mapped.
#[test]
fn a_peer_that_sends_its_handles_byte_by_byte_is_soon_read_through_slots() {
    let (here, mut there) = (Side::of(0, LEN), Process::with(LEN, "1 whole"));
    there.order("pattern 7");
    there.order("lie trickle");
    let descriptor = there.descriptor();
    let peer = here.meet(&descriptor);
    done(&here.move_all(peer, Op::Read, descriptor.regions[0].number));
    assert!(here.memory.all() == pattern(LEN, 7));
    assert_eq!(here.trouble(peer), "the peer does not send the handles of its GPU memory");
}

/// The runtime folder is open to other users, so no socket is made in it.
#[test]
fn a_process_whose_runtime_folder_is_open_to_others_is_read_through_slots() {
    let session = tempfile::tempdir().unwrap();
    let folder = session.path().join("kvlane");
    create_dir(&folder).unwrap();
    set_permissions(&folder, PermissionsExt::from_mode(0o755)).unwrap();
    let why = format!("the peer reports: {} is not used: its mode is 755, so ", folder.display());
    read_through_slots("1 whole", session.path(), "", &why);
}

/// A container that does not share the folder looks the same.
#[test]
fn a_process_with_another_runtime_folder_is_read_through_slots() {
    let session = tempfile::tempdir().unwrap();
    let why = "this process does not see the peer's socket: it is on another host, runs as another user, or is in a container";
    read_through_slots("1 whole token", session.path(), "between", why);
}

fn read_through_slots(setup: &str, session: &Path, token: &str, why: &str) {
    let options = EngineOptions { token: token.into(), ..EngineOptions::default() };
    let here = Side::new(0, Kind::Whole, LEN, options);
    let mut there = Process::in_environment(LEN, setup, &[("XDG_RUNTIME_DIR", session)]);
    there.order("pattern 7");
    let descriptor = there.descriptor();
    let (peer, region) = (here.connect(&descriptor), descriptor.regions[0].number);
    done(&here.move_all(peer, Op::Read, region));
    assert!(here.memory.all() == pattern(LEN, 7));
    assert!(here.trouble(peer).starts_with(why), "{}", here.trouble(peer));
    assert_eq!(here.staged(), LEN as u64);
}

#[test]
fn the_socket_of_a_killed_process_is_removed_by_the_next_one() {
    let mut there = Process::with(LEN, "0 whole");
    let socket = there.ask("socket");
    assert_eq!(std::fs::symlink_metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    there.kill();
    make_old(Path::new(&socket));
    let _here = Side::of(0, LEN);
    assert!(!Path::new(&socket).exists());
}

/// Engines that started at the same time removed each other's, and bytes went through slots until the next start.
#[test]
fn a_socket_of_a_process_that_does_not_listen_yet_is_left_alone() {
    let mut there = Process::with(LEN, "0 whole");
    let folder = Path::new(&there.ask("socket")).parent().unwrap().to_owned();
    let bound = folder.join(format!("fabric-{:016x}.sock", std::process::id()));
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(&bound).unwrap()).unwrap();
    drop(Side::of(0, LEN));
    assert!(bound.exists());
    make_old(&bound);
    drop(Side::of(0, LEN));
    assert!(!bound.exists());
}

/// As if the file had been there for an hour.
fn make_old(path: &Path) {
    let then = UNIX_EPOCH.elapsed().unwrap() - Duration::from_secs(3600);
    let then = Timespec { tv_sec: then.as_secs() as i64, tv_nsec: 0 };
    let times = Timestamps { last_access: then, last_modification: then };
    utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

/// A process needs the pass, which peers hear of over their control connection.
#[test]
fn a_process_that_found_the_socket_gets_no_handle() {
    let mut there = Process::with(LEN, "0 whole");
    let socket = there.ask("socket");
    let say = |words: &[u8]| {
        let mut stream = UnixStream::connect(&socket).unwrap();
        stream.write_all(words).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        // It hangs up before it has read all words.
        let _ = stream.read_to_end(&mut answer);
        answer
    };
    let ask = [b"kvmeet 1", &[1; 16][..], &[0; 8]].concat();
    assert_eq!(say(&ask)[8..], *b"the peer does not know this pass");
    let too_many = [&ask[..24], &u32::MAX.to_le_bytes(), &[0; 4]].concat();
    for other in [&too_many, &vec![0x47; 4096], &ask[..31].to_vec(), &Vec::new()] {
        assert_eq!(say(other), [0; 0]);
    }
    if rustix::process::geteuid().is_root() {
        let path = socket.clone();
        let of_another_user = std::thread::spawn(move || {
            let user = Uid::from_raw(65_534);
            set_thread_res_uid(user, user, user).unwrap();
            UnixStream::connect(&path).map(drop).map_err(|error| error.kind())
        });
        assert_eq!(of_another_user.join().unwrap(), Err(ErrorKind::PermissionDenied));
    }
    // Its peers get theirs.
    let here = Side::of(0, LEN);
    here.meet(&there.descriptor());
}

#[test]
fn a_peer_with_very_many_regions_is_read_through_slots() {
    let (here, mut there) = (Side::of(0, LEN), Process::with(LEN, "1 whole"));
    there.order("pattern 7");
    there.order("register-pages 4200");
    let descriptor = there.descriptor();
    let peer = here.meet(&descriptor);
    let pages = descriptor.regions.iter().filter(|region| region.len == 16);
    let runs = pages.enumerate().map(|(at, page)| here.run(page.number, 16 * at, 0, 16));
    done(&here.begin(peer, Op::Read, runs.collect()));
    assert!(here.memory.get(0, 16 * 4200) == pattern(LEN, 7)[..16 * 4200]);
    assert_eq!(here.trouble(peer), "it has more regions than this process maps");
}
