//! Failures of a worker's driver: of mapping a pool, and of a copy.

use std::io;

use kvlane_engine_memory::OwnError;
use thiserror::Error;

/// Why a daemon's pool is not mapped. The link disconnects from that daemon, and tries again after a pause.
#[derive(Debug, Error)]
pub enum NotMapped {
    /// A fault of the daemon.
    #[error("the daemon sent no descriptor of its pool")]
    NoDescriptor,
    /// This process has too many files open.
    #[error("no descriptor left: {0}")]
    NoDescriptorLeft(io::Error),
    /// The descriptor is no pool of that size, or the kernel refuses to map it.
    #[error("the pool of {bytes} bytes cannot be mapped: {error}")]
    Refused {
        /// Size of the pool, as the daemon names it.
        bytes: u64,
        /// From the kernel, or from the check of the descriptor.
        error: io::Error,
    },
}

/// Why this process did not copy between a pool and the engine.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotCopied {
    /// The pool was unmapped, or was never mapped. It does not come back, because its run of the daemon is over.
    #[error("the pool of that boot is not mapped")]
    NoPool,
    /// The copy itself failed; the bytes of its target are undefined.
    #[error(transparent)]
    Own(#[from] OwnError),
}
