//! The first two pages of a file: whose it is and how it is cut. Written once, when the file is made.

use super::error::LayoutError;
use super::fields::{Reader, Writer};
use super::units::{DeviceId, PAGE_BYTES, SegmentNumber};

const KIND: &[u8; 8] = b"kvlnSSD\0";

/// The format that this build writes, and the newest it reads.
pub(crate) const FORMAT_VERSION: u32 = 1;

/// Identity and geometry of a file. It stands in page 0 and, again, in page 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Superblock {
    /// Which format the file has; of another one nothing else is read.
    pub version: u32,
    /// Random; every structure in the file repeats it.
    pub device_id: [u8; 16],
    /// Bytes of a segment, a multiple of 4096.
    pub segment_bytes: u64,
    /// Segments in the file.
    pub segments: u32,
}

impl Superblock {
    /// Where the first segment begins.
    pub const SEGMENTS_START: u64 = 64 << 10;

    /// As it stands in a page.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new(KIND);
        out.u32(self.version).raw(&self.device_id).u64(self.segment_bytes).u32(self.segments);
        let mut page = out.finish();
        page.resize(PAGE_BYTES as usize, 0);
        page
    }

    /// Reads a page. A version that this build does not know is no error here; its other fields then mean nothing.
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

    /// Bytes of the whole file; None where they have no number.
    pub fn file_bytes(&self) -> Option<u64> {
        self.segment_bytes
            .checked_mul(u64::from(self.segments))?
            .checked_add(Self::SEGMENTS_START)
            .filter(|bytes| *bytes <= i64::MAX as u64)
    }

    /// Pages of a segment.
    pub(crate) fn segment_pages(&self) -> u32 {
        (self.segment_bytes / PAGE_BYTES) as u32
    }

    /// Offset of a page of a segment in the file.
    pub(crate) fn offset(&self, segment: SegmentNumber, page: u32) -> u64 {
        Self::SEGMENTS_START + u64::from(segment.0) * self.segment_bytes + u64::from(page) * PAGE_BYTES
    }

    /// What must be the same in every structure of this file.
    pub(crate) fn is_of(&self, device_id: &DeviceId) -> bool {
        self.device_id == *device_id
    }
}
