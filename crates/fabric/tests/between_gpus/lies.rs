//! A process that lies at its meeting place: it stands between its engine and the peer, and changes the answer.

use std::collections::HashSet;
use std::fs::{File, read_dir, read_link, read_to_string, remove_file};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

use kvlane_gpu::{Gpu, IpcHandle};
use kvlane_memory::{recv_with_fds, send_with_fds};

use crate::support::PATIENCE;

/// Bytes of an ask before its regions, and where it says how many follow.
const ASK_BYTES: usize = 32;
const ASK_COUNT: usize = 24;
/// In the answer for one region, with the verdict before it: the region's number, its parts, its GPU, its first part and that
/// part's handle.
const REGION: usize = 8;
const PARTS: usize = REGION + 24;
const UUID: usize = REGION + 32;
const PART: usize = REGION + 48;
const PART_BASE: usize = PART + 8;
const PART_BYTES: usize = PART + 16;
const HANDLE: usize = PART + 24;

/// The socket at which this process's engine gives out handles.
pub(crate) fn own_socket() -> PathBuf {
    let entries = read_dir("/proc/self/fd").unwrap().flatten();
    let links = entries.filter_map(|entry| read_link(entry.path()).ok());
    let inode = |link: PathBuf| Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned());
    let own: HashSet<String> = links.filter_map(inode).collect();
    let table = read_to_string("/proc/net/unix").unwrap();
    let mut sockets = table.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let path = words.get(7).filter(|_| own.contains(words[6]))?;
        (path.contains("/fabric-") && path.ends_with(".sock")).then(|| PathBuf::from(path))
    });
    sockets.next().expect("this engine has a meeting place")
}

/// An answer to a peer, with its descriptors: the card's and those of chunks.
struct Answer {
    bytes: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

impl Answer {
    fn has_region(&self) -> bool {
        self.bytes.len() > HANDLE
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn add(&mut self, at: usize, more: i64) {
        let word = u64::from_le_bytes(self.bytes[at..at + 8].try_into().unwrap());
        self.put(at, &word.wrapping_add_signed(more).to_le_bytes());
    }
}

/// Lies from now on to each peer that asks for memory of this GPU.
pub(crate) fn lie(gpu: &Gpu, how: &str) {
    let path = own_socket();
    // This reaches the engine's socket although another one takes its place.
    let real = File::options().read(true).custom_flags(libc::O_PATH).open(&path).unwrap();
    remove_file(&path).unwrap();
    if how == "unlink" {
        return;
    }
    let listener = UnixListener::bind(&path).unwrap();
    let (how, freed) = (how.to_owned(), freed(gpu));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            // A peer may hang up before it has heard all lies.
            let _ = answer(stream.unwrap(), &real, &how, freed);
        }
    });
}

/// The handle of memory that is free again.
fn freed(gpu: &Gpu) -> IpcHandle {
    let memory = gpu.alloc(4096).unwrap();
    gpu.export(memory.address()).unwrap().handle
}

fn answer(mut stream: UnixStream, real: &File, how: &str, freed: IpcHandle) -> std::io::Result<()> {
    let mut ask = vec![0; ASK_BYTES];
    stream.read_exact(&mut ask)?;
    let count = u32::from_le_bytes(ask[ASK_COUNT..ASK_COUNT + 4].try_into().unwrap());
    let mut regions = vec![0; 8 * count as usize];
    stream.read_exact(&mut regions)?;
    ask.append(&mut regions);
    if how == "hang" {
        stream.set_read_timeout(Some(PATIENCE))?;
        return stream.read_exact(&mut [0]);
    }
    let engine = UnixStream::connect(format!("/proc/self/fd/{}", real.as_raw_fd()))?;
    (&engine).write_all(&ask)?;
    let mut answer = Answer { bytes: Vec::new(), descriptors: Vec::new() };
    loop {
        let mut some = [0; 4096];
        match recv_with_fds(&engine, &mut some, &mut answer.descriptors)? {
            0 => break,
            len => answer.bytes.extend(&some[..len]),
        }
    }
    change(&mut answer, how, freed);
    let descriptors: Vec<_> = answer.descriptors.iter().map(AsFd::as_fd).collect();
    if how == "trickle" {
        // A region's answer takes 14 s.
        let first = send_with_fds(&stream, &answer.bytes[..1], &descriptors)?;
        for byte in &answer.bytes[first..] {
            stream.set_read_timeout(Some(Duration::from_millis(100)))?;
            if matches!(stream.read(&mut [0]), Ok(0)) {
                break;
            }
            stream.write_all(&[*byte])?;
        }
        return Ok(());
    }
    let sent = send_with_fds(&stream, &answer.bytes, &descriptors)?;
    stream.write_all(&answer.bytes[sent..])
}

fn change(answer: &mut Answer, how: &str, freed: IpcHandle) {
    match how {
        "not-at-all" | "trickle" => {}
        "no-card" => answer.descriptors.clear(),
        "odd-card" => answer.descriptors[0] = File::open("/dev/null").unwrap().into(),
        "odd-verdict" => answer.put(0, &[7]),
        _ if !answer.has_region() => {}
        "other-region" => answer.put(REGION, &[77]),
        "other-gpu" => answer.put(UUID, &[9; 16]),
        "many-parts" => answer.put(PARTS, &u32::MAX.to_le_bytes()),
        "more-parts" => answer.put(PARTS, &2u32.to_le_bytes()),
        "elsewhere" => answer.add(PART_BASE, 4096),
        "larger" => answer.add(PART_BYTES, 4096),
        "smaller" => answer.add(PART_BYTES, -4096),
        "zeros" => answer.put(HANDLE, &[0; 64]),
        "freed" => answer.put(HANDLE, &freed),
        // The first of two chunks.
        "larger-chunk" => answer.add(HANDLE, 2 << 20),
        "smaller-chunk" => answer.add(HANDLE, -(1 << 20)),
        "no-chunk" => drop(answer.descriptors.pop()),
        "odd-chunk" => answer.descriptors[1] = File::open("/dev/null").unwrap().into(),
        "cut" => answer.bytes.truncate(HANDLE),
        _ => panic!("{how}?"),
    }
}
