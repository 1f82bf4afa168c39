//! What a peer can do wrong.

use thiserror::Error;

/// The peer broke the protocol, or a limit, or speaks another one. The connection has to be closed.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum ProtocolError {
    /// The first byte is not that of a ZMTP 2.0 or later greeting.
    #[error("the peer's first byte is {first:#04x}, not 0xff: it speaks no ZMTP, or version 1.0")]
    NotZmtp {
        /// The byte that came.
        first: u8,
    },
    /// The tenth byte says that the peer speaks ZMTP 1.0.
    #[error("the tenth byte of the peer's greeting is {byte:#04x}, not 0x7f: it speaks ZMTP 1.0, or none")]
    Signature {
        /// The byte that came.
        byte: u8,
    },
    /// The peer speaks a version before 3.0.
    #[error("the peer's greeting has revision {revision}, that of a ZMTP before 3.0")]
    OldVersion {
        /// The byte after the signature: 0 for ZMTP 1.0, 1 for 2.0, 2 for a draft.
        revision: u8,
    },
    /// The peer wants to be sure of who we are, or to encrypt.
    #[error("the peer asks for the security mechanism {name:?}, and only \"NULL\" is supported")]
    Mechanism {
        /// The mechanism, at most 20 characters; what is no printable ASCII is escaped.
        name: String,
    },
    /// A frame's flags have bits that no version has, or a command that says more is to come.
    #[error("a frame has the flags {flags:#04x}, which ZMTP 3 does not have")]
    Flags {
        /// The flags that came.
        flags: u8,
    },
    /// One frame is too long.
    #[error("a frame announces {announced} bytes, more than the {most} that are allowed")]
    FrameTooLong {
        /// Bytes that the frame says it has.
        announced: u64,
        /// Bytes that a frame may have, by [`Limits`](crate::Limits).
        most: usize,
    },
    /// The frames of one message are too long together.
    #[error("a message would have {announced} bytes, more than the {most} that are allowed")]
    MessageTooLong {
        /// Bytes of the frames that came, with what the next announces.
        announced: u64,
        /// Bytes that a message may have, by [`Limits`](crate::Limits).
        most: usize,
    },
    /// A message has too many frames.
    #[error("a message has {frames} frames or more, and {most} are allowed")]
    TooManyFrames {
        /// Frames with the one that has begun.
        frames: usize,
        /// Frames that a message may have, by [`Limits`](crate::Limits).
        most: usize,
    },
    /// One command is too long.
    #[error("a command announces {announced} bytes, more than the {most} that are allowed")]
    CommandTooLong {
        /// Bytes that the command says it has.
        announced: u64,
        /// Bytes that a command may have.
        most: usize,
    },
    /// A command's body does not parse.
    #[error("a command {command} is malformed: {reason}")]
    MalformedCommand {
        /// The command's name, or "without a name".
        command: &'static str,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// Something else than READY came first, or READY came twice, or a message was to be sent before READY.
    #[error("{what} came before or after its time in the handshake")]
    OutOfTurn {
        /// The command or message, by its kind.
        what: &'static str,
    },
    /// The peer's socket is of a type that we do not talk to.
    #[error("the peer's socket is a {peer:?}, to which a {ours} does not talk")]
    SocketType {
        /// The type that the peer named, at most 16 characters; what is no printable ASCII is escaped.
        peer: String,
        /// The type of the socket at our end.
        ours: &'static str,
    },
    /// The identity is longer than the RFC allows, or begins with the zero that marks made-up ones.
    #[error("an identity of {bytes} bytes is too long, or it begins with a zero byte")]
    Identity {
        /// Bytes of the identity.
        bytes: usize,
    },
    /// The peer sent ERROR.
    #[error("the peer ended the connection: {reason:?}")]
    Peer {
        /// The peer's reason, at most 255 characters; what is no printable ASCII is escaped.
        reason: String,
    },
}

/// Bytes of a stranger as text for a message: printable ASCII as it is, all else escaped.
pub(crate) fn printable(bytes: &[u8]) -> String {
    bytes.escape_ascii().to_string()
}
