//! Maps GPU memory of peers and unmaps it, in two threads, because drivers take up to 10 ms for an allocation of another GPU.
//!
//! ```text
//!  carrier:  fetch --> one thread: meets the peer, maps its card and regions, tries a copy --> take_done
//!            close --> another thread: unmaps                                             --> take_done
//! ```
//! A peer that hangs holds up the first thread for as long as [`PATIENCE`] allows, but never the second: memory of other peers
//! is unmapped at once.
//!
//! A driver never says that an import is stale: after a peer has died or freed its memory, copies from it succeed with the old
//! bytes. The card decides ([`SharedCard::marks`]). And an import keeps the memory allocated, so the carrier closes imports as
//! soon as the peer has gone or wants its memory back.

#![allow(unsafe_code, reason = "GPUs read memory of other processes")]

use std::collections::HashMap;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvlane_gpu::{Copy, DeviceMemory, Export, Gpu, GpuError, Imported, ImportedChunks, Priority, Stream};
use kvlane_memory::{PeerCredentials, peer_pidfd};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

use super::handles::{Ask, Incoming, Part, RegionHead, Source, Verdict, send};
use super::meeting::Meeting;
use crate::carriers::card::SharedCard;
use crate::identity::Identity;

/// How long one fetch waits for its peer in all: other peers' fetches wait behind it.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes that are copied to see whether memory can be read.
const PROBE_BYTES: u64 = 16;

/// Names a fetch. Never reused within a process.
pub(super) type FetchId = u64;

/// Regions of a peer to be mapped for a GPU of this process.
#[derive(Debug)]
pub(super) struct Fetch {
    pub(super) id: FetchId,
    pub(super) meeting: Meeting,
    pub(super) identity: Identity,
    pub(super) gpu: Gpu,
    /// As (number, generation).
    pub(super) regions: Vec<(u32, u32)>,
}

/// The thread did what it was asked for.
#[derive(Debug)]
pub(super) enum Done {
    Fetched {
        id: FetchId,
        outcome: Result<FetchedMemory, String>,
    },
    /// Nothing of this process maps that region for that GPU any more.
    Closed(Arc<ImportOf>),
}

#[derive(Debug)]
pub(super) struct FetchedMemory {
    pub(super) card: SharedCard,
    /// A pidfd of the peer, if the kernel gives one.
    pub(super) process: Option<OwnedFd>,
    /// Regions that the peer still has. Those that are missing are gone.
    pub(super) regions: Vec<RegionImport>,
}

/// Whose region an import maps, for the message that it was closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct ImportOf {
    pub(super) region: u32,
    pub(super) generation: u32,
    /// The carrier's connection to the peer.
    pub(super) connection: u64,
}

/// A region of a peer, mapped for one GPU of this process.
#[derive(Debug)]
pub(super) struct RegionImport {
    pub(super) region: u32,
    pub(super) generation: u32,
    /// Whether it lies on the GPU for which it is mapped.
    pub(super) is_own_gpu: bool,
    /// Sorted by offset, without gaps.
    pieces: Vec<ImportedPiece>,
    /// Keeps the pieces mapped.
    _held: Vec<Mapped>,
    _counted: Option<Counted>,
    /// The carrier has begun to close it. A copy that still holds it then hands it to [`Imports::close`] too.
    pub(super) is_given_up: AtomicBool,
}

/// Counts an import until it is unmapped.
#[derive(Debug)]
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(count: &Arc<AtomicUsize>) -> Counted {
        count.fetch_add(1, Ordering::AcqRel);
        Counted(Arc::clone(count))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Bytes of a region at one place of this process's addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ImportedPiece {
    offset: u64,
    len: u64,
    local: u64,
}

#[derive(Debug)]
enum Mapped {
    #[expect(dead_code, reason = "unmapped when dropped")]
    Allocation(Imported),
    #[expect(dead_code, reason = "unmapped when dropped")]
    Chunks(ImportedChunks),
}

impl RegionImport {
    /// The copies that bring these bytes of the region to `to`. None: the region has no such bytes.
    pub(super) fn copies(&self, offset: u64, len: u64, to: u64, copies: &mut Vec<Copy>) -> Option<()> {
        let end = offset.checked_add(len)?;
        let first = self.pieces.partition_point(|piece| piece.offset + piece.len <= offset);
        let mut at = offset;
        for piece in &self.pieces[first..] {
            if at == end {
                break;
            }
            let skip = at - piece.offset;
            let bytes = (piece.len - skip).min(end - at);
            copies.push(Copy { dst: to + (at - offset), src: piece.local + skip, len: bytes });
            at += bytes;
        }
        (at == end).then_some(())
    }
}

/// The threads, and their results.
#[derive(Debug)]
pub(super) struct Imports {
    maps: Helper,
    unmaps: Helper,
    shared: Arc<Results>,
    next: FetchId,
}

/// A thread that is started when it is first needed.
#[derive(Debug, Default)]
struct Helper {
    /// None: the thread has not been needed yet, or this is being dropped.
    to: Option<Sender<Errand>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Results {
    done: Mutex<Vec<Done>>,
    /// An eventfd that is readable when something is done.
    wake: OwnedFd,
    /// Regions that are mapped.
    mapped: Arc<AtomicUsize>,
    /// The socket of the fetch that runs, to end it when the engine closes.
    asking: Mutex<Option<UnixStream>>,
    /// No fetch is wanted any more.
    is_closed: AtomicBool,
}

#[derive(Debug)]
enum Errand {
    Fetch(Fetch),
    Close(Arc<ImportOf>, Arc<RegionImport>),
}

impl Imports {
    pub(super) fn new() -> io::Result<Imports> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (done, mapped, asking) = (Mutex::default(), Arc::default(), Mutex::default());
        let is_closed = AtomicBool::new(false);
        let shared = Arc::new(Results { done, wake, mapped, asking, is_closed });
        Ok(Imports { maps: Helper::default(), unmaps: Helper::default(), shared, next: 0 })
    }

    /// The eventfd that is readable when [`Imports::take_done`] has something.
    pub(super) fn wake(&self) -> &OwnedFd {
        &self.shared.wake
    }

    /// Wakes the thread that sleeps until something is done.
    pub(super) fn waker(&self) -> Waker {
        Waker(Arc::clone(&self.shared))
    }

    /// Begins to map regions of a peer.
    pub(super) fn fetch(
        &mut self,
        meeting: Meeting,
        identity: Identity,
        gpu: Gpu,
        regions: Vec<(u32, u32)>,
    ) -> FetchId {
        let id = self.next;
        self.next += 1;
        let fetch = Fetch { id, meeting, identity, gpu, regions };
        self.maps.send("kvlane-fabric-map", Errand::Fetch(fetch), &self.shared);
        id
    }

    /// Unmaps a region, once nothing else holds it. Each holder comes here, so the last one reports that it is closed.
    pub(super) fn close(&mut self, of: Arc<ImportOf>, import: Arc<RegionImport>) {
        import.is_given_up.store(true, Ordering::Release);
        self.unmaps.send("kvlane-fabric-free", Errand::Close(of, import), &self.shared);
    }

    /// Whether any region of a peer is mapped.
    pub(super) fn are_mapped(&self) -> bool {
        self.shared.mapped.load(Ordering::Acquire) > 0
    }

    /// Fetches and closes that the thread has finished since the last call.
    pub(super) fn take_done(&self) -> Vec<Done> {
        std::mem::take(&mut self.shared.done.lock())
    }

    /// Ends the fetch that runs, and those that wait fail.
    pub(super) fn give_up_fetches(&self) {
        self.shared.is_closed.store(true, Ordering::Release);
        if let Some(stream) = &*self.shared.asking.lock() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Imports {
    fn drop(&mut self) {
        self.give_up_fetches();
        self.maps.end();
        self.unmaps.end();
    }
}

impl Helper {
    fn send(&mut self, name: &str, errand: Errand, shared: &Arc<Results>) {
        if self.to.is_none() {
            let (to, errands) = channel();
            let results = Arc::clone(shared);
            match std::thread::Builder::new().name(name.into()).spawn(move || run(&errands, &results)) {
                Ok(thread) => (self.to, self.thread) = (Some(to), Some(thread)),
                Err(error) => return shared.refuse(errand, &format!("no thread can be started: {error}")),
            }
        }
        if let Some(Err(failed)) = self.to.as_ref().map(|to| to.send(errand)) {
            shared.refuse(failed.0, "the thread that maps memory has ended");
        }
    }

    fn end(&mut self) {
        self.to = None;
        crate::audit::takes_time("the end of a thread");
        // It does not panic. If it did, there is nothing left to end.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Makes the engine's thread poll the carrier.
#[derive(Debug, Clone)]
pub(super) struct Waker(Arc<Results>);

impl Waker {
    pub(super) fn wake(&self) {
        self.0.wake();
    }
}

impl Results {
    fn add(&self, done: Done) {
        self.done.lock().push(done);
        self.wake();
    }

    fn wake(&self) {
        // A full eventfd counter is readable too, so a failed write loses nothing.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn refuse(&self, errand: Errand, why: &str) {
        match errand {
            Errand::Fetch(fetch) => self.add(Done::Fetched { id: fetch.id, outcome: Err(why.to_owned()) }),
            Errand::Close(of, _) => self.add(Done::Closed(of)),
        }
    }
}

/// A thread: maps and unmaps until its sender is gone.
fn run(errands: &Receiver<Errand>, shared: &Results) {
    let mut probes = HashMap::new();
    while let Ok(errand) = errands.recv() {
        match errand {
            Errand::Fetch(fetch) if shared.is_closed.load(Ordering::Acquire) => {
                shared.add(Done::Fetched { id: fetch.id, outcome: Err("the engine was closed".into()) });
            }
            Errand::Fetch(fetch) => {
                fetch.gpu.let_others_capture();
                let outcome = fetch_memory(&fetch, &mut probes, shared);
                *shared.asking.lock() = None;
                shared.add(Done::Fetched { id: fetch.id, outcome });
            }
            Errand::Close(of, import) => {
                if Arc::into_inner(import).is_some() {
                    shared.add(Done::Closed(of));
                }
            }
        }
    }
}

/// Meets the peer and maps what it shares. The error is a sentence for users.
fn fetch_memory(
    fetch: &Fetch,
    probes: &mut HashMap<u32, CopyProbe>,
    shared: &Results,
) -> Result<FetchedMemory, String> {
    let Fetch { meeting, identity, gpu, regions, .. } = fetch;
    let stream = UnixStream::connect(meeting.path()).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            "this process does not see the peer's socket: it is on another host, runs as another user, or is in a container \
             with another runtime folder"
                .to_owned()
        }
        _ => format!("the peer's socket cannot be reached: {error}"),
    })?;
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::WouldBlock => "the peer does not send the handles of its GPU memory".to_owned(),
        _ => format!("the peer's GPU memory was not shared: {error}"),
    };
    stream.set_write_timeout(Some(PATIENCE)).map_err(failed)?;
    *shared.asking.lock() = Some(stream.try_clone().map_err(failed)?);
    kvlane_memory::check_same_user(&stream).map_err(failed)?;
    if PeerCredentials::of(&stream).map_err(failed)?.pid == std::process::id() {
        return Err("it is in this process, and a driver maps only memory of other processes".into());
    }
    // Linux before 6.5 has none of a process that this one does not see.
    let process = peer_pidfd(&stream).ok();
    let ask = Ask { pass: meeting.pass, regions: regions.clone() };
    send(&stream, &ask.encode(), &[]).map_err(failed)?;
    let mut incoming = Incoming::new(Patient { stream: &stream, left: PATIENCE });
    let card = match incoming.verdict().map_err(failed)? {
        Verdict::Fine(card) => SharedCard::open(card.as_fd(), *identity).map_err(failed)?,
        Verdict::Refused(why) => return Err(why),
    };
    let probe = match probes.entry(gpu.info().ordinal) {
        std::collections::hash_map::Entry::Occupied(probe) => probe.into_mut(),
        std::collections::hash_map::Entry::Vacant(room) => {
            room.insert(CopyProbe::new(gpu).map_err(|error| not_read(&error))?)
        }
    };
    let mut mapped = Vec::with_capacity(regions.len());
    for asked in regions {
        let head = incoming.region().map_err(failed)?;
        if (head.region, head.generation) != *asked {
            return Err("the peer's GPU memory was not shared: it names another region".into());
        }
        if let Some(import) =
            import_region(&mut incoming, gpu, &head, probe).map_err(|error| match error {
                ImportError::Socket(error) => failed(error),
                ImportError::Gpu(error) => not_read(&error),
            })?
        {
            let counted = Some(Counted::new(&shared.mapped));
            mapped.push(RegionImport { _counted: counted, ..import });
        }
    }
    Ok(FetchedMemory { card, process, regions: mapped })
}

/// A peer's answer, which may take so long in all.
struct Patient<'a> {
    stream: &'a UnixStream,
    left: Duration,
}

impl Source for Patient<'_> {
    fn take(&mut self, bytes: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> io::Result<usize> {
        if self.left.is_zero() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.stream.set_read_timeout(Some(self.left))?;
        let begun = Instant::now();
        let taken = Source::take(&mut self.stream, bytes, descriptors);
        self.left = self.left.saturating_sub(begun.elapsed());
        taken
    }
}

fn not_read(error: &GpuError) -> String {
    format!("this process's GPU cannot read the peer's GPU memory: {error}")
}

enum ImportError {
    Socket(io::Error),
    Gpu(GpuError),
}

impl From<io::Error> for ImportError {
    fn from(error: io::Error) -> ImportError {
        ImportError::Socket(error)
    }
}

impl From<GpuError> for ImportError {
    fn from(error: GpuError) -> ImportError {
        ImportError::Gpu(error)
    }
}

/// Maps the parts of a region. None: the peer has given it back.
fn import_region(
    incoming: &mut Incoming<Patient<'_>>,
    gpu: &Gpu,
    head: &RegionHead,
    probe: &mut CopyProbe,
) -> Result<Option<RegionImport>, ImportError> {
    let RegionHead { region, generation, address, len, parts, uuid } = *head;
    let (mut pieces, mut held) = (Vec::new(), Vec::new());
    for _ in 0..parts {
        let (base, bytes, local) = match incoming.part()? {
            Part::Allocation { base, bytes, handle } => {
                let export = Export { handle, base, bytes, device_uuid: uuid };
                let imported = gpu.import_from_any(&export)?;
                let local = imported.base();
                held.push(Mapped::Allocation(imported));
                (base, bytes, local)
            }
            Part::Chunks { base, bytes, count } => {
                let mut chunks = ImportedChunks::begin_from_any(gpu, base, bytes)?;
                for _ in 0..count {
                    let (bytes, descriptor) = incoming.chunk()?;
                    chunks.push(bytes, descriptor.as_fd())?;
                }
                let local = chunks.mapped()?.local_base;
                held.push(Mapped::Chunks(chunks));
                (base, bytes, local)
            }
        };
        let few = bytes.min(PROBE_BYTES);
        probe.try_copy(local, few)?;
        probe.try_copy(local + bytes - few, few)?;
        let (first, end) = (base.max(address), (base + bytes).min(address + len));
        if first < end {
            pieces.push(ImportedPiece {
                offset: first - address,
                len: end - first,
                local: local + (first - base),
            });
        }
    }
    if parts == 0 {
        return Ok(None);
    }
    pieces.sort_unstable_by_key(|piece| piece.offset);
    let reached = pieces.iter().try_fold(0, |at, piece| (piece.offset == at).then_some(at + piece.len));
    if reached != Some(len) {
        let why = "the peer's parts are not the bytes of its region";
        return Err(io::Error::new(io::ErrorKind::InvalidData, why).into());
    }
    let is_own_gpu = uuid == gpu.info().uuid;
    Ok(Some(RegionImport {
        region,
        generation,
        is_own_gpu,
        pieces,
        _held: held,
        _counted: None,
        is_given_up: AtomicBool::new(false),
    }))
}

/// Copies a few bytes, because a driver maps memory that a GPU does not reach, and says so only when it is read.
#[derive(Debug)]
struct CopyProbe {
    stream: Stream,
    to: DeviceMemory,
}

impl CopyProbe {
    fn new(gpu: &Gpu) -> Result<CopyProbe, GpuError> {
        Ok(CopyProbe { stream: Stream::new(gpu, Priority::Normal)?, to: gpu.alloc(PROBE_BYTES)? })
    }

    /// Copies up to [`PROBE_BYTES`].
    fn try_copy(&mut self, from: u64, len: u64) -> Result<(), GpuError> {
        let copy = Copy { dst: self.to.address(), src: from, len };
        // SAFETY: the source is mapped, and the destination is this probe's. Both live until the stream is done.
        unsafe { self.stream.copy(copy)? };
        self.stream.synchronize()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn bytes_of_a_region_may_lie_in_several_allocations() {
        let piece = |offset, len, local| ImportedPiece { offset, len, local };
        let pieces = vec![piece(0, 10, 1000), piece(10, 20, 5000), piece(30, 5, 200)];
        let import = RegionImport {
            region: 0,
            generation: 0,
            is_own_gpu: false,
            pieces,
            _held: Vec::new(),
            _counted: None,
            is_given_up: AtomicBool::new(false),
        };
        let copies = |offset, len| {
            let mut copies = Vec::new();
            import.copies(offset, len, 7000, &mut copies).map(|()| copies)
        };
        let copy = |dst, src, len| Copy { dst, src, len };
        assert_eq!(copies(0, 10), Some(vec![copy(7000, 1000, 10)]));
        assert_eq!(copies(8, 25), Some(vec![copy(7000, 1008, 2), copy(7002, 5000, 20), copy(7022, 200, 3)]));
        assert_eq!(copies(34, 1), Some(vec![copy(7000, 204, 1)]));
        assert_eq!(copies(34, 2), None);
        assert_eq!(copies(35, 1), None);
        assert_eq!(copies(u64::MAX, 2), None);
    }
}
