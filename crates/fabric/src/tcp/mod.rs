//! Connections over TCP: the greeting that proves the secret, frames, checksums and TLS.
//!
//! ```text
//!  dialling, greeting   both sides prove the secret, then say who they are
//!  frame, regions       the wire format of frames, and of news of regions
//!  link                 one connection: sends frames, receives them and places their bytes
//!    outgoing           what is queued to be written, with checksums (sum)
//!    stream             a socket, shared-memory rings, or TLS (tls, credentials)
//! ```
//! Bytes go from registered memory into the socket, and at the peer from the socket into registered memory, with no copy in
//! between. TLS copies them, to encrypt and decrypt.

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
pub(crate) use link::{Ended, Link, Received};
pub(crate) use outgoing::Out;
pub(crate) use regions::{decode_regions, encode_regions, window_news};
pub(crate) use stream::Stream;
#[cfg(any(feature = "fuzzing", test))]
pub(crate) use {
    frame::HEAD_BYTES,
    greeting::{Nonces, VERDICT_BYTES, Verdict, WELCOME_BYTES, decode_challenge},
    sum::Sum,
};
