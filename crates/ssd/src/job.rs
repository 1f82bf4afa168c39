//! What a device is doing for whom, and how it is cut into operations.

use std::io;
use std::time::Instant;

use kvlane_block::{BlockKey, PoolExtent};

use crate::headers::HeaderMemory;
use crate::index::{Live, Location};
use crate::io::{Op, OpKind, Piece, Registration};
use crate::layout::{SegmentFoot, SegmentNumber};
use crate::pages::Pages;
use crate::request::{ReadEnd, Record, WriteEnd};

/// Bytes of one operation, about; at most half as much more. A block of 2 MiB is several, which devices carry out at the
/// same time.
const OP_BYTES: usize = 1 << 20;

/// A read that was accepted. Its segment is pinned.
pub(crate) struct ReadJob {
    pub(crate) key: BlockKey,
    pub(crate) location: Location,
    pub(crate) into: Vec<PoolExtent>,
    pub(crate) deadline: Option<Instant>,
    pub(crate) done: Box<dyn FnOnce(ReadEnd) + Send>,
}

/// Which device a write that was accepted goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Accepted {
    pub(crate) device: u8,
    /// How often its namespace had been dropped by then.
    pub(crate) drops: u64,
}

/// A write that was accepted.
pub(crate) struct WriteJob {
    pub(crate) record: Record,
    /// Of the record with its header.
    pub(crate) pages: u32,
    pub(crate) accepted: Accepted,
    pub(crate) done: Box<dyn FnOnce(WriteEnd) + Send>,
}

/// A record on its way to the log.
pub(crate) struct Written {
    pub(crate) job: WriteJob,
    pub(crate) location: Location,
    pub(crate) header: Pages,
}

/// Records that lie one after the other in the log, and so can be written at once: a device takes a request of a MiB in
/// much less time than four of a quarter.
#[derive(Default)]
pub(crate) struct Batch {
    records: Vec<Written>,
    pieces: Vec<Piece>,
    bytes: usize,
}

impl Batch {
    /// Whether a record at this place, of so many pieces, can follow those of the batch, as far as it has any.
    pub(crate) fn takes(&self, location: &Location, pieces: usize) -> bool {
        let Some(last) = self.records.last().map(|record| &record.location) else { return true };
        let bytes = location.pages as usize * crate::PAGE_BYTES as usize;
        let adjacent = last.segment == location.segment && last.page + last.pages == location.page;
        // More than one operation would hold is no use; and if that one fails, all of its records do.
        let in_one = self.bytes < OP_BYTES
            && self.bytes + bytes <= OP_BYTES + OP_BYTES / 2
            && self.pieces.len() + pieces <= Op::MAX_PIECES;
        adjacent && in_one
    }

    /// `shards`: the record's memory behind its header.
    pub(crate) fn push(&mut self, record: Written, shards: &[Piece]) {
        self.bytes += record.location.pages as usize * crate::PAGE_BYTES as usize;
        self.pieces.push(record.header.piece(record.header.len()));
        self.pieces.extend(shards);
        self.records.push(record);
    }

    /// Bytes in the file.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// The records and their memory in the order of the file.
    pub(crate) fn into_parts(self) -> (Vec<Written>, Vec<Piece>) {
        (self.records, self.pieces)
    }
}

/// What a transfer is for. Each holds the memory that its operations use, but for the pool's.
#[expect(dead_code, reason = "some pages are only kept: the kernel reads them")]
pub(crate) enum What {
    Read {
        job: ReadJob,
        header: HeaderMemory,
    },
    /// At least one record; all of one segment.
    Write {
        records: Vec<Written>,
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
    /// A record on its way to the log's end.
    CopyIn {
        live: Live,
        from: Location,
        buffer: Pages,
    },
    CopyOut {
        live: Live,
        from: Location,
        to: Location,
        buffer: Pages,
    },
}

impl What {
    pub(crate) fn kind(&self) -> OpKind {
        match self {
            What::Read { .. } | What::CopyIn { .. } => OpKind::Read,
            What::Sync => OpKind::Sync,
            _ => OpKind::Write,
        }
    }
}

/// Something that is done when all its operations have ended.
pub(crate) struct Transfer {
    pub(crate) what: What,
    pub(crate) operations: usize,
    pub(crate) error: Option<io::Error>,
}

impl Transfer {
    /// Bytes of the file that were read for somebody; 0 if it is something else.
    pub(crate) fn read_bytes(&self) -> u64 {
        match &self.what {
            What::Read { job, .. } => u64::from(job.location.pages) * crate::PAGE_BYTES,
            _ => 0,
        }
    }
}

/// An operation, or what is left of it after an attempt that did not do all of it.
pub(crate) struct UnfinishedOp {
    pub(crate) transfer: u64,
    pub(crate) kind: OpKind,
    pub(crate) offset: u64,
    pub(crate) pieces: Vec<Piece>,
    /// Attempts without progress.
    pub(crate) stalls: u32,
}

impl UnfinishedOp {
    pub(crate) fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.bytes as u64).sum()
    }

    /// So many bytes are done; the rest is to be asked for again. Only whole pages count.
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

/// Cuts a record into operations. Where memory is registered, the kernel has its pages at hand for operations of one piece.
/// So the header, which never lies beside the shards, gets an operation of its own then if the shards lie together;
/// they are posted together, and the kernel makes one request of them again. Otherwise all pieces are in one operation.
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
        let mut parts = cut(transfer, kind, offset, &[header]);
        parts.extend(cut(transfer, kind, offset + header.bytes as u64, shards));
        return parts;
    }
    cut(transfer, kind, offset, &[&[header], shards].concat())
}

fn ends_at(piece: &Piece, next: &Piece) -> bool {
    std::ptr::eq(piece.address.wrapping_add(piece.bytes), next.address)
}

/// Cuts contiguous bytes of the file, whose memory is these pieces, into operations.
pub(crate) fn cut(transfer: u64, kind: OpKind, offset: u64, pieces: &[Piece]) -> Vec<UnfinishedOp> {
    let mut parts: Vec<UnfinishedOp> = Vec::new();
    // Of equal size, so that a header does not leave a page for an operation of its own.
    let bytes: usize = pieces.iter().map(|piece| piece.bytes).sum();
    let count = ((bytes + OP_BYTES / 2) / OP_BYTES).max(1);
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
        assert_eq!(flat(&whole), flat(&cut(1, OpKind::Read, 8192, &[&[header], &shards[..]].concat())));
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
            let mut parts = cut(1, OpKind::Read, 8192, &pieces);
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
