//! The bytes that cross the socket of a [`super::meeting`]: which regions a peer asks for, and the handles of their memory. All
//! numbers are little-endian.
//!
//! ```text
//!  ask:     | magic u64 | pass 16 B | count u32 | 0 u32 | count x (region u32, generation u32) |
//!  answer:  | status u32: 0 fine, 1 refused | len u32 | len B: the reason, UTF-8 |   fine: with the card's descriptor
//!  then for each region, in the order in which they were asked:
//!  region:  | region u32 | generation u32 | address u64 | len u64 | parts u32 | 0 u32 | GPU's UUID, 16 B |   0 parts: it is gone
//!  parts x: | kind u32: 1 an allocation, 2 chunks | count u32 | base u64 | bytes u64 |
//!        1: | 64 B: the driver's handle |
//!        2: count x | bytes u64 |   each with the chunk's descriptor
//! ```
//! Addresses are the exporter's. The parts of a region hold all of its bytes, and mostly more.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use kvlane_gpu::IpcHandle;
use kvlane_memory::{recv_with_fds, send_with_fds};

const MAGIC: u64 = u64::from_le_bytes(*b"kvmeet 1");
/// Most regions of one ask.
pub(super) const REGIONS_ASKED_MAX: usize = 4096;
/// Most parts of a region.
pub(super) const PARTS_MAX: u32 = 65_536;
/// Most chunks of a part.
pub(super) const CHUNKS_MAX: u32 = 1 << 20;
const REASON_BYTES_MAX: usize = 1024;
const ASK_HEAD_BYTES: usize = 32;
const REGION_BYTES: usize = 48;
const PART_BYTES: usize = 24;
const ALLOCATION: u32 = 1;
const CHUNKS: u32 = 2;

/// The regions that a peer asks for, as (number, generation), and its proof that it may.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Ask {
    pub(super) pass: u128,
    pub(super) regions: Vec<(u32, u32)>,
}

/// A region of the exporter, and how many parts follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RegionHead {
    pub(super) region: u32,
    pub(super) generation: u32,
    pub(super) address: u64,
    pub(super) len: u64,
    pub(super) parts: u32,
    /// The GPU that holds it.
    pub(super) uuid: [u8; 16],
}

/// Memory that a region lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Allocation {
        base: u64,
        bytes: u64,
        handle: IpcHandle,
    },
    /// `count` chunks follow, of `bytes` in sum.
    Chunks {
        base: u64,
        bytes: u64,
        count: u32,
    },
}

/// The answer to an ask, before its regions.
#[derive(Debug)]
pub(super) enum Verdict {
    /// With the descriptor of the exporter's card.
    Fine(OwnedFd),
    Refused(String),
}

impl Ask {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(ASK_HEAD_BYTES + 8 * self.regions.len());
        bytes.extend(MAGIC.to_le_bytes());
        bytes.extend(self.pass.to_le_bytes());
        bytes.extend((self.regions.len() as u32).to_le_bytes());
        bytes.extend([0; 4]);
        for (region, generation) in &self.regions {
            bytes.extend(region.to_le_bytes());
            bytes.extend(generation.to_le_bytes());
        }
        bytes
    }
}

impl RegionHead {
    pub(super) fn encode(&self) -> Vec<u8> {
        let RegionHead { region, generation, address, len, parts, uuid } = *self;
        let (region, generation, parts) =
            (region.to_le_bytes(), generation.to_le_bytes(), parts.to_le_bytes());
        let (address, len) = (address.to_le_bytes(), len.to_le_bytes());
        [&region[..], &generation, &address, &len, &parts, &[0; 4], &uuid].concat()
    }
}

impl Part {
    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, count, base, bytes, handle) = match self {
            Part::Allocation { base, bytes, handle } => (ALLOCATION, 0, base, bytes, &handle[..]),
            Part::Chunks { base, bytes, count } => (CHUNKS, *count, base, bytes, &[][..]),
        };
        [&kind.to_le_bytes()[..], &count.to_le_bytes(), &base.to_le_bytes(), &bytes.to_le_bytes(), handle]
            .concat()
    }
}

/// The answer's first bytes that refuse an ask. The ones that do not are [`FINE`].
pub(super) fn refusal(why: &str) -> Vec<u8> {
    let mut short = why;
    while short.len() > REASON_BYTES_MAX {
        let (last, _) = short.char_indices().next_back().unwrap_or_default();
        short = &short[..last];
    }
    [&1u32.to_le_bytes()[..], &(short.len() as u32).to_le_bytes(), short.as_bytes()].concat()
}

/// The answer's first bytes for an ask that is served. The card's descriptor goes with them.
pub(super) const FINE: [u8; 8] = [0; 8];

/// Sends all bytes, with the descriptors on the first of them.
pub(super) fn send(stream: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut sent = send_with_fds(stream, bytes, descriptors)?;
    while sent < bytes.len() {
        sent += send_with_fds(stream, &bytes[sent..], &[])?;
    }
    Ok(())
}

/// Takes in what the other side sends, piece by piece.
#[derive(Debug)]
pub(super) struct Incoming<S> {
    from: S,
    bytes: Vec<u8>,
    at: usize,
    descriptors: Vec<OwnedFd>,
    taken: VecDeque<OwnedFd>,
}

/// A stream of bytes and descriptors.
pub(super) trait Source {
    /// Takes some bytes, and the descriptors that came with them. 0 bytes: the stream has ended.
    fn take(&mut self, bytes: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> io::Result<usize>;
}

impl Source for &UnixStream {
    fn take(&mut self, bytes: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> io::Result<usize> {
        recv_with_fds(self.as_fd(), bytes, descriptors)
    }
}

/// Bytes without descriptors.
impl Source for &[u8] {
    fn take(&mut self, bytes: &mut [u8], _: &mut Vec<OwnedFd>) -> io::Result<usize> {
        io::Read::read(self, bytes)
    }
}

impl<S: Source> Incoming<S> {
    pub(super) fn new(from: S) -> Incoming<S> {
        Incoming { from, bytes: Vec::new(), at: 0, descriptors: Vec::new(), taken: VecDeque::new() }
    }

    /// The next `len` bytes. `len` is bounded by the caller.
    fn next(&mut self, len: usize) -> io::Result<&[u8]> {
        if self.bytes.len() - self.at < len {
            self.bytes.drain(..self.at);
            self.at = 0;
            while self.bytes.len() < len {
                let before = self.bytes.len();
                self.bytes.resize(before + 4096, 0);
                let taken = self.from.take(&mut self.bytes[before..], &mut self.descriptors);
                self.bytes.truncate(before + *taken.as_ref().unwrap_or(&0));
                self.taken.extend(self.descriptors.drain(..));
                if taken? == 0 {
                    return Err(bad("it ended too early"));
                }
            }
        }
        let first = self.at;
        self.at += len;
        Ok(&self.bytes[first..self.at])
    }

    fn descriptor(&mut self) -> io::Result<OwnedFd> {
        self.taken.pop_front().ok_or_else(|| bad("a descriptor is missing"))
    }

    pub(super) fn ask(&mut self) -> io::Result<Ask> {
        let head = self.next(ASK_HEAD_BYTES)?;
        let (magic, low, high) = (word(head, 0), word(head, 8), word(head, 16));
        let count = word(head, 24) as u32 as usize;
        if magic != MAGIC {
            return Err(bad("it asks in another way"));
        }
        if count > REGIONS_ASKED_MAX {
            return Err(bad("it asks for too many regions"));
        }
        let pass = u128::from(high) << 64 | u128::from(low);
        let regions = self.next(8 * count)?.chunks_exact(8).map(|entry| halves(word(entry, 0))).collect();
        Ok(Ask { pass, regions })
    }

    pub(super) fn verdict(&mut self) -> io::Result<Verdict> {
        match halves(word(self.next(8)?, 0)) {
            (0, 0) => Ok(Verdict::Fine(self.descriptor()?)),
            (1, len) if len as usize <= REASON_BYTES_MAX => {
                let why = String::from_utf8_lossy(self.next(len as usize)?).into_owned();
                Ok(Verdict::Refused(why))
            }
            _ => Err(bad("an answer of no known kind")),
        }
    }

    pub(super) fn region(&mut self) -> io::Result<RegionHead> {
        let head = self.next(REGION_BYTES)?;
        let (region, generation) = halves(word(head, 0));
        let (address, len, parts) = (word(head, 8), word(head, 16), word(head, 24) as u32);
        if parts > PARTS_MAX || address.checked_add(len).is_none() {
            return Err(bad("a region of no known kind"));
        }
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&head[32..]);
        Ok(RegionHead { region, generation, address, len, parts, uuid })
    }

    pub(super) fn part(&mut self) -> io::Result<Part> {
        let head = self.next(PART_BYTES)?;
        let ((kind, count), base, bytes) = (halves(word(head, 0)), word(head, 8), word(head, 16));
        if base.checked_add(bytes).is_none() {
            return Err(bad("memory of no known kind"));
        }
        match (kind, count) {
            (ALLOCATION, 0) => {
                let mut handle = [0; 64];
                handle.copy_from_slice(self.next(64)?);
                Ok(Part::Allocation { base, bytes, handle })
            }
            (CHUNKS, 1..=CHUNKS_MAX) => Ok(Part::Chunks { base, bytes, count }),
            _ => Err(bad("memory of no known kind")),
        }
    }

    /// The size of the next chunk, and its descriptor.
    pub(super) fn chunk(&mut self) -> io::Result<(u64, OwnedFd)> {
        let bytes = word(self.next(8)?, 0);
        Ok((bytes, self.descriptor()?))
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    crate::wire::word(bytes, at)
}

fn halves(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

fn bad(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Parses any bytes as both sides would.
#[cfg(any(feature = "fuzzing", test))]
pub(crate) fn check_handles(bytes: &[u8]) {
    if let Ok(ask) = Incoming::new(bytes).ask() {
        assert!(bytes.starts_with(&ask.encode()[..24]));
    }
    let mut incoming = Incoming::new(bytes);
    let _ = incoming.verdict();
    while let Ok(head) = incoming.region() {
        let encoded = head.encode();
        let again = Incoming::new(&encoded[..]).region();
        assert!(again.is_ok_and(|again| again == head));
        for _ in 0..head.parts {
            let Ok(part) = incoming.part() else { return };
            let encoded = part.encode();
            assert!(Incoming::new(&encoded[..]).part().is_ok_and(|again| again == part));
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use proptest::collection::vec;
    use proptest::prelude::*;
    use tempfile::tempfile;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_parsed_or_refused(bytes in vec(any::<u8>(), 0..400)) {
            check_handles(&bytes);
        }

        #[test]
        fn an_ask_is_read_as_it_was_written(pass: u128, regions in vec(any::<(u32, u32)>(), 0..50)) {
            let ask = Ask { pass, regions };
            let encoded = ask.encode();
            prop_assert_eq!(Incoming::new(&encoded[..]).ask().unwrap(), ask);
            prop_assert!(Incoming::new(&encoded[..encoded.len() - 1]).ask().is_err());
        }
    }

    #[test]
    fn an_answer_is_read_as_it_was_written_with_its_descriptors() {
        let (here, there) = UnixStream::pair().unwrap();
        let files: Vec<_> = (0..4).map(|_| tempfile().unwrap()).collect();
        let uuid = [9; 16];
        let head = RegionHead { region: 3, generation: 1, address: 4096, len: 100, parts: 2, uuid };
        let allocation = Part::Allocation { base: 4096, bytes: 50, handle: [7; 64] };
        let chunks = Part::Chunks { base: 4146, bytes: 60, count: 3 };
        send(&here, &FINE, &[files[0].as_fd()]).unwrap();
        send(&here, &[head.encode(), allocation.encode(), chunks.encode()].concat(), &[]).unwrap();
        let sizes: Vec<u8> = [10u64, 20, 30].iter().flat_map(|bytes| bytes.to_le_bytes()).collect();
        let descriptors: Vec<_> = files[1..].iter().map(AsFd::as_fd).collect();
        send(&here, &sizes, &descriptors).unwrap();
        drop(here);
        let mut incoming = Incoming::new(&there);
        assert!(matches!(incoming.verdict().unwrap(), Verdict::Fine(_)));
        assert_eq!(incoming.region().unwrap(), head);
        assert_eq!(incoming.part().unwrap(), allocation);
        assert_eq!(incoming.part().unwrap(), chunks);
        let inode = |file: &dyn AsFd| rustix::fs::fstat(file.as_fd()).unwrap().st_ino;
        for (number, bytes) in [10u64, 20, 30].into_iter().enumerate() {
            let (size, descriptor) = incoming.chunk().unwrap();
            assert_eq!((size, inode(&descriptor)), (bytes, inode(&files[number + 1])));
        }
        assert!(incoming.chunk().is_err(), "it has ended");
    }

    #[test]
    fn a_long_reason_is_cut_at_a_letter() {
        let long = "ä".repeat(REASON_BYTES_MAX);
        let encoded = refusal(&long);
        let Verdict::Refused(why) = Incoming::new(&encoded[..]).verdict().unwrap() else { panic!("refused") };
        assert_eq!(why, "ä".repeat(REASON_BYTES_MAX / 2));
    }
}
