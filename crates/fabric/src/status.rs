//! The ways to a peer, as they are now.

use std::net::SocketAddr;

/// A way to a peer.
#[derive(Debug, Clone, PartialEq)]
pub struct PathStatus {
    /// What carries it: "control" for immediates and messages; "tcp", "tcp-slots" or "cma" for bytes.
    pub carrier: &'static str,
    /// Of the peer; None before the control connection was tried.
    pub address: Option<SocketAddr>,
    /// Whether it carries something.
    pub is_up: bool,
    /// Of the control connection between processes of one host: why what is said goes through the socket and not through
    /// shared memory. None if it does not.
    pub no_rings: Option<String>,
    /// Over the last parts that it carried, in the time in which it had any; None before the first.
    pub bytes_per_second: Option<f64>,
    /// Why it broke or could not be made the last time; None if that never happened.
    pub trouble: Option<String>,
}
