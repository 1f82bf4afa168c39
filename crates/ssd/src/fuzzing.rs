//! Fuzz targets of the file's layout, for crates/fuzz-targets: each function panics if a property fails for its bytes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a panic is what they are for")]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use kvlane_block::{BlockHash, BlockKey, CutDigest, Namespace, Space};
use rustix::fs::MemfdFlags;

use crate::drops::DropTable;
use crate::file::TierFile;
use crate::index::Index;
use crate::layout::{
    Drops, FORMAT_VERSION, PAGE_BYTES, RecordHeader, SegmentFoot, SegmentHead, SegmentNumber, ShardSum,
    Superblock, Table, TableRecord, header_pages, table_bytes,
};
use crate::log::{Log, RecordSource, largest_record};
use crate::recover::recover;

const KINDS: [&[u8; 8]; 6] = [b"kvlnSSD\0", b"kvlnHEAD", b"kvlnFOOT", b"kvlnTABL", b"kvlnBLCK", b"kvlnDROP"];

/// Decodes the bytes as a structure of every kind: fields must be within their limits, and encode to the same bytes
/// again. Runs on the bytes themselves, and with a start of each kind before them, because random bytes hardly ever
/// have the right checksum.
pub fn structure(bytes: &[u8]) {
    decode_all(bytes);
    for kind in KINDS {
        decode_all(&sealed(kind, bytes));
    }
}

/// A structure of this kind with these fields, and the right checksum and length.
fn sealed(kind: &[u8; 8], fields: &[u8]) -> Vec<u8> {
    let mut bytes = kind.to_vec();
    let mut checked = (16 + fields.len() as u32).to_le_bytes().to_vec();
    checked.extend_from_slice(fields);
    bytes.extend_from_slice(&kvlane_block::crc32c(&checked).to_le_bytes());
    bytes.extend_from_slice(&checked);
    bytes
}

fn decode_all(bytes: &[u8]) {
    let mut decoded = 0;
    // Decoding ignores the bytes behind the length that a structure claims.
    let length =
        bytes.get(12..16).and_then(|length| length.first_chunk().copied()).map_or(0, u32::from_le_bytes);
    let again = |written: &[u8]| {
        assert_eq!(written[..length as usize], bytes[..length as usize]);
        assert!(written[length as usize..].iter().all(|byte| *byte == 0));
    };
    if let Ok(found) = Superblock::decode(bytes) {
        // With another version no other field is read.
        decoded += 1;
        if found.version == FORMAT_VERSION {
            again(&found.encode());
            assert!(found.segment_bytes.is_multiple_of(PAGE_BYTES) && found.segment_pages() >= 4);
            let end = found.file_bytes().expect("it was checked");
            let last = SegmentNumber(found.segments.saturating_sub(1));
            assert!(found.segments == 0 || found.offset(last, found.segment_pages() - 1) + PAGE_BYTES == end);
        }
    }
    if let Ok(found) = SegmentHead::decode(bytes) {
        decoded += 1;
        again(&found.encode());
    }
    if let Ok(found) = SegmentFoot::decode(bytes) {
        decoded += 1;
        again(&found.encode());
    }
    if let Ok(found) = Table::decode(bytes) {
        decoded += 1;
        again(&found.encode());
        assert_eq!(table_bytes(found.records.len(), found.spaces.len()), u64::from(length));
        assert!(found.records.iter().all(|record| (record.space as usize) < found.spaces.len()));
    }
    if let Ok(found) = RecordHeader::decode(bytes) {
        let written = found.encode();
        assert_eq!(RecordHeader::decode(&written).as_ref(), Ok(&found));
        decoded += 1;
        assert_eq!(written.len() as u64, header_pages(found.shards.len()) * PAGE_BYTES);
        assert_eq!(RecordHeader::claimed_pages(bytes), Some(header_pages(found.shards.len())));
        let shards: u64 = found.shards.iter().map(|shard| u64::from(shard.bytes).div_ceil(PAGE_BYTES)).sum();
        let pages = header_pages(found.shards.len()) + shards;
        assert_eq!(found.pages().map(u64::from), u32::try_from(pages).is_ok().then_some(pages));
    }
    if let Ok(found) = Drops::decode(bytes) {
        assert_eq!(Drops::decode(&found.encode()), Ok(found));
        decoded += 1;
    }
    assert!(decoded <= 1, "structures of two kinds at once");
}

/// Pages of each segment in the fuzzed file.
const PAGES: u32 = 8;
const SEGMENTS: u32 = 3;
const DEVICE: [u8; 16] = [7; 16];

/// Recovers a file whose structures follow from `tape`. Every record that is found must lie inside its segment and must
/// count, and the next segment must be newer than everything in the file. The superblock is right, because opening
/// checks it before.
pub fn file(tape: &[u8]) {
    let superblock = Superblock {
        version: FORMAT_VERSION,
        device_id: DEVICE,
        segment_bytes: u64::from(PAGES) * PAGE_BYTES,
        segments: SEGMENTS,
    };
    let memory: File =
        rustix::fs::memfd_create("kvlane-fuzz", MemfdFlags::CLOEXEC).expect("a file in memory").into();
    memory.set_len(superblock.file_bytes().unwrap()).expect("it has room");
    play(tape, &memory, &superblock);
    let path = PathBuf::from("a file in memory");
    let file = TierFile { path, file: memory, superblock, direct: false, notes: Vec::new(), warm: true };

    let mut log = Log::new(SEGMENTS, PAGES);
    let drops = DropTable::read(&file).expect("it can be read");
    log.observe_generation(drops.highest());
    let mut index = Index::new();
    index.add_device(SEGMENTS);
    let found = recover(&file, 0, &drops, &mut index, &mut log);
    assert_eq!(found.unreadable, 0);
    assert!(index.blocks() as u64 <= found.from_tables + found.by_scan);
    let keys: Vec<BlockKey> = (0..index.slots()).filter_map(|slot| index.key_at(slot)).collect();
    assert_eq!(keys.len(), index.blocks());
    for key in keys {
        let location = index.find(&key).expect("it is in the index");
        assert!(location.device == 0 && location.segment < SegmentNumber(SEGMENTS));
        // The record must lie between the head and the foot.
        let end = location.page.checked_add(location.pages).expect("a record that has an end");
        assert!(location.page >= 1 && location.pages >= 1 && end < PAGES, "{location:?}");
        assert!(location.pages <= largest_record(PAGES) + 1, "{location:?}");
        assert!(drops.counts(&key.space.namespace, log.generation(location.segment)));
    }
    let last = log.last_generation();
    if let Some((_, generation)) = log.open_segment(RecordSource::Writes) {
        assert!(generation > last && generation > drops.highest());
    }
    let may_hold = |namespace: &Namespace, up_to| found.holdings.may_hold(namespace, up_to);
    drops.end_former_run(last, may_hold).expect("it can be written");
    // Dropped blocks stay dropped, also if the table has forgotten the drop.
    let again = DropTable::read(&file).expect("it can be read");
    assert!(again.highest() <= last.max(drops.highest()));
    let (mut log, mut same) = (Log::new(SEGMENTS, PAGES), Index::new());
    same.add_device(SEGMENTS);
    recover(&file, 0, &again, &mut same, &mut log);
    assert_eq!(same.blocks(), index.blocks());
    assert!((0..same.slots()).filter_map(|slot| same.key_at(slot)).all(|key| index.find(&key).is_some()));
}

/// Writes structures with right checksums, most of them of this file, to pages of any segment, and noise.
fn play(tape: &[u8], file: &File, superblock: &Superblock) {
    let mut tape = tape.iter().copied();
    while let Some(kind) = tape.next() {
        let mut number = |below: u32| u32::from(tape.next().unwrap_or(1)) % below;
        // Most numbers are near their limits, some are arbitrary.
        let (segment, page) = (SegmentNumber(number(SEGMENTS)), number(PAGES));
        let generation = match number(16) {
            0 => u64::MAX - u64::from(number(3)),
            small => u64::from(small % 5),
        };
        let device_id = if number(16) == 0 { [8; 16] } else { DEVICE };
        let mut field = |usual: u32| match number(12) {
            0 => number(256) << 24 | number(256),
            1 => number(12),
            _ => usual,
        };
        let named = SegmentNumber(field(segment.0));
        let space = |number: u8| Space { namespace: Namespace([number; 16]), cut: CutDigest([1; 16]) };
        let mut offset = superblock.offset(segment, page);
        let bytes = match kind % 8 {
            0 | 1 => {
                offset = superblock.offset(segment, 0);
                SegmentHead { device_id, segment: named, generation }.encode()
            }
            2 => {
                offset = superblock.offset(segment, PAGES - 1);
                let bytes = table_bytes(field(1).min(9) as usize, 1) as u32;
                let (table_page, table_bytes, scan_from) = (field(page), field(bytes), field(page + 1));
                SegmentFoot { device_id, segment: named, generation, table_page, table_bytes, scan_from }
                    .encode()
            }
            3 => {
                let count = field(1).min(9);
                let record = |at: u32, field: &mut dyn FnMut(u32) -> u32| TableRecord {
                    hash: BlockHash([at as u8; 16]),
                    space: 0,
                    page: field(1 + 2 * at),
                    pages: field(2),
                };
                let records = (0..count).map(|at| record(at, &mut field)).collect();
                Table { device_id, generation, spaces: vec![space(field(1) as u8)], records }.encode()
            }
            4 | 5 => {
                let key = BlockKey { space: space(field(1) as u8), hash: BlockHash([field(3) as u8; 16]) };
                let shards = (0..=field(0).min(600))
                    .map(|at| ShardSum { bytes: field(4096).max(1), crc: at })
                    .collect();
                let page = field(page);
                RecordHeader { device_id, generation, segment: named, page, key, shards }.encode()
            }
            6 => {
                let mut drops = Drops { device_id, sequence: generation, ..Drops::none(device_id) };
                drops.all_up_to = u64::from(field(0).min(5));
                drops.namespaces.insert(Namespace([field(1) as u8; 16]), generation);
                offset = Drops::COPIES[named.index() % 2];
                drops.encode()
            }
            _ => {
                offset += u64::from(field(0)) % PAGE_BYTES;
                let count = field(20) as usize % 64;
                tape.by_ref().take(count).collect()
            }
        };
        let end = superblock.file_bytes().unwrap();
        let fits = usize::try_from(end.saturating_sub(offset)).unwrap_or(0).min(bytes.len());
        file.write_all_at(&bytes[..fits], offset).expect("it has room");
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        // The fuzzer looks deeper; this keeps its targets in order.
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn what_the_fuzzer_checks_holds_for_some_bytes(bytes in vec(prop_oneof![0..8u8, any::<u8>()], 0..400)) {
            super::structure(&bytes);
            super::file(&bytes);
        }
    }
}
