//! Errors of bytes that should be MessagePack of a known shape.

use thiserror::Error;

/// Why a message was refused, and where.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[error("at byte {offset}: {wrong}")]
pub struct DecodeError {
    /// Start of the faulty value, in bytes from the message's start.
    pub offset: usize,
    /// The fault of that value.
    pub wrong: Wrong,
}

/// A fault of a value.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum Wrong {
    /// The message ends within a value.
    #[error("the message ends within a value")]
    Truncated,
    /// Bytes follow the message's one value.
    #[error("{bytes} bytes follow the message")]
    Surplus {
        /// Bytes after the value.
        bytes: usize,
    },
    /// A value is of another type.
    #[error("{expected} was expected, not a value with the MessagePack marker {marker:#04x}")]
    Type {
        /// The type that the field has, in words.
        expected: &'static str,
        /// The value's first byte.
        marker: u8,
    },
    /// A number is negative or too large.
    #[error("the number is not within what {expected} can hold")]
    Range {
        /// The type that the number would have to fit.
        expected: &'static str,
    },
    /// A text is not UTF-8.
    #[error("the text is not UTF-8")]
    Utf8,
    /// A hash is neither 16 nor 32 bytes long.
    #[error("a block's hash has {bytes} bytes, not 16 or 32")]
    HashLength {
        /// Length of the hash.
        bytes: usize,
    },
    /// A limit is exceeded.
    #[error("{count} {what}, and {most} are allowed")]
    TooMany {
        /// The limited things, such as "events".
        what: &'static str,
        /// How many there are, or how many a length announces.
        count: usize,
        /// How many are allowed.
        most: usize,
    },
    /// A field that has no default is not there.
    #[error("the field {field} is missing")]
    Missing {
        /// Its name in vLLM's events.
        field: &'static str,
    },
}
