//! Parses a chunked body: finds its data, and the end of its last chunk.

use super::error::AnswerError;

/// Most bytes of extensions and trailers together. Nothing reads them.
const EXTRA_BYTES_MAX: usize = 16 << 10;
/// Most digits of a chunk's size: no chunk has 2^60 bytes or more.
const DIGITS_MAX: u8 = 15;

/// A position in a chunked body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Chunked {
    state: ChunkState,
    /// Bytes of extensions and trailers so far.
    extra: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ChunkState {
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
    /// In the data, of which so many bytes are to come.
    Data {
        left: u64,
    },
    /// Behind the data.
    DataReturn,
    /// Behind the CR that follows the data.
    DataLineFeed,
    /// At the beginning of a line behind the last chunk: a trailer or the end.
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
        Self { state: ChunkState::Size { size: 0, digits: 0 }, extra: 0 }
    }

    pub(super) fn is_over(&self) -> bool {
        self.state == ChunkState::Over
    }

    /// Parses further bytes. Each piece of data goes to `data`. Returns how many of the bytes belong to the body.
    pub(super) fn take<'b>(
        &mut self,
        bytes: &'b [u8],
        mut data: impl FnMut(&'b [u8]),
    ) -> Result<usize, AnswerError> {
        let mut rest = bytes;
        while let Some((&byte, behind)) = rest.split_first() {
            match self.state {
                ChunkState::Data { left } => {
                    let length = usize::try_from(left).map_or(rest.len(), |left| left.min(rest.len()));
                    let (piece, behind) = rest.split_at(length);
                    data(piece);
                    rest = behind;
                    let left = left - length as u64;
                    self.state = if left == 0 { ChunkState::DataReturn } else { ChunkState::Data { left } };
                }
                ChunkState::Over => break,
                state => {
                    self.state = self.step(state, byte)?;
                    rest = behind;
                }
            }
        }
        Ok(bytes.len() - rest.len())
    }

    /// The state behind one byte that is not data.
    fn step(&mut self, state: ChunkState, byte: u8) -> Result<ChunkState, AnswerError> {
        match (state, byte) {
            (ChunkState::Size { size, digits }, b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') => {
                if digits == DIGITS_MAX {
                    return Err(AnswerError::BadChunkSize);
                }
                let digit = char::from(byte).to_digit(16).unwrap_or(0);
                Ok(ChunkState::Size { size: size << 4 | u64::from(digit), digits: digits + 1 })
            }
            (ChunkState::Size { digits: 0, .. }, _) => Err(AnswerError::BadChunkSize),
            (ChunkState::Size { size, .. } | ChunkState::Extension { size }, b'\r') => {
                Ok(ChunkState::SizeLineFeed { size })
            }
            (ChunkState::Size { size, .. }, b';' | b' ' | b'\t') => {
                self.count_extra(ChunkState::Extension { size })
            }
            (ChunkState::Extension { size }, byte) if byte != b'\n' => {
                self.count_extra(ChunkState::Extension { size })
            }
            (ChunkState::SizeLineFeed { size: 0 }, b'\n') => Ok(ChunkState::Trailers),
            (ChunkState::SizeLineFeed { size }, b'\n') => Ok(ChunkState::Data { left: size }),
            (ChunkState::Size { .. } | ChunkState::Extension { .. } | ChunkState::SizeLineFeed { .. }, _) => {
                Err(AnswerError::BadChunkSize)
            }
            (ChunkState::DataReturn, b'\r') => Ok(ChunkState::DataLineFeed),
            (ChunkState::DataLineFeed, b'\n') => Ok(ChunkState::Size { size: 0, digits: 0 }),
            (ChunkState::Trailers, b'\r') => Ok(ChunkState::LastLineFeed),
            (ChunkState::Trailer, b'\r') => self.count_extra(ChunkState::TrailerLineFeed),
            (ChunkState::Trailers | ChunkState::Trailer, byte) if byte != b'\n' => {
                self.count_extra(ChunkState::Trailer)
            }
            (ChunkState::TrailerLineFeed, b'\n') => Ok(ChunkState::Trailers),
            (ChunkState::LastLineFeed, b'\n') => Ok(ChunkState::Over),
            _ => Err(AnswerError::BadChunkEnd),
        }
    }

    fn count_extra(&mut self, next: ChunkState) -> Result<ChunkState, AnswerError> {
        self.extra += 1;
        if self.extra > EXTRA_BYTES_MAX {
            return Err(AnswerError::TooManyExtraBytes(EXTRA_BYTES_MAX));
        }
        Ok(next)
    }
}
