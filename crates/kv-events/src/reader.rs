//! A MessagePack reader over a slice, value by value. It allocates nothing for lengths that are only announced.
//!
//! Source of the format: <https://github.com/msgpack/msgpack/blob/master/spec.md>.

use crate::{DecodeError, Wrong};

/// The first bytes of a value: its type, and its number or length.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Head {
    Nil,
    Bool,
    Unsigned(u64),
    Negative(i64),
    Float(f64),
    Text(usize),
    Bytes(usize),
    Array(usize),
    Map(usize),
    /// An extension type, and its length with the type byte.
    Extension(usize),
}

/// A position in the message.
#[derive(Debug, Clone)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, offset: 0 }
    }

    pub(crate) fn offset(&self) -> usize {
        self.offset
    }

    fn wrong<T>(&self, offset: usize, wrong: Wrong) -> Result<T, DecodeError> {
        Err(DecodeError { offset, wrong })
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], DecodeError> {
        let Some((taken, _)) = self.bytes[self.offset..].split_at_checked(count) else {
            return self.wrong(self.offset, Wrong::Truncated);
        };
        self.offset += count;
        Ok(taken)
    }

    fn number(&mut self, bytes: usize) -> Result<u64, DecodeError> {
        Ok(self.take(bytes)?.iter().fold(0, |value, &byte| value << 8 | u64::from(byte)))
    }

    fn length(&mut self, bytes: usize) -> Result<usize, DecodeError> {
        Ok(self.number(bytes)? as usize)
    }

    /// Reads a signed number of `bytes` bytes.
    fn signed(&mut self, bytes: usize) -> Result<Head, DecodeError> {
        let unused = 64 - 8 * bytes as u32;
        let value = ((self.number(bytes)? << unused) as i64) >> unused;
        Ok(u64::try_from(value).map_or(Head::Negative(value), Head::Unsigned))
    }

    fn head(&mut self) -> Result<Head, DecodeError> {
        let start = self.offset;
        let marker = self.take(1)?[0];
        let low = |mask: u8| usize::from(marker & mask);
        Ok(match marker {
            0x00..=0x7f => Head::Unsigned(u64::from(marker)),
            0x80..=0x8f => Head::Map(low(0x0f)),
            0x90..=0x9f => Head::Array(low(0x0f)),
            0xa0..=0xbf => Head::Text(low(0x1f)),
            0xc0 => Head::Nil,
            0xc1 => return self.wrong(start, Wrong::Type { expected: "a value", marker }),
            0xc2 | 0xc3 => Head::Bool,
            0xc4..=0xc6 => Head::Bytes(self.length(1 << (marker - 0xc4))?),
            0xc7..=0xc9 => Head::Extension(self.length(1 << (marker - 0xc7))?.saturating_add(1)),
            0xca => Head::Float(f64::from(f32::from_bits(self.number(4)? as u32))),
            0xcb => Head::Float(f64::from_bits(self.number(8)?)),
            0xcc..=0xcf => Head::Unsigned(self.number(1 << (marker - 0xcc))?),
            0xd0..=0xd3 => self.signed(1 << (marker - 0xd0))?,
            0xd4..=0xd8 => Head::Extension((1 << (marker - 0xd4)) + 1),
            0xd9..=0xdb => Head::Text(self.length(1 << (marker - 0xd9))?),
            0xdc | 0xdd => Head::Array(self.length(2 << (marker - 0xdc))?),
            0xde | 0xdf => Head::Map(self.length(2 << (marker - 0xde))?),
            0xe0..=0xff => Head::Negative(i64::from(marker as i8)),
        })
    }

    /// Reads the next value's head. An error if `pick` does not take it.
    fn expect<T>(
        &mut self,
        expected: &'static str,
        pick: impl FnOnce(Head) -> Option<T>,
    ) -> Result<T, DecodeError> {
        let start = self.offset;
        match pick(self.head()?) {
            Some(value) => Ok(value),
            None => self.wrong(start, Wrong::Type { expected, marker: self.bytes[start] }),
        }
    }

    /// Skips a nil, and returns whether there was one.
    pub(crate) fn nil(&mut self) -> bool {
        let nil = self.bytes.get(self.offset) == Some(&0xc0);
        self.offset += usize::from(nil);
        nil
    }

    pub(crate) fn unsigned(&mut self, expected: &'static str) -> Result<u64, DecodeError> {
        let pick = |head| match head {
            Head::Unsigned(value) => Some(value),
            _ => None,
        };
        self.expect(expected, pick)
    }

    pub(crate) fn unsigned_32(&mut self, expected: &'static str) -> Result<u32, DecodeError> {
        let start = self.offset;
        match u32::try_from(self.unsigned(expected)?) {
            Ok(value) => Ok(value),
            Err(_) => self.wrong(start, Wrong::Range { expected }),
        }
    }

    pub(crate) fn integer(&mut self, expected: &'static str) -> Result<i64, DecodeError> {
        let start = self.offset;
        let pick = |head| match head {
            Head::Unsigned(value) => Some(i64::try_from(value)),
            Head::Negative(value) => Some(Ok(value)),
            _ => None,
        };
        match self.expect(expected, pick)? {
            Ok(value) => Ok(value),
            Err(_) => self.wrong(start, Wrong::Range { expected }),
        }
    }

    /// Reads a float, or an integer in its stead.
    pub(crate) fn float(&mut self, expected: &'static str) -> Result<f64, DecodeError> {
        let pick = |head| match head {
            Head::Float(value) => Some(value),
            Head::Unsigned(value) => Some(value as f64),
            Head::Negative(value) => Some(value as f64),
            _ => None,
        };
        self.expect(expected, pick)
    }

    pub(crate) fn text(&mut self, expected: &'static str) -> Result<&'a str, DecodeError> {
        let start = self.offset;
        let pick = |head| match head {
            Head::Text(length) => Some(length),
            _ => None,
        };
        let length = self.expect(expected, pick)?;
        match std::str::from_utf8(self.take(length)?) {
            Ok(text) => Ok(text),
            Err(_) => self.wrong(start, Wrong::Utf8),
        }
    }

    /// Reads an unsigned number (Ok), or bytes (Err).
    pub(crate) fn number_or_bytes(
        &mut self,
        expected: &'static str,
    ) -> Result<Result<u64, &'a [u8]>, DecodeError> {
        let pick = |head| match head {
            Head::Unsigned(value) => Some(Ok(value)),
            Head::Bytes(length) => Some(Err(length)),
            _ => None,
        };
        match self.expect(expected, pick)? {
            Ok(value) => Ok(Ok(value)),
            Err(length) => self.take(length).map(Err),
        }
    }

    /// Reads the length of an array, whose values follow.
    pub(crate) fn array(&mut self, expected: &'static str) -> Result<usize, DecodeError> {
        let pick = |head| match head {
            Head::Array(length) => Some(length),
            _ => None,
        };
        self.expect(expected, pick)
    }

    /// Reads the length of an array of at most `most` values. An error if the message is too short for so many.
    pub(crate) fn array_of(&mut self, what: &'static str, most: usize) -> Result<usize, DecodeError> {
        let start = self.offset;
        let count = self.array(what)?;
        if count > most {
            return self.wrong(start, Wrong::TooMany { what, count, most });
        }
        // A value has at least one byte. So the caller makes no room for values that cannot be there.
        if count > self.bytes.len() - self.offset {
            return self.wrong(start, Wrong::Truncated);
        }
        Ok(count)
    }

    /// Reads the number of a map's pairs, which follow.
    pub(crate) fn map(&mut self, expected: &'static str) -> Result<usize, DecodeError> {
        let pick = |head| match head {
            Head::Map(length) => Some(length),
            _ => None,
        };
        self.expect(expected, pick)
    }

    pub(crate) fn is_map(&self) -> bool {
        matches!(self.bytes.get(self.offset), Some(0x80..=0x8f | 0xde | 0xdf))
    }

    pub(crate) fn is_array(&self) -> bool {
        matches!(self.bytes.get(self.offset), Some(0x90..=0x9f | 0xdc | 0xdd))
    }

    pub(crate) fn is_text(&self) -> bool {
        matches!(self.bytes.get(self.offset), Some(0xa0..=0xbf | 0xd9..=0xdb))
    }

    /// Skips a value whose arrays and maps are nested at most `depth` deep.
    pub(crate) fn skip(&mut self, depth: usize) -> Result<(), DecodeError> {
        // How many values are left at each level. Not recursive, so that no depth exhausts the thread's stack.
        let mut left: Vec<usize> = vec![1];
        while let Some(values) = left.last_mut() {
            if *values == 0 {
                left.pop();
                continue;
            }
            *values -= 1;
            let start = self.offset;
            let inner = match self.head()? {
                Head::Text(length) | Head::Bytes(length) | Head::Extension(length) => {
                    self.take(length)?;
                    continue;
                }
                Head::Array(length) => length,
                Head::Map(length) => length.saturating_mul(2),
                _ => continue,
            };
            if left.len() > depth {
                let what = "values within each other";
                return self.wrong(start, Wrong::TooMany { what, count: left.len(), most: depth });
            }
            left.push(inner);
        }
        Ok(())
    }

    /// Skips `values` values.
    pub(crate) fn skip_all(&mut self, values: usize, depth: usize) -> Result<(), DecodeError> {
        (0..values).try_for_each(|_| self.skip(depth))
    }

    /// An error unless the message ends here.
    pub(crate) fn end(&self) -> Result<(), DecodeError> {
        match self.bytes.len() - self.offset {
            0 => Ok(()),
            bytes => self.wrong(self.offset, Wrong::Surplus { bytes }),
        }
    }
}
