//! A Unix socket's file: made for its user alone, and removed at the end.

use std::{
    fs, io,
    os::{
        fd::OwnedFd,
        unix::{
            fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt},
            net::UnixListener,
        },
    },
    path::{Path, PathBuf},
};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use thiserror::Error;

use crate::{FolderRefused, RuntimeFolder};

/// Why a socket cannot be made.
#[derive(Debug, Error)]
pub enum SocketError {
    /// Somebody listens there.
    #[error("somebody else listens there")]
    Occupied,
    /// The runtime folder may be a stranger's.
    #[error(transparent)]
    Folder(#[from] FolderRefused),
    /// Something else lies at the path.
    #[error("{0} exists and is no socket")]
    NotASocket(PathBuf),
    /// The kernel refuses.
    #[error(transparent)]
    Refused(#[from] io::Error),
}

/// A socket's file: removed when this is dropped, unless another process has replaced it.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: FileIdentity,
}

impl SocketFile {
    /// Listens at a path, with mode 0600. A stale file, which nobody answers, is replaced; the runtime folder is made and
    /// checked, another one is made where it is missing.
    ///
    /// # Errors
    /// [`SocketError`].
    pub fn bind(path: &Path) -> Result<(UnixListener, SocketFile), SocketError> {
        let runtime = RuntimeFolder::of_this_user();
        if runtime.holds(path) {
            runtime.make()?;
        } else {
            make_folder(path)?;
        }
        clear_stale(path)?;
        let listener = UnixListener::bind(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        let identity = FileIdentity::of(path)?;
        Ok((listener, SocketFile { path: path.to_owned(), identity }))
    }

    /// Which file it is.
    pub fn identity(&self) -> FileIdentity {
        self.identity
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if FileIdentity::of(&self.path).is_ok_and(|found| found == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Which file it is, as long as somebody has it open: its device and inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileIdentity(pub u64, pub u64);

impl FileIdentity {
    /// Of what lies at a path.
    pub fn of(path: &Path) -> io::Result<Self> {
        fs::symlink_metadata(path).map(|found| Self(found.dev(), found.ino()))
    }
}

fn make_folder(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)
        }
        _ => Ok(()),
    }
}

fn clear_stale(path: &Path) -> Result<(), SocketError> {
    let Ok(found) = fs::symlink_metadata(path) else { return Ok(()) };
    if !found.file_type().is_socket() {
        return Err(SocketError::NotASocket(path.to_owned()));
    }
    match try_connect(path) {
        Ok(_) => Err(SocketError::Occupied),
        Err(Errno::CONNREFUSED) => {
            tracing::info!(path = %path.display(), "replacing a socket that nobody serves");
            fs::remove_file(path)?;
            Ok(())
        }
        // Full backlog, no permission: somebody is there.
        Err(_) => Err(SocketError::Occupied),
    }
}

/// Does not wait where somebody listens and accepts nobody.
fn try_connect(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}
