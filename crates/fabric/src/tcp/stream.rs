//! What carries the bytes of a connection.

#![allow(unsafe_code, reason = "the kernel reads and writes registered memory")]

use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::shm::{Reader, RingError, Writer};

/// Bytes both ways, without waiting.
#[derive(Debug)]
pub(crate) struct Stream {
    /// Whatever carries the bytes: when it ends, the connection does.
    socket: TcpStream,
    way: Way,
}

#[derive(Debug)]
enum Way {
    /// Through the socket, as they are.
    Plain,
    /// Through memory that both processes have.
    Rings(Rings),
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
    pub(crate) fn new(socket: TcpStream) -> Stream {
        Stream { socket, way: Way::Plain }
    }

    /// The connection below.
    pub(crate) fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// Everything from now on goes through these ends of a segment.
    pub(crate) fn go_through(&mut self, (writer, reader): (Writer, Reader)) {
        self.way = Way::Rings(Rings { writer, reader, is_told: false });
    }

    /// Its rings, if it has some.
    pub(crate) fn rings(&mut self) -> Option<&mut Rings> {
        match &mut self.way {
            Way::Plain => None,
            Way::Rings(rings) => Some(rings),
        }
    }

    /// Sends from these ranges, one after the other. Answers how many bytes it took, at least one.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if it takes none now.
    ///
    /// # Safety
    /// The ranges are valid for reads.
    pub(crate) unsafe fn send(&mut self, ranges: &[libc::iovec]) -> io::Result<usize> {
        match &mut self.way {
            Way::Plain => {
                // SAFETY: a msghdr of zeros is an empty message.
                let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
                message.msg_iov = ranges.as_ptr().cast_mut();
                message.msg_iovlen = ranges.len();
                // SAFETY: the ranges are valid by the caller's promise.
                answer(unsafe { libc::sendmsg(self.socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) })
            }
            Way::Rings(rings) => {
                // SAFETY: the caller's promise is passed on.
                let taken = unsafe { rings.writer.write(ranges) }.map_err(spoiled)?;
                if taken == 0 {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                if rings.writer.take_reader_sleeps() {
                    wake(&self.socket)?;
                }
                Ok(taken)
            }
        }
    }

    /// Receives into these ranges, one after the other. Answers how many bytes came; 0 if the peer sends no more.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if none are there now.
    ///
    /// # Safety
    /// The ranges are valid for writes.
    pub(crate) unsafe fn receive(&mut self, ranges: &[libc::iovec]) -> io::Result<usize> {
        match &mut self.way {
            Way::Plain => {
                let count = ranges.len() as libc::c_int;
                // SAFETY: the ranges are valid by the caller's promise.
                answer(unsafe { libc::readv(self.socket.as_raw_fd(), ranges.as_ptr(), count) })
            }
            Way::Rings(rings) => {
                // Before the ring: what the peer wrote before it ended is there.
                let is_over = std::mem::take(&mut rings.is_told) && is_over(&self.socket)?;
                // SAFETY: the caller's promise is passed on.
                let came = unsafe { rings.reader.read(ranges) }.map_err(spoiled)?;
                if came > 0 {
                    // To be seen once more, when the ring is empty.
                    rings.is_told = is_over;
                    if rings.reader.take_writer_waits() {
                        wake(&self.socket)?;
                    }
                    return Ok(came);
                }
                if is_over { Ok(0) } else { Err(io::ErrorKind::WouldBlock.into()) }
            }
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
    loop {
        match rustix::net::recv(socket, &mut wakes, RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Ok(true),
            Ok((64.., _)) | Err(Errno::INTR) => {}
            Ok(_) | Err(Errno::AGAIN) => return Ok(false),
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn spoiled(error: RingError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

impl Drop for Stream {
    fn drop(&mut self) {
        // Also where a forked process still holds the socket.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn answer(bytes: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(bytes).map_err(|_| io::Error::last_os_error())
}
