//! Encodes and decodes a structure's fields, which follow each other without gaps behind the common start.

use super::error::LayoutError;

/// Bytes of the common start: kind (8), crc32c (4), length (4).
const START: usize = 16;
/// Offset from which on the checksum covers the structure: its length, then its fields.
const CHECKED: usize = 12;

/// Builds one structure, field by field.
pub(super) struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    pub(super) fn new(kind: &[u8; 8]) -> Writer {
        let mut bytes = kind.to_vec();
        bytes.resize(START, 0);
        Writer { bytes }
    }

    pub(super) fn u32(&mut self, value: u32) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    pub(super) fn u64(&mut self, value: u64) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    pub(super) fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// The whole structure, with its length and checksum filled in.
    pub(super) fn finish(mut self) -> Vec<u8> {
        let length = self.bytes.len() as u32;
        self.bytes[CHECKED..START].copy_from_slice(&length.to_le_bytes());
        let crc = kvlane_block::crc32c(&self.bytes[CHECKED..]);
        self.bytes[8..CHECKED].copy_from_slice(&crc.to_le_bytes());
        self.bytes
    }
}

/// The fields of one structure that are not taken yet.
pub(super) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Checks kind, length and checksum of the structure at the start of `bytes`, and returns its fields.
    pub(super) fn new(kind: &[u8; 8], bytes: &'a [u8]) -> Result<Reader<'a>, LayoutError> {
        let length = claimed_length(kind, bytes)?;
        let all = bytes.get(..length).ok_or(LayoutError::Length)?;
        let crc = u32::from_le_bytes([all[8], all[9], all[10], all[11]]);
        if kvlane_block::crc32c(&all[CHECKED..]) != crc {
            return Err(LayoutError::Checksum);
        }
        Ok(Reader { rest: &all[START..] })
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], LayoutError> {
        let (first, rest) = self.rest.split_first_chunk::<N>().ok_or(LayoutError::Length)?;
        self.rest = rest;
        Ok(*first)
    }

    pub(super) fn u32(&mut self) -> Result<u32, LayoutError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, LayoutError> {
        self.array().map(u64::from_le_bytes)
    }

    /// A list of `count` items of `N` bytes.
    pub(super) fn items<const N: usize>(&mut self, count: u32) -> Result<&'a [[u8; N]], LayoutError> {
        let bytes = (count as usize).checked_mul(N).ok_or(LayoutError::Length)?;
        let (items, rest) = self.rest.split_at_checked(bytes).ok_or(LayoutError::Length)?;
        self.rest = rest;
        Ok(items.as_chunks::<N>().0)
    }

    /// Fails if bytes are left over.
    pub(super) fn end(self) -> Result<(), LayoutError> {
        if self.rest.is_empty() { Ok(()) } else { Err(LayoutError::Length) }
    }
}

/// The length that a structure of this kind claims, in bytes. Does not check its checksum.
pub(super) fn claimed_length(kind: &[u8; 8], bytes: &[u8]) -> Result<usize, LayoutError> {
    let start = bytes.first_chunk::<START>().filter(|start| start.starts_with(kind));
    let start = start.ok_or(LayoutError::OtherKind)?;
    let length = u32::from_le_bytes([start[12], start[13], start[14], start[15]]) as usize;
    if length < START { Err(LayoutError::Length) } else { Ok(length) }
}
