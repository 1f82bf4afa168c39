//! The part of ZeroMQ's wire protocol that a router of LLM requests needs: ZMTP 3.0 and 3.1 over TCP, without encryption.
//!
//! Sources: <https://rfc.zeromq.org/spec/23/> (3.0) and <https://rfc.zeromq.org/spec/37/> (3.1).
//!
//! [`Session`] is one connection's state, without I/O: bytes in, events and bytes out. A stranger may send it anything. What
//! a length field announces is compared with [`Limits`] before any memory is taken, and memory grows with the bytes that
//! came, never with those that were announced.
//!
//! [`Listener`], [`Subscriber`] and [`Dealer`] carry sessions over tokio's TCP sockets. None of them connects anew when a
//! connection ends: that is its caller's business.
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
