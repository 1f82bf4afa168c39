//! A TLS session over a non-blocking socket.
//!
//! ```text
//!  send:     ranges --copy--> staged --encrypt--> records of the session --> socket
//!  receive:  socket --> incoming --decrypt--> the session's plaintext --copy--> ranges
//! ```
//! Registered memory may change at any time, so its bytes are copied before they are encrypted. Everything is bounded:
//! `staged`, `incoming` and the session's records by [`BUFFER_BYTES`] each, its plaintext by a few records.

#![allow(unsafe_code, reason = "registered memory is read and written")]

use std::io::{self, BufRead, IoSlice, Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpStream};

use rustix::net::{SendAncillaryBuffer, SendFlags};
use rustls::pki_types::ServerName;
use rustls::{AlertDescription, ClientConnection, Connection, Error, ServerConnection};

use super::credentials::Credentials;

const BUFFER_BYTES: usize = 64 << 10;
/// The first byte of a TLS record, from either side.
const RECORD_TYPES: std::ops::RangeInclusive<u8> = 0x14..=0x17;

pub(super) const NO_TLS: &str = "the peer does not speak TLS: give `tls` to both sides, or to neither";

/// Whether a peer that starts with this byte speaks TLS rather than our plain greeting.
pub(super) fn is_record(first: u8) -> bool {
    RECORD_TYPES.contains(&first)
}

/// TLS over a non-blocking socket. The connecting side speaks first.
#[derive(Debug)]
pub(crate) struct TlsStream {
    socket: TcpStream,
    session: Connection,
    staged: Vec<u8>,
    incoming: Box<[u8]>,
    /// Bytes of `incoming` that the session has not read.
    start: usize,
    end: usize,
    has_heard: bool,
    /// [`TlsStream::receive`] would return something even if the socket has nothing more.
    has_more: bool,
}

impl TlsStream {
    /// `accepted`: the peer connected.
    pub(super) fn new(socket: TcpStream, credentials: &Credentials, accepted: bool) -> io::Result<TlsStream> {
        let session: Result<Connection, Error> = if accepted {
            ServerConnection::new(credentials.server.clone()).map(Connection::from)
        } else {
            // The verifier ignores the name, and an IP address is not sent as SNI.
            let name = ServerName::from(IpAddr::V4(Ipv4Addr::LOCALHOST));
            ClientConnection::new(credentials.client.clone(), name).map(Connection::from)
        };
        let mut session = session.map_err(io::Error::other)?;
        session.set_buffer_limit(Some(BUFFER_BYTES));
        Ok(TlsStream {
            socket,
            session,
            staged: Vec::new(),
            incoming: vec![0; BUFFER_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            has_heard: false,
            has_more: false,
        })
    }

    pub(super) fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// Whether no encrypted byte waits for the socket.
    pub(super) fn is_flushed(&self) -> bool {
        !self.session.wants_write()
    }

    /// Whether the last [`TlsStream::receive`] left something that the next call returns at once.
    pub(super) fn has_more(&self) -> bool {
        self.has_more
    }

    /// Whether the peer has sent a byte.
    pub(super) fn has_heard(&self) -> bool {
        self.has_heard
    }

    /// Writes encrypted bytes to the socket.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if the socket does not take all of it now.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        while self.session.wants_write() {
            match self.session.write_tls(&mut Quiet(&self.socket)) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// As [`super::stream::Stream::send`]. Before the handshake is done, the session buffers the bytes and sends them
    /// after it.
    ///
    /// # Safety
    /// The ranges are valid for reads.
    pub(super) unsafe fn send(&mut self, ranges: &[libc::iovec]) -> io::Result<usize> {
        let mut from = Cursor::new(ranges);
        let blocked = loop {
            match self.flush() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break error,
                flushed => flushed?,
            }
            if from.is_at_end() {
                return Ok(from.done);
            }
            self.staged.clear();
            // SAFETY: the caller's promise.
            unsafe { from.read(&mut self.staged, BUFFER_BYTES) };
            match self.session.writer().write(&self.staged)? {
                0 => break io::ErrorKind::WouldBlock.into(),
                taken => from.advance(taken),
            }
        };
        if from.done > 0 { Ok(from.done) } else { Err(blocked) }
    }

    /// As [`super::stream::Stream::receive`]. Also carries the handshake on.
    ///
    /// # Safety
    /// The ranges are valid for writes.
    pub(super) unsafe fn receive(&mut self, ranges: &[libc::iovec]) -> io::Result<usize> {
        let mut to = Cursor::new(ranges);
        self.has_more = false;
        self.flush_own();
        let mut is_dry = false;
        loop {
            // SAFETY: the caller's promise.
            let is_over = unsafe { self.read_plaintext(&mut to)? };
            if to.is_at_end() || is_over {
                // The next call reports the end, by itself.
                self.has_more = to.done > 0;
                return Ok(to.done);
            }
            if self.start == self.end && !is_dry {
                (self.start, self.end) = (0, 0);
                match self.socket.read(&mut self.incoming) {
                    Ok(0) if to.done == 0 => return Ok(0),
                    Ok(0) => is_dry = true,
                    Ok(more) => {
                        self.end = more;
                        is_dry = more < self.incoming.len();
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) if to.done == 0 => return Err(error),
                    // A real error comes again at the next read.
                    Err(_) => is_dry = true,
                }
            }
            if self.start == self.end {
                return if to.done > 0 { Ok(to.done) } else { Err(io::ErrorKind::WouldBlock.into()) };
            }
            self.decrypt()?;
        }
    }

    /// Copies plaintext into the ranges. Whether the peer sends no more.
    ///
    /// # Safety
    /// As for [`TlsStream::receive`].
    unsafe fn read_plaintext(&mut self, to: &mut Cursor<'_>) -> io::Result<bool> {
        let mut reader = self.session.reader();
        while !to.is_at_end() {
            let there = match reader.fill_buf() {
                Ok(there) => there,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            };
            if there.is_empty() {
                return Ok(true);
            }
            // SAFETY: the caller's promise.
            let taken = unsafe { to.write(there) };
            reader.consume(taken);
        }
        Ok(false)
    }

    /// Gives the session some of the bytes that arrived.
    fn decrypt(&mut self) -> io::Result<()> {
        let mut there = &self.incoming[self.start..self.end];
        if !self.has_heard {
            if there.first().is_some_and(|first| !is_record(*first)) {
                return Err(bad(
                    "the peer does not speak TLS: give `tls` to both sides, or to neither".into()
                ));
            }
            self.has_heard = true;
        }
        self.start += self.session.read_tls(&mut there)?;
        let done = self.session.process_new_packets();
        // If that failed, this sends the alert that tells the peer why.
        self.flush_own();
        done.map(drop).map_err(|error| bad(explain(&error)))
    }

    /// Sends handshake messages, answers and alerts. A full socket is flushed later; any other error comes again at the next
    /// read.
    fn flush_own(&mut self) {
        let _ = self.flush();
    }

    /// Says goodbye, if nothing else waits to be sent. Before the handshake is done, this tells the peer that we speak TLS.
    pub(super) fn send_close_notify(&mut self) {
        if self.is_flushed() {
            self.session.send_close_notify();
            self.flush_own();
        }
    }
}

fn bad(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

fn explain(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(why) => {
            format!("the peer's certificate is not accepted, `authority` has to have signed it: {why:?}")
        }
        Error::AlertReceived(
            alert @ (AlertDescription::UnknownCA
            | AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateRequired
            | AlertDescription::CertificateUnknown
            | AlertDescription::AccessDenied
            | AlertDescription::DecryptError),
        ) => format!(
            "the peer does not accept our certificate, its `authority` has to have signed it: {alert:?}"
        ),
        error => format!("TLS with the peer failed: {error}"),
    }
}

/// Writes without SIGPIPE when the peer is gone.
struct Quiet<'a>(&'a TcpStream);

impl Write for Quiet<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut nothing = SendAncillaryBuffer::default();
        Ok(rustix::net::sendmsg(self.0, slices, &mut nothing, SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A position in consecutive ranges.
#[derive(Clone, Copy)]
struct Cursor<'a> {
    ranges: &'a [libc::iovec],
    /// Offset in the first range.
    offset: usize,
    done: usize,
}

impl<'a> Cursor<'a> {
    fn new(ranges: &'a [libc::iovec]) -> Cursor<'a> {
        let mut cursor = Cursor { ranges, offset: 0, done: 0 };
        cursor.advance(0);
        cursor
    }

    fn is_at_end(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The rest of the current range, at most so many bytes.
    fn here(&self, bytes: usize) -> Option<(*mut u8, usize)> {
        let range = self.ranges.first()?;
        let len = bytes.min(range.iov_len - self.offset);
        Some((range.iov_base.cast::<u8>().wrapping_add(self.offset), len))
    }

    /// Moves on by `bytes`. Never stays at the end of a range.
    fn advance(&mut self, mut bytes: usize) {
        self.done += bytes;
        while let Some((range, others)) = self.ranges.split_first() {
            let left = range.iov_len - self.offset;
            if bytes < left {
                self.offset += bytes;
                return;
            }
            bytes -= left;
            (self.ranges, self.offset) = (others, 0);
        }
    }

    /// Appends bytes from here on to `to`, until `to` has `bytes` bytes or the ranges end.
    ///
    /// # Safety
    /// The ranges are valid for reads.
    unsafe fn read(mut self, to: &mut Vec<u8>, bytes: usize) {
        to.reserve(bytes);
        while to.len() < bytes
            && let Some((from, len)) = self.here(bytes - to.len())
        {
            // SAFETY: the range is valid by the caller's promise and as long; the vector has room for so many bytes more,
            // which are then initialized.
            unsafe {
                std::ptr::copy_nonoverlapping(from, to.spare_capacity_mut().as_mut_ptr().cast(), len);
                to.set_len(to.len() + len);
            }
            self.advance(len);
        }
    }

    /// Copies some of these bytes here, at least one if there is room, and moves on behind them. Returns how many.
    ///
    /// # Safety
    /// The ranges are valid for writes.
    unsafe fn write(&mut self, bytes: &[u8]) -> usize {
        let Some((to, len)) = self.here(bytes.len()) else { return 0 };
        // SAFETY: the range is valid by the caller's promise, and both are at least as long.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, len) };
        self.advance(len);
        len
    }
}

#[cfg(test)]
#[path = "../../tests/certificates/mod.rs"]
mod certificates;

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::net::TcpListener;
    use std::sync::OnceLock;

    use proptest::collection::vec;
    use proptest::prelude::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};

    use super::super::credentials::Tls;
    use super::super::stream::Stream;
    use super::certificates::Authority;
    use super::*;

    const PATIENCE: Timespec = Timespec { tv_sec: 20, tv_nsec: 0 };

    /// Credentials for either side.
    fn credentials() -> &'static Credentials {
        static CREDENTIALS: OnceLock<Credentials> = OnceLock::new();
        CREDENTIALS.get_or_init(|| {
            let folder = tempfile::tempdir().unwrap();
            let (certificate, key, authority) = Authority::new("ours").files(folder.path(), "both");
            Credentials::load(&Tls { certificate, key, authority }).unwrap()
        })
    }

    /// The connecting side comes first.
    pub(in crate::tcp) fn streams(is_tls: bool, socket_bytes: Option<usize>) -> (Stream, Stream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (other, _) = listener.accept().unwrap();
        for socket in [&one, &other] {
            socket.set_nonblocking(true).unwrap();
            if let Some(bytes) = socket_bytes {
                set_socket_send_buffer_size(socket, bytes).unwrap();
                set_socket_recv_buffer_size(socket, bytes).unwrap();
            }
        }
        let credentials = is_tls.then(credentials);
        (Stream::new(one, credentials, false).unwrap(), Stream::new(other, credentials, true).unwrap())
    }

    fn ranges(bytes: &mut [u8], lens: &[usize]) -> Vec<libc::iovec> {
        let mut rest = bytes;
        let mut ranges = Vec::new();
        for len in lens {
            let (range, others) = std::mem::take(&mut rest).split_at_mut(*len);
            ranges.push(libc::iovec { iov_base: range.as_mut_ptr().cast(), iov_len: *len });
            rest = others;
        }
        ranges
    }

    fn or_blocked(done: io::Result<usize>) -> usize {
        match done {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            done => done.unwrap(),
        }
    }

    /// Sends bytes from one side to the other, in ranges of these lengths, and returns what arrived. Receives only if the
    /// stream or the socket says that there is something, as epoll would.
    fn arrived(sender: &mut Stream, receiver: &mut Stream, sent: &mut [u8], steps: &[Step]) -> Vec<u8> {
        let mut arrived = vec![0; sent.len()];
        let (mut at, mut to) = (0, 0);
        let mut steps = steps.iter().cycle();
        while to < sent.len() {
            let step = steps.next().unwrap();
            let lens = clipped(&step.send, sent.len() - at);
            if !lens.is_empty() {
                // SAFETY: the memory is alive.
                let taken = or_blocked(unsafe { sender.send(&ranges(&mut sent[at..], &lens)) });
                at += taken;
                // Peers refuse many key updates without bytes between them.
                if let (Stream::Tls(tls), true) = (&mut *sender, step.update && taken > 0) {
                    let _ = tls.session.refresh_traffic_keys();
                }
            }
            or_blocked(sender.flush().map(|()| 0));
            or_blocked(receiver.flush().map(|()| 0));
            // The handshake needs both directions.
            // SAFETY: the memory is alive.
            or_blocked(unsafe { sender.receive(&ranges(&mut [0], &[1])) });
            let waits = !sender.is_flushed() || at < sent.len();
            if !receiver.has_more() {
                let sends = if waits { PollFlags::OUT } else { PollFlags::empty() };
                let fds = (receiver.socket().try_clone().unwrap(), sender.socket().try_clone().unwrap());
                let mut fds =
                    [PollFd::new(&fds.0, PollFlags::IN), PollFd::new(&fds.1, PollFlags::IN | sends)];
                assert!(
                    poll(&mut fds, Some(&PATIENCE)).unwrap() > 0,
                    "{to} of {at} came, and nobody tells of more"
                );
                if fds[0].revents().is_empty() {
                    continue;
                }
            }
            let lens = clipped(&step.receive, sent.len() - to);
            // SAFETY: the memory is alive.
            to += or_blocked(unsafe { receiver.receive(&ranges(&mut arrived[to..], &lens)) });
        }
        arrived
    }

    fn clipped(lens: &[usize], mut bytes: usize) -> Vec<usize> {
        let mut clipped = Vec::new();
        for len in lens {
            let len = bytes.min(*len);
            bytes -= len;
            clipped.push(len);
        }
        if clipped.iter().all(|len| *len == 0) { Vec::new() } else { clipped }
    }

    #[derive(Debug, Clone)]
    struct Step {
        send: Vec<usize>,
        receive: Vec<usize>,
        update: bool,
    }

    fn lens() -> impl Strategy<Value = Vec<usize>> {
        let len = prop_oneof![0..3usize, 1..5000usize, Just(8191), Just(16384), Just(16385), Just(100_000)];
        vec(len, 0..6).prop_map(|mut lens| {
            lens.push(1);
            lens
        })
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = (lens(), lens(), prop::bool::weighted(0.1));
        vec(step.prop_map(|(send, receive, update)| Step { send, receive, update }), 1..12)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn encrypted_bytes_arrive_as_plain_ones_do(
            steps in steps(), bytes in 1..400_000usize, small in any::<bool>(), back in any::<bool>(),
        ) {
            // Small windows are slow, because TCP waits for more room.
            let bytes = if small { bytes.min(30_000) } else { bytes };
            let mut sent: Vec<u8> = (0..bytes).map(|index| (index % 251) as u8).collect();
            for is_tls in [false, true] {
                let (mut one, mut other) = streams(is_tls, small.then_some(8 << 10));
                let (sender, receiver) = if back { (&mut other, &mut one) } else { (&mut one, &mut other) };
                let arrived = arrived(sender, receiver, &mut sent.clone(), &steps);
                prop_assert!(arrived == sent, "TLS: {is_tls}");
            }
            sent.clear();
        }
    }

    /// Epoll reports an edge once only: many records arrive at once and are received byte by byte.
    #[test]
    fn what_has_left_the_socket_is_told_of() {
        let (mut one, mut other) = streams(true, None);
        let mut sent: Vec<u8> = (0..40_000u32).map(|index| (index % 251) as u8).collect();
        let steps = [Step { send: vec![40_000], receive: vec![1], update: false }];
        assert!(arrived(&mut one, &mut other, &mut sent.clone(), &steps) == sent);
        // And the other way, after a key update.
        let steps = [Step { send: vec![20_000], receive: vec![3], update: true }];
        assert!(arrived(&mut other, &mut one, &mut sent.clone(), &steps) == sent);
        sent.clear();
    }

    #[test]
    fn the_end_is_told_after_all_that_came_before() {
        let (mut one, mut other) = streams(true, None);
        let step = Step { send: vec![1], receive: vec![1], update: false };
        arrived(&mut one, &mut other, &mut [7], &[step]);
        // SAFETY: the memory is alive.
        assert_eq!(unsafe { one.send(&ranges(&mut [8; 5], &[5])) }.unwrap(), 5);
        // Shutdown, because a process that another test is starting may hold a copy of the descriptor.
        rustix::net::shutdown(&one, rustix::net::Shutdown::Write).unwrap();
        let mut room = [0; 10];
        // SAFETY: as above.
        let mut receive = || unsafe { other.receive(&ranges(&mut room, &[10])) }.unwrap();
        assert_eq!((receive(), receive(), receive()), (5, 0, 0));
    }
}
