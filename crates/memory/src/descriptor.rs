//! [`send_with_fds`] and [`recv_with_fds`]: bytes and descriptors together over a Unix socket.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// Limit of descriptors in one message. The kernel's is 253.
pub const DESCRIPTORS_MAX: usize = 128;

/// Sends some of `bytes`, with the descriptors on the first of them; returns how many were sent. Send the rest, if any,
/// without the descriptors. A closed peer is an error, not a signal.
///
/// # Panics
/// If there are no bytes, because a stream carries no descriptors alone, or more than [`DESCRIPTORS_MAX`] descriptors.
pub fn send_with_fds(stream: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    assert!(!bytes.is_empty(), "a descriptor travels with at least one byte");
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        let fits = fds.len() <= DESCRIPTORS_MAX && ancillary.push(SendAncillaryMessage::ScmRights(fds));
        assert!(fits, "{} descriptors do not fit into a message", fds.len());
    }
    let sent = retry_on_intr(|| {
        rustix::net::sendmsg(&stream, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)
    });
    sent.map_err(|error| match error {
        // The kernel counts descriptors that a user has sent and nobody has received yet against the sender's limit.
        Errno::TOOMANYREFS => {
            io::Error::other("too many descriptors are under way: raise the limit of open files (ulimit -n)")
        }
        error => error.into(),
    })
}

/// Receives bytes into `buf`, and appends the descriptors that came with them, which are closed on exec. Returns the
/// number of bytes; 0 means that the peer closed the socket. Fails if more descriptors came than a message of kvlane
/// carries or this process may open.
pub fn recv_with_fds(stream: impl AsFd, buf: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = retry_on_intr(|| {
        rustix::net::recvmsg(&stream, &mut [IoSliceMut::new(buf)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)
    })?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            fds.extend(descriptors);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!(
                "descriptors of the peer were lost: it sent more than {DESCRIPTORS_MAX} in one message, or this process may \
                 open no more files (ulimit -n)"
            ),
        ));
    }
    Ok(received.bytes)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_descriptor_rides_on_its_bytes_and_is_closed_on_exec() {
        let (left, right) = UnixStream::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"through the socket").unwrap();
        assert_eq!(send_with_fds(&left, b"plain", &[]).unwrap(), 5);
        assert_eq!(send_with_fds(&left, b"frame", &[file.as_fd()]).unwrap(), 5);
        let mut buffer = [0; 64];
        let mut fds = Vec::new();
        let mut bytes = 0;
        while bytes < 10 {
            bytes += recv_with_fds(&right, &mut buffer[bytes..], &mut fds).unwrap();
        }
        assert_eq!(&buffer[..bytes], b"plainframe");
        assert_eq!(fds.len(), 1);
        let flags = rustix::io::fcntl_getfd(&fds[0]).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        let mut same = File::from(fds.remove(0));
        same.rewind().unwrap();
        let mut text = String::new();
        same.read_to_string(&mut text).unwrap();
        assert_eq!(text, "through the socket");
    }

    #[test]
    fn a_closed_peer_is_an_error_for_the_sender_and_the_end_for_the_receiver() {
        let (left, right) = UnixStream::pair().unwrap();
        drop(right);
        assert_eq!(send_with_fds(&left, b"x", &[]).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        assert_eq!(recv_with_fds(&left, &mut [0; 8], &mut Vec::new()).unwrap(), 0);
    }

    #[test]
    fn a_flood_of_descriptors_is_refused() {
        let (left, right) = UnixStream::pair().unwrap();
        let many = [left.as_fd(); DESCRIPTORS_MAX + 100];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX + 100))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&many)));
        rustix::net::sendmsg(&left, &[IoSlice::new(b"x")], &mut ancillary, SendFlags::empty()).unwrap();
        let error = recv_with_fds(&right, &mut [0; 8], &mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains("more than 128"), "{error}");
    }
}
