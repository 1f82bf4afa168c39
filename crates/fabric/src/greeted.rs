//! [`Greeted`]: a connection for a carrier's bytes that a peer has made. The control connections' listener has done the
//! greeting, and hands the connection to the carrier.

use crate::identity::Identity;
use crate::lease::Lease;
use crate::tcp::Link;

/// The peer has proved the secret. Frames may have arrived already.
#[derive(Debug)]
pub struct Greeted {
    pub(crate) link: Box<Link>,
    pub(crate) lease: Lease,
    pub(crate) from: Identity,
    /// The number that the peer gave the connection.
    pub(crate) connection: u64,
}
