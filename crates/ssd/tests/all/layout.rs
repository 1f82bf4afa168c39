//! The layout of a file: encoded structures decode to themselves, and no other bytes decode.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use kvlane_block::{BlockHash, BlockKey, CutDigest, Namespace, Space};
use kvlane_ssd::{
    LayoutError, RecordHeader, SegmentFoot, SegmentHead, SegmentNumber, ShardSum, Superblock, Table,
    TableRecord,
};
use proptest::prelude::*;

fn space() -> impl Strategy<Value = Space> {
    (any::<[u8; 16]>(), any::<[u8; 16]>())
        .prop_map(|(namespace, cut)| Space { namespace: Namespace(namespace), cut: CutDigest(cut) })
}

fn header() -> impl Strategy<Value = RecordHeader> {
    let shard = (1u32.., any::<u32>()).prop_map(|(bytes, crc)| ShardSum { bytes, crc });
    let shards = prop::collection::vec(shard, 1..1500);
    let place = (any::<[u8; 16]>(), any::<u64>(), any::<u32>(), any::<u32>());
    (place, space(), any::<[u8; 16]>(), shards).prop_map(
        |((device_id, generation, segment, page), space, hash, shards)| RecordHeader {
            device_id,
            generation,
            segment: SegmentNumber(segment),
            page,
            key: BlockKey { space, hash: BlockHash(hash) },
            shards,
        },
    )
}

fn table() -> impl Strategy<Value = Table> {
    let record = (any::<[u8; 16]>(), any::<u32>(), any::<u32>(), any::<u32>());
    let parts = (any::<[u8; 16]>(), any::<u64>());
    (parts, prop::collection::vec(space(), 1..5), prop::collection::vec(record, 0..300)).prop_map(
        |((device_id, generation), spaces, records)| {
            let count = spaces.len() as u32;
            let records = records
                .into_iter()
                .map(|(hash, space, page, pages)| TableRecord {
                    hash: BlockHash(hash),
                    space: space % count,
                    page,
                    pages,
                })
                .collect();
            Table { device_id, generation, spaces, records }
        },
    )
}

/// No structure decodes as another one, and no damaged one at all.
fn only(bytes: &[u8], kind: usize) {
    let decoded = [
        Superblock::decode(bytes).is_ok(),
        SegmentHead::decode(bytes).is_ok(),
        SegmentFoot::decode(bytes).is_ok(),
        Table::decode(bytes).is_ok(),
        RecordHeader::decode(bytes).is_ok(),
    ];
    for (other, decoded) in decoded.into_iter().enumerate() {
        assert_eq!(decoded, other == kind, "as number {other}");
    }
}

/// One changed bit, and one lost byte of what the length covers, are noticed.
fn damaged(bytes: &[u8], at: usize, bit: u8) {
    let length = u32::from_le_bytes(*bytes[12..].first_chunk().unwrap()) as usize;
    let mut changed = bytes.to_vec();
    changed[at % length] ^= 1 << (bit % 8);
    only(&changed, usize::MAX);
    only(&bytes[..length - 1], usize::MAX);
}

proptest! {
    #[test]
    fn headers_come_back(header in header(), at in any::<usize>(), bit in any::<u8>()) {
        let bytes = header.encode();
        prop_assert_eq!(bytes.len() % 4096, 0);
        prop_assert_eq!(RecordHeader::decode(&bytes), Ok(header));
        only(&bytes, 4);
        damaged(&bytes, at, bit);
    }

    #[test]
    fn tables_come_back(table in table(), at in any::<usize>(), bit in any::<u8>()) {
        let bytes = table.encode();
        prop_assert_eq!(Table::decode(&bytes), Ok(table));
        only(&bytes, 3);
        damaged(&bytes, at, bit);
    }

    #[test]
    fn single_pages_come_back(
        device_id in any::<[u8; 16]>(),
        generation in 0..1u64 << 63,
        numbers in any::<[u32; 4]>(),
        pages in 4u64..1 << 20,
        at in any::<usize>(),
        bit in any::<u8>(),
    ) {
        let [segment, table_page, table_bytes, scan_from] = numbers;
        let superblock = Superblock { version: 1, device_id, segment_bytes: pages * 4096, segments: segment >> 4 };
        let segment = SegmentNumber(segment);
        prop_assert_eq!(Superblock::decode(&superblock.encode()), Ok(superblock));
        let head = SegmentHead { device_id, segment, generation };
        prop_assert_eq!(SegmentHead::decode(&head.encode()), Ok(head));
        let foot = SegmentFoot { device_id, segment, generation, table_page, table_bytes, scan_from };
        prop_assert_eq!(SegmentFoot::decode(&foot.encode()), Ok(foot));
        for (kind, page) in [superblock.encode(), head.encode(), foot.encode()].iter().enumerate() {
            prop_assert_eq!(page.len(), 4096);
            only(page, kind);
            damaged(page, at, bit);
        }
    }

    #[test]
    fn arbitrary_bytes_are_an_error_and_no_panic(
        kind in 0usize..5,
        length in any::<u32>(),
        rest in prop::collection::vec(any::<u8>(), 0..600),
        right_checksum in any::<bool>(),
    ) {
        let kinds = [b"kvlnSSD\0", b"kvlnHEAD", b"kvlnFOOT", b"kvlnTABL", b"kvlnBLCK"];
        let mut bytes = kinds[kind].to_vec();
        let length = if right_checksum { 16 + rest.len() as u32 } else { length };
        let mut checked = length.to_le_bytes().to_vec();
        checked.extend_from_slice(&rest);
        bytes.extend_from_slice(&kvlane_block::crc32c(&checked).to_le_bytes());
        bytes.extend_from_slice(&checked);
        // Fields of any value behind a right checksum: they may decode, and must not do harm.
        let _ = Superblock::decode(&bytes);
        let _ = SegmentHead::decode(&bytes);
        let _ = SegmentFoot::decode(&bytes);
        let _ = Table::decode(&bytes);
        let _ = RecordHeader::decode(&bytes);
        for end in 0..bytes.len().min(40) {
            only(&bytes[..end], usize::MAX);
        }
    }
}

#[test]
fn fields_that_contradict_each_other_are_an_error() {
    let space = Space { namespace: Namespace([1; 16]), cut: CutDigest([2; 16]) };
    let record = TableRecord { hash: BlockHash([3; 16]), space: 1, page: 1, pages: 2 };
    let table = Table { device_id: [0; 16], generation: 1, spaces: vec![space], records: vec![record] };
    assert_eq!(Table::decode(&table.encode()), Err(LayoutError::Fields));
    let key = BlockKey { space, hash: BlockHash([3; 16]) };
    let header = |shards| RecordHeader {
        device_id: [0; 16],
        generation: 1,
        segment: SegmentNumber(0),
        page: 1,
        key,
        shards,
    };
    for shards in [vec![], vec![ShardSum { bytes: 0, crc: 5 }]] {
        assert_eq!(RecordHeader::decode(&header(shards).encode()), Err(LayoutError::Fields));
    }
    for segment_bytes in [0, 4096, 16_385, u64::MAX] {
        let superblock = Superblock { version: 1, device_id: [0; 16], segment_bytes, segments: 9 };
        assert_eq!(Superblock::decode(&superblock.encode()), Err(LayoutError::Fields));
    }
    // Of another version nothing else is read.
    let other = Superblock { version: 9, device_id: [1; 16], segment_bytes: 3, segments: 7 };
    assert_eq!(Superblock::decode(&other.encode()).map(|found| found.version), Ok(9));
}
