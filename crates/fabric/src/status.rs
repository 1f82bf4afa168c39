//! [`PathStatus`]: the state of a path to a peer, for users.

use std::net::SocketAddr;

/// A path to a peer, as it is now.
#[derive(Debug, Clone, PartialEq)]
pub struct PathStatus {
    /// "control" for immediates and messages, else the name of the carrier of bytes: "tcp", "tcp-slots", "cma" or another.
    pub carrier: &'static str,
    /// The peer's address. None before the control connection was tried, and for a carrier that cannot reach the peer.
    pub address: Option<SocketAddr>,
    /// Whether it carries posts.
    pub is_up: bool,
    /// For a control connection between processes of one host: why its frames go through the socket and not through shared
    /// memory. None: they go through shared memory, or the peer is on another host.
    pub no_rings: Option<String>,
    /// Bytes a second of its last posts, over the time in which it had any under way. None before the first completes.
    pub bytes_per_second: Option<f64>,
    /// Why it last broke or could not be made. None: that never happened.
    pub trouble: Option<String>,
}
