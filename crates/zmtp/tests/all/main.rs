//! Tests of ZeroMQ's wire protocol, as one program: each one takes seconds to link.

mod sockets;
mod strangers;
mod transcripts;
