//! Answers of engines, as bytes of an HTTP/1.1 connection (RFC 9112): where a head ends, and where a body does.
//!
//! The proxy passes an answer on as it comes. Of its bytes it needs to know only which belong to it. Whatever two programs could
//! read in two ways is refused, since one of them might take the next answer for a part of this one.
//!
//! ```text
//!   HTTP/1.1 200 OK\r\n  transfer-encoding: chunked\r\n  \r\n   1a\r\n ...data... \r\n   0\r\n\r\n
//!   `------------------- Head -------------------------------'  `-- Framing: data out of chunks --'
//! ```
//!
//! Pure: bytes in, pieces of them out. Nothing is kept of a body but the place where it stands.

mod chunked;
mod error;
mod framing;
mod head;

pub use self::{
    error::AnswerError,
    framing::Framing,
    head::{HEAD_BYTES_MAX, Head, head, head_ends},
};
