//! The part of ZeroMQ's wire protocol that a router of LLM requests needs: ZMTP 3.0 and 3.1 over TCP, without
//! encryption.
//!
//! Sources: <https://rfc.zeromq.org/spec/23/> (3.0) and <https://rfc.zeromq.org/spec/37/> (3.1).
//!
//! [`Session`] is the state of one connection, without I/O: bytes in, events and bytes out. A peer may send it any
//! bytes. A session compares each announced length with [`Limits`] before it takes memory. Its memory grows with the
//! bytes that were received, never with those that were announced.
//!
//! ```text
//!  both sides:  greeting (64 bytes, NULL mechanism) --> READY (socket type, identity) --> messages and commands
//!  a frame:     flags (1 byte) | length (1 or 8 bytes) | body         a message is one or more frames
//! ```
//!
//! [`Listener`], [`Subscriber`] and [`Dealer`] run sessions over tokio's TCP sockets. None of them reconnects when its
//! connection ends; the caller does.
#![forbid(unsafe_code)]

mod command;
mod error;
mod frame;
mod greeting;
mod io;
mod limits;
mod session;
mod socket_type;

pub use error::ProtocolError;
pub use greeting::{GREETING_BYTES, Greeting};
pub use io::{ConnectionError, Counts, Dealer, Listener, ListenerOptions, PeerOptions, Received, Subscriber};
pub use limits::Limits;
pub use session::{Event, Session};
pub use socket_type::SocketType;
