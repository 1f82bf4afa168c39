//! The meeting place: the Unix socket at which an engine gives peers the handles of its GPU memory.
//!
//! ```text
//!  exporter                                                  importer
//!  binds fabric-NUMBER.sock, mode 0600, in the runtime
//!  folder of its user
//!  offer or answer: name, pass -------- control connection -->
//!                                                            connects; is the exporter of the same user?
//!  is the importer of the same user? has it the pass? <------ ask: pass, regions
//!  the card's descriptor, each region's handles ------------>
//!  hangs up
//! ```
//! A handle maps a whole allocation, and the importer may write it, because drivers have nothing less. So handles go only to
//! processes of the same user of this host, never over TCP. No descriptor names the socket: a peer learns of it over the
//! control connection, on which both sides have proved their secret. Containers that share the runtime folder can meet.
//!
//! The socket is made when the first GPU memory is registered. A thread accepts, and one thread for each peer sends, so a peer
//! that hangs costs the others nothing.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvlane_gpu::{ChunkRange, Gpu, GpuError};
use kvlane_memory::{DESCRIPTORS_MAX, RuntimeFolder, SocketFile, check_same_user};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::exposed::{Exposed, ExposedRegion};
use super::handles::{Ask, FINE, Incoming, Part, RegionHead, refusal, send};
use crate::random::{long_random, random};

/// Longest silence of a peer at the socket.
const PATIENCE: Duration = Duration::from_secs(5);
/// Peers that are served at the same time. Others wait until one is done.
const SERVED_MAX: usize = 32;
/// Pause after an accept that failed, mostly because this process may open no more files, and while as many peers are served as
/// may be.
const PAUSE: Duration = Duration::from_millis(10);

/// How a peer finds the socket, and proves that it was told of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Meeting {
    pub(super) number: u64,
    pub(super) pass: u128,
}

impl Meeting {
    /// The socket's path, in this user's runtime folder.
    pub(super) fn path(self) -> PathBuf {
        RuntimeFolder::of_this_user().path().join(format!("fabric-{:016x}.sock", self.number))
    }
}

/// The open socket. Its thread ends when this is dropped.
#[derive(Debug)]
pub(super) struct MeetingPlace {
    pub(super) meeting: Meeting,
    stop: Arc<OwnedFd>,
    _file: SocketFile,
}

impl MeetingPlace {
    /// Opens the socket.
    ///
    /// # Errors
    /// A sentence for users: the runtime folder cannot be used, or the kernel refuses something.
    pub(super) fn open(exposed: &Arc<Exposed>) -> Result<MeetingPlace, String> {
        let refused = |error: io::Error| format!("it cannot give out handles of GPU memory: {error}");
        exposed.make_card().map_err(refused)?;
        let meeting = Meeting { number: random().map_err(refused)?, pass: long_random().map_err(refused)? };
        SocketFile::remove_stale("fabric-");
        let (listener, file) = SocketFile::bind(&meeting.path()).map_err(|error| error.to_string())?;
        listener.set_nonblocking(true).map_err(refused)?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let stop = Arc::new(eventfd(0, flags).map_err(|errno| refused(errno.into()))?);
        let (exposed, until) = (Arc::clone(exposed), Arc::clone(&stop));
        std::thread::Builder::new()
            .name("kvlane-fabric-meet".into())
            .spawn(move || accept(&listener, &exposed, meeting.pass, &until))
            .map_err(refused)?;
        Ok(MeetingPlace { meeting, stop, _file: file })
    }
}

impl Drop for MeetingPlace {
    fn drop(&mut self) {
        // The thread touches no memory of transfers, so nothing has to wait until it has ended.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
    }
}

/// Accepts peers until `stop` is readable.
fn accept(listener: &UnixListener, exposed: &Arc<Exposed>, pass: u128, stop: &OwnedFd) {
    let served = Arc::new(AtomicUsize::new(0));
    loop {
        let mut watched =
            [PollFd::new(&listener, PollFlags::IN), PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN)];
        if poll(&mut watched, None).is_ok() && !watched[1].revents().is_empty() {
            return;
        }
        if served.load(Ordering::Acquire) >= SERVED_MAX {
            std::thread::sleep(PAUSE);
            continue;
        }
        match listener.accept() {
            Ok((stream, _)) => serve_in_thread(stream, exposed, pass, &served),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

fn serve_in_thread(stream: UnixStream, exposed: &Arc<Exposed>, pass: u128, served: &Arc<AtomicUsize>) {
    served.fetch_add(1, Ordering::AcqRel);
    let (exposed, counted) = (Arc::clone(exposed), Arc::clone(served));
    let serving = std::thread::Builder::new().name("kvlane-fabric-give".into()).spawn(move || {
        exposed.let_others_capture();
        if let Err(error) = serve(&stream, &exposed, pass) {
            tracing::debug!(%error, "a peer did not get the handles of GPU memory");
        }
        counted.fetch_sub(1, Ordering::AcqRel);
    });
    if serving.is_err() {
        served.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Answers one ask.
fn serve(stream: &UnixStream, exposed: &Exposed, pass: u128) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    check_same_user(stream)?;
    let ask = Incoming::new(stream).ask()?;
    if ask.pass != pass {
        return send(stream, &refusal("the peer does not know this pass"), &[]);
    }
    answer(stream, exposed, &ask)
}

fn answer(stream: &UnixStream, exposed: &Exposed, ask: &Ask) -> io::Result<()> {
    let card = exposed.card().ok_or_else(|| io::Error::other("there is no card"))?;
    send(stream, &FINE, &[card])?;
    for (number, generation) in &ask.regions {
        let (region, generation) = (*number, *generation);
        let known = exposed.region(region, generation).filter(|(found, _)| found.is_open);
        let Some((ExposedRegion { address, len, .. }, gpu)) = known else {
            let gone = RegionHead { region, generation, address: 0, len: 0, parts: 0, uuid: [0; 16] };
            send(stream, &gone.encode(), &[])?;
            continue;
        };
        let parts = parts_of(&gpu, address, len).map_err(io::Error::other)?;
        let (uuid, count) = (gpu.info().uuid, parts.len() as u32);
        let head = RegionHead { region, generation, address, len, parts: count, uuid };
        send(stream, &head.encode(), &[])?;
        for part in parts {
            send_part(stream, &gpu, &part)?;
        }
    }
    Ok(())
}

/// Memory that a region lies in.
enum Holding {
    /// An allocation, by an address in it.
    Allocation(u64),
    Chunks(ChunkRange),
}

/// The allocations or chunks that hold a region.
fn parts_of(gpu: &Gpu, address: u64, len: u64) -> Result<Vec<Holding>, GpuError> {
    if gpu.is_chunked(address)? {
        return Ok(gpu.chunk_ranges(&[(address, len)])?.into_iter().map(Holding::Chunks).collect());
    }
    let (driver, device) = gpu.raw();
    let (mut at, end, mut parts) = (address, address.saturating_add(len), Vec::new());
    while at < end {
        parts.push(Holding::Allocation(at));
        let (base, bytes) = driver.address_range(device, at)?;
        at = base.saturating_add(bytes).max(at + 1);
    }
    Ok(parts)
}

fn send_part(stream: &UnixStream, gpu: &Gpu, holding: &Holding) -> io::Result<()> {
    match holding {
        Holding::Allocation(address) => {
            let export = gpu.export(*address).map_err(io::Error::other)?;
            let part = Part::Allocation { base: export.base, bytes: export.bytes, handle: export.handle };
            send(stream, &part.encode(), &[])
        }
        Holding::Chunks(range) => {
            let ChunkRange { base, chunks } = range;
            let part = Part::Chunks { base: *base, bytes: range.bytes(), count: chunks.len() as u32 };
            send(stream, &part.encode(), &[])?;
            let mut address = *base;
            for some in chunks.chunks(DESCRIPTORS_MAX) {
                let mut descriptors = Vec::with_capacity(some.len());
                for bytes in some {
                    descriptors.push(gpu.export_chunk(address).map_err(io::Error::other)?);
                    address += bytes;
                }
                let sizes: Vec<u8> = some.iter().flat_map(|bytes| bytes.to_le_bytes()).collect();
                let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
                send(stream, &sizes, &descriptors)?;
            }
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::fs::{Permissions, set_permissions};
    use std::io::Read;
    use std::os::unix::fs::PermissionsExt;

    use rustix::fs::Uid;
    use rustix::thread::set_thread_res_uid;

    use super::*;
    use crate::carriers::cuda::handles::Verdict;
    use crate::identity::Identity;

    const PASS: u128 = 7;

    /// A connection of another user, which only root can make, and has asked as a peer would.
    fn ask_as(user: u32, path: PathBuf) -> UnixStream {
        let asking = std::thread::spawn(move || {
            let user = Uid::from_raw(user);
            set_thread_res_uid(user, user, user).unwrap();
            let stream = UnixStream::connect(path).unwrap();
            // It may be hung up on already.
            let _ = send(&stream, &Ask { pass: PASS, regions: Vec::new() }.encode(), &[]);
            stream
        });
        asking.join().unwrap()
    }

    /// The folder and the socket's mode keep others away. If those fail, the kernel's word on the peer's user does.
    #[test]
    fn processes_of_another_user_get_nothing_and_keep_no_peer_waiting() {
        let exposed = Arc::new(Exposed::new(Identity { engine: 1, boot: 2 }));
        exposed.make_card().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
        set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let until = Arc::clone(&stop);
        let accepting = std::thread::spawn(move || accept(&listener, &exposed, PASS, &until));
        let is_root = rustix::process::geteuid().is_root();
        let strangers = 0..if is_root { 3 * SERVED_MAX } else { 0 };
        let strangers: Vec<_> = strangers.map(|_| ask_as(65_534, path.clone())).collect();
        let peer = UnixStream::connect(&path).unwrap();
        send(&peer, &Ask { pass: PASS, regions: Vec::new() }.encode(), &[]).unwrap();
        assert!(matches!(Incoming::new(&peer).verdict().unwrap(), Verdict::Fine(_)));
        for mut stranger in strangers {
            let mut heard = Vec::new();
            // The end may be that of a connection with unread bytes.
            let _ = stranger.read_to_end(&mut heard);
            assert!(heard.is_empty(), "{heard:?}");
        }
        rustix::io::write(&*stop, &1u64.to_ne_bytes()).unwrap();
        accepting.join().unwrap();
    }

    #[test]
    fn another_user_is_named_in_the_reason() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
        set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
        let _stranger = ask_as(65_534, path.clone());
        let error = check_same_user(&listener.accept().unwrap().0).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the peer runs as user 65534, this process as user 0: run both as one user"
        );
        let _own = UnixStream::connect(&path).unwrap();
        check_same_user(&listener.accept().unwrap().0).unwrap();
    }
}
