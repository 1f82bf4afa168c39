//! The chunks of a body: what is data, and where the last one ends.

use super::error::AnswerError;

/// Bytes of extensions and trailers together, which nobody reads.
const AROUND_BYTES_MAX: usize = 16 << 10;
/// Digits of a chunk's size: 2^60 bytes and more are no chunk.
const DIGITS_MAX: u8 = 15;

/// Where a walk over chunks stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Chunked {
    at: At,
    /// Bytes of extensions and trailers so far.
    around: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    /// In the digits of a size.
    Size {
        size: u64,
        digits: u8,
    },
    /// Behind the size: space or an extension, up to CR.
    Extension {
        size: u64,
    },
    /// Behind the CR of a size's line.
    SizeLineFeed {
        size: u64,
    },
    /// In the data.
    Data {
        left: u64,
    },
    /// Behind the data.
    DataReturn,
    /// Behind the CR that follows the data.
    DataLineFeed,
    /// At the beginning of a line behind the last chunk: a trailer, or the end.
    Trailers,
    /// Within a trailer.
    Trailer,
    /// Behind a trailer's CR.
    TrailerLineFeed,
    /// Behind the last CR of all.
    LastLineFeed,
    Over,
}

impl Chunked {
    pub(super) fn new() -> Self {
        Self { at: At::Size { size: 0, digits: 0 }, around: 0 }
    }

    pub(super) fn is_over(&self) -> bool {
        self.at == At::Over
    }

    /// Walks on. Each piece of data goes to `data`; answers how many of the bytes were of the body.
    pub(super) fn take<'b>(
        &mut self,
        bytes: &'b [u8],
        mut data: impl FnMut(&'b [u8]),
    ) -> Result<usize, AnswerError> {
        let mut rest = bytes;
        while let Some((&byte, behind)) = rest.split_first() {
            match self.at {
                At::Data { left } => {
                    let length = usize::try_from(left).map_or(rest.len(), |left| left.min(rest.len()));
                    let (piece, behind) = rest.split_at(length);
                    data(piece);
                    rest = behind;
                    let left = left - length as u64;
                    self.at = if left == 0 { At::DataReturn } else { At::Data { left } };
                }
                At::Over => break,
                at => {
                    self.at = self.step(at, byte)?;
                    rest = behind;
                }
            }
        }
        Ok(bytes.len() - rest.len())
    }

    /// Over one byte that is no data.
    fn step(&mut self, at: At, byte: u8) -> Result<At, AnswerError> {
        match (at, byte) {
            (At::Size { size, digits }, b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') => {
                if digits == DIGITS_MAX {
                    return Err(AnswerError::BadChunkSize);
                }
                let digit = char::from(byte).to_digit(16).unwrap_or(0);
                Ok(At::Size { size: size << 4 | u64::from(digit), digits: digits + 1 })
            }
            (At::Size { digits: 0, .. }, _) => Err(AnswerError::BadChunkSize),
            (At::Size { size, .. } | At::Extension { size }, b'\r') => Ok(At::SizeLineFeed { size }),
            (At::Size { size, .. }, b';' | b' ' | b'\t') => self.around(At::Extension { size }),
            (At::Extension { size }, byte) if byte != b'\n' => self.around(At::Extension { size }),
            (At::SizeLineFeed { size: 0 }, b'\n') => Ok(At::Trailers),
            (At::SizeLineFeed { size }, b'\n') => Ok(At::Data { left: size }),
            (At::Size { .. } | At::Extension { .. } | At::SizeLineFeed { .. }, _) => {
                Err(AnswerError::BadChunkSize)
            }
            (At::DataReturn, b'\r') => Ok(At::DataLineFeed),
            (At::DataLineFeed, b'\n') => Ok(At::Size { size: 0, digits: 0 }),
            (At::Trailers, b'\r') => Ok(At::LastLineFeed),
            (At::Trailer, b'\r') => self.around(At::TrailerLineFeed),
            (At::Trailers | At::Trailer, byte) if byte != b'\n' => self.around(At::Trailer),
            (At::TrailerLineFeed, b'\n') => Ok(At::Trailers),
            (At::LastLineFeed, b'\n') => Ok(At::Over),
            _ => Err(AnswerError::BadChunkEnd),
        }
    }

    fn around(&mut self, next: At) -> Result<At, AnswerError> {
        self.around += 1;
        if self.around > AROUND_BYTES_MAX {
            return Err(AnswerError::TooMuchAround(AROUND_BYTES_MAX));
        }
        Ok(next)
    }
}
