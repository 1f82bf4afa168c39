//! Finds the bytes of a body behind its head: by length, by chunks, or up to the end of the connection.

use super::{chunked::Chunked, error::AnswerError};

/// How the end of a body is found, and the position in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Framing(Kind);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    /// Bytes that are still to come.
    Length(u64),
    Chunked(Chunked),
    /// Everything until the connection ends.
    UntilClose,
}

impl Framing {
    /// A body of this many bytes.
    pub fn length(bytes: u64) -> Self {
        Self(Kind::Length(bytes))
    }

    /// A body in chunks.
    pub fn chunked() -> Self {
        Self(Kind::Chunked(Chunked::new()))
    }

    /// A body that ends with its connection.
    pub fn until_close() -> Self {
        Self(Kind::UntilClose)
    }

    /// Takes further bytes of the connection. Each piece of the body goes to `data`. Returns how many bytes belong to this body:
    /// fewer than all only if it ends among them.
    ///
    /// # Errors
    /// The bytes are not well-formed chunks.
    pub fn take<'b>(
        &mut self,
        bytes: &'b [u8],
        mut data: impl FnMut(&'b [u8]),
    ) -> Result<usize, AnswerError> {
        match &mut self.0 {
            Kind::Length(left) => {
                let length = usize::try_from(*left).map_or(bytes.len(), |left| left.min(bytes.len()));
                *left -= length as u64;
                if length > 0 {
                    data(&bytes[..length]);
                }
                Ok(length)
            }
            Kind::Chunked(chunked) => chunked.take(bytes, data),
            Kind::UntilClose => {
                if !bytes.is_empty() {
                    data(bytes);
                }
                Ok(bytes.len())
            }
        }
    }

    /// Whether all of the body has arrived. Never true of a body that ends with its connection.
    pub fn is_over(&self) -> bool {
        match &self.0 {
            Kind::Length(left) => *left == 0,
            Kind::Chunked(chunked) => chunked.is_over(),
            Kind::UntilClose => false,
        }
    }

    /// Whether the end of the connection ends the body. Otherwise the body is incomplete then.
    pub fn ends_with_connection(&self) -> bool {
        self.0 == Kind::UntilClose
    }
}
