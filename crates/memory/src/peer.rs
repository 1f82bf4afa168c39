//! The peer of a Unix socket: its credentials, a pidfd that tells when it has exited, and its permission to read this
//! process.

use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags};

/// From include/uapi/asm-generic/socket.h, since Linux 6.5; libc does not have it yet.
const SO_PEERPIDFD: libc::c_int = 77;

/// Credentials of a peer when it connected, recorded by the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Process id in this process's pid namespace; 0 if it is not visible from here.
    pub pid: u32,
    /// Effective user id of the process when it connected.
    pub uid: u32,
    /// Effective group id of the process when it connected.
    pub gid: u32,
}

impl PeerCredentials {
    /// The credentials of the process at the other end.
    pub fn of(stream: impl AsFd) -> io::Result<PeerCredentials> {
        // SAFETY: ucred is three integers, for which all zeros are a value.
        let none: libc::ucred = unsafe { mem::zeroed() };
        // SAFETY: SO_PEERCRED fills a ucred, and any bytes are a valid one.
        let found = unsafe { socket_option(stream, libc::SO_PEERCRED, none)? };
        Ok(PeerCredentials { pid: found.pid.max(0) as u32, uid: found.uid, gid: found.gid })
    }
}

/// Whether the other end is a process of this user.
///
/// # Errors
/// It is another user's, with a sentence that says so.
pub fn check_same_user(stream: impl AsFd) -> io::Result<()> {
    let (theirs, own) = (PeerCredentials::of(stream)?.uid, rustix::process::geteuid().as_raw());
    if theirs == own {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!("the peer runs as user {theirs}, this process as user {own}: run both as one user"),
    ))
}

/// Reads a socket-level option.
///
/// # Safety
/// The kernel fills the option with a `T`, and every bit pattern is a `T`.
unsafe fn socket_option<T>(stream: impl AsFd, option: libc::c_int, mut value: T) -> io::Result<T> {
    let mut length = mem::size_of::<T>() as libc::socklen_t;
    // SAFETY: value and length are live, and the kernel writes at most `length` bytes.
    let result = unsafe {
        libc::getsockopt(
            stream.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw mut value).cast(),
            &raw mut length,
        )
    };
    if result == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

/// A pidfd of the process at the other end. Linux before 6.5 opens it only by pid, which may name another process by
/// then. So a caller that reads the process must check more than its pid.
pub fn peer_pidfd(stream: impl AsFd) -> io::Result<OwnedFd> {
    // SAFETY: SO_PEERPIDFD fills an int.
    match unsafe { socket_option(stream.as_fd(), SO_PEERPIDFD, -1 as libc::c_int) } {
        // SAFETY: the kernel made this descriptor for us, and nothing else owns it.
        Ok(fd) => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => {
            let pid = PeerCredentials::of(stream)?.pid;
            let pid = Pid::from_raw(pid as i32).ok_or_else(|| {
                io::Error::new(
                    io::ErrorKind::NotFound,
                    "the peer is in a pid namespace not visible from here",
                )
            })?;
            Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
        }
        Err(error) => Err(error),
    }
}

/// Whether the process of a pidfd has exited; a zombie has.
pub fn pidfd_exited(pidfd: &OwnedFd) -> bool {
    pidfd_exited_within(pidfd, Duration::ZERO)
}

/// Waits up to `time` for the process of a pidfd to exit. Returns whether it has.
pub fn pidfd_exited_within(pidfd: &OwnedFd, time: Duration) -> bool {
    let mut polled = [PollFd::new(pidfd, PollFlags::IN)];
    let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
    let ready = rustix::io::retry_on_intr(|| rustix::event::poll(&mut polled, Some(&time)));
    matches!(ready, Ok(1..))
}

/// Lets a process of the same user read this process's memory although the Yama module would forbid it. None revokes
/// the permission. Returns false if the kernel has no Yama, so that no permission is needed.
pub fn allow_ptrace_by(pid: Option<u32>) -> io::Result<bool> {
    // SAFETY: PR_SET_PTRACER takes a number, and changes who may trace this process, not its memory.
    let result = unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::c_ulong::from(pid.unwrap_or(0)), 0, 0, 0) };
    if result == 0 {
        return Ok(true);
    }
    match io::Error::last_os_error() {
        error if error.raw_os_error() == Some(libc::EINVAL) => Ok(false),
        error => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn the_peer_of_a_pair_is_this_process_and_it_lives() {
        let (one, _other) = UnixStream::pair().unwrap();
        let peer = PeerCredentials::of(&one).unwrap();
        assert_eq!(peer.pid, std::process::id());
        assert_eq!(peer.uid, rustix::process::getuid().as_raw());
        assert_eq!(peer.gid, rustix::process::getgid().as_raw());
        assert!(!pidfd_exited(&peer_pidfd(&one).unwrap()));
    }

    #[test]
    fn an_exited_process_is_seen_even_before_it_is_reaped() {
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let pid = Pid::from_child(&child);
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).unwrap();
        assert!(!pidfd_exited(&pidfd));
        drop(child.stdin.take());
        // Waits for the exit and leaves the zombie.
        rustix::event::poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], None).unwrap();
        assert!(pidfd_exited(&pidfd));
        child.wait().unwrap();
        assert!(pidfd_exited(&pidfd));
    }

    #[test]
    fn yama_is_asked_or_absent() {
        let yama = std::path::Path::new("/proc/sys/kernel/yama/ptrace_scope").exists();
        assert_eq!(allow_ptrace_by(Some(std::process::id())).unwrap(), yama);
        assert_eq!(allow_ptrace_by(None).unwrap(), yama);
    }
}
