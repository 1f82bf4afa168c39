//! A memfd that two processes map, with one ring for each direction.
//!
//! ```text
//!  | ring 0: header, bytes | ring 1: header, bytes |
//!    connecting side writes  listening side writes
//! ```
//! The connecting side creates it and names it in its Hello. The listening side takes the descriptor out of that process, and
//! maps it only if its size is sealed.

#![allow(unsafe_code, reason = "rings at addresses of a mapping")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use kvlane_memory::Mapping;
use kvlane_shm_ring::{HEADER_BYTES, Memory, Reader, Writer};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::wire::RingsOffer;

/// Bytes of each ring of a connection.
pub(crate) const RING_BYTES: usize = 256 << 10;
/// The smallest ring. Rings begin at multiples of it.
const RING_BYTES_MIN: usize = 4096;
/// The largest ring. Bounds what a peer can make us map, and is a few times what any process asks for.
const RING_BYTES_MAX: usize = 1 << 20;
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Which side of a connection this process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RingSide {
    /// It connected: it writes ring 0 and reads ring 1.
    Connecting,
    /// It listened: it writes ring 1 and reads ring 0.
    Listening,
}

/// A memfd with two rings, one after the other. Its size is sealed, so neither process can shrink it and make an access of
/// the other fault.
#[derive(Debug)]
pub(crate) struct Segment {
    memfd: OwnedFd,
    mapping: Mapping,
    ring_bytes: usize,
}

impl Segment {
    /// Creates a segment with empty rings. Send its descriptor to the other side before taking the ends.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] unless `ring_bytes` is a power of two from 4 KiB to 1 MiB, or an error of the kernel.
    pub(crate) fn create(ring_bytes: usize) -> io::Result<Segment> {
        if !is_ring(ring_bytes as u64) {
            let why = format!(
                "a ring has a power of two of bytes, {RING_BYTES_MIN} to {RING_BYTES_MAX}, and not {ring_bytes}"
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memfd = rustix::fs::memfd_create("kvlane-rings", flags)?;
        rustix::fs::ftruncate(&memfd, segment_bytes(ring_bytes))?;
        rustix::fs::fcntl_add_seals(&memfd, SEALS)?;
        Segment::map(memfd, ring_bytes)
    }

    /// Maps a segment that the other side created.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if the descriptor is no segment, or could be shrunk: then it was not mapped. Errors of
    /// the kernel.
    pub(crate) fn open(memfd: OwnedFd) -> io::Result<Segment> {
        let refused = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
        let seals = rustix::fs::fcntl_get_seals(&memfd)
            .map_err(|errno| refused(format!("the peer's shared memory is no memfd: {errno}")))?;
        if !seals.contains(SEALS) {
            let missing = SEALS.difference(seals);
            return Err(refused(format!("the peer's shared memory lacks the seals {missing:?}")));
        }
        // Sealed, so the size cannot change from here on.
        let bytes = rustix::fs::fstat(&memfd)?.st_size as u64;
        let ring_bytes = (bytes / 2).saturating_sub(HEADER_BYTES as u64);
        if !is_ring(ring_bytes) || segment_bytes(ring_bytes as usize) != bytes {
            return Err(refused(format!(
                "the peer's shared memory of {bytes} bytes does not hold two rings"
            )));
        }
        Segment::map(memfd, ring_bytes as usize)
    }

    fn map(memfd: OwnedFd, ring_bytes: usize) -> io::Result<Segment> {
        let mapping = Mapping::new(memfd.as_fd(), segment_bytes(ring_bytes), true)?;
        Ok(Segment { memfd, mapping, ring_bytes })
    }

    /// Bytes that each ring holds.
    #[cfg(test)]
    pub(crate) fn ring_bytes(&self) -> usize {
        self.ring_bytes
    }

    /// Tells the other side how to find the descriptor. None if the kernel does not say.
    pub(crate) fn offer(&self) -> Option<RingsOffer> {
        let found = rustix::fs::fstat(&self.memfd).ok()?;
        let descriptor = u32::try_from(self.memfd.as_fd().as_raw_fd()).ok()?;
        Some(RingsOffer { pid: std::process::id(), descriptor, file: (found.st_dev, found.st_ino) })
    }

    /// This side's ends of the rings. Closes the descriptor; the memory stays mapped while one of the ends lives. The two
    /// processes must take different sides.
    pub(crate) fn ends(self, side: RingSide) -> (Writer, Reader) {
        let Segment { memfd: _, mapping, ring_bytes } = self;
        let mapping = Arc::new(mapping);
        let ring = |number: usize| {
            let base = mapping.base().wrapping_add(number * (HEADER_BYTES + ring_bytes));
            // SAFETY: the ring lies in the mapping, which is writable, cannot be shrunk, and lives as long as the Arc. It
            // begins at a multiple of 4096. The segment is consumed, so this process makes one end of each ring and
            // nothing else of it.
            unsafe { Memory::at(base, ring_bytes, mapping.clone()) }
        };
        let (to_listening, to_connecting) = (ring(0), ring(1));
        match side {
            RingSide::Connecting => (Writer::new(to_listening), Reader::new(to_connecting)),
            RingSide::Listening => (Writer::new(to_connecting), Reader::new(to_listening)),
        }
    }
}

/// The memfd, to be sent to the other side.
impl AsFd for Segment {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memfd.as_fd()
    }
}

fn is_ring(bytes: u64) -> bool {
    bytes.is_power_of_two() && (RING_BYTES_MIN as u64..=RING_BYTES_MAX as u64).contains(&bytes)
}

fn segment_bytes(ring_bytes: usize) -> u64 {
    2 * (HEADER_BYTES + ring_bytes) as u64
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::process::{Command, Stdio};
    use std::time::Duration;

    use kvlane_memory::{recv_with_fds, send_with_fds};
    use rustix::io::Errno;
    use rustix::process::{Signal, set_parent_process_death_signal};

    use super::*;

    /// Environment variable of a process that echoes: how many bytes.
    const BYTES: &str = "KVLANE_TEST_ECHO_BYTES";
    /// The pattern repeats after so many bytes, a number that no ring's size divides.
    const PERIOD: usize = 1_000_003;
    const MIB: usize = 1 << 20;

    /// One side of a connection. Sleeps while it can do nothing; wakes travel over a socket.
    struct RingPeer {
        writer: Writer,
        reader: Reader,
        socket: UnixStream,
        sleeps: usize,
    }

    impl RingPeer {
        fn new(segment: Segment, side: RingSide, socket: UnixStream) -> RingPeer {
            let (writer, reader) = segment.ends(side);
            socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            RingPeer { writer, reader, socket, sleeps: 0 }
        }

        fn write(&mut self, bytes: &[u8]) -> usize {
            let range = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
            // SAFETY: the range is the slice.
            let written = unsafe { self.writer.write(&[range]).unwrap() };
            if written > 0 && self.writer.take_reader_sleeps() {
                self.socket.write_all(&[1]).unwrap();
            }
            written
        }

        fn read(&mut self, bytes: &mut [u8]) -> usize {
            let range = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
            // SAFETY: the range is the slice.
            let read = unsafe { self.reader.read(&[range]).unwrap() };
            if read > 0 && self.reader.take_writer_waits() {
                self.socket.write_all(&[1]).unwrap();
            }
            read
        }

        /// Sleeps until there may be something to read, or room to write, whichever this side needs.
        fn sleep(&mut self, reads: bool, writes: bool) {
            if (!reads || self.reader.prepare_to_sleep())
                && (!writes || self.writer.prepare_to_wait_for_room())
            {
                self.sleeps += 1;
                let wakes = self.socket.read(&mut [0; 64]).expect("nothing wakes this side");
                assert!(wakes > 0, "the other side is gone");
            }
            self.reader.woken();
            self.writer.woken();
        }

        /// Echoes that many bytes.
        fn echo(&mut self, bytes: usize) {
            let mut buffer = vec![0; 40_000];
            let mut done = 0;
            while done < bytes {
                let read = self.read(&mut buffer);
                if read == 0 {
                    self.sleep(true, false);
                }
                let mut sent = 0;
                while sent < read {
                    match self.write(&buffer[sent..read]) {
                        0 => self.sleep(false, true),
                        more => sent += more,
                    }
                }
                done += read;
            }
        }

        /// Sends that many bytes to an echo, and compares what comes back.
        fn send_and_compare(&mut self, bytes: usize) {
            let mut random = 88_172_645_463_325_252u64;
            let pattern: Vec<u8> = std::iter::repeat_with(|| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                random as u8
            })
            .take(PERIOD)
            .collect();
            let mut buffer = vec![0; 50_000];
            let (mut sent, mut compared) = (0, 0);
            while compared < bytes {
                let from = sent % PERIOD;
                let more = self.write(&pattern[from..PERIOD.min(from + bytes - sent)]);
                sent += more;
                let read = self.read(&mut buffer);
                let mut left = &buffer[..read];
                while !left.is_empty() {
                    let from = compared % PERIOD;
                    let len = left.len().min(PERIOD - from);
                    assert!(left[..len] == pattern[from..from + len], "other bytes near {compared}");
                    compared += len;
                    left = &left[len..];
                }
                if more == 0 && read == 0 {
                    self.sleep(true, sent < bytes);
                }
            }
        }
    }

    fn other_side(segment: &Segment) -> Segment {
        Segment::open(segment.as_fd().try_clone_to_owned().unwrap()).unwrap()
    }

    #[test]
    fn bytes_go_between_two_threads_which_sleep() {
        let segment = Segment::create(RING_BYTES_MIN).unwrap();
        let other = other_side(&segment);
        let (left, right) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| RingPeer::new(other, RingSide::Listening, right).echo(8 * MIB));
            RingPeer::new(segment, RingSide::Connecting, left).send_and_compare(8 * MIB);
        });
    }

    #[test]
    fn bytes_go_between_two_processes_which_sleep() {
        let segment = Segment::create(64 << 10).unwrap();
        let (left, right) = UnixStream::pair().unwrap();
        let name = format!("{}::the_other_process", module_path!().split_once("::").unwrap().1);
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &name, "--nocapture"])
            .env(BYTES, (64 * MIB).to_string())
            .stdin(OwnedFd::from(right))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        assert_eq!(send_with_fds(&left, &[0], &[segment.as_fd()]).unwrap(), 1);
        let mut peer = RingPeer::new(segment, RingSide::Connecting, left);
        peer.send_and_compare(64 * MIB);
        assert!(child.wait().unwrap().success());
        // This side had to wait for the other process to start.
        assert!(peer.sleeps > 0);
    }

    /// No test by itself: with `BYTES` in the environment, this process echoes over a segment that it gets through its
    /// standard input.
    #[test]
    fn the_other_process() {
        let Ok(bytes) = std::env::var(BYTES) else { return };
        set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
        let socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
        let mut memfds = Vec::new();
        assert_eq!(recv_with_fds(&socket, &mut [0], &mut memfds).unwrap(), 1);
        let segment = Segment::open(memfds.remove(0)).unwrap();
        assert_eq!(segment.ring_bytes(), 64 << 10);
        RingPeer::new(segment, RingSide::Listening, socket).echo(bytes.parse().unwrap());
    }

    #[test]
    fn a_segment_is_mapped_as_long_as_one_of_its_ends_lives() {
        let segment = Segment::create(RING_BYTES).unwrap();
        let mark = format!(" {} ", rustix::fs::fstat(&segment).unwrap().st_ino);
        let is_mapped = || {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            maps.lines().any(|line| line.contains("/memfd:kvlane-rings") && line.contains(&mark))
        };
        let (writer, mut reader) = segment.ends(RingSide::Connecting);
        drop(writer);
        assert!(is_mapped());
        assert!(reader.is_empty());
        drop(reader);
        assert!(!is_mapped());
    }

    #[test]
    fn nobody_can_change_the_size_of_a_segment() {
        let segment = Segment::create(RING_BYTES).unwrap();
        let bytes = segment_bytes(RING_BYTES);
        for other in [0, bytes - 1, bytes + 1] {
            assert_eq!(rustix::fs::ftruncate(&segment, other), Err(Errno::PERM), "to {other}");
        }
        let add = rustix::fs::fcntl_add_seals(&segment, SealFlags::WRITE);
        assert_eq!(add, Err(Errno::PERM));
    }

    #[test]
    fn what_can_be_shrunk_or_has_another_size_is_refused() {
        let memfd = |bytes, seals| {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let memfd = rustix::fs::memfd_create("kvlane-test", flags).unwrap();
            rustix::fs::ftruncate(&memfd, bytes).unwrap();
            rustix::fs::fcntl_add_seals(&memfd, seals).unwrap();
            memfd
        };
        let refusal = |memfd| {
            let error = Segment::open(memfd).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
            error.to_string()
        };
        let right = segment_bytes(RING_BYTES);
        assert_eq!(Segment::open(memfd(right, SEALS)).unwrap().ring_bytes(), RING_BYTES);
        for missing in [SealFlags::SHRINK, SealFlags::GROW, SealFlags::SEAL] {
            let why = refusal(memfd(right, SEALS.difference(missing)));
            assert!(why.contains("lacks the seals"), "{why}");
        }
        assert!(refusal(memfd(right, SealFlags::empty())).contains("lacks the seals"));
        let small = segment_bytes(RING_BYTES_MIN / 2);
        let large = segment_bytes(2 * RING_BYTES_MAX);
        for bytes in [0, 1, 4096, small, right - 4096, right - 1, right + 1, right + 4096, large, 1 << 62] {
            let why = refusal(memfd(bytes, SEALS));
            assert!(why.contains(&format!("memory of {bytes} bytes does not")), "{why}");
        }
        assert!(refusal(File::open("/dev/null").unwrap().into()).contains("no memfd"));
        let (socket, _) = UnixStream::pair().unwrap();
        assert!(refusal(socket.into()).contains("no memfd"));
    }

    #[test]
    fn rings_of_odd_sizes_are_refused() {
        for bytes in [0, 1, 2048, 4095, 4097, 12_288, RING_BYTES_MAX * 2, usize::MAX] {
            assert_eq!(Segment::create(bytes).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{bytes}");
        }
    }
}
