//! The peer of a connection, and whether its user may use the daemon.

use std::{io, net::TcpStream, os::fd::OwnedFd, os::unix::net::UnixStream, time::Duration};

use kvlane_memory::{PeerCredentials, peer_pidfd};

/// The process at the other end of a connection.
#[derive(Debug)]
pub(crate) enum Peer {
    /// A process of this host, as the kernel names it.
    Local { credentials: PeerCredentials, pidfd: OwnedFd },
    /// A peer over TCP. Only tools may connect so, and only read.
    Remote,
}

/// A connection of either kind.
#[derive(Debug)]
pub(crate) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    /// Identifies the peer.
    pub(crate) fn peer(&self) -> io::Result<Peer> {
        match self {
            Self::Unix(stream) => {
                Ok(Peer::Local { credentials: PeerCredentials::of(stream)?, pidfd: peer_pidfd(stream)? })
            }
            Self::Tcp(_) => Ok(Peer::Remote),
        }
    }

    /// Ends the connection for both sides; a thread that reads from it sees the end.
    pub(crate) fn shutdown(&self) {
        // Fails only if the peer is gone already.
        let _ = match self {
            Self::Unix(stream) => stream.shutdown(std::net::Shutdown::Both),
            Self::Tcp(stream) => stream.shutdown(std::net::Shutdown::Both),
        };
    }

    /// Sets how long a read (None: without bound) and a write may take.
    pub(crate) fn set_timeouts(&self, read: Option<Duration>, write: Duration) -> io::Result<()> {
        match self {
            Self::Unix(stream) => {
                stream.set_read_timeout(read)?;
                stream.set_write_timeout(Some(write))
            }
            Self::Tcp(stream) => {
                stream.set_read_timeout(read)?;
                stream.set_write_timeout(Some(write))
            }
        }
    }

    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Unix(stream) => Self::Unix(stream.try_clone()?),
            Self::Tcp(stream) => Self::Tcp(stream.try_clone()?),
        })
    }
}

/// Why a user may not connect, or `None`: the daemon serves its own user and root.
/// `own_is_unclear`: in the daemon's user namespace, every user without a number looks like its own.
pub(crate) fn refuse_user(peer_uid: u32, own_uid: u32, own_is_unclear: bool) -> Option<String> {
    if peer_uid == own_uid && own_is_unclear {
        return Some(format!(
            "this daemon belongs to user {own_uid}, and in its user namespace every user without a number looks so: run it \
             as another user"
        ));
    }
    (peer_uid != own_uid && peer_uid != 0).then(|| {
        format!(
            "user {peer_uid} may not use this daemon, which belongs to user {own_uid}: run one of your own"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::refuse_user;

    #[test]
    fn only_the_own_user_and_root_may_connect() {
        assert_eq!(refuse_user(1000, 1000, false), None);
        assert_eq!(refuse_user(0, 1000, false), None);
        assert!(refuse_user(1001, 1000, false).unwrap().contains("user 1001"));
        assert!(refuse_user(65534, 65534, true).unwrap().contains("user namespace"));
        assert_eq!(refuse_user(0, 65534, true), None);
    }
}
