//! [`ProtocolError`]: how a peer can break the protocol.

use thiserror::Error;

/// The peer broke the protocol or a limit, or speaks another protocol. The caller has to close the connection.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum ProtocolError {
    /// The first byte is not that of a ZMTP 2.0 or later greeting.
    #[error("the peer's first byte is {first:#04x}, not 0xff: it speaks no ZMTP, or version 1.0")]
    NotZmtp {
        /// The byte received.
        first: u8,
    },
    /// The tenth byte says that the peer speaks ZMTP 1.0.
    #[error("the tenth byte of the peer's greeting is {byte:#04x}, not 0x7f: it speaks ZMTP 1.0, or none")]
    Signature {
        /// The byte received.
        byte: u8,
    },
    /// The peer speaks a version before 3.0.
    #[error("the peer's greeting has revision {revision}, that of a ZMTP before 3.0")]
    OldVersion {
        /// The byte after the signature: 0 for ZMTP 1.0, 1 for 2.0, 2 for a draft.
        revision: u8,
    },
    /// The peer demands authentication or encryption.
    #[error("the peer asks for the security mechanism {name:?}, and only \"NULL\" is supported")]
    Mechanism {
        /// The mechanism's name, at most 20 bytes; bytes that are not printable ASCII are escaped.
        name: String,
    },
    /// A frame's flags have bits that no version defines, or mark a command as followed by more frames.
    #[error("a frame has the flags {flags:#04x}, which ZMTP 3 does not have")]
    Flags {
        /// The flags received.
        flags: u8,
    },
    /// One frame is too long.
    #[error("a frame announces {announced} bytes, more than the {most} that are allowed")]
    FrameTooLong {
        /// Length that the frame announces.
        announced: u64,
        /// The limit, [`Limits::frame_bytes`](crate::Limits::frame_bytes).
        most: usize,
    },
    /// The frames of one message are too long together.
    #[error("a message would have {announced} bytes, more than the {most} that are allowed")]
    MessageTooLong {
        /// Bytes of the frames received, plus the length that the next one announces.
        announced: u64,
        /// The limit, [`Limits::message_bytes`](crate::Limits::message_bytes).
        most: usize,
    },
    /// A message has too many frames.
    #[error("a message has {frames} frames or more, and {most} are allowed")]
    TooManyFrames {
        /// Frames received, plus the one that has begun, plus one if it announces more.
        frames: usize,
        /// The limit, [`Limits::message_frames`](crate::Limits::message_frames).
        most: usize,
    },
    /// One command is too long.
    #[error("a command announces {announced} bytes, more than the {most} that are allowed")]
    CommandTooLong {
        /// Length that the command announces.
        announced: u64,
        /// The limit, [`Limits::command_bytes`](crate::Limits::command_bytes).
        most: usize,
    },
    /// A command's body does not parse.
    #[error("a command {command} is malformed: {reason}")]
    MalformedCommand {
        /// The command's name, or "without a name".
        command: &'static str,
        /// The part that does not parse.
        reason: &'static str,
    },
    /// The peer sent something else before READY, or READY twice, or we tried to send a message before READY.
    #[error("{what} came before or after its time in the handshake")]
    OutOfTurn {
        /// Kind of the command or message.
        what: &'static str,
    },
    /// The peer's socket is of a type that we do not talk to.
    #[error("the peer's socket is a {peer:?}, to which a {ours} does not talk")]
    SocketType {
        /// The type that the peer named, at most 16 bytes; bytes that are not printable ASCII are escaped.
        peer: String,
        /// The type of our socket.
        ours: &'static str,
    },
    /// The identity is longer than the RFC allows, or begins with the zero byte that marks generated ones.
    #[error("an identity of {bytes} bytes is too long, or it begins with a zero byte")]
    Identity {
        /// Length of the identity in bytes.
        bytes: usize,
    },
    /// The peer sent ERROR.
    #[error("the peer ended the connection: {reason:?}")]
    Peer {
        /// The peer's reason, at most 255 bytes; bytes that are not printable ASCII are escaped.
        reason: String,
    },
}

/// Formats bytes of a peer for a message: printable ASCII as it is, all other bytes escaped.
pub(crate) fn printable(bytes: &[u8]) -> String {
    bytes.escape_ascii().to_string()
}
