//! [`PoolView`]: the pool as mapped in an engine's process.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use kvlane_block::PoolOffset;
use rustix::mm::Advice;
use thiserror::Error;

use crate::arena::SEALS;
use crate::mapping::Mapping;

/// A range that does not lie inside the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{bytes} bytes at {offset} are not inside the pool")]
pub struct OutsidePool {
    /// Start of the range.
    pub offset: PoolOffset,
    /// Length of the range in bytes.
    pub bytes: u64,
}

/// A mapping of the pool's memfd. Share it in an `Arc`, with one clone for each copy in flight, so that it is unmapped
/// after the last copy. It outlives the daemon, so promised loads complete without the daemon.
#[derive(Debug)]
pub struct PoolView {
    mapping: Mapping,
    writable: bool,
}

impl PoolView {
    /// Maps the first `bytes` bytes. Touching a page behind a file's end is SIGBUS, so a shorter file is refused. So is
    /// one that its sender could shrink later: only a memfd with the seals of an [`Arena`](crate::Arena) is mapped.
    pub fn map(fd: OwnedFd, bytes: u64, writable: bool) -> io::Result<PoolView> {
        if bytes == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a pool of 0 bytes cannot be mapped"));
        }
        let refused = |why| io::Error::new(io::ErrorKind::InvalidData, why);
        let seals = rustix::fs::fcntl_get_seals(&fd)
            .map_err(|errno| refused(format!("what came as the pool is no memfd: {errno}")))?;
        if !seals.contains(SEALS) {
            let missing = SEALS.difference(seals);
            return Err(refused(format!(
                "the pool's descriptor lacks the seals {missing:?}: whoever sent it could shrink it"
            )));
        }
        let file_bytes = rustix::fs::fstat(&fd)?.st_size as u64;
        if file_bytes < bytes {
            return Err(refused(format!("the pool's descriptor holds {file_bytes} bytes and not {bytes}")));
        }
        Ok(PoolView { mapping: Mapping::new(fd.as_fd(), bytes, writable)?, writable })
    }

    /// Address of the first byte. Writing through it faults unless [`PoolView::writable`].
    pub fn base(&self) -> *mut u8 {
        self.mapping.base()
    }

    /// Size of the mapping in bytes.
    pub fn bytes(&self) -> u64 {
        self.mapping.bytes()
    }

    /// Whether the pool may be written through this view.
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// Reads bytes as they are now, whichever engine owns them. Bytes that are written meanwhile may be torn.
    pub fn read(&self, offset: PoolOffset, into: &mut [u8]) -> Result<(), OutsidePool> {
        self.check(offset, into.len())?;
        // SAFETY: the range was checked, and the view is mapped while this lives; `into` is the caller's alone.
        // Concurrent writes may tear the bytes, and bytes have no invalid values.
        unsafe {
            std::ptr::copy_nonoverlapping(self.base().add(offset.0 as usize), into.as_mut_ptr(), into.len());
        }
        Ok(())
    }

    /// Overwrites bytes, whichever engine owns them.
    ///
    /// # Panics
    /// If the view is not writable.
    pub fn write(&self, offset: PoolOffset, bytes: &[u8]) -> Result<(), OutsidePool> {
        assert!(self.writable, "this view of the pool is read-only");
        self.check(offset, bytes.len())?;
        // SAFETY: the range was checked, and the view is mapped writable while this lives. No Rust reference to its
        // bytes exists.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.base().add(offset.0 as usize), bytes.len());
        }
        Ok(())
    }

    fn check(&self, offset: PoolOffset, bytes: usize) -> Result<(), OutsidePool> {
        let bytes = bytes as u64;
        offset.end_inside(bytes, self.bytes()).map(drop).ok_or(OutsidePool { offset, bytes })
    }

    /// Maps a range's pages into this process's page tables, so that the first copies out of it do not fault page by
    /// page. Only speed depends on it. Linux before 5.14 refuses.
    ///
    /// # Panics
    /// If the range is not inside the view.
    pub fn prefault(&self, offset: PoolOffset, len: u64) -> io::Result<()> {
        assert!(
            offset.end_inside(len, self.bytes()).is_some(),
            "{len} bytes at {offset} are not inside {} bytes",
            self.bytes()
        );
        let start = offset.0 / HUGE_ALIGN * HUGE_ALIGN;
        // SAFETY: the range lies inside the mapping and starts on a page; reading pages in changes no byte.
        unsafe {
            let address = self.base().add(start as usize);
            rustix::mm::madvise(
                address.cast(),
                (offset.0 - start + len) as usize,
                Advice::LinuxPopulateRead,
            )?;
        }
        Ok(())
    }
}

/// A multiple of every page size in use.
const HUGE_ALIGN: u64 = crate::hugepages::HUGE_BYTES;
