//! [`OpenError`]: why a tier does not open, and what the user can do.

use std::io;
use std::path::PathBuf;

use bytesize::ByteSize;
use thiserror::Error;

/// A size as a flag takes it: "64mib", "2gb", or plain bytes if it is not a whole number of any unit.
fn flag_size(bytes: u64) -> String {
    const UNITS: [(u64, &str); 8] = [
        (1 << 40, "tib"),
        (1_000_000_000_000, "tb"),
        (1 << 30, "gib"),
        (1_000_000_000, "gb"),
        (1 << 20, "mib"),
        (1_000_000, "mb"),
        (1 << 10, "kib"),
        (1000, "kb"),
    ];
    let fits = |(unit, _): &&(u64, &str)| bytes >= *unit && bytes.is_multiple_of(*unit);
    UNITS
        .iter()
        .find(fits)
        .map_or_else(|| bytes.to_string(), |(unit, name)| format!("{}{name}", bytes / unit))
}

/// A rounded size for people, such as "24.5 GB".
fn human_size(bytes: u64) -> impl std::fmt::Display {
    ByteSize::b(bytes).display().si()
}

/// Why a tier does not open. No variant loses a stored block.
#[derive(Debug, Error)]
pub enum OpenError {
    /// No device was named, or too many were.
    #[error("an SSD tier has 1 to 255 files or directories, not {0}")]
    DeviceCount(usize),
    /// The capacity does not hold a few segments.
    #[error(
        "{path}: a capacity of {} is too small, the smallest is {}; name a larger one or free space",
        flag_size(*capacity), flag_size(*least)
    )]
    TooSmall {
        /// The file that was to be made.
        path: PathBuf,
        /// Bytes asked for, or 80 % of those free.
        capacity: u64,
        /// Bytes of the smallest that works.
        least: u64,
    },
    /// The segment size is not a multiple of 4096 from 16384 bytes to 1 GiB.
    #[error("segments of {0} bytes are not possible: they are a multiple of 4096, 16384 to 1 GiB")]
    SegmentBytes(u64),
    /// The file system has not enough room for the capacity.
    #[error(
        "{path}: there is no room for {}, {} are free; name a smaller capacity or free space",
        flag_size(*capacity), human_size(*free)
    )]
    NoSpace {
        /// The file that was to be made, or to grow.
        path: PathBuf,
        /// Bytes that the file was to have.
        capacity: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// The file belongs to something else, and is left as it is.
    #[error(
        "{path} is not a file of kvlane's SSD tier and is left alone; name another path, or remove it if nobody needs it"
    )]
    NotOurs {
        /// The file as it was named.
        path: PathBuf,
    },
    /// The path is neither a file nor a directory.
    #[error("{path} is neither a file nor a directory; name one of these")]
    NotAFile {
        /// The path that the options name.
        path: PathBuf,
    },
    /// Both copies of the superblock are damaged.
    #[error("{path}: both copies of the superblock are damaged; remove the file to start with an empty tier")]
    Damaged {
        /// The file as it was named.
        path: PathBuf,
    },
    /// A newer kvlane wrote the file.
    #[error(
        "{path} has format version {found}, this build knows {known}; use a newer kvlane, or remove the file to start with an empty tier"
    )]
    OtherVersion {
        /// The file as it was named.
        path: PathBuf,
        /// Version of the file.
        found: u32,
        /// Version of this build.
        known: u32,
    },
    /// The file was made with another capacity or segment size.
    #[error(
        "{path} was made with {} {of}, not {}; ask for that, leave it out, or remove the file to start with an empty tier",
        flag_size(*found), flag_size(*asked)
    )]
    OtherGeometry {
        /// The file as it was named.
        path: PathBuf,
        /// "of capacity" or "a segment".
        of: &'static str,
        /// Bytes of the file.
        found: u64,
        /// Bytes that the options ask for.
        asked: u64,
    },
    /// Another process has the file open.
    #[error("{path} is in use by another daemon; stop it or name another path")]
    InUse {
        /// The file that is locked.
        path: PathBuf,
    },
    /// The same file was named twice.
    #[error("{path} is named twice; name each file once")]
    Twice {
        /// The file that two of the names lead to.
        path: PathBuf,
    },
    /// The folder that the file is to be in is not there.
    #[error("the folder {folder} does not exist; make it, or name another path")]
    NoFolder {
        /// The folder that is missing; it is not made.
        folder: PathBuf,
    },
    /// This process may not write there.
    #[error(
        "{path} cannot be written by user {uid}, who runs this process ({source}); give it and its folder to that user, or name \
         another path"
    )]
    NotWritable {
        /// The file that was to be opened or made.
        path: PathBuf,
        /// Effective user id of this process.
        uid: u32,
        /// The system's error.
        source: io::Error,
    },
    /// A system call failed.
    #[error("{path}: {what}: {source}")]
    Io {
        /// The file that the step was for.
        path: PathBuf,
        /// The step that failed.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

impl OpenError {
    /// Maps a system error: a missing permission or a read-only file system becomes [`OpenError::NotWritable`].
    pub(crate) fn of_system(path: PathBuf, what: &'static str, source: io::Error) -> OpenError {
        match source.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                OpenError::NotWritable { path, uid: rustix::process::geteuid().as_raw(), source }
            }
            _ => OpenError::Io { path, what, source },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_can_be_written_into_a_flag_again() {
        for (bytes, text) in [
            (64 << 20, "64mib"),
            (2_000_000_000, "2gb"),
            (66_060_288, "63mib"),
            (1 << 40, "1tib"),
            (4097, "4097"),
            (0, "0"),
            (3000, "3kb"),
        ] {
            assert_eq!(flag_size(bytes), text);
        }
    }
}
