//! A connection for a carrier's bytes that a peer has made, and that has been greeted.

use crate::identity::Identity;
use crate::lease::Lease;
use crate::tcp::Link;

/// Who made it, and the connection itself.
#[derive(Debug)]
pub struct Greeted {
    pub(crate) link: Box<Link>,
    pub(crate) lease: Lease,
    pub(crate) from: Identity,
    /// Its number at whoever made it.
    pub(crate) connection: u64,
}
