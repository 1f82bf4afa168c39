//! The daemon's sockets.

use std::{
    fs, io,
    net::{SocketAddr, TcpListener},
    os::{
        fd::OwnedFd,
        unix::{
            fs::{DirBuilderExt, FileTypeExt, PermissionsExt},
            net::UnixListener,
        },
    },
    path::{Path, PathBuf},
    sync::Arc,
    thread::JoinHandle,
};

use kvlane_memory::{FolderRefused, RuntimeFolder};
use kvlane_proto::Address;
use parking_lot::Mutex;
use rustix::{
    io::Errno,
    net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, shutdown, socket_with},
};
use thiserror::Error;

use crate::{
    Shared,
    keeper::{Identity, Keeper},
    peer::Stream,
    session,
};

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

#[derive(Debug)]
enum Listener {
    Unix(UnixListener, #[allow(dead_code, reason = "kept for its end")] SocketFile),
    Tcp(TcpListener),
}

/// A socket's file: removed at the end, unless another daemon has replaced it.
#[derive(Debug)]
struct SocketFile {
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
    fn bind(address: &Address) -> Result<Self, ListenError> {
        let listener = Mutex::new(Arc::new(bind_one(address)?));
        Ok(Self { address: address.clone(), listener })
    }

    /// Where engines and tools find it.
    pub(crate) fn address(&self) -> &Address {
        &self.address
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

/// Sockets that are bound but not yet served.
#[derive(Debug)]
pub(crate) struct Bound(Vec<Door>);

/// Sockets that are served.
#[derive(Debug)]
pub(crate) struct Listeners {
    doors: Vec<Arc<Door>>,
    threads: Vec<JoinHandle<()>>,
    keeper: Option<Keeper>,
}

/// Binds all addresses. A stale socket file, which nobody answers, is replaced.
pub(crate) fn bind(addresses: &[Address]) -> Result<Bound, ListenError> {
    addresses.iter().map(Door::bind).collect::<Result<_, _>>().map(Bound)
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

/// Accepts on all sockets, one thread each, and keeps them where they are.
pub(crate) fn serve(bound: Bound, shared: &Arc<Shared>) -> io::Result<Listeners> {
    let doors: Vec<Arc<Door>> = bound.0.into_iter().map(Arc::new).collect();
    let mut threads = Vec::new();
    for door in &doors {
        let (door, shared) = (Arc::clone(door), Arc::clone(shared));
        threads.push(
            std::thread::Builder::new().name("kvlane-accept".into()).spawn(move || accept(&door, &shared))?,
        );
    }
    let keeper = Some(Keeper::start(doors.clone(), Arc::clone(shared))?);
    Ok(Listeners { doors, threads, keeper })
}

fn accept(door: &Door, shared: &Arc<Shared>) {
    loop {
        let listener = Arc::clone(&door.listener.lock());
        let accepted = match &*listener {
            Listener::Unix(listener, ..) => listener.accept().map(|(stream, _)| Stream::Unix(stream)),
            Listener::Tcp(listener) => listener.accept().and_then(|(stream, _)| {
                stream.set_nodelay(true)?;
                Ok(Stream::Tcp(stream))
            }),
        };
        if shared.is_stopping() {
            return;
        }
        match accepted {
            Ok(stream) => session::start(stream, Arc::clone(shared)),
            // It was woken to go on with the new one.
            Err(_) if !Arc::ptr_eq(&listener, &door.listener.lock()) => {}
            Err(error) => {
                // Out of descriptors, for example: sessions that end will free some.
                tracing::warn!(%error, "cannot accept a connection");
                std::thread::park_timeout(std::time::Duration::from_millis(100));
            }
        }
    }
}

impl Listener {
    /// Wakes the accepting thread, whose accept fails from now on. Connecting would not do: the file may have been removed.
    fn wake(&self) {
        let _ = match self {
            Self::Unix(listener, _) => shutdown(listener, Shutdown::Both),
            Self::Tcp(listener) => shutdown(listener, Shutdown::Both),
        };
    }
}

impl Listeners {
    /// Stops accepting and removes the socket files.
    pub(crate) fn stop(&mut self) {
        if let Some(keeper) = self.keeper.take() {
            keeper.stop();
        }
        for door in &self.doors {
            door.listener.lock().wake();
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        self.doors.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unix(folder: &tempfile::TempDir, name: &str) -> Address {
        Address::Unix(folder.path().join(name))
    }

    #[test]
    fn a_stale_socket_file_is_replaced_and_a_live_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let address = unix(&folder, "deep/er/kvlane.sock");
        let Address::Unix(path) = &address else { unreachable!() };
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        drop(UnixListener::bind(path).unwrap());
        assert!(path.exists());
        let live = bind(std::slice::from_ref(&address)).unwrap();
        let error = bind(std::slice::from_ref(&address)).unwrap_err();
        assert!(matches!(error, ListenError::Occupied(_)), "{error}");
        drop(live);
        assert!(!path.exists(), "a daemon that does not start leaves no file");
    }

    #[test]
    fn a_file_that_is_no_socket_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("data"), "precious").unwrap();
        let error = bind(&[unix(&folder, "data")]).unwrap_err();
        assert!(matches!(error, ListenError::NotASocket(_)), "{error}");
        assert_eq!(fs::read_to_string(folder.path().join("data")).unwrap(), "precious");
    }

    #[test]
    fn an_occupied_port_is_named() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = taken.local_addr().unwrap();
        let error = bind(&[Address::Tcp(at)]).unwrap_err().to_string();
        assert!(error.contains(&at.to_string()) && error.contains("--listen"), "{error}");
    }
}
