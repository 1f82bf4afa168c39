//! [`SocketFile`]: the file of a listening Unix socket. Only its user may connect, and dropping it removes the file.

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
    time::Duration,
};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use thiserror::Error;

use crate::{FolderRefused, RuntimeFolder};

/// A socket of this age at which no process listens is a killed process's.
const STALE_AGE: Duration = Duration::from_secs(10);

/// Why a socket cannot be made.
#[derive(Debug, Error)]
pub enum SocketError {
    /// A process listens there already.
    #[error("somebody else listens there")]
    Occupied,
    /// The runtime folder may belong to another user.
    #[error(transparent)]
    Folder(#[from] FolderRefused),
    /// The path is not a socket.
    #[error("{0} exists and is no socket")]
    NotASocket(PathBuf),
    /// A system call failed.
    #[error(transparent)]
    Refused(#[from] io::Error),
}

/// The file of a listening socket. Dropping it removes the file, unless another process has replaced it.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: FileIdentity,
}

impl SocketFile {
    /// Listens at a path, with mode 0600. Replaces a stale file, at which no process answers. Makes and checks the
    /// runtime folder; makes any other folder if it is missing.
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

    /// Removes sockets of this user's runtime folder whose names begin so, and whose processes were killed.
    pub fn remove_stale(prefix: &str) {
        let Ok(folder) = fs::read_dir(RuntimeFolder::of_this_user().path()) else { return };
        for entry in folder.flatten() {
            let name = entry.file_name();
            let is_one =
                name.to_str().is_some_and(|name| name.starts_with(prefix) && name.ends_with(".sock"));
            let age =
                entry.metadata().and_then(|found| found.modified()).ok().and_then(|at| at.elapsed().ok());
            // A younger one may belong to a process that has bound it and does not listen yet: ranks start together.
            if is_one
                && age.is_some_and(|age| age >= STALE_AGE)
                && matches!(try_connect(&entry.path()), Err(Errno::CONNREFUSED))
            {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// Device and inode of the file that this process made.
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

/// Device and inode of a file. They identify it as long as a process has it open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileIdentity(pub u64, pub u64);

impl FileIdentity {
    /// The identity of the file at a path; does not follow links.
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
            // Log: a program that was killed left its socket behind; this one uses the path now.
            tracing::info!(path = %path.display(), "stale socket replaced");
            fs::remove_file(path)?;
            Ok(())
        }
        // A full backlog or a missing permission means that a process listens.
        Err(_) => Err(SocketError::Occupied),
    }
}

/// Connects without waiting, so that a process that listens and accepts nothing does not block this one.
fn try_connect(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}
