//! Binds and serves the daemon's sockets, with an accepting thread for each.

use std::{io, sync::Arc, thread::JoinHandle};

use kvlane_proto::Address;

use crate::{
    door::{Door, ListenError},
    keeper::Keeper,
    session,
    shared::Shared,
};

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

/// Binds all addresses. A stale socket file, behind which no daemon answers, is replaced.
pub(crate) fn bind(addresses: &[Address]) -> Result<Bound, ListenError> {
    addresses.iter().map(Door::bind).collect::<Result<_, _>>().map(Bound)
}

/// Accepts on all sockets, with one thread each. A keeper makes socket files again that are removed.
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
        let listener = door.listener();
        let accepted = listener.accept();
        if shared.is_stopping() {
            return;
        }
        match accepted {
            Ok(stream) => session::start(stream, Arc::clone(shared)),
            // The socket was bound again: accept on the new one.
            Err(_) if !Arc::ptr_eq(&listener, &door.listener()) => {}
            Err(error) => {
                // The process may be out of descriptors; sessions that end free some.
                // Log: the kernel refused a connection, mostly for lack of file descriptors; the daemon tries
                // again. Do: raise the limit of open files (ulimit -n, LimitNOFILE= of systemd).
                tracing::warn!(%error, "cannot accept a connection");
                std::thread::park_timeout(std::time::Duration::from_millis(100));
            }
        }
    }
}

impl Listeners {
    /// Stops accepting and removes the socket files.
    pub(crate) fn stop(&mut self) {
        if let Some(keeper) = self.keeper.take() {
            keeper.stop();
        }
        for door in &self.doors {
            door.listener().wake();
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        self.doors.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, net::TcpListener, os::unix::net::UnixListener};

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
