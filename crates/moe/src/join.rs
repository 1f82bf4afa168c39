//! [`join`]: how the ranks of a host find each other's memory.
//!
//! ```text
//!  every rank: opens moe-NUMBER.sock, mode 0600, in the runtime folder of its user
//!  all gather: sizes, host, the socket's number and pass, or why the rank has none     by a call of the user's: torch, MPI, ...
//!  every rank: connects to every other one, of the same user? ------>  of the same user? has it the pass?
//!              <----------------------------------------------------- the descriptor of its memory
//!  all gather: has each rank all memory?
//! ```

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvlane_memory::{
    RuntimeFolder, SocketFile, check_same_user, peer_pidfd, random, recv_with_fds, send_with_fds,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;

use crate::heap::{Heap, Peers};
use crate::layout::Layout;
use crate::shape::Field;
use crate::{MoeError, Rank, Scales, Shape};

/// Longest silence of a peer at the socket, and longest wait until all have come.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest silence of a process that has connected.
const PASS_PATIENCE: Duration = Duration::from_secs(5);
/// Longest wait for the next peer before a look whether this rank has failed.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
const MAGIC: &[u8; 8] = b"kvlmoe02";
/// Begins the bytes of a rank that cannot join. The reason follows.
const CANNOT: &[u8; 8] = b"kvlmoeno";
const PASS_BYTES: usize = 16;
/// Sizes, the kind of memory, and terms.
const FIELDS: usize = 14;
/// Offset of what a rank has written into its memory before it gives it to others.
pub(crate) const TOLD_AT: usize = 128;

/// Gives all ranks' bytes to every rank, in the order of ranks. Called twice by each rank.
pub type AllGather<'a> = dyn FnMut(&[u8]) -> Result<Vec<Vec<u8>>, String> + 'a;

/// The bytes that a rank tells the others, little-endian: `kvlmoe02`, then these.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Hello {
    rank: u32,
    uid: u32,
    socket: u64,
    pass: [u8; PASS_BYTES],
    /// The kernel's number of this boot, the same for all processes of a host.
    host: [u8; 36],
    fields: [u64; FIELDS],
}

impl Hello {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.rank.to_le_bytes());
        bytes.extend(self.uid.to_le_bytes());
        bytes.extend(self.socket.to_le_bytes());
        bytes.extend(self.pass);
        bytes.extend(self.host);
        bytes.extend(self.fields.iter().flat_map(|field| field.to_le_bytes()));
        bytes
    }

    /// None if these bytes are no hello.
    fn decode(bytes: &[u8]) -> Option<Hello> {
        let rest = bytes.strip_prefix(MAGIC)?;
        let (rank, rest) = rest.split_first_chunk()?;
        let (uid, rest) = rest.split_first_chunk()?;
        let (socket, rest) = rest.split_first_chunk()?;
        let (pass, rest) = rest.split_first_chunk()?;
        let (host, rest) = rest.split_first_chunk()?;
        let (words, []) = rest.as_chunks::<8>() else { return None };
        let words: &[[u8; 8]; FIELDS] = words.try_into().ok()?;
        Some(Hello {
            rank: u32::from_le_bytes(*rank),
            uid: u32::from_le_bytes(*uid),
            socket: u64::from_le_bytes(*socket),
            pass: *pass,
            host: *host,
            fields: words.map(u64::from_le_bytes),
        })
    }

    fn socket_path(&self) -> PathBuf {
        RuntimeFolder::of_this_user().path().join(format!("moe-{:016x}.sock", self.socket))
    }
}

/// The memory by which ranks meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Memory of the host, in which they work.
    Host,
    /// That of a GPU, and memory of the host in which they say whether they take part.
    Gpu,
}

/// The settings beside the shape in which ranks have to agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// Whether a combine may be exact. On a GPU there is memory for it.
    pub is_exact: bool,
    /// How the caller casts rows before a dispatch.
    pub cast: Option<Scales>,
}

/// The part of a rank before it meets others: the size of its memory of the host, its first bytes at [`TOLD_AT`], and what else it
/// keeps.
pub(crate) struct Part<P> {
    pub(crate) bytes: usize,
    pub(crate) told: Vec<u8>,
    pub(crate) kept: P,
}

/// A rank that has met the others, and what it keeps.
pub(crate) struct Met<P> {
    pub(crate) layout: Layout,
    pub(crate) heap: Heap,
    pub(crate) peers: Peers,
    pub(crate) kept: P,
}

/// A rank that is about to meet the others.
struct Ready<P> {
    layout: Layout,
    kept: P,
    bytes: usize,
    heap: Heap,
    memfd: OwnedFd,
    hello: Hello,
    listener: UnixListener,
    _file: SocketFile,
}

/// Joins the ranks of an all-to-all; all have to call this. `timeout` is the longest wait for a peer in an operation.
///
/// # Errors
/// [`MoeError::BadInput`] for a shape that cannot be, [`MoeError::NotJoined`] if the ranks do not agree or do not reach each
/// other. Every rank gets an error then.
pub fn join(
    shape: &Shape,
    rank: usize,
    terms: Terms,
    timeout: Duration,
    all_gather: &mut AllGather<'_>,
) -> Result<Rank, MoeError> {
    let part = |layout: &Layout| Ok(Part { bytes: layout.bytes, told: Vec::new(), kept: () });
    let make =
        |Met { layout, heap, peers, kept: () }| Ok(Rank::new(*shape, rank, layout, heap, peers, timeout));
    meet_all(shape, rank, Kind::Host, terms, all_gather, part, make)
}

/// Takes the place of [`join`] in a rank that cannot: tells the others why, so that none waits for it.
pub fn decline(ranks: usize, why: &str, all_gather: &mut AllGather<'_>) {
    let told = [CANNOT.as_slice(), why.as_bytes()].concat();
    // The others gather twice.
    let _ = gather(all_gather, &told, ranks).and_then(|_| gather(all_gather, why.as_bytes(), ranks));
}

/// Has all ranks meet. `part` begins this one, and `make` ends it once it has the others' memory. If one of them fails on any
/// rank, all ranks hear why.
pub(crate) fn meet_all<P, T>(
    shape: &Shape,
    rank: usize,
    kind: Kind,
    terms: Terms,
    all_gather: &mut AllGather<'_>,
    part: impl FnOnce(&Layout) -> Result<Part<P>, MoeError>,
    make: impl FnOnce(Met<P>) -> Result<T, MoeError>,
) -> Result<T, MoeError> {
    let agreed = fields(shape, kind, terms);
    let ready = match prepare(shape, rank, &agreed, part) {
        Ok(ready) => ready,
        Err(error) => {
            decline(shape.ranks, &error.to_string(), all_gather);
            return Err(error);
        }
    };
    let Ready { layout, kept, bytes, heap, memfd, hello, listener, _file } = ready;
    let told = gather(all_gather, &hello.encode(), shape.ranks)?;
    let made = meet(&agreed, &hello, &told, &listener, &memfd, bytes)
        .map_err(MoeError::NotJoined)
        .and_then(|peers| make(Met { layout, heap, peers, kept }));
    let verdict = made.as_ref().err().map(MoeError::to_string).unwrap_or_default();
    // A rank that fails here has not joined, and leaves: so a peer that has joined does not wait for it.
    let verdicts = gather(all_gather, verdict.as_bytes(), shape.ranks)?;
    all_fine(&verdicts)?;
    made
}

fn prepare<P>(
    shape: &Shape,
    rank: usize,
    agreed: &[Field; FIELDS],
    part: impl FnOnce(&Layout) -> Result<Part<P>, MoeError>,
) -> Result<Ready<P>, MoeError> {
    shape.check().map_err(MoeError::BadInput)?;
    if rank >= shape.ranks {
        return Err(MoeError::BadInput(format!("rank {rank} is not one of {}", shape.ranks)));
    }
    let too_large = || MoeError::BadInput("the ranks' memory would be larger than any process".into());
    let layout = Layout::of(shape).ok_or_else(too_large)?;
    let own = |error: io::Error| MoeError::NotJoined(format!("rank {rank} cannot meet the others: {error}"));
    let Part { bytes, told, kept } = part(&layout)?;
    let (heap, memfd) = Heap::create(bytes).map_err(own)?;
    heap.write(TOLD_AT, &told);
    let mut host = [0; 36];
    std::fs::File::open("/proc/sys/kernel/random/boot_id")
        .and_then(|mut file| file.read_exact(&mut host))
        .map_err(own)?;
    let hello = Hello {
        rank: rank as u32,
        uid: rustix::process::geteuid().as_raw(),
        socket: u64::from_le_bytes(random().map_err(own)?),
        pass: random().map_err(own)?,
        host,
        fields: agreed.map(|field| field.value),
    };
    SocketFile::remove_stale("moe-");
    let path = hello.socket_path();
    let (listener, _file) = SocketFile::bind(&path).map_err(|error| {
        MoeError::NotJoined(format!(
            "rank {rank} cannot meet the others at {}: {error}. XDG_RUNTIME_DIR names another folder",
            path.display()
        ))
    })?;
    Ok(Ready { layout, kept, bytes, heap, memfd, hello, listener, _file })
}

/// All on which ranks have to agree.
fn fields(shape: &Shape, kind: Kind, terms: Terms) -> [Field; FIELDS] {
    let cast = match terms.cast {
        None => 0,
        Some(Scales::Float) => 1,
        Some(Scales::PowerOfTwo) => 2,
        Some(Scales::Exponent) => 3,
    };
    let [ranks, experts, top_k, tokens, row, scale, hidden, dtype, alignment, layout, capacity] =
        shape.fields();
    // First those from which others follow: the first that differs is told.
    [
        Field { name: "device", value: u64::from(kind == Kind::Gpu), words: &["cpu", "cuda"] },
        dtype,
        layout,
        Field { name: "exact", value: terms.is_exact.into(), words: &["False", "True"] },
        Field { name: "cast", value: cast, words: &["None", "fp8", "fp8_pow2", "fp8_ue8m0"] },
        ranks,
        experts,
        top_k,
        tokens,
        hidden,
        row,
        scale,
        alignment,
        capacity,
    ]
}

fn gather(all_gather: &mut AllGather<'_>, bytes: &[u8], ranks: usize) -> Result<Vec<Vec<u8>>, MoeError> {
    let told = all_gather(bytes).map_err(MoeError::NotJoined)?;
    if told.len() != ranks {
        let why = format!("all_gather gave {} answers for {ranks} ranks", told.len());
        return Err(MoeError::NotJoined(why));
    }
    Ok(told)
}

/// Whether no rank tells why it has not all memory.
fn all_fine(verdicts: &[Vec<u8>]) -> Result<(), MoeError> {
    let whys: Vec<String> = verdicts
        .iter()
        .enumerate()
        .filter(|(_, why)| !why.is_empty())
        .map(|(rank, why)| format!("rank {rank}: {}", String::from_utf8_lossy(why)))
        .collect();
    if whys.is_empty() {
        return Ok(());
    }
    Err(MoeError::NotJoined(format!("the ranks did not join: {}", whys.join("; "))))
}

fn meet(
    agreed_on: &[Field; FIELDS],
    hello: &Hello,
    told: &[Vec<u8>],
    listener: &UnixListener,
    memfd: &OwnedFd,
    bytes: usize,
) -> Result<Peers, String> {
    let hellos = agreed(agreed_on, hello, told)?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let giving = scope.spawn(|| give(listener, hello, told.len() - 1, memfd, &stop));
        let peers: Result<Peers, String> = hellos
            .iter()
            .map(|peer| {
                if peer.rank == hello.rank {
                    return Ok(None);
                }
                let taken = take(peer, bytes);
                taken.map(Some).map_err(|error| format!("it does not reach rank {}: {error}", peer.rank))
            })
            .collect();
        if peers.is_err() {
            stop.store(true, Ordering::Relaxed);
        }
        let given = giving.join().unwrap_or_else(|_| Err(io::Error::other("the thread that gives it ended")));
        let peers = peers?;
        given.map_err(|error| format!("it could not give its memory to all others: {error}"))?;
        Ok(peers)
    })
}

/// The hellos of all ranks, if these agree.
fn agreed(fields: &[Field; FIELDS], own: &Hello, told: &[Vec<u8>]) -> Result<Vec<Hello>, String> {
    let mut hellos = Vec::with_capacity(told.len());
    for (rank, bytes) in told.iter().enumerate() {
        if let Some(why) = bytes.strip_prefix(CANNOT) {
            return Err(format!("rank {rank} cannot: {}", String::from_utf8_lossy(why)));
        }
        let hello = Hello::decode(bytes)
            .ok_or_else(|| format!("all_gather gave bytes for rank {rank} that are not of this kvlane"))?;
        if hello.rank as usize != rank {
            return Err(format!("all_gather gave the bytes of rank {} as those of rank {rank}", hello.rank));
        }
        if hello.host != own.host {
            return Err(format!("rank {rank} is on another host: kvlane.moe joins the ranks of one host"));
        }
        if hello.uid != own.uid {
            let (theirs, ours) = (hello.uid, own.uid);
            return Err(format!("it runs as user {ours}, rank {rank} as user {theirs}: run all as one user"));
        }
        for (field, theirs) in fields.iter().zip(hello.fields) {
            if field.value != theirs {
                let (ours, theirs) = (field.say(field.value), field.say(theirs));
                return Err(format!("{} is {ours} here and {theirs} at rank {rank}", field.name));
            }
        }
        hellos.push(hello);
    }
    Ok(hellos)
}

/// Gives the descriptor to that many peers.
fn give(
    listener: &UnixListener,
    hello: &Hello,
    peers: usize,
    memfd: &OwnedFd,
    stop: &AtomicBool,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let begun = Instant::now();
    let mut given = 0;
    while given < peers && !stop.load(Ordering::Relaxed) {
        // Also while processes connect that know no pass.
        if begun.elapsed() > PATIENCE {
            let why = format!("{given} of {peers} came within {} s", PATIENCE.as_secs());
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
        retry_on_intr(|| poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&LOOK)))?;
        match listener.accept() {
            // A process that hangs up or knows no pass is no peer.
            Ok((stream, _)) => given += usize::from(give_one(&stream, hello, memfd).is_ok()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn give_one(stream: &UnixStream, hello: &Hello, memfd: &OwnedFd) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(PASS_PATIENCE))?;
    check_same_user(stream)?;
    let mut pass = [0; PASS_BYTES];
    (&*stream).read_exact(&mut pass)?;
    if pass != hello.pass {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    send_with_fds(stream, &[1], &[memfd.as_fd()])?;
    Ok(())
}

/// Maps a peer's memory.
fn take(peer: &Hello, bytes: usize) -> io::Result<(Heap, OwnedFd)> {
    let path = peer.socket_path();
    let mut stream = UnixStream::connect(&path).map_err(|error| {
        let why = format!("{}: {error}. All ranks need the same XDG_RUNTIME_DIR", path.display());
        io::Error::new(error.kind(), why)
    })?;
    stream.set_read_timeout(Some(PATIENCE))?;
    check_same_user(&stream)?;
    let process = peer_pidfd(&stream)?;
    stream.write_all(&peer.pass)?;
    let mut descriptors = Vec::new();
    let came = recv_with_fds(&stream, &mut [0], &mut descriptors).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => {
            io::Error::other(format!("it gave nothing within {} s", PATIENCE.as_secs()))
        }
        _ => error,
    })?;
    if came == 0 {
        return Err(io::Error::other("it hung up"));
    }
    let memfd = descriptors.pop().ok_or_else(|| io::Error::other("it gave no descriptor"))?;
    Ok((Heap::open(&memfd, bytes)?, process))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use proptest::prelude::*;

    use super::*;
    use crate::{Number, RowLayout};

    fn shape() -> Shape {
        Shape {
            ranks: 2,
            experts: 4,
            top_k: 2,
            max_tokens: 8,
            row_bytes: 32,
            scale_bytes: 0,
            hidden: 16,
            number: Number::Bf16,
            alignment: 1,
            layout: RowLayout::Experts,
        }
    }

    fn fields_here() -> [Field; FIELDS] {
        fields(&shape(), Kind::Host, Terms { is_exact: true, cast: None })
    }

    fn hello(rank: u32) -> Hello {
        let fields = fields_here().map(|field| field.value);
        Hello { rank, uid: 5, socket: 7, pass: [3; PASS_BYTES], host: [b'h'; 36], fields }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_hello_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..200), whole: bool) {
            let mut told = if whole { hello(1).encode() } else { MAGIC.to_vec() };
            told.extend(bytes);
            if let Some(hello) = Hello::decode(&told) {
                prop_assert_eq!(hello.encode(), told);
            }
        }
    }

    #[test]
    fn ranks_that_do_not_agree_are_told_what_differs() {
        let agree = |change: &dyn Fn(&mut Hello)| {
            let mut other = hello(1);
            change(&mut other);
            agreed(&fields_here(), &hello(0), &[hello(0).encode(), other.encode()])
        };
        assert_eq!(agree(&|_| ()).unwrap(), [hello(0), hello(1)]);
        for (name, value, sentence) in [
            ("top_k", 8, "top_k is 2 here and 8 at rank 1"),
            ("device", 1, "device is cpu here and cuda at rank 1"),
            ("dtype", 2, "dtype is bfloat16 here and float32 at rank 1"),
            ("layout", 1, "layout is experts here and masked at rank 1"),
            ("exact", 0, "exact is True here and False at rank 1"),
            ("cast", 3, "cast is None here and fp8_ue8m0 at rank 1"),
            // A later kvlane may have more.
            ("cast", 9, "cast is None here and 9 at rank 1"),
        ] {
            let place = fields_here().iter().position(|field| field.name == name).unwrap();
            assert_eq!(agree(&|other| other.fields[place] = value).unwrap_err(), sentence);
        }
        assert_eq!(
            agree(&|other| other.uid = 6).unwrap_err(),
            "it runs as user 5, rank 1 as user 6: run all as one user"
        );
        let elsewhere = agree(&|other| other.host[0] = b'i').unwrap_err();
        assert_eq!(elsewhere, "rank 1 is on another host: kvlane.moe joins the ranks of one host");
        let failed = agreed(&fields_here(), &hello(0), &[hello(0).encode(), b"kvlmoenono memory".to_vec()]);
        assert_eq!(failed.unwrap_err(), "rank 1 cannot: no memory");
        let swapped = agreed(&fields_here(), &hello(0), &[hello(1).encode(), hello(0).encode()]).unwrap_err();
        assert_eq!(swapped, "all_gather gave the bytes of rank 1 as those of rank 0");
        let garbage =
            agreed(&fields_here(), &hello(0), &[hello(0).encode(), b"kvlmoe02".to_vec()]).unwrap_err();
        assert_eq!(garbage, "all_gather gave bytes for rank 1 that are not of this kvlane");
    }
}
