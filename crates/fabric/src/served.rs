//! The processes that have connected to this one, and are served over their control connections.

use crate::identity::Identity;
use crate::numbered::Numbered;

/// By the number of their control connection.
pub(crate) type SessionsServed = Numbered<u64, Served>;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Served {
    pub(crate) from: Identity,
    /// The number that the peer drew for this session ([`crate::sessions`]); all of its connections name it.
    pub(crate) session: u128,
}
