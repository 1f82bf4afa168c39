//! A segment's own structures: its first page (head), its table of records, and its last page (foot), which points to
//! the table.

use kvlane_block::{BlockHash, CutDigest, Namespace, Space};

use super::error::LayoutError;
use super::fields::{Reader, Writer};
use super::units::{GENERATIONS, PAGE_BYTES, SegmentNumber};

const HEAD: &[u8; 8] = b"kvlnHEAD";
const FOOT: &[u8; 8] = b"kvlnFOOT";
const TABLE: &[u8; 8] = b"kvlnTABL";

/// Bytes of a record in the table: hash (16), space (4), page (4), pages (4).
const RECORD: usize = 28;
/// Bytes of a space in the table: namespace (16), cut digest (16).
const SPACE: usize = 32;

/// The first page of a segment. Voids the segment's former structures, because only those of its generation count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentHead {
    /// The superblock's; a head of another file does not count.
    pub device_id: [u8; 16],
    /// Number of this segment.
    pub segment: SegmentNumber,
    /// Higher than that of every segment opened in this file before.
    pub generation: u64,
}

/// The last page of a segment. Points to the table; written after it when the segment is full, and at every checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentFoot {
    /// The superblock's; a foot of another file does not count.
    pub device_id: [u8; 16],
    /// Number of this segment.
    pub segment: SegmentNumber,
    /// The segment head's; with another one, the foot is left over from an earlier use of the segment.
    pub generation: u64,
    /// First page of the table in the segment.
    pub table_page: u32,
    /// Length of the table in bytes, without padding.
    pub table_bytes: u32,
    /// The table may lack records from this page on.
    pub scan_from: u32,
}

/// One record in a segment's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableRecord {
    /// The engine's hash of the block.
    pub hash: BlockHash,
    /// Index into the table's spaces.
    pub space: u32,
    /// First page of the record in the segment.
    pub page: u32,
    /// Pages of the record, header included.
    pub pages: u32,
}

/// The records of a segment, so that a start need not read their headers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// The superblock's; a table of another file does not count.
    pub device_id: [u8; 16],
    /// The segment head's; with another one, the table is left over from an earlier use of the segment.
    pub generation: u64,
    /// Namespaces and cuts of the records, and perhaps of records that do not count; [`Table::NAMES_ALL`] may be among
    /// them.
    pub spaces: Vec<Space>,
    /// Records that count, in the order of their pages.
    pub records: Vec<TableRecord>,
}

impl SegmentHead {
    /// The head's bytes, padded with zeros to one page.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new(HEAD);
        out.raw(&self.device_id).u32(self.segment.0).u64(self.generation);
        page(out)
    }

    /// Decodes a segment's first page. Whether it stands in the segment that it names is for the caller to check.
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
    /// The foot's bytes, padded with zeros to one page.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new(FOOT);
        out.raw(&self.device_id).u32(self.segment.0).u64(self.generation);
        out.u32(self.table_page).u32(self.table_bytes).u32(self.scan_from);
        page(out)
    }

    /// Decodes a segment's last page. Whether it stands in the segment that it names is for the caller to check.
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
    /// A mark among the spaces, which no record has. It says that the table names every namespace that has records in
    /// its segment, also records that do not count. Builds that did not know the mark left those out.
    pub const NAMES_ALL: Space = Space { namespace: Namespace([0; 16]), cut: CutDigest([0; 16]) };

    /// The table's bytes, padded with zeros to whole pages. The foot has its length without the padding.
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

    /// Decodes a table. Whether its records lie inside their segment is for the caller to check.
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

/// Bytes of a table, without padding.
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
