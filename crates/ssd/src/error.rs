//! Why a tier does not open.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why a tier does not open. Nothing that was in a file is lost by any of them.
#[derive(Debug, Error)]
pub enum OpenError {
    /// No device was named, or too many were.
    #[error("an SSD tier has 1 to 255 files or directories, not {0}")]
    DeviceCount(usize),
    /// The capacity does not hold a few segments.
    #[error(
        "{path}: a capacity of {capacity} bytes is too small, the smallest is {least} bytes; name a larger one or free space"
    )]
    TooSmall {
        /// The file.
        path: PathBuf,
        /// Bytes asked for, or 80 % of those free.
        capacity: u64,
        /// Bytes of the smallest that works.
        least: u64,
    },
    /// A segment size that cannot be.
    #[error("segments of {0} bytes are not possible: they are a multiple of 4096, 16384 to 1 GiB")]
    SegmentBytes(u64),
    /// The file system has not enough room for the capacity.
    #[error(
        "{path}: there is no room for {capacity} bytes, {free} are free; name a smaller capacity or free space"
    )]
    NoSpace {
        /// The file.
        path: PathBuf,
        /// Bytes asked for.
        capacity: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// The file is something else's. It is left as it is.
    #[error(
        "{path} is not a file of kvlane's SSD tier and is left alone; name another path, or remove it if nobody needs it"
    )]
    NotOurs {
        /// The file.
        path: PathBuf,
    },
    /// The path is neither a file nor a directory.
    #[error("{path} is neither a file nor a directory; name one of these")]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// Both copies of the superblock are damaged.
    #[error("{path}: both copies of the superblock are damaged; remove the file to start with an empty tier")]
    Damaged {
        /// The file.
        path: PathBuf,
    },
    /// A newer kvlane wrote the file.
    #[error(
        "{path} has format version {found}, this build knows {known}; use a newer kvlane, or remove the file to start with an empty tier"
    )]
    OtherVersion {
        /// The file.
        path: PathBuf,
        /// Version of the file.
        found: u32,
        /// Version of this build.
        known: u32,
    },
    /// The file was made with another capacity or segment size.
    #[error(
        "{path} was made with {found} bytes {of}, not {asked}; ask for that, leave it out, or remove the file to start with an empty tier"
    )]
    OtherGeometry {
        /// The file.
        path: PathBuf,
        /// "of capacity" or "a segment".
        of: &'static str,
        /// Bytes of the file.
        found: u64,
        /// Bytes asked for.
        asked: u64,
    },
    /// Another process has the file open.
    #[error("{path} is in use by another daemon; stop it or name another path")]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// The same file was named twice.
    #[error("{path} is named twice; name each file once")]
    Twice {
        /// The file.
        path: PathBuf,
    },
    /// The system refused.
    #[error("{path}: {what}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The step that failed.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
}
