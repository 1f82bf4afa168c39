//! Finds where an engine's answer ends in the bytes of an HTTP/1.1 connection (RFC 9112). Pure.
//!
//! The proxy passes an answer on as it comes, and has to know only which bytes belong to it. Bytes that two parsers could read in
//! different ways are refused: one of them might take the next answer for a part of this one.
//!
//! ```text
//!   HTTP/1.1 200 OK\r\n  transfer-encoding: chunked\r\n  \r\n   1a\r\n ...data... \r\n   0\r\n\r\n
//!   `------------------- Head -------------------------------'  `-- Framing: data out of chunks --'
//! ```
//!
//! Bytes go in, and pieces of them come out. Nothing of a body is kept but the position in it.

mod chunked;
mod error;
mod framing;
mod head;

pub use self::{
    error::AnswerError,
    framing::Framing,
    head::{HEAD_BYTES_MAX, Head, head, head_ends},
};
