//! [`PeerOptions`]: limits and timeout of a client towards its peer.

use std::time::Duration;

use crate::Limits;

/// Limits and timeout of a client towards its peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerOptions {
    /// Limits on the bytes of the peer.
    pub limits: Limits,
    /// Timeout of connecting and the handshake together.
    pub handshake: Duration,
}

impl Default for PeerOptions {
    fn default() -> Self {
        Self { limits: Limits::default(), handshake: Duration::from_secs(5) }
    }
}
