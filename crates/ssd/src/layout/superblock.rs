//! The superblock: the first two pages of a file, with its identity and geometry. Written once, when the file is made.

use super::error::LayoutError;
use super::fields::{Reader, Writer};
use super::units::{DeviceId, PAGE_BYTES, SegmentNumber};

const KIND: &[u8; 8] = b"kvlnSSD\0";

/// The only format that this build writes and reads.
pub(crate) const FORMAT_VERSION: u32 = 1;

/// Identity and geometry of a file. Page 1 holds a copy of page 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Superblock {
    /// Format version. If this build does not know it, the other fields are not read.
    pub version: u32,
    /// Drawn at random when the file is made; every structure in the file repeats it.
    pub device_id: [u8; 16],
    /// Size of a segment in bytes, a multiple of 4096.
    pub segment_bytes: u64,
    /// The number of segments in the file.
    pub segments: u32,
}

impl Superblock {
    /// Offset of the first segment in the file, in bytes.
    pub const SEGMENTS_START: u64 = 64 << 10;

    /// The superblock's bytes, padded with zeros to one page.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new(KIND);
        out.u32(self.version).raw(&self.device_id).u64(self.segment_bytes).u32(self.segments);
        let mut page = out.finish();
        page.resize(PAGE_BYTES as usize, 0);
        page
    }

    /// Decodes a page. A version that this build does not know is no error here, but then the other fields mean
    /// nothing.
    pub fn decode(page: &[u8]) -> Result<Superblock, LayoutError> {
        let mut fields = Reader::new(KIND, page)?;
        let version = fields.u32()?;
        if version != FORMAT_VERSION {
            return Ok(Superblock { version, device_id: [0; 16], segment_bytes: 0, segments: 0 });
        }
        let found = Superblock {
            version,
            device_id: fields.array::<16>()?,
            segment_bytes: fields.u64()?,
            segments: fields.u32()?,
        };
        fields.end()?;
        let sound = found.segment_bytes >= 4 * PAGE_BYTES
            && found.segment_bytes.is_multiple_of(PAGE_BYTES)
            && found.segment_bytes <= 1 << 40
            && found.file_bytes().is_some();
        if sound { Ok(found) } else { Err(LayoutError::Fields) }
    }

    /// Size of the whole file in bytes; None if it overflows an i64.
    pub fn file_bytes(&self) -> Option<u64> {
        self.segment_bytes
            .checked_mul(u64::from(self.segments))?
            .checked_add(Self::SEGMENTS_START)
            .filter(|bytes| *bytes <= i64::MAX as u64)
    }

    /// Pages of a segment, head and foot included.
    pub(crate) fn segment_pages(&self) -> u32 {
        (self.segment_bytes / PAGE_BYTES) as u32
    }

    /// Offset of a segment's page in the file, in bytes.
    pub(crate) fn offset(&self, segment: SegmentNumber, page: u32) -> u64 {
        Self::SEGMENTS_START + u64::from(segment.0) * self.segment_bytes + u64::from(page) * PAGE_BYTES
    }

    /// Whether a structure with this device id belongs to this file.
    pub(crate) fn is_of(&self, device_id: &DeviceId) -> bool {
        self.device_id == *device_id
    }
}
