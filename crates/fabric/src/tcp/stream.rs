//! The bytes of a connection in both directions: over a plain socket, through shared-memory rings, or over TLS.

#![allow(unsafe_code, reason = "the kernel reads and writes registered memory")]

use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use kvlane_shm_ring::{Reader, RingError, Writer};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::credentials::Credentials;
use super::tls::TlsStream;

/// Non-blocking bytes both ways.
#[derive(Debug)]
pub(crate) enum Stream {
    /// Not encrypted: over the socket, or through rings in memory that both processes map.
    Plain(TcpStream, Option<Box<Rings>>),
    /// Encrypted by TLS.
    Tls(Box<TlsStream>),
}

/// One ring for each direction. The socket carries wake bytes for a side that sleeps, and tells when the peer is gone.
#[derive(Debug)]
pub(crate) struct Rings {
    writer: Writer,
    reader: Reader,
    /// The socket may have wakes to be drained, or the peer's end.
    is_readable: bool,
}

impl Stream {
    /// Encrypted if there are credentials. `accepted`: the peer connected.
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

    /// The socket below. The stream ends when it does.
    pub(crate) fn socket(&self) -> &TcpStream {
        match self {
            Stream::Plain(socket, _) => socket,
            Stream::Tls(tls) => tls.socket(),
        }
    }

    /// Sends and receives everything through these rings from now on. False: the stream is encrypted and stays as it is.
    pub(crate) fn switch_to_rings(&mut self, (writer, reader): (Writer, Reader)) -> bool {
        let Stream::Plain(_, rings) = self else { return false };
        *rings = Some(Box::new(Rings { writer, reader, is_readable: false }));
        true
    }

    /// The rings, if the stream was switched to some.
    pub(crate) fn rings(&mut self) -> Option<&mut Rings> {
        match self {
            Stream::Plain(_, rings) => rings.as_deref_mut(),
            Stream::Tls(_) => None,
        }
    }

    /// Whether the kernel or the peer has everything that [`Stream::send`] took, and any handshake or alert.
    pub(crate) fn is_flushed(&self) -> bool {
        match self {
            Stream::Plain(..) => true,
            Stream::Tls(tls) => tls.is_flushed(),
        }
    }

    /// Hands the kernel what is left of that.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if the kernel does not take all of it.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        match self {
            Stream::Plain(..) => Ok(()),
            Stream::Tls(tls) => tls.flush(),
        }
    }

    /// For rings while nothing is received from them: drains the wakes. Whether the peer has ended the connection.
    pub(crate) fn has_ended(&mut self) -> bool {
        match self {
            Stream::Plain(socket, Some(rings)) => {
                std::mem::take(&mut rings.is_readable) && is_over(socket).unwrap_or(true)
            }
            _ => false,
        }
    }

    /// Whether bytes have left the socket but were not received. Nothing will tell of them again.
    pub(crate) fn has_more(&self) -> bool {
        match self {
            Stream::Plain(..) => false,
            Stream::Tls(tls) => tls.has_more(),
        }
    }

    /// Whether the peer has to speak first (TLS) and has not sent a byte.
    pub(crate) fn awaits_first_word(&self) -> bool {
        match self {
            Stream::Plain(..) => false,
            Stream::Tls(tls) => !tls.has_heard(),
        }
    }

    /// Sends from these ranges in order. Returns how many bytes it took, at least one; those are not read any more. If it
    /// took fewer than all, it takes no more now.
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
                syscall_result(unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) })
            }
            Stream::Plain(socket, Some(rings)) => {
                // SAFETY: the caller's promise is passed on.
                let taken = unsafe { rings.writer.write(ranges) }.map_err(ring_error)?;
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

    /// Receives into these ranges in order. Returns how many bytes arrived, or 0 if the peer has ended the connection. If
    /// the ranges are not full, no more bytes have arrived.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if none have arrived.
    ///
    /// # Safety
    /// The ranges are valid for writes.
    pub(crate) unsafe fn receive(&mut self, ranges: &[libc::iovec]) -> io::Result<usize> {
        match self {
            Stream::Plain(socket, None) => {
                let count = ranges.len() as libc::c_int;
                // SAFETY: the ranges are valid by the caller's promise.
                syscall_result(unsafe { libc::readv(socket.as_raw_fd(), ranges.as_ptr(), count) })
            }
            Stream::Plain(socket, Some(rings)) => {
                // Checked before the ring is read: whatever the peer wrote before its end is in the ring by then.
                let is_over = std::mem::take(&mut rings.is_readable) && is_over(socket).unwrap_or(true);
                // SAFETY: the caller's promise is passed on.
                let came = unsafe { rings.reader.read(ranges) }.map_err(ring_error)?;
                if came > 0 {
                    // Reports the end later, once the ring is empty.
                    rings.is_readable = is_over;
                    if rings.reader.take_writer_waits() {
                        // A failure means that the peer is gone, which is reported once the ring is empty.
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
    /// The watch says that the socket is readable.
    pub(crate) fn note_readable(&mut self) {
        self.is_readable = true;
    }

    /// Whether the ring holds nothing to receive.
    pub(crate) fn is_empty(&mut self) -> bool {
        self.reader.is_empty()
    }

    /// From now on the peer sends a wake with its next bytes. False: some are there already.
    pub(crate) fn prepare_to_sleep(&mut self) -> bool {
        self.reader.prepare_to_sleep()
    }

    /// The peer need not send wakes any more.
    pub(crate) fn woken(&mut self) {
        self.reader.woken();
    }

    /// From now on the peer sends a wake when there is room to send. False: there is some already.
    pub(crate) fn prepare_to_wait_for_room(&mut self) -> bool {
        self.writer.prepare_to_wait_for_room()
    }
}

/// Sends the peer a wake byte.
fn wake(socket: &TcpStream) -> io::Result<()> {
    match rustix::net::send(socket, &[0], SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
        // The socket is full of wakes, so the peer wakes anyway.
        Ok(_) | Err(Errno::AGAIN) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Drains the wakes. Whether the peer has ended the connection.
fn is_over(socket: &TcpStream) -> io::Result<bool> {
    let mut wakes = [0; 64];
    // Bounded, so a flood of wakes cannot keep an engine busy. The socket stays readable for the rest.
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

fn ring_error(error: RingError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Stream::Tls(tls) = self {
            tls.send_close_notify();
        }
        // Ends the connection even if a forked process still holds the socket.
        let _ = self.socket().shutdown(Shutdown::Both);
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket().as_fd()
    }
}

fn syscall_result(bytes: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(bytes).map_err(|_| io::Error::last_os_error())
}
