//! [`unacknowledged_bytes`]: how much of a TCP connection's output the peer's kernel has not acknowledged.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
};

/// Bytes that were written to a TCP connection and that the peer's kernel has not acknowledged. The number stays
/// readable after either end has closed or reset the connection.
///
/// # Errors
/// The descriptor is not a TCP socket.
pub fn unacknowledged_bytes(socket: impl AsFd) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: SIOCOUTQ (which has TIOCOUTQ's number) writes one int through the pointer, which is valid for the call.
    let asked = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if asked < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(usize::try_from(bytes).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::{TcpListener, TcpStream},
    };

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    #[test]
    fn bytes_that_arrive_after_the_close_stay_unacknowledged() {
        let (mut one, other) = pair();
        drop(other);
        one.write_all(b"12345").unwrap();
        assert_eq!(one.read(&mut [0; 8]).unwrap_or(0), 0);
        assert_eq!(unacknowledged_bytes(&one).unwrap(), 5);
    }

    #[test]
    fn bytes_that_were_read_before_the_close_are_acknowledged_by_it() {
        let (mut one, mut other) = pair();
        one.write_all(b"12345").unwrap();
        other.read_exact(&mut [0; 5]).unwrap();
        drop(other);
        assert_eq!(one.read(&mut [0; 8]).unwrap(), 0);
        assert_eq!(unacknowledged_bytes(&one).unwrap(), 0);
    }
}
