//! One connection: writes queued frames and registered memory to its stream, and places received bytes where the owner says.
//!
//! ```text
//!  send_all --> queue --> flush: at most TURN_BYTES --> stream
//!  stream --> receive: Frame --> owner: expect(pieces) --> receive: Body --> ... Nothing: wait for the socket
//! ```
//! A frame counts only if its checksum is right; otherwise the connection ends as `Damaged`. Bytes of a peer that holds a
//! lease are placed only while the lease holds, checked right before each call that places.

#![allow(unsafe_code, reason = "the kernel reads and writes registered memory")]

use std::collections::VecDeque;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

use kvlane_shm_ring::{Reader, Writer};

use super::frame::{ENTRIES_MAX, HEAD_BYTES, Head, is_undamaged};
use super::outgoing::{Out, SendQueue};
use super::stream::{Rings, Stream};
use super::sum::{SUM_BYTES, Sum};
use super::tls::{NO_TLS, is_record};
use crate::lease::Lease;
use crate::ranges::{Piece, Spots};
use crate::wire::{BadFrame, RUN_BYTES};

/// Holds any head with its entries. The next frame's first bytes land here too, so one call may bring both.
const BUFFER_BYTES: usize = HEAD_BYTES + ENTRIES_MAX * RUN_BYTES;
/// Bytes behind a body that the same call may bring into the buffer. More would often be bytes of the next body,
/// copied twice.
const BEHIND_BYTES: usize = 2 << 10;
/// Bodies up to this size go through the buffer if they have a checksum.
const SHORT_BYTES: usize = 256;
/// Iovecs of one call; the kernel takes 1,024.
const RANGES_MAX: usize = 256;
/// Bytes of one call, and of one turn in each direction: then other connections have their turn.
const TURN_BYTES: usize = 4 << 20;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Ended {
    #[error("it is not wanted any more, or a part of a transfer took too long")]
    NotWanted,
    #[error("it was too slow to let go of memory that is not shared any more")]
    TooSlow,
    #[error("the peer closed the connection")]
    Closed,
    #[error("lease expired: the peer has not echoed a recent stamp")]
    Late,
    #[error("a GPU still copies what the fenced connection has brought")]
    StillPlaces,
    #[error("bytes were changed on the way: their checksum differs; what was under way is sent again")]
    Damaged,
    #[error(transparent)]
    Bad(#[from] BadFrame),
    #[error("the peer wants TLS: give `tls` to both sides, or to neither")]
    WantsTls,
    #[error("{NO_TLS}")]
    NoTls,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The result of [`Link::receive`].
#[derive(Debug)]
pub(crate) enum Received {
    /// A head and its entries. If bytes follow, the caller must say where they go, by [`Link::expect`], before anything else.
    Frame(Head, Vec<u8>),
    /// All bytes of the frame before are in place.
    Body,
    /// Nothing more for now, or in this turn. In the second case the socket stays readable, or [`Link::has_more`] is true.
    Nothing,
}

/// A non-blocking connection.
#[derive(Debug)]
pub(crate) struct Link {
    stream: Stream,
    out: SendQueue,
    received: u64,
    buffer: Box<[u8]>,
    /// Bytes of the buffer that were not parsed yet.
    start: usize,
    end: usize,
    body: Option<IncomingBody>,
    /// With checksums: bytes of the current body that have not arrived, and the checksum of those that have.
    coming: Option<(u64, Sum)>,
}

/// A body that is arriving.
#[derive(Debug)]
struct IncomingBody {
    to: VecDeque<Piece>,
    discard: u64,
}

impl Link {
    pub(crate) fn new(stream: Stream) -> io::Result<Link> {
        stream.socket().set_nonblocking(true)?;
        let buffer = vec![0; BUFFER_BYTES].into_boxed_slice();
        let (received, start, end) = (0, 0, 0);
        let (out, body, coming) = (SendQueue::default(), None, None);
        Ok(Link { stream, out, received, buffer, start, end, body, coming })
    }

    /// From the next frame on, each body is followed by its checksum, in both directions.
    pub(crate) fn begin_sums(&mut self) {
        self.out.begin_sums();
    }

    pub(crate) fn has_sums(&self) -> bool {
        self.out.has_sums()
    }

    pub(crate) fn socket(&self) -> &TcpStream {
        self.stream.socket()
    }

    /// Everything from now on goes through these rings. Bytes behind the greeting were only wakes, and are dropped.
    pub(crate) fn switch_to_rings(&mut self, ends: (Writer, Reader)) {
        debug_assert!(self.is_flushed() && self.body.is_none());
        if self.stream.switch_to_rings(ends) {
            (self.start, self.end) = (0, 0);
        }
    }

    /// The rings, if the connection was switched to some.
    pub(crate) fn rings(&mut self) -> Option<&mut Rings> {
        self.stream.rings()
    }

    /// See [`Stream::has_ended`].
    pub(crate) fn has_ended(&mut self) -> bool {
        self.stream.has_ended()
    }

    /// Queues these to be written.
    pub(crate) fn send_all(&mut self, outs: impl IntoIterator<Item = Out>) {
        outs.into_iter().for_each(|out| self.out.push(out));
    }

    /// Bytes owned by the queue, and entries, that wait to be written.
    pub(crate) fn backlog(&self) -> (usize, usize) {
        self.out.backlog()
    }

    /// Entries that have been written, of all ever queued.
    pub(crate) fn written(&self) -> u64 {
        self.out.written()
    }

    /// Bytes received so far.
    pub(crate) fn received(&self) -> u64 {
        self.received
    }

    /// Whether the queue is empty and the stream has handed everything to the kernel, handshakes and alerts included.
    pub(crate) fn is_flushed(&self) -> bool {
        self.out.is_empty() && self.stream.is_flushed()
    }

    /// Whether bytes have left the socket but were not received: epoll does not report those.
    pub(crate) fn has_more(&self) -> bool {
        self.stream.has_more()
    }

    /// Whether part of the next frame has left the socket.
    pub(crate) fn has_begun(&self) -> bool {
        self.start < self.end
    }

    /// Whether the peer has to speak first (TLS) and has not sent a byte.
    pub(crate) fn awaits_first_word(&self) -> bool {
        self.stream.awaits_first_word()
    }

    /// Whether queued memory, or memory that is being received into, overlaps this.
    pub(crate) fn touches(&self, memory: Spots<'_>) -> bool {
        let overlaps = |piece: &Piece| memory.overlap_host(*piece);
        self.out.touches(memory) || self.body.as_ref().is_some_and(|body| body.to.iter().any(overlaps))
    }

    /// Writes as much as the stream takes, at most one turn.
    ///
    /// # Safety
    /// Queued memory is valid for reads.
    pub(crate) unsafe fn flush(&mut self) -> Result<(), Ended> {
        crate::audit::takes_time("the writing of a connection");
        let mut turn = 0;
        while !self.out.is_empty() && turn < TURN_BYTES {
            let mut ranges = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; RANGES_MAX];
            // SAFETY: the caller's promise.
            let (count, bytes) = unsafe { self.out.next_ranges(&mut ranges, TURN_BYTES) };
            // SAFETY: the ranges are alive, owned bytes or valid by the caller's promise.
            match unsafe { self.stream.send(&ranges[..count]) } {
                Ok(sent) => {
                    turn += sent;
                    // SAFETY: the caller's promise.
                    unsafe { self.out.wrote(sent) };
                    if sent < bytes {
                        // The socket is full. Another call would only say so.
                        return Ok(());
                    }
                }
                Err(error) => match blocked(error)? {
                    Retry::Now => {}
                    Retry::Later => return Ok(()),
                },
            }
        }
        match self.stream.flush() {
            Err(error) => blocked(error).map(drop),
            Ok(()) => Ok(()),
        }
    }

    /// A greeting of `len` bytes, once all of it has arrived. Reads no byte beyond it from the socket, so a peer that has
    /// proved nothing cannot fill the buffer.
    pub(crate) fn greeting(&mut self, len: usize) -> Result<Option<Vec<u8>>, Ended> {
        crate::audit::takes_time("the reading of a connection");
        debug_assert!(len <= BUFFER_BYTES);
        loop {
            if self.buffer[self.start..self.end].first().is_some_and(|first| is_record(*first)) {
                // The rest of the record is drained, because closing a socket with unread bytes resets the connection.
                // The reset could discard our plain greeting, by which the peer sees that we do not speak TLS.
                let _ = self.fill(BUFFER_BYTES);
                return Err(Ended::WantsTls);
            }
            if self.end - self.start >= len {
                let bytes = self.buffer[self.start..self.start + len].to_vec();
                self.start += len;
                return Ok(Some(bytes));
            }
            if !self.fill(len - (self.end - self.start))? {
                return Ok(None);
            }
        }
    }

    /// Says where the bytes of the last frame go: into `to`, in this order, or nowhere (`discard` bytes).
    pub(crate) fn expect(&mut self, to: Vec<Piece>, discard: u64) {
        debug_assert!(self.body.is_none());
        self.body = Some(IncomingBody { to: to.into(), discard });
    }

    /// Receives the next frame or the end of its body. If there is a lease, bytes are placed only while it holds. The
    /// lease is checked right before each call that places, because this thread may be stopped anywhere.
    ///
    /// # Safety
    /// Expected memory is valid for writes.
    pub(crate) unsafe fn receive(&mut self, lease: Option<Lease>) -> Result<Received, Ended> {
        crate::audit::takes_time("the reading of a connection");
        if self.body.is_some() {
            // SAFETY: the caller's promise.
            let is_whole = unsafe { self.receive_body(lease)? };
            return Ok(if is_whole { Received::Body } else { Received::Nothing });
        }
        loop {
            let there = &self.buffer[self.start..self.end];
            if let Some((head, rest)) = there.split_first_chunk::<HEAD_BYTES>() {
                let head = Head::decode(head)?;
                if let Some(entries) = rest.get(..head.entry_bytes()) {
                    if !is_undamaged(&there[..HEAD_BYTES + entries.len()]) {
                        return Err(Ended::Damaged);
                    }
                    let entries = entries.to_vec();
                    self.start += HEAD_BYTES + entries.len();
                    let bytes = head.body_bytes().filter(|bytes| *bytes > 0 && self.has_sums());
                    self.coming = bytes.map(|bytes| (bytes, Sum::new()));
                    return Ok(Received::Frame(head, entries));
                }
            }
            if !self.fill(BUFFER_BYTES)? {
                return Ok(Received::Nothing);
            }
        }
    }

    /// Reads at most `most` bytes into the buffer. False if nothing has arrived.
    fn fill(&mut self, most: usize) -> Result<bool, Ended> {
        self.make_room();
        let room = &mut self.buffer[self.end..];
        let most = most.min(room.len());
        let room = &mut room[..most];
        let range = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
        loop {
            // SAFETY: the range is the buffer's.
            match unsafe { self.stream.receive(&[range]) } {
                Ok(0) => return Err(Ended::Closed),
                Ok(more) => {
                    self.end += more;
                    self.received += more as u64;
                    return Ok(true);
                }
                Err(error) => match blocked(error)? {
                    Retry::Now => {}
                    Retry::Later => return Ok(false),
                },
            }
        }
    }

    /// Moves the unparsed bytes to the buffer's front.
    fn make_room(&mut self) {
        self.buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
    }

    /// Places arrived bytes of the body. True once all of it is in place.
    ///
    /// # Safety
    /// As for [`Link::receive`].
    unsafe fn receive_body(&mut self, lease: Option<Lease>) -> Result<bool, Ended> {
        let mut turn = 0;
        loop {
            // SAFETY: the caller's promise.
            unsafe { self.place_buffered(lease)? };
            let Some(body) = &mut self.body else { return Ok(true) };
            if body.to.is_empty() && body.discard == 0 {
                let is_whole = self.take_sum()?;
                if is_whole {
                    self.body = None;
                }
                return Ok(is_whole);
            }
            if turn >= TURN_BYTES {
                return Ok(false);
            }
            // The buffer is empty: all of it belonged to the body.
            (self.start, self.end) = (0, 0);
            if self.coming.is_some() && body.is_short() {
                // Summed before it is placed: a process that polls the flag may change it as soon as it is there.
                if !self.fill(BUFFER_BYTES)? {
                    return Ok(false);
                }
                continue;
            }
            let mut ranges = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; RANGES_MAX];
            let mut count = 0;
            let mut bytes = 0;
            for piece in &body.to {
                if count == RANGES_MAX - 1 || bytes == TURN_BYTES {
                    break;
                }
                let len = piece.len.min(TURN_BYTES - bytes);
                ranges[count] = libc::iovec { iov_base: piece.pointer().cast(), iov_len: len };
                bytes += len;
                count += 1;
            }
            let fits = body.to.iter().map(|piece| piece.len).sum::<usize>() == bytes;
            if body.to.is_empty() {
                let len = body.discard.min(BUFFER_BYTES as u64) as usize;
                ranges[0] = libc::iovec { iov_base: self.buffer.as_mut_ptr().cast(), iov_len: len };
                (count, bytes) = (1, len);
            } else if fits && body.discard == 0 {
                // The same call may bring what follows the body.
                let behind = self.buffer.as_mut_ptr().cast();
                ranges[count] = libc::iovec { iov_base: behind, iov_len: BEHIND_BYTES };
                count += 1;
            }
            check_lease(lease)?;
            // SAFETY: the ranges are our own buffers, or valid by the caller's promise.
            match unsafe { self.stream.receive(&ranges[..count]) } {
                Ok(0) => return Err(Ended::Closed),
                Ok(read) if body.to.is_empty() => {
                    (turn, self.received) = (turn + read, self.received + read as u64);
                    body.discard -= read as u64;
                    add_to_sum(&mut self.coming, &self.buffer[..read]);
                }
                Ok(read) => {
                    (turn, self.received) = (turn + read, self.received + read as u64);
                    self.end += read.saturating_sub(bytes);
                    // SAFETY: the caller's promise.
                    unsafe { body.placed(read.min(bytes), &mut self.coming) };
                    if read < bytes {
                        // Nothing more has arrived.
                        return Ok(false);
                    }
                }
                Err(error) => match blocked(error)? {
                    Retry::Now => {}
                    Retry::Later => return Ok(false),
                },
            }
        }
    }

    /// Checks the checksum behind a complete body, if there is one. False if it has not arrived yet.
    fn take_sum(&mut self) -> Result<bool, Ended> {
        while let Some((0, sum)) = &self.coming {
            if let Some(there) = self.buffer[self.start..self.end].first_chunk::<SUM_BYTES>() {
                if *there != sum.bytes() {
                    return Err(Ended::Damaged);
                }
                self.start += SUM_BYTES;
                self.coming = None;
            } else if !self.fill(BUFFER_BYTES)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Places the bytes of the body that are in the buffer.
    ///
    /// # Safety
    /// As for [`Link::receive`].
    unsafe fn place_buffered(&mut self, lease: Option<Lease>) -> Result<(), Ended> {
        let Some(body) = &mut self.body else { return Ok(()) };
        while self.start < self.end {
            let there = &self.buffer[self.start..self.end];
            let taken = if let Some(piece) = body.to.front() {
                let len = piece.len.min(there.len());
                check_lease(lease)?;
                // SAFETY: the piece is valid for writes and at least as long; the buffer is our own.
                unsafe { std::ptr::copy_nonoverlapping(there.as_ptr(), piece.pointer(), len) };
                add_to_sum(&mut self.coming, &there[..len]);
                // SAFETY: nothing is read.
                unsafe { body.placed(len, &mut None) };
                len
            } else {
                let len = body.discard.min(there.len() as u64) as usize;
                add_to_sum(&mut self.coming, &there[..len]);
                body.discard -= len as u64;
                len
            };
            if taken == 0 {
                break;
            }
            self.start += taken;
        }
        Ok(())
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl IncomingBody {
    /// Whether the rest is so short that it is read through the buffer.
    fn is_short(&self) -> bool {
        let mut left = 0;
        self.to.iter().take(2).all(|piece| {
            left += piece.len;
            left <= SHORT_BYTES
        }) && self.to.len() <= 2
            && self.discard == 0
    }

    /// Drops `bytes` placed bytes from the front, and adds them to the checksum.
    ///
    /// # Safety
    /// If there is a checksum, those pieces are valid for reads.
    unsafe fn placed(&mut self, mut bytes: usize, coming: &mut Option<(u64, Sum)>) {
        while let Some(first) = self.to.front_mut() {
            if coming.is_some() {
                let len = bytes.min(first.len);
                // SAFETY: the caller's promise. If another thread changes the bytes, the checksum does not match, and the
                // peer sends them again.
                add_to_sum(coming, unsafe { std::slice::from_raw_parts(first.pointer(), len) });
            }
            if bytes < first.len {
                *first = first.after(bytes);
                return;
            }
            bytes -= first.len;
            self.to.pop_front();
        }
    }
}

/// Adds arrived bytes of a body to its checksum.
fn add_to_sum(coming: &mut Option<(u64, Sum)>, bytes: &[u8]) {
    if let Some((left, sum)) = coming {
        sum.add(bytes);
        *left = left.saturating_sub(bytes.len() as u64);
    }
}

/// Called right before bytes are placed.
fn check_lease(lease: Option<Lease>) -> Result<(), Ended> {
    if lease.is_none_or(|lease| lease.holds()) { Ok(()) } else { Err(Ended::Late) }
}

enum Retry {
    Now,
    Later,
}

fn blocked(error: io::Error) -> Result<Retry, Ended> {
    match error.kind() {
        io::ErrorKind::Interrupted => Ok(Retry::Now),
        io::ErrorKind::WouldBlock => Ok(Retry::Later),
        _ => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use proptest::collection::vec;
    use proptest::prelude::*;

    use std::collections::VecDeque;
    use std::io::Write;
    use std::os::fd::OwnedFd;

    use super::super::tls::tests::streams;
    use super::*;

    fn pair(is_tls: bool) -> (Link, Link) {
        let (one, other) = streams(is_tls, None);
        (Link::new(one).unwrap(), Link::new(other).unwrap())
    }

    fn send(link: &mut Link, head: Head) {
        link.send_all([Out::Bytes(head.frame(&[]), 0)]);
    }

    fn piece(bytes: &mut [u8]) -> Piece {
        Piece { address: bytes.as_mut_ptr().expose_provenance(), len: bytes.len() }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn frames_of_any_length_arrive_where_they_belong(
            frames in vec((vec(1..5000usize, 1..40), any::<bool>(), 0..400_000usize), 1..20),
            (is_tls, has_sums) in any::<(bool, bool)>(),
        ) {
            let (mut from, mut to) = pair(is_tls);
            if has_sums {
                from.begin_sums();
                to.begin_sums();
            }
            let mut source: Vec<u8> = (0..1 << 20).map(|index: u32| (index % 251) as u8).collect();
            let mut arrived = vec![0u8; 1 << 20];
            let mut expected = vec![0u8; 1 << 20];
            let mut at = 0;
            let mut wanted = VecDeque::new();
            for (token, (lens, discard, far)) in (0..).zip(&frames) {
                let bytes: usize = lens.iter().sum();
                send(&mut from, Head::Data { token, bytes: bytes as u64 });
                // As a frame has many, of any length.
                let mut rest = &mut source[*far..];
                for len in lens {
                    let (first, behind) = rest.split_at_mut(*len);
                    from.send_all([Out::Memory(piece(first))]);
                    rest = behind;
                }
                from.send_all(has_sums.then(Out::sum));
                send(&mut from, Head::Ping { stamp: 7 });
                let mut pieces = Vec::new();
                if !discard {
                    expected[at..at + bytes].copy_from_slice(&source[*far..far + bytes]);
                    for len in lens {
                        pieces.push(piece(&mut arrived[at..at + len]));
                        at += len;
                    }
                }
                wanted.push_back((bytes, pieces));
            }
            let mut bodies = 0;
            let mut pings = 0;
            while pings < frames.len() {
                // SAFETY: all memory outlives the links' last calls here.
                unsafe { from.flush().unwrap() };
                // Only the TLS handshake sends anything back. SAFETY: as above.
                assert!(matches!(unsafe { from.receive(None).unwrap() }, Received::Nothing));
                loop {
                    // SAFETY: as above.
                    match unsafe { to.receive(None).unwrap() } {
                        Received::Frame(Head::Data { bytes, .. }, _) => {
                            let (len, pieces) = wanted.pop_front().unwrap();
                            assert_eq!(len as u64, bytes);
                            let discard = if pieces.is_empty() { bytes } else { 0 };
                            to.expect(pieces, discard);
                        }
                        Received::Frame(head, _) => {
                            assert_eq!(head, Head::Ping { stamp: 7 });
                            pings += 1;
                        }
                        Received::Body => bodies += 1,
                        Received::Nothing => break,
                    }
                }
            }
            prop_assert_eq!(bodies, frames.len());
            prop_assert!(from.is_flushed());
            prop_assert!(arrived == expected);
        }
    }

    /// Receives one frame that goes over the wire as these bytes.
    fn comes(wire: &[u8], memory: &mut [u8]) -> Result<(), Ended> {
        let (mut socket, other) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut to =
            Link::new(Stream::new(TcpStream::from(OwnedFd::from(other)), None, true).unwrap()).unwrap();
        to.begin_sums();
        socket.write_all(wire).unwrap();
        drop(socket);
        loop {
            // SAFETY: the memory outlives the link.
            match unsafe { to.receive(None)? } {
                Received::Frame(Head::Data { bytes, .. }, _) => {
                    assert_eq!(bytes, memory.len() as u64);
                    let (one, other) = memory.split_at_mut(memory.len() / 3);
                    to.expect(vec![piece(one), piece(other)], 0);
                }
                Received::Frame(head, _) => panic!("{head:?} was not sent"),
                Received::Body => return Ok(()),
                Received::Nothing => {}
            }
        }
    }

    proptest! {
        #[test]
        fn one_changed_bit_anywhere_is_found(len in 3..5000usize, at in any::<prop::sample::Index>(), bit in 0..8) {
            let body: Vec<u8> = (0..len).map(|index| (index * 7 % 253) as u8).collect();
            let mut sum = Sum::new();
            sum.add(&body);
            let head = Head::Data { token: 9, bytes: len as u64 };
            let mut wire = [&head.frame(&[])[..], &body, &sum.bytes()].concat();
            let mut came = vec![0; len];
            prop_assert!(comes(&wire, &mut came).is_ok() && came == body);
            let at = at.index(wire.len());
            wire[at] ^= 1u8 << bit;
            // A changed length makes the frame wait for bytes that never come.
            let ended = comes(&wire, &mut came).err();
            prop_assert!(matches!(ended, Some(Ended::Damaged | Ended::Bad(_) | Ended::Closed)), "{ended:?}");
        }
    }

    /// The owner of a flag changes it while it is sent.
    #[test]
    fn short_memory_is_sent_as_it_was_when_its_sum_was_made() {
        let (mut from, mut to) = pair(false);
        from.begin_sums();
        to.begin_sums();
        let mut flag = [1; 8];
        let flag_at = flag.as_mut_ptr();
        for round in 0..4u8 {
            send(&mut from, Head::Data { token: 1, bytes: 8 });
            from.send_all([Out::Memory(Piece { address: flag_at.expose_provenance(), len: 8 }), Out::sum()]);
            let mut ranges = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; RANGES_MAX];
            // SAFETY: the flag is alive, here and below.
            unsafe {
                // As if the kernel had refused the first call.
                from.out.next_ranges(&mut ranges, TURN_BYTES);
                flag_at.write(round + 2);
                from.flush().unwrap();
            }
            let mut came = [0; 8];
            loop {
                // SAFETY: likewise.
                match unsafe { to.receive(None) }.unwrap() {
                    Received::Frame(..) => to.expect(vec![piece(&mut came)], 0),
                    Received::Body => break,
                    Received::Nothing => {}
                }
            }
            assert_eq!(came[0], round + 1, "as it was");
        }
    }

    /// A call that ended right at the end of a body leaves its checksum to the next call, which once skipped it.
    #[test]
    fn the_sum_of_a_body_of_as_many_pieces_as_a_call_takes_is_written() {
        for (frames, pieces) in [(1, 255), (1, 256), (1, 511), (1, 512), (1, 767), (200, 1), (86, 2), (90, 3)]
        {
            for each in [64, 4096] {
                let (mut from, mut to) = pair(false);
                from.begin_sums();
                to.begin_sums();
                let mut source = vec![7u8; each];
                let mut arrived = vec![0u8; pieces * each];
                for token in 0..frames {
                    send(&mut from, Head::Data { token, bytes: (pieces * each) as u64 });
                    for _ in 0..pieces {
                        from.send_all([Out::Memory(piece(&mut source))]);
                    }
                    from.send_all([Out::sum()]);
                }
                let (mut bodies, mut turns) = (0, 0);
                while bodies < frames {
                    turns += 1;
                    assert!(turns < 100_000, "{bodies} of {frames} frames of {pieces} pieces came");
                    // SAFETY: all memory outlives the links' last calls here.
                    unsafe { from.flush().unwrap() };
                    loop {
                        // SAFETY: as above.
                        match unsafe { to.receive(None) }.unwrap() {
                            Received::Frame(..) => to.expect(vec![piece(&mut arrived)], 0),
                            Received::Body => bodies += 1,
                            Received::Nothing => break,
                        }
                    }
                }
                assert!(from.is_flushed() && arrived.iter().all(|byte| *byte == 7));
            }
        }
    }

    #[test]
    fn an_end_in_the_middle_is_told() {
        let (mut from, mut to) = pair(false);
        send(&mut from, Head::Data { token: 1, bytes: 10 });
        let mut memory = [7; 5];
        from.send_all([Out::Memory(piece(&mut memory))]);
        // SAFETY: the memory is alive.
        unsafe { from.flush().unwrap() };
        drop(from);
        let mut arrived = [0; 10];
        loop {
            // SAFETY: as above.
            match unsafe { to.receive(None) } {
                Ok(Received::Frame(..)) => to.expect(vec![piece(&mut arrived)], 0),
                Ok(Received::Nothing) => {}
                Ok(Received::Body) => panic!("only half of it was sent"),
                Err(ended) => {
                    assert!(matches!(ended, Ended::Closed), "{ended}");
                    break;
                }
            }
        }
        assert_eq!(arrived, [7, 7, 7, 7, 7, 0, 0, 0, 0, 0]);
    }
}
