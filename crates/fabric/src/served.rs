//! Processes that have connected to this one.

use crate::identity::Identity;
use crate::numbered::Numbered;

/// By the number of their control connection.
pub(crate) type SessionsServed = Numbered<u64, Served>;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Served {
    pub(crate) from: Identity,
    /// What the connecting side calls all of its connections to us as this peer.
    pub(crate) session: u128,
}
