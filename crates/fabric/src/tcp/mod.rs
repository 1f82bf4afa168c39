//! Transfers over TCP: bytes go from registered memory into the socket, and at the peer from the socket to where they
//! belong, with no copy in between.

mod frame;
mod greeting;
mod link;
mod stream;

pub(crate) use frame::{BYTES_MAX, BadFrame, ENTRIES_MAX, Head, Outcome, WireRun};
pub(crate) use greeting::{
    Answer, Hello, Identity, Key, Offer, Purpose, Reads, Welcome, decode_challenge, encode_challenge,
};
pub(crate) use link::{Came, Ended, Link};
pub(crate) use stream::Rings;
