//! Notifies a service manager by the protocol of sd_notify(3): one datagram to the socket that NOTIFY_SOCKET names. systemd
//! (`Type=notify`) and the tests wait for it.

use std::{
    env, io,
    os::{
        linux::net::SocketAddrExt,
        unix::{
            ffi::OsStrExt,
            net::{SocketAddr, UnixDatagram},
        },
    },
};

/// The state of a process that serves.
pub(crate) const READY: &str = "READY=1";
/// The state of a process that ends.
pub(crate) const STOPPING: &str = "STOPPING=1";

/// Notifies the service manager, if there is one. A failed notification of the start is logged as a warning, because the
/// manager would wait for it, and then end the process.
pub(crate) fn notify(state: &str) {
    match try_notify(state) {
        Ok(()) => {}
        Err(error) if state == READY => {
            // Log: systemd does not learn that the program is ready, so it may end it when its start times out.
            // Do: look at `Type=notify` and `NotifyAccess=` of the unit.
            tracing::warn!(%error, "cannot notify the service manager (NOTIFY_SOCKET) that this process is ready");
        }
        Err(error) => tracing::debug!(%error, state, "cannot notify the service manager"),
    }
}

fn try_notify(state: &str) -> io::Result<()> {
    let Some(path) = env::var_os("NOTIFY_SOCKET").filter(|path| !path.is_empty()) else { return Ok(()) };
    let address = match path.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(&path)?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address).map(drop)
}
