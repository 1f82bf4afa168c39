//! The 64 bytes by which another process opens a fake's memory: a file descriptor of a live process.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd};

use kvlane_gpu::{IpcHandle, code};

/// The kinds of handles.
pub(super) const MEMORY: [u8; 8] = *b"kvfakmem";
pub(super) const EVENT: [u8; 8] = *b"kvfakevt";

#[derive(Clone, Copy)]
pub(super) struct Handle {
    pid: u32,
    fd: u32,
    /// Distinguishes the file from a later one with the same descriptor number.
    inode: u64,
    pub(super) bytes: u64,
}

impl Handle {
    pub(super) fn new(file: impl AsFd, bytes: u64) -> Result<Handle, u32> {
        let status = rustix::fs::fstat(file.as_fd()).map_err(|_| code::INVALID_VALUE)?;
        let fd = file.as_fd().as_raw_fd() as u32;
        Ok(Handle { pid: std::process::id(), fd, inode: status.st_ino, bytes })
    }

    pub(super) fn encode(self, kind: [u8; 8]) -> IpcHandle {
        let mut handle = [0; 64];
        handle[..8].copy_from_slice(&kind);
        handle[8..12].copy_from_slice(&self.pid.to_le_bytes());
        handle[12..16].copy_from_slice(&self.fd.to_le_bytes());
        handle[16..24].copy_from_slice(&self.inode.to_le_bytes());
        handle[24..32].copy_from_slice(&self.bytes.to_le_bytes());
        handle
    }

    pub(super) fn decode(handle: &IpcHandle, kind: [u8; 8]) -> Result<Handle, u32> {
        let word =
            |at: usize| handle[at..at + 4].iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte));
        let long = |at: usize| u64::from(word(at + 4)) << 32 | u64::from(word(at));
        if handle[..8] != kind {
            return Err(code::INVALID_HANDLE);
        }
        Ok(Handle { pid: word(8), fd: word(12), inode: long(16), bytes: long(24) })
    }

    /// The file, from its owner's table of descriptors. As with CUDA, a process cannot open its own handle.
    pub(super) fn open(self) -> Result<File, u32> {
        if self.pid == std::process::id() {
            return Err(code::INVALID_CONTEXT);
        }
        let path = format!("/proc/{}/fd/{}", self.pid, self.fd);
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(|_| code::MAP_FAILED)?;
        let status = rustix::fs::fstat(&file).map_err(|_| code::MAP_FAILED)?;
        if status.st_ino != self.inode || status.st_size as u64 != self.bytes {
            return Err(code::MAP_FAILED);
        }
        Ok(file)
    }
}
