//! What carries the bytes of a connection.

#![allow(unsafe_code, reason = "the kernel reads and writes registered memory")]

use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Bytes both ways, without waiting.
#[derive(Debug)]
pub(crate) enum Stream {
    /// As they are.
    Plain(TcpStream),
}

impl Stream {
    /// The connection below.
    pub(crate) fn socket(&self) -> &TcpStream {
        match self {
            Stream::Plain(socket) => socket,
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
        match self {
            Stream::Plain(socket) => {
                // SAFETY: a msghdr of zeros is an empty message.
                let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
                message.msg_iov = ranges.as_ptr().cast_mut();
                message.msg_iovlen = ranges.len();
                // SAFETY: the ranges are valid by the caller's promise.
                answer(unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) })
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
        match self {
            Stream::Plain(socket) => {
                let count = ranges.len() as libc::c_int;
                // SAFETY: the ranges are valid by the caller's promise.
                answer(unsafe { libc::readv(socket.as_raw_fd(), ranges.as_ptr(), count) })
            }
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
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
