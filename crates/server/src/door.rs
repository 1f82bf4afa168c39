//! A socket that the daemon listens on, and its file.

use std::{
    fs, io,
    net::{SocketAddr, TcpListener},
    os::{
        fd::OwnedFd,
        unix::{
            fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt},
            net::UnixListener,
        },
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use kvlane_memory::{FolderRefused, RuntimeFolder};
use kvlane_proto::Address;
use parking_lot::Mutex;
use rustix::{
    io::Errno,
    net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, shutdown, socket_with},
};
use thiserror::Error;

use crate::peer::Stream;

/// A place where the daemon cannot listen.
#[derive(Debug, Error)]
pub enum ListenError {
    /// Another daemon answers there.
    #[error("another daemon listens at {0}: stop it, or choose another --listen")]
    Occupied(Address),
    /// Some program has the port.
    #[error("{flag} {at}: another program uses this port; stop it, or choose another one")]
    PortInUse {
        /// What named it.
        flag: &'static str,
        /// Where.
        at: SocketAddr,
    },
    /// The folder of the default socket may be a stranger's.
    #[error(transparent)]
    Folder(#[from] FolderRefused),
    /// Something else lies at the path.
    #[error("{0} exists and is no socket: remove it, or choose another --listen")]
    NotASocket(PathBuf),
    /// The kernel refuses.
    #[error("cannot listen at {address}: {error}; choose another place")]
    Refused {
        /// Where.
        address: String,
        /// Why.
        error: io::Error,
    },
}

/// What listens at an address.
#[derive(Debug)]
pub(crate) enum Listener {
    Unix(UnixListener, #[allow(dead_code, reason = "kept for its end")] SocketFile),
    Tcp(TcpListener),
}

/// A socket's file: removed at the end, unless another daemon has replaced it.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    identity: Identity,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if Identity::of(&self.path).is_ok_and(|found| found == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// An address, and what listens there now.
#[derive(Debug)]
pub(crate) struct Door {
    address: Address,
    listener: Mutex<Arc<Listener>>,
}

impl Door {
    /// A stale socket file, which nobody answers, is replaced.
    pub(crate) fn bind(address: &Address) -> Result<Self, ListenError> {
        let listener = Mutex::new(Arc::new(bind_one(address)?));
        Ok(Self { address: address.clone(), listener })
    }

    /// Where engines and tools find it.
    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// What listens now.
    pub(crate) fn listener(&self) -> Arc<Listener> {
        Arc::clone(&self.listener.lock())
    }

    /// Of a socket with a file.
    pub(crate) fn path(&self) -> Option<&Path> {
        match &self.address {
            Address::Unix(path) => Some(path),
            Address::Tcp(_) => None,
        }
    }

    /// The file that belongs to what listens.
    pub(crate) fn identity(&self) -> Option<Identity> {
        match &**self.listener.lock() {
            Listener::Unix(_, file) => Some(file.identity),
            Listener::Tcp(_) => None,
        }
    }

    /// Listens at the address anew, by the same rules as at the start; connections that are there go on. On an error what
    /// listened before still does.
    pub(crate) fn bind_again(&self) -> Result<(), ListenError> {
        let new = Arc::new(bind_one(&self.address)?);
        let former = std::mem::replace(&mut *self.listener.lock(), new);
        former.wake();
        Ok(())
    }
}

/// Which file it is, as long as somebody has it open: its device and inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity(pub(crate) u64, pub(crate) u64);

impl Identity {
    /// Of what lies at a path.
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        fs::symlink_metadata(path).map(|found| Self(found.dev(), found.ino()))
    }
}

fn bind_one(address: &Address) -> Result<Listener, ListenError> {
    let refused = |error| ListenError::Refused { address: address.to_string(), error };
    match address {
        Address::Unix(path) => {
            let runtime = RuntimeFolder::of_this_user();
            if runtime.holds(path) {
                runtime.make()?;
            } else {
                make_folder(path).map_err(refused)?;
            }
            clear_stale(path, address)?;
            let listener = UnixListener::bind(path).map_err(refused)?;
            fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(refused)?;
            let identity = Identity::of(path).map_err(refused)?;
            Ok(Listener::Unix(listener, SocketFile { path: path.clone(), identity }))
        }
        Address::Tcp(at) => match TcpListener::bind(at) {
            Ok(listener) => Ok(Listener::Tcp(listener)),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                Err(ListenError::PortInUse { flag: "--listen", at: *at })
            }
            Err(error) => Err(refused(error)),
        },
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

fn clear_stale(path: &Path, address: &Address) -> Result<(), ListenError> {
    let Ok(found) = fs::symlink_metadata(path) else { return Ok(()) };
    if !found.file_type().is_socket() {
        return Err(ListenError::NotASocket(path.to_owned()));
    }
    match try_connect(path) {
        Ok(_) => Err(ListenError::Occupied(address.clone())),
        Err(Errno::CONNREFUSED) => {
            tracing::info!(path = %path.display(), "replacing a socket that nobody serves");
            fs::remove_file(path)
                .map_err(|error| ListenError::Refused { address: address.to_string(), error })
        }
        // Full backlog, no permission: somebody is there.
        Err(_) => Err(ListenError::Occupied(address.clone())),
    }
}

/// Does not wait where somebody listens and accepts nobody.
fn try_connect(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

impl Listener {
    /// Waits for the next connection.
    pub(crate) fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Unix(listener, ..) => listener.accept().map(|(stream, _)| Stream::Unix(stream)),
            Self::Tcp(listener) => listener.accept().and_then(|(stream, _)| {
                stream.set_nodelay(true)?;
                Ok(Stream::Tcp(stream))
            }),
        }
    }

    /// Wakes the accepting thread, whose accept fails from now on. Connecting would not do: the file may have been removed.
    pub(crate) fn wake(&self) {
        let _ = match self {
            Self::Unix(listener, _) => shutdown(listener, Shutdown::Both),
            Self::Tcp(listener) => shutdown(listener, Shutdown::Both),
        };
    }
}
