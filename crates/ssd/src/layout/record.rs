//! A record's header: the key of its block, its own location, and the length and checksum of each shard.

use kvlane_block::{BlockHash, BlockKey, CutDigest, Namespace, Space};

use super::error::LayoutError;
use super::fields::{Reader, Writer, claimed_length};
use super::units::{PAGE_BYTES, SegmentNumber};

const KIND: &[u8; 8] = b"kvlnBLCK";

/// Bytes between the block's hash and the list of shards. Every build has written zeros there; they were reserved for a
/// use that never came.
const UNUSED: usize = 20;
/// Bytes before the list of shards.
const FIXED: u64 = 120;
/// Bytes of each shard in that list: length and crc32c.
const SHARD: u64 = 8;

/// Length and checksum of one shard, by which a read verifies it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardSum {
    /// Length of the shard in bytes; above 0 in a header that counts.
    pub bytes: u32,
    /// crc32c of the shard.
    pub crc: u32,
}

/// The header of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordHeader {
    /// The superblock's; a record of another file does not count.
    pub device_id: [u8; 16],
    /// The segment head's. Generation and page order the file's records as they were written.
    pub generation: u64,
    /// The segment that the record is in.
    pub segment: SegmentNumber,
    /// First page of the record in its segment.
    pub page: u32,
    /// Key of the block that the record holds.
    pub key: BlockKey,
    /// The shards, in the order in which they follow the header.
    pub shards: Vec<ShardSum>,
}

impl RecordHeader {
    /// The header's bytes, padded with zeros to whole pages.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new(KIND);
        out.raw(&self.device_id).u64(self.generation).u32(self.segment.0).u32(self.page);
        out.raw(&self.key.space.namespace.0).raw(&self.key.space.cut.0).raw(&self.key.hash.0);
        out.raw(&[0; UNUSED]);
        out.u32(self.shards.len() as u32);
        for ShardSum { bytes, crc } in &self.shards {
            out.u32(*bytes).u32(*crc);
        }
        let mut bytes = out.finish();
        bytes.resize(bytes.len().next_multiple_of(PAGE_BYTES as usize), 0);
        bytes
    }

    /// Decodes a header. Whether it stands where it says is for the caller to check.
    pub fn decode(bytes: &[u8]) -> Result<RecordHeader, LayoutError> {
        let mut fields = Reader::new(KIND, bytes)?;
        let (device_id, generation) = (fields.array::<16>()?, fields.u64()?);
        let (segment, page) = (SegmentNumber(fields.u32()?), fields.u32()?);
        let namespace = Namespace(fields.array()?);
        let space = Space { namespace, cut: CutDigest(fields.array()?) };
        let key = BlockKey { space, hash: BlockHash(fields.array()?) };
        let unused = fields.array::<UNUSED>()?;
        let shards = fields.u32()?;
        let shards = fields.items::<8>(shards)?.iter();
        let shards: Vec<ShardSum> = shards
            .map(|[a, b, c, d, e, f, g, h]| ShardSum {
                bytes: u32::from_le_bytes([*a, *b, *c, *d]),
                crc: u32::from_le_bytes([*e, *f, *g, *h]),
            })
            .collect();
        fields.end()?;
        if unused != [0; UNUSED] || shards.is_empty() || shards.iter().any(|shard| shard.bytes == 0) {
            return Err(LayoutError::Fields);
        }
        Ok(RecordHeader { device_id, generation, segment, page, key, shards })
    }

    /// Pages that the header at the start of `page` claims to fill; None if there is no header.
    pub(crate) fn claimed_pages(page: &[u8]) -> Option<u64> {
        claimed_length(KIND, page).ok().map(|length| (length as u64).div_ceil(PAGE_BYTES))
    }

    /// Pages of the whole record; None if they do not fit into a u32.
    pub fn pages(&self) -> Option<u32> {
        record_pages(self.shards.iter().map(|shard| u64::from(shard.bytes)))
    }
}

/// Pages of the header of a record with this many shards.
pub(crate) fn header_pages(shards: usize) -> u64 {
    (FIXED + shards as u64 * SHARD).div_ceil(PAGE_BYTES)
}

/// Pages of a shard of this length in bytes.
pub(crate) fn shard_pages(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE_BYTES)
}

/// Pages of a record with shards of these lengths in bytes; None if they do not fit into a u32.
pub(crate) fn record_pages(shards: impl Iterator<Item = u64>) -> Option<u32> {
    let (mut count, mut pages) = (0, 0u64);
    for bytes in shards {
        count += 1;
        pages = pages.checked_add(shard_pages(bytes))?;
    }
    u32::try_from(pages.checked_add(header_pages(count))?).ok()
}
