//! A door: an address that the daemon listens at, with its socket and the socket's file.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    os::unix::net::UnixListener,
    path::{Path, PathBuf},
    sync::Arc,
};

pub(crate) use kvlane_memory::FileIdentity as Identity;
use kvlane_memory::{FolderRefused, SocketError, SocketFile};
use kvlane_proto::Address;
use parking_lot::Mutex;
use rustix::net::{Shutdown, shutdown};
use thiserror::Error;

use crate::peer::Stream;

/// Why the daemon cannot listen at an address.
#[derive(Debug, Error)]
pub enum ListenError {
    /// Another daemon answers there.
    #[error("another daemon listens at {0}: stop it, or choose another --listen")]
    Occupied(Address),
    /// Some program has the port.
    #[error("{flag} {at}: another program uses this port; stop it, or choose another one")]
    PortInUse {
        /// The option that names the port, with its dashes.
        flag: &'static str,
        /// The address with the port that is in use.
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
        /// The address as the user named it.
        address: String,
        /// The kernel's error from socket, bind or listen.
        error: io::Error,
    },
}

/// A listening socket. A Unix socket's file is removed with it.
#[derive(Debug)]
pub(crate) enum Listener {
    Unix(UnixListener, #[allow(dead_code, reason = "kept for its end")] SocketFile),
    Tcp(TcpListener),
}

/// An address, and the socket that listens there now.
#[derive(Debug)]
pub(crate) struct Door {
    address: Address,
    listener: Mutex<Arc<Listener>>,
}

impl Door {
    /// Binds an address. A stale socket file, behind which no daemon answers, is replaced.
    pub(crate) fn bind(address: &Address) -> Result<Self, ListenError> {
        let listener = Mutex::new(Arc::new(bind_one(address)?));
        Ok(Self { address: address.clone(), listener })
    }

    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// The present socket. [`bind_again`](Self::bind_again) replaces it.
    pub(crate) fn listener(&self) -> Arc<Listener> {
        Arc::clone(&self.listener.lock())
    }

    /// The path of a socket with a file.
    pub(crate) fn path(&self) -> Option<&Path> {
        match &self.address {
            Address::Unix(path) => Some(path),
            Address::Tcp(_) => None,
        }
    }

    /// The file of the present socket.
    pub(crate) fn identity(&self) -> Option<Identity> {
        match &**self.listener.lock() {
            Listener::Unix(_, file) => Some(file.identity()),
            Listener::Tcp(_) => None,
        }
    }

    /// Binds the address again, by the same rules as at the start. Open connections go on. On an error the former socket
    /// still listens.
    pub(crate) fn bind_again(&self) -> Result<(), ListenError> {
        let new = Arc::new(bind_one(&self.address)?);
        let former = std::mem::replace(&mut *self.listener.lock(), new);
        former.wake();
        Ok(())
    }
}

fn bind_one(address: &Address) -> Result<Listener, ListenError> {
    let refused = |error| ListenError::Refused { address: address.to_string(), error };
    match address {
        Address::Unix(path) => {
            let (listener, file) = SocketFile::bind(path).map_err(|error| match error {
                SocketError::Folder(refused) => ListenError::Folder(refused),
                SocketError::NotASocket(path) => ListenError::NotASocket(path),
                SocketError::Occupied => ListenError::Occupied(address.clone()),
                SocketError::Refused(error) => refused(error),
            })?;
            Ok(Listener::Unix(listener, file))
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

    /// Wakes the accepting thread: its accept fails from now on. A connection would not wake it, because the file may have
    /// been removed.
    pub(crate) fn wake(&self) {
        let _ = match self {
            Self::Unix(listener, _) => shutdown(listener, Shutdown::Both),
            Self::Tcp(listener) => shutdown(listener, Shutdown::Both),
        };
    }
}
