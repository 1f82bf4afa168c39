//! Why a worker's driver could not do what its link wanted.

use std::io;

use kvlane_engine_memory::OwnError;
use thiserror::Error;

/// Why a daemon's pool is not mapped. The link leaves that daemon, and tries again after a pause.
#[derive(Debug, Error)]
pub enum NotMapped {
    /// The daemon's fault.
    #[error("the daemon sent no descriptor of its pool")]
    NoDescriptor,
    /// This process has too many files open.
    #[error("no descriptor left: {0}")]
    NoDescriptorLeft(io::Error),
    /// What the daemon sent is no pool of that size, or the kernel refuses to map it.
    #[error("the pool of {bytes} bytes cannot be mapped: {error}")]
    Refused {
        /// As the daemon told.
        bytes: u64,
        /// What the kernel or the check of the descriptor said.
        error: io::Error,
    },
}

/// Why this process did not copy between a pool and the engine.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotCopied {
    /// The pool was let go, or never came. It does not come back: its run of the daemon is over.
    #[error("the pool of that boot is not mapped")]
    NoPool,
    /// The copy itself failed; what its target holds is worth nothing.
    #[error(transparent)]
    Own(#[from] OwnError),
}
