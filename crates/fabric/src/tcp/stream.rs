//! What carries the bytes of a connection.

#![allow(unsafe_code, reason = "the kernel reads and writes registered memory")]

use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use kvlane_shm_ring::{Reader, RingError, Writer};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::credentials::Credentials;
use super::tls::TlsStream;

/// Bytes both ways, without waiting.
#[derive(Debug)]
pub(crate) enum Stream {
    /// As they are: through the socket, or through memory that both processes have.
    Plain(TcpStream, Option<Box<Rings>>),
    /// Encrypted.
    Tls(Box<TlsStream>),
}

/// A ring each way. The socket carries a byte to wake who sleeps.
#[derive(Debug)]
pub(crate) struct Rings {
    writer: Writer,
    reader: Reader,
    /// Whether the socket may have something: a wake, or the end.
    is_told: bool,
}

impl Stream {
    /// Encrypted where there are credentials. `accepted`: the peer connected.
    pub(crate) fn new(
        socket: TcpStream,
        credentials: Option<&Credentials>,
        accepted: bool,
    ) -> io::Result<Stream> {
        Ok(match credentials {
            Some(credentials) => Stream::Tls(Box::new(TlsStream::new(socket, credentials, accepted)?)),
            None => Stream::Plain(socket, None),
        })
    }

    /// The connection below. When it ends, this does.
    pub(crate) fn socket(&self) -> &TcpStream {
        match self {
            Stream::Plain(socket, _) => socket,
            Stream::Tls(tls) => tls.socket(),
        }
    }

    /// Everything from now on goes through these ends of a segment. False: it is encrypted, and goes on as it is.
    pub(crate) fn go_through(&mut self, (writer, reader): (Writer, Reader)) -> bool {
        let Stream::Plain(_, rings) = self else { return false };
        *rings = Some(Box::new(Rings { writer, reader, is_told: false }));
        true
    }

    /// Its rings, if it has some.
    pub(crate) fn rings(&mut self) -> Option<&mut Rings> {
        match self {
            Stream::Plain(_, rings) => rings.as_deref_mut(),
            Stream::Tls(_) => None,
        }
    }

    /// Whether all that [`Stream::send`] took, and what is said beside it, is with the kernel or the peer.
    pub(crate) fn is_flushed(&self) -> bool {
        match self {
            Stream::Plain(..) => true,
            Stream::Tls(tls) => tls.is_flushed(),
        }
    }

    /// Gives the kernel what it takes of that.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if that is not all of it.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        match self {
            Stream::Plain(..) => Ok(()),
            Stream::Tls(tls) => tls.flush(),
        }
    }

    /// Of rings from which nothing is received now: takes the wakes that came. Whether the peer has ended the connection.
    pub(crate) fn has_ended(&mut self) -> bool {
        match self {
            Stream::Plain(socket, Some(rings)) => {
                std::mem::take(&mut rings.is_told) && is_over(socket).unwrap_or(true)
            }
            _ => false,
        }
    }

    /// Whether more can be received of what has left the socket already: nothing tells of that again.
    pub(crate) fn has_more(&self) -> bool {
        match self {
            Stream::Plain(..) => false,
            Stream::Tls(tls) => tls.has_more(),
        }
    }

    /// Whether the peer is to speak first, and has not said a word.
    pub(crate) fn awaits_first_word(&self) -> bool {
        match self {
            Stream::Plain(..) => false,
            Stream::Tls(tls) => !tls.has_heard(),
        }
    }

    /// Sends from these ranges, one after the other. Answers how many bytes it took, at least one: the ranges are not
    /// needed any more for those. If it was not all, it takes no more now.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if it takes none now.
    ///
    /// # Safety
    /// The ranges are valid for reads.
    pub(crate) unsafe fn send(&mut self, ranges: &[libc::iovec]) -> io::Result<usize> {
        match self {
            Stream::Plain(socket, None) => {
                // SAFETY: a msghdr of zeros is an empty message.
                let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
                message.msg_iov = ranges.as_ptr().cast_mut();
                message.msg_iovlen = ranges.len();
                // SAFETY: the ranges are valid by the caller's promise.
                answer(unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) })
            }
            Stream::Plain(socket, Some(rings)) => {
                // SAFETY: the caller's promise is passed on.
                let taken = unsafe { rings.writer.write(ranges) }.map_err(spoiled)?;
                if taken == 0 {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                if rings.writer.take_reader_sleeps() {
                    wake(socket)?;
                }
                Ok(taken)
            }
            // SAFETY: the caller's promise is passed on.
            Stream::Tls(tls) => unsafe { tls.send(ranges) },
        }
    }

    /// Receives into these ranges, one after the other. Answers how many bytes came; 0 if the peer sends no more. If they
    /// are not full, nothing more is there now.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if none are there now.
    ///
    /// # Safety
    /// The ranges are valid for writes.
    pub(crate) unsafe fn receive(&mut self, ranges: &[libc::iovec]) -> io::Result<usize> {
        match self {
            Stream::Plain(socket, None) => {
                let count = ranges.len() as libc::c_int;
                // SAFETY: the ranges are valid by the caller's promise.
                answer(unsafe { libc::readv(socket.as_raw_fd(), ranges.as_ptr(), count) })
            }
            Stream::Plain(socket, Some(rings)) => {
                // Before the ring: what the peer wrote before it ended is there, however it ended.
                let is_over = std::mem::take(&mut rings.is_told) && is_over(socket).unwrap_or(true);
                // SAFETY: the caller's promise is passed on.
                let came = unsafe { rings.reader.read(ranges) }.map_err(spoiled)?;
                if came > 0 {
                    // To be seen once more, when the ring is empty.
                    rings.is_told = is_over;
                    if rings.reader.take_writer_waits() {
                        // If the peer is gone, that is told when the ring is empty.
                        let _ = wake(socket);
                    }
                    return Ok(came);
                }
                if is_over { Ok(0) } else { Err(io::ErrorKind::WouldBlock.into()) }
            }
            // SAFETY: the caller's promise is passed on.
            Stream::Tls(tls) => unsafe { tls.receive(ranges) },
        }
    }
}

impl Rings {
    /// The socket can be read.
    pub(crate) fn note_told(&mut self) {
        self.is_told = true;
    }

    /// Whether nothing can be received.
    pub(crate) fn is_empty(&mut self) -> bool {
        self.reader.is_empty()
    }

    /// From now on the peer's next bytes come with a wake. False: there are some.
    pub(crate) fn prepare_to_sleep(&mut self) -> bool {
        self.reader.prepare_to_sleep()
    }

    /// No wakes are needed any more.
    pub(crate) fn woken(&mut self) {
        self.reader.woken();
    }

    /// From now on a wake comes when there is room to send. False: there is some.
    pub(crate) fn prepare_to_wait_for_room(&mut self) -> bool {
        self.writer.prepare_to_wait_for_room()
    }
}

/// Wakes the peer.
fn wake(socket: &TcpStream) -> io::Result<()> {
    match rustix::net::send(socket, &[0], SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
        // So full of wakes that one more would tell nothing new.
        Ok(_) | Err(Errno::AGAIN) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Takes the wakes that came. Whether the peer has ended the connection.
fn is_over(socket: &TcpStream) -> io::Result<bool> {
    let mut wakes = [0; 64];
    // Of more than this is told again: nobody keeps an engine busy with wakes.
    for _ in 0..16 {
        match rustix::net::recv(socket, &mut wakes, RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Ok(true),
            Ok((64.., _)) | Err(Errno::INTR) => {}
            Ok(_) | Err(Errno::AGAIN) => return Ok(false),
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(false)
}

fn spoiled(error: RingError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Stream::Tls(tls) = self {
            tls.send_close_notify();
        }
        // Also where a forked process still holds the socket.
        let _ = self.socket().shutdown(Shutdown::Both);
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket().as_fd()
    }
}

fn answer(bytes: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(bytes).map_err(|_| io::Error::last_os_error())
}
