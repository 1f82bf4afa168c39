//! [`RemoteProcess`]: reads another process's memory with process_vm_readv, and duplicates its descriptors.

use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::{fs, io};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};
use thiserror::Error;

use crate::peer::pidfd_exited;

/// Limit of ranges on each side of one call: the kernel's IOV_MAX.
pub const RANGES_MAX: usize = 1024;

/// A process, by its pid, and a pidfd that tells when it has exited. Calls go by the pid, which another process may
/// have had before or may get after. So bytes that were read count only if [`RemoteProcess::has_exited`] is false
/// afterwards.
#[derive(Debug)]
pub struct RemoteProcess {
    pid: u32,
    pidfd: OwnedFd,
}

/// Why a process cannot be read this way. Its saves then travel through a mapping of the pool.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ProbeError {
    /// The kernel, a security module or a seccomp filter forbids it.
    #[error("process_vm refused: {errno} ({hint})")]
    NotPermitted {
        /// The kernel's error.
        errno: Errno,
        /// The most likely reason on this host, and how to change it.
        hint: String,
    },
    /// The announced nonce is not at the announced address: this is another process, or the peer announced wrong
    /// values.
    #[error("the fence in the engine's memory does not hold the nonce that the engine announced")]
    WrongNonce,
    /// The process has exited.
    #[error("the engine's process has exited")]
    Gone,
    /// The system has no such call, or cannot see the process.
    #[error("process_vm cannot be used here: {0}")]
    Unsupported(Errno),
}

impl ProbeError {
    /// The errno that comes closest.
    pub fn errno(&self) -> Errno {
        match self {
            ProbeError::NotPermitted { errno, .. } | ProbeError::Unsupported(errno) => *errno,
            ProbeError::WrongNonce => Errno::FAULT,
            ProbeError::Gone => Errno::SRCH,
        }
    }
}

impl RemoteProcess {
    /// The process that has this pid now, in this process's pid namespace.
    pub fn open(pid: u32) -> Result<RemoteProcess, ProbeError> {
        let raw =
            i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(ProbeError::Unsupported(Errno::SRCH))?;
        match rustix::process::pidfd_open(raw, PidfdFlags::empty()) {
            Ok(pidfd) => Ok(RemoteProcess { pid, pidfd }),
            Err(Errno::SRCH) => Err(ProbeError::Gone),
            Err(errno) => Err(ProbeError::Unsupported(errno)),
        }
    }

    /// The process with this pid, and a pidfd of it.
    pub fn new(pid: u32, pidfd: OwnedFd) -> RemoteProcess {
        RemoteProcess { pid, pidfd }
    }

    /// The process id, in this process's pid namespace.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The pidfd, which turns readable when the process exits.
    pub fn pidfd(&self) -> &OwnedFd {
        &self.pidfd
    }

    /// Whether the process has exited. If not, everything that was read before came from it, because no other process
    /// can have had its pid meanwhile.
    pub fn has_exited(&self) -> bool {
        pidfd_exited(&self.pidfd)
    }

    /// Copies from the process's memory into the local ranges, in order, with one system call. Returns the number of
    /// bytes, which is smaller than requested if a remote address is not mapped.
    ///
    /// # Safety
    /// The local ranges are valid for writes, and nothing else touches them during the call. The kernel checks
    /// the remote ones.
    pub unsafe fn read(&self, local: &[libc::iovec], remote: &[libc::iovec]) -> Result<u64, Errno> {
        let (locals, remotes) = (local.len() as libc::c_ulong, remote.len() as libc::c_ulong);
        loop {
            // SAFETY: both lists are live. The kernel checks every remote address, and the caller vouches for the local
            // ones.
            let copied = unsafe {
                let pid = self.pid as libc::pid_t;
                libc::process_vm_readv(pid, local.as_ptr(), locals, remote.as_ptr(), remotes, 0)
            };
            if let Ok(copied) = u64::try_from(copied) {
                return Ok(copied);
            }
            match Errno::from_io_error(&io::Error::last_os_error()) {
                Some(Errno::INTR) => {}
                errno => return Err(errno.unwrap_or(Errno::IO)),
            }
        }
    }

    /// Duplicates a descriptor of the process. Needs the same permission as [`Self::read`].
    pub fn descriptor(&self, fd: i32) -> io::Result<OwnedFd> {
        let pidfd = self.pidfd.as_fd();
        // SAFETY: pidfd_getfd takes three numbers and touches no memory.
        let copy = unsafe {
            libc::syscall(
                libc::SYS_pidfd_getfd,
                std::os::fd::AsRawFd::as_raw_fd(&pidfd),
                fd,
                0 as libc::c_uint,
            )
        };
        match i32::try_from(copy) {
            // SAFETY: the kernel made this descriptor for us, and nothing else owns it.
            Ok(copy) if copy >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(copy) }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Explains why the first read of a process failed.
    pub fn explain(errno: Errno) -> ProbeError {
        match errno {
            Errno::FAULT => ProbeError::WrongNonce,
            Errno::SRCH => ProbeError::Gone,
            Errno::PERM | Errno::ACCESS => {
                let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok();
                ProbeError::NotPermitted { errno, hint: hint(scope.as_deref().map(str::trim)) }
            }
            errno => ProbeError::Unsupported(errno),
        }
    }
}

fn hint(ptrace_scope: Option<&str>) -> String {
    match ptrace_scope {
        Some(scope @ "1") => {
            format!("Yama ptrace_scope {scope}: that process has to allow this one, and run as the same user")
        }
        Some(scope @ "2") => format!("Yama ptrace_scope {scope}: only a process with CAP_SYS_PTRACE may"),
        Some(scope @ "3") => format!("Yama ptrace_scope {scope}: nobody may until the next boot"),
        _ => "another user, a process that is not dumpable, a container's rules or a seccomp filter".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_name_what_forbids_it() {
        assert!(hint(Some("1")).contains("allow"));
        assert!(hint(Some("2")).contains("CAP_SYS_PTRACE"));
        assert!(hint(Some("0")).contains("seccomp"));
        assert!(hint(None).contains("seccomp"));
    }
}
