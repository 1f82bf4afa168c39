//! The memory in which an engine holds its KV blocks, seen from whoever copies.

use kvlane_block::Run;
use rustix::io::Errno;
use thiserror::Error;

/// Moves runs between an engine's memory and the pool.
///
/// The runs of one call may be many and of any length; an implementation cuts them into bounded batches. After an
/// error, what the destination holds is undefined.
pub trait EngineMemory: Send + Sync {
    /// Gathers: engine to pool.
    ///
    /// # Safety
    /// Every run's `pool_offset..pool_offset + len` lies inside a writable mapping at `pool_base`, and nobody else
    /// reads or writes those bytes during the call. Runs do not share pool bytes. For [`crate::OwnMemory`] the engine
    /// addresses too must be valid to read, and not written meanwhile.
    unsafe fn read(&self, runs: &[Run], pool_base: *mut u8) -> Result<(), CopyError>;

    /// Scatters: pool to engine.
    ///
    /// # Safety
    /// Every run's `pool_offset..pool_offset + len` lies inside a mapping at `pool_base`, and nobody writes those
    /// bytes during the call. The engine's bytes belong to this copy: the engine has set those blocks aside. For
    /// [`crate::OwnMemory`] the engine addresses must be valid to write, and shared with nobody.
    unsafe fn write(&self, runs: &[Run], pool_base: *const u8) -> Result<(), CopyError>;
}

/// Why a copy is worth nothing.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CopyError {
    /// The process is no more, or another one has its pid.
    #[error("the engine's process {pid} has exited")]
    Gone {
        /// Its process id.
        pid: u32,
    },
    /// The engine gave the copy up and may have reused its blocks.
    #[error("the engine is at epoch {found} and gave up the copy that it asked for at epoch {asked}")]
    Cancelled {
        /// The epoch of the request.
        asked: u64,
        /// The epoch that the fence holds now.
        found: u64,
    },
    /// The kernel refused: an address that is not mapped, or a permission that was taken away.
    #[error("the engine's process {pid} cannot be copied at {address:#x}: {errno}")]
    Refused {
        /// Its process id.
        pid: u32,
        /// Address of the run that failed.
        address: u64,
        /// What the kernel said.
        errno: Errno,
    },
}
