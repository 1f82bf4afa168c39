//! Jobs of a device: reads and writes that callers queued, the transfers that carry them out, and the operations that
//! transfers are cut into.

use std::io;
use std::time::Instant;

use kvlane_block::{BlockKey, PoolExtent};

use crate::headers::HeaderMemory;
use crate::index::{Live, Location};
use crate::io::{Op, OpKind, Piece, Registration};
use crate::layout::{SegmentFoot, SegmentNumber};
use crate::pages::Pages;
use crate::request::{ReadEnd, Record, WriteEnd};
use crate::staging::Slot;

/// Target size of an operation in bytes; an operation has at most half as much more. A block of 2 MiB becomes several
/// operations, which devices carry out at the same time.
pub(crate) const OP_BYTES: usize = 1 << 20;
/// The same for operations on staging memory. Its pages are huge, so the kernel makes few requests of a large operation.
pub(crate) const STAGED_OP_BYTES: usize = 2 << 20;

/// An accepted read. Its segment is pinned until `done` is called.
pub(crate) struct ReadJob {
    pub(crate) key: BlockKey,
    pub(crate) location: Location,
    pub(crate) into: Vec<PoolExtent>,
    pub(crate) deadline: Option<Instant>,
    pub(crate) accepted_at: Instant,
    pub(crate) done: Box<dyn FnOnce(ReadEnd) + Send>,
}

/// Stamp of an accepted write: its device, and the drops of its namespace so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Accepted {
    pub(crate) device: u8,
    /// Drops of the namespace when the write was accepted. If the count differs when the write ends, the write fails.
    pub(crate) drops: u64,
}

/// An accepted write.
pub(crate) struct WriteJob {
    pub(crate) record: Record,
    /// Pages of the record, header included.
    pub(crate) pages: u32,
    pub(crate) accepted: Accepted,
    pub(crate) accepted_at: Instant,
    pub(crate) done: Box<dyn FnOnce(WriteEnd) + Send>,
}

/// A write whose location in the log is allocated.
pub(crate) struct AllocatedWrite {
    pub(crate) job: WriteJob,
    pub(crate) location: Location,
    pub(crate) header: Pages,
}

/// Adjacent records of the log, which go to the device in one operation. A device takes one request of 1 MiB in much
/// less time than four of 256 KiB.
pub(crate) struct Batch {
    records: Vec<AllocatedWrite>,
    pieces: Vec<Piece>,
    bytes: usize,
    op_bytes: usize,
}

impl Batch {
    /// An empty batch, for operations of about this size.
    pub(crate) fn new(op_bytes: usize) -> Batch {
        Batch { records: Vec::new(), pieces: Vec::new(), bytes: 0, op_bytes }
    }

    /// Takes all records out.
    pub(crate) fn take(&mut self) -> Batch {
        std::mem::replace(self, Batch::new(self.op_bytes))
    }

    /// Whether a record at this location, with this many pieces of memory, may join the batch. An empty batch takes any.
    pub(crate) fn takes(&self, location: &Location, pieces: usize) -> bool {
        let Some(last) = self.records.last().map(|record| &record.location) else { return true };
        let bytes = location.pages as usize * crate::PAGE_BYTES as usize;
        let adjacent = last.segment == location.segment && last.page + last.pages == location.page;
        // Stop at one operation: a larger batch saves nothing, and one failure fails every record of the batch.
        let in_one = self.bytes < self.op_bytes
            && self.bytes + bytes <= self.op_bytes + self.op_bytes / 2
            && self.pieces.len() + pieces <= Op::MAX_PIECES;
        adjacent && in_one
    }

    /// Adds a record; `shards` is its memory behind the header.
    pub(crate) fn push(&mut self, record: AllocatedWrite, shards: &[Piece]) {
        self.bytes += record.location.pages as usize * crate::PAGE_BYTES as usize;
        self.pieces.push(record.header.piece(record.header.len()));
        self.pieces.extend(shards);
        self.records.push(record);
    }

    /// Bytes that the records take in the file.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// The records, and their memory in the order of the file.
    pub(crate) fn into_parts(self) -> (Vec<AllocatedWrite>, Vec<Piece>) {
        (self.records, self.pieces)
    }
}

/// Where the device puts a record.
pub(crate) enum ReadMemory {
    /// The shards into the pool, the header into memory of its own.
    Direct(HeaderMemory),
    /// The whole record into staging.
    Staged(Slot),
}

/// The purpose of a transfer. Each variant owns the memory that its operations use, except for the pool's.
#[expect(dead_code, reason = "some pages are only kept because the kernel reads them")]
pub(crate) enum Purpose {
    Read {
        job: ReadJob,
        memory: ReadMemory,
    },
    /// At least one record; all are in one segment.
    Write {
        records: Vec<AllocatedWrite>,
        /// The staging memory that they were copied to. None if they are written from the pool.
        staged: Option<Slot>,
    },
    Head {
        segment: SegmentNumber,
        page: Pages,
    },
    Table {
        segment: SegmentNumber,
        foot: SegmentFoot,
        pages: Pages,
    },
    Foot {
        segment: SegmentNumber,
        page: Pages,
    },
    Sync,
    /// Cleaning reads a record that it keeps.
    CopyIn {
        live: Live,
        from: Location,
        buffer: Pages,
    },
    /// Cleaning writes that record to the log's end.
    CopyOut {
        live: Live,
        from: Location,
        to: Location,
        buffer: Pages,
    },
}

impl Purpose {
    pub(crate) fn kind(&self) -> OpKind {
        match self {
            Purpose::Read { .. } | Purpose::CopyIn { .. } => OpKind::Read,
            Purpose::Sync => OpKind::Sync,
            _ => OpKind::Write,
        }
    }
}

/// A set of operations with one purpose. Ends when its last operation has ended.
pub(crate) struct Transfer {
    pub(crate) purpose: Purpose,
    pub(crate) operations: usize,
    pub(crate) error: Option<io::Error>,
}

impl Transfer {
    /// Bytes to verify if this is a caller's read; 0 for any other transfer.
    pub(crate) fn read_bytes(&self) -> u64 {
        match &self.purpose {
            Purpose::Read { job, .. } => u64::from(job.location.pages) * crate::PAGE_BYTES,
            _ => 0,
        }
    }
}

/// An operation, or the rest of one that the device cut short.
pub(crate) struct UnfinishedOp {
    pub(crate) transfer: u64,
    pub(crate) kind: OpKind,
    pub(crate) offset: u64,
    pub(crate) pieces: Vec<Piece>,
    /// Attempts in a row that moved no whole page.
    pub(crate) stalls: u32,
}

impl UnfinishedOp {
    pub(crate) fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.bytes as u64).sum()
    }

    /// Takes `bytes` that were moved off the front. Only whole pages count, so the rest may be moved again.
    pub(crate) fn advance(&mut self, bytes: usize) {
        let mut left = bytes / crate::PAGE_BYTES as usize * crate::PAGE_BYTES as usize;
        self.offset += left as u64;
        self.stalls = if left == 0 { self.stalls + 1 } else { 0 };
        self.pieces.retain_mut(|piece| {
            let step = left.min(piece.bytes);
            left -= step;
            piece.address = piece.address.wrapping_add(step);
            piece.bytes -= step;
            piece.bytes > 0
        });
    }
}

/// Cuts a record into operations. Operations of one piece use registered memory, whose pages the kernel need not pin. So
/// where memory is registered and the shards are adjacent, the header gets an operation of its own, because it never
/// lies beside the shards. Both are posted together, and the kernel merges them into one request. In all other cases the
/// header and the shards are cut as one run.
pub(crate) fn cut_record(
    transfer: u64,
    kind: OpKind,
    offset: u64,
    header: Piece,
    shards: &[Piece],
    registration: Registration,
) -> Vec<UnfinishedOp> {
    let is_one_run = shards.windows(2).all(|pair| ends_at(&pair[0], &pair[1]));
    if registration == Registration::Registered && is_one_run {
        let mut parts = cut(transfer, kind, offset, &[header], OP_BYTES);
        parts.extend(cut(transfer, kind, offset + header.bytes as u64, shards, OP_BYTES));
        return parts;
    }
    cut(transfer, kind, offset, &[&[header], shards].concat(), OP_BYTES)
}

fn ends_at(piece: &Piece, next: &Piece) -> bool {
    std::ptr::eq(piece.address.wrapping_add(piece.bytes), next.address)
}

/// Cuts a contiguous range of the file, which these pieces of memory hold, into operations of about `op_bytes`.
pub(crate) fn cut(
    transfer: u64,
    kind: OpKind,
    offset: u64,
    pieces: &[Piece],
    op_bytes: usize,
) -> Vec<UnfinishedOp> {
    let mut parts: Vec<UnfinishedOp> = Vec::new();
    // Cut into equal sizes, so that a header of one page does not leave one page for a last operation.
    let bytes: usize = pieces.iter().map(|piece| piece.bytes).sum();
    let count = ((bytes + op_bytes / 2) / op_bytes).max(1);
    let part_bytes = bytes.div_ceil(count).next_multiple_of(crate::PAGE_BYTES as usize);
    let (mut at, mut room) = (offset, 0);
    for piece in pieces {
        let mut rest = *piece;
        while rest.bytes > 0 {
            let new_part = || UnfinishedOp { transfer, kind, offset: at, pieces: Vec::new(), stalls: 0 };
            if room == 0 {
                parts.push(new_part());
                room = part_bytes;
            }
            let Some(part) = parts.last_mut() else { break };
            let adjacent = part.pieces.last().is_some_and(|last| ends_at(last, &rest));
            if !adjacent && part.pieces.len() == Op::MAX_PIECES {
                room = 0;
                continue;
            }
            let step = rest.bytes.min(room);
            match part.pieces.last_mut() {
                Some(last) if adjacent => last.bytes += step,
                _ => part.pieces.push(Piece { address: rest.address, bytes: step }),
            }
            rest = Piece { address: rest.address.wrapping_add(step), bytes: rest.bytes - step };
            at += step as u64;
            room -= step;
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn flat(parts: &[UnfinishedOp]) -> Vec<(u64, usize)> {
        let mut pages = Vec::new();
        for part in parts {
            let mut at = part.offset;
            for piece in &part.pieces {
                for page in (0..piece.bytes).step_by(4096) {
                    pages.push((at, piece.address as usize + page));
                    at += 4096;
                }
            }
        }
        pages
    }

    #[test]
    fn shards_that_lie_together_are_one_piece_where_memory_is_registered() {
        let piece = |address: usize, pages: usize| Piece { address: address as *mut u8, bytes: pages * 4096 };
        let (header, shards) = (piece(4096, 1), [piece(1 << 20, 8), piece((1 << 20) + 8 * 4096, 56)]);
        let counts = |shards: &[Piece], registration| -> Vec<usize> {
            let parts = cut_record(1, OpKind::Read, 8192, header, shards, registration);
            assert_eq!(parts[0].offset, 8192);
            parts.iter().map(|part| part.pieces.len()).collect()
        };
        assert_eq!(counts(&shards, Registration::Registered), [1, 1]);
        assert_eq!(counts(&shards, Registration::Unregistered), [2]);
        let apart = [shards[0], piece(1 << 24, 56)];
        assert_eq!(counts(&apart, Registration::Registered), [3]);
        let whole = cut_record(1, OpKind::Read, 8192, header, &shards, Registration::Registered);
        assert_eq!(
            flat(&whole),
            flat(&cut(1, OpKind::Read, 8192, &[&[header], &shards[..]].concat(), OP_BYTES))
        );
    }

    proptest! {
        #[test]
        fn operations_cover_every_page_once_whatever_is_cut_short(
            runs in prop::collection::vec((0usize..4, 1usize..700), 1..40),
            short in prop::collection::vec(0usize..3_000_000, 0..40),
        ) {
            let mut address = 4096;
            let pieces: Vec<Piece> = runs
                .iter()
                .map(|&(gap, pages)| {
                    address += gap * 4096;
                    let piece = Piece { address: address as *mut u8, bytes: pages * 4096 };
                    address += pages * 4096;
                    piece
                })
                .collect();
            let mut offset = 8192;
            let mut expected = Vec::new();
            for piece in &pieces {
                for page in (0..piece.bytes).step_by(4096) {
                    expected.push((offset, piece.address as usize + page));
                    offset += 4096;
                }
            }
            let mut parts = cut(1, OpKind::Read, 8192, &pieces, OP_BYTES);
            prop_assert_eq!(flat(&parts), expected.clone());
            prop_assert!(parts.iter().all(|part| part.bytes() <= 3 << 19 && part.pieces.len() <= Op::MAX_PIECES));
            let mut done = Vec::new();
            for (part, short) in parts.iter_mut().zip(&short) {
                let moved = short % part.bytes() as usize;
                let before = flat(std::slice::from_ref(part));
                part.advance(moved);
                done.extend_from_slice(&before[..moved / 4096]);
            }
            let mut all: Vec<_> = done.into_iter().chain(flat(&parts)).collect();
            all.sort_unstable();
            prop_assert_eq!(all, expected);
        }
    }
}
