//! What a client sets of its peer.

use std::time::Duration;

use crate::Limits;

/// How a client treats its peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerOptions {
    /// What is accepted of the peer.
    pub limits: Limits,
    /// How long connecting and the handshake may take together.
    pub handshake: Duration,
}

impl Default for PeerOptions {
    fn default() -> Self {
        Self { limits: Limits::default(), handshake: Duration::from_secs(5) }
    }
}
