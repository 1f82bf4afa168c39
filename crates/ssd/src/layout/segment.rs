//! A segment's first page (head), its table of records, and its last page (foot), which says where the table is.

use kvlane_block::{BlockHash, CutDigest, Namespace, Space};

use super::error::LayoutError;
use super::fields::{Reader, Writer};
use super::units::{GENERATIONS, PAGE_BYTES, SegmentNumber};

const HEAD: &[u8; 8] = b"kvlnHEAD";
const FOOT: &[u8; 8] = b"kvlnFOOT";
const TABLE: &[u8; 8] = b"kvlnTABL";

/// Hash, space, page, pages.
const RECORD: usize = 28;
const SPACE: usize = 32;

/// Makes what stood in the segment before void: only structures of this generation count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentHead {
    /// As in the superblock: a head of another file does not count.
    pub device_id: [u8; 16],
    /// Which segment this is.
    pub segment: SegmentNumber,
    /// How many segments were opened in this file before this one, plus 1.
    pub generation: u64,
}

/// Where the segment's table is. Written when the segment is full, and at every checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentFoot {
    /// As in the superblock: a foot of another file does not count.
    pub device_id: [u8; 16],
    /// Which segment this is.
    pub segment: SegmentNumber,
    /// As in the segment's head: of another one the foot is left over from before.
    pub generation: u64,
    /// First page of the table.
    pub table_page: u32,
    /// Bytes of the table.
    pub table_bytes: u32,
    /// Records from this page on may be missing in the table.
    pub scan_from: u32,
}

/// One record of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableRecord {
    /// The engine's hash of the block.
    pub hash: BlockHash,
    /// Index into the table's spaces.
    pub space: u32,
    /// Where in the segment its header begins.
    pub page: u32,
    /// Pages of header and shards.
    pub pages: u32,
}

/// The records of a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// As in the superblock: a table of another file does not count.
    pub device_id: [u8; 16],
    /// As in the segment's head: of another one the table is left over from before.
    pub generation: u64,
    /// Spaces that the records are of.
    pub spaces: Vec<Space>,
    /// In the order of their pages.
    pub records: Vec<TableRecord>,
}

impl SegmentHead {
    /// As it stands in a page.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new(HEAD);
        out.raw(&self.device_id).u32(self.segment.0).u64(self.generation);
        page(out)
    }

    /// Reads a page.
    pub fn decode(page: &[u8]) -> Result<SegmentHead, LayoutError> {
        let mut fields = Reader::new(HEAD, page)?;
        let head = SegmentHead {
            device_id: fields.array::<16>()?,
            segment: SegmentNumber(fields.u32()?),
            generation: fields.u64()?,
        };
        fields.end()?;
        if head.generation < GENERATIONS { Ok(head) } else { Err(LayoutError::Fields) }
    }
}

impl SegmentFoot {
    /// As it stands in a page.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new(FOOT);
        out.raw(&self.device_id).u32(self.segment.0).u64(self.generation);
        out.u32(self.table_page).u32(self.table_bytes).u32(self.scan_from);
        page(out)
    }

    /// Reads a page.
    pub fn decode(page: &[u8]) -> Result<SegmentFoot, LayoutError> {
        let mut fields = Reader::new(FOOT, page)?;
        let foot = SegmentFoot {
            device_id: fields.array::<16>()?,
            segment: SegmentNumber(fields.u32()?),
            generation: fields.u64()?,
            table_page: fields.u32()?,
            table_bytes: fields.u32()?,
            scan_from: fields.u32()?,
        };
        fields.end()?;
        if foot.generation < GENERATIONS { Ok(foot) } else { Err(LayoutError::Fields) }
    }
}

impl Table {
    /// Stands among the spaces of a table that names all namespaces of which its segment has records, also of those that do
    /// not count. No record is of it. Builds that did not know it left out what did not count.
    pub const NAMES_ALL: Space = Space { namespace: Namespace([0; 16]), cut: CutDigest([0; 16]) };

    /// Its bytes, filled up to whole pages; its length without that stands in the foot.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new(TABLE);
        out.raw(&self.device_id).u64(self.generation);
        out.u32(self.spaces.len() as u32).u32(self.records.len() as u32);
        for space in &self.spaces {
            out.raw(&space.namespace.0).raw(&space.cut.0);
        }
        for record in &self.records {
            out.raw(&record.hash.0).u32(record.space).u32(record.page).u32(record.pages);
        }
        page(out)
    }

    /// Reads a table. That its records lie inside their segment is not checked here.
    pub fn decode(bytes: &[u8]) -> Result<Table, LayoutError> {
        let mut fields = Reader::new(TABLE, bytes)?;
        let (device_id, generation) = (fields.array::<16>()?, fields.u64()?);
        let (spaces, records) = (fields.u32()?, fields.u32()?);
        let spaces: Vec<Space> = fields.items::<SPACE>(spaces)?.iter().map(space).collect();
        let records: Vec<TableRecord> = fields.items::<RECORD>(records)?.iter().map(record).collect();
        fields.end()?;
        if records.iter().any(|record| record.space as usize >= spaces.len()) {
            return Err(LayoutError::Fields);
        }
        Ok(Table { device_id, generation, spaces, records })
    }
}

/// Bytes of a table before they are filled up to pages.
pub(crate) fn table_bytes(records: usize, spaces: usize) -> u64 {
    48 + (records * RECORD + spaces * SPACE) as u64
}

fn space(bytes: &[u8; SPACE]) -> Space {
    let (namespace, cut) = bytes.split_at(16);
    let name = |bytes: &[u8]| bytes.first_chunk::<16>().copied().unwrap_or_default();
    Space { namespace: Namespace(name(namespace)), cut: CutDigest(name(cut)) }
}

fn record(bytes: &[u8; RECORD]) -> TableRecord {
    let number = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    TableRecord {
        hash: BlockHash(bytes.first_chunk::<16>().copied().unwrap_or_default()),
        space: number(16),
        page: number(20),
        pages: number(24),
    }
}

fn page(out: Writer) -> Vec<u8> {
    let mut bytes = out.finish();
    bytes.resize(bytes.len().next_multiple_of(PAGE_BYTES as usize), 0);
    bytes
}
