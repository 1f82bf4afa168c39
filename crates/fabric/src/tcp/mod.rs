//! Transfers over TCP: bytes go from registered memory into the socket, and at the peer from the socket to where they
//! belong, with no copy in between. With TLS they are encrypted on the way, and copied.

mod credentials;
mod frame;
mod greeting;
mod link;
mod stream;
mod tls;

pub(crate) use credentials::Credentials;
pub use credentials::{Tls, TlsError};
pub(crate) use frame::{BYTES_MAX, BadFrame, ENTRIES_MAX, Fate, Head, Outcome, WireRun};
pub(crate) use greeting::{
    Answer, Hello, Identity, Key, Nonces, Offer, Purpose, Reads, SessionKey, Verdict, Welcome,
    decode_challenge, encode_challenge, encode_refusal,
};
pub(crate) use link::{Came, Ended, Link};
pub(crate) use stream::{Rings, Stream};
#[cfg(any(feature = "fuzzing", test))]
pub(crate) use {
    frame::{HEAD_BYTES, PULLED_RUN_BYTES, RUN_BYTES},
    greeting::{HELLO_BYTES, PROOF_MESSAGE_BYTES, VERDICT_BYTES, WELCOME_BYTES},
};
