//! Transfers over TCP: bytes go from registered memory into the socket, and at the peer from the socket to where they
//! belong, with no copy in between. With TLS they are encrypted on the way, and copied.

mod credentials;
mod dialling;
mod frame;
mod greeting;
mod link;
mod outgoing;
mod regions;
mod stream;
mod sum;
mod tls;

pub(crate) use credentials::Credentials;
pub use credentials::{Tls, TlsError};
pub(crate) use dialling::{Dialled, Dialling, nonce};
pub(crate) use frame::{BYTES_MAX, ENTRIES_MAX, Head, MESSAGE_BYTES_MAX, WORDS_BYTES_MAX};
pub(crate) use greeting::{
    Answer, HELLO_BYTES, Hello, PROOF_MESSAGE_BYTES, Purpose, SessionKey, Welcome, encode_challenge,
    encode_refusal,
};
pub(crate) use link::{Came, Ended, Link};
pub(crate) use outgoing::Out;
pub(crate) use regions::{decode_regions, encode_regions, window_news};
pub(crate) use stream::Stream;
#[cfg(any(feature = "fuzzing", test))]
pub(crate) use {
    frame::HEAD_BYTES,
    greeting::{Nonces, VERDICT_BYTES, Verdict, WELCOME_BYTES, decode_challenge},
    sum::Sum,
};
