//! Which bytes behind a head are the body.

use super::{chunked::Chunked, error::AnswerError};

/// How a body's end is known, and what is still to come of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Framing(Kind);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    /// Bytes that are to come.
    Length(u64),
    Chunked(Chunked),
    /// Everything until the connection ends.
    UntilClose,
}

impl Framing {
    /// A body of that many bytes.
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

    /// Walks on over bytes that came. Each piece of the body goes to `data`. Answers how many bytes were of this answer: fewer than
    /// all only if it ends among them.
    ///
    /// # Errors
    /// These are no chunks.
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

    /// Whether all of the body has come. One that ends with its connection never knows.
    pub fn is_over(&self) -> bool {
        match &self.0 {
            Kind::Length(left) => *left == 0,
            Kind::Chunked(chunked) => chunked.is_over(),
            Kind::UntilClose => false,
        }
    }

    /// Whether the end of the connection is the body's end, and no failure.
    pub fn ends_with_connection(&self) -> bool {
        self.0 == Kind::UntilClose
    }
}
