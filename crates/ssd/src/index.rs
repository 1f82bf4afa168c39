//! [`Index`]: maps each stored block's key to the location of its record. About 55 bytes a block, all included. Pure.
//!
//! Entries live in chunks; an entry's number is its slot. 256 hash tables map a key to its slot. Each segment lists the
//! slots whose records were put there, so that cleaning finds them. The list may name slots that have left since.

use std::collections::HashMap;

use hashbrown::HashTable;
use kvlane_block::{BlockHash, BlockKey, Space};
use kvlane_policy::Memo;

use crate::layout::SegmentNumber;

/// Entries in a chunk. Chunks never move, so growing copies no entry.
const CHUNK: usize = 4096;
/// A growing table rehashes all its entries at once. With this many tables, millions of blocks rehash in small steps.
const TABLES: usize = 256;
/// Segment of a free entry.
const FREE: SegmentNumber = SegmentNumber(u32::MAX);

/// Where a record lies: device, segment, first page and length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Location {
    pub(crate) device: u8,
    pub(crate) segment: SegmentNumber,
    /// First page in its segment.
    pub(crate) page: u32,
    pub(crate) pages: u32,
}

/// A record of a segment that the index has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Live {
    pub(crate) key: BlockKey,
    pub(crate) page: u32,
    pub(crate) pages: u32,
    /// Reads since the record was written to this location; saturates at 255.
    pub(crate) reads: u8,
    /// The policy's memo of the block, from when it was written or left the pool.
    pub(crate) memo: Memo,
}

#[derive(Clone, Copy)]
struct Entry {
    hash: BlockHash,
    space: u32,
    segment: SegmentNumber,
    page: u32,
    pages: u32,
    device: u8,
    reads: u8,
    memo: Memo,
}

const NO_ENTRY: Entry = Entry {
    hash: BlockHash([0; 16]),
    space: 0,
    segment: FREE,
    page: 0,
    pages: 0,
    device: 0,
    reads: 0,
    memo: Memo::NOTHING,
};

impl Entry {
    fn location(&self) -> Location {
        Location { device: self.device, segment: self.segment, page: self.page, pages: self.pages }
    }
}

/// Totals of one space. With 0 blocks its number is free.
#[derive(Clone, Copy)]
struct SpaceTotals {
    space: Space,
    blocks: u64,
    pages: u64,
}

/// The stored blocks of all devices of a tier.
pub(crate) struct Index {
    chunks: Vec<Box<[Entry]>>,
    tables: Box<[HashTable<u32>]>,
    free: Vec<u32>,
    spaces: Vec<SpaceTotals>,
    /// Indices into `spaces` whose space has no blocks.
    free_numbers: Vec<u32>,
    numbers: HashMap<Space, u32>,
    /// For each device and segment the slots whose records were put there. A slot may have left since, or be listed
    /// twice.
    segments: Vec<Vec<Vec<u32>>>,
    blocks: usize,
    pages: u64,
}

impl Index {
    pub(crate) fn new() -> Index {
        Index {
            chunks: Vec::new(),
            tables: (0..TABLES).map(|_| HashTable::new()).collect(),
            free: Vec::new(),
            spaces: Vec::new(),
            free_numbers: Vec::new(),
            numbers: HashMap::new(),
            segments: Vec::new(),
            blocks: 0,
            pages: 0,
        }
    }

    /// Adds a device with `segments` segments. Devices are numbered from 0 in the order of the calls.
    pub(crate) fn add_device(&mut self, segments: u32) {
        self.segments.push(vec![Vec::new(); segments as usize]);
    }

    /// The number of stored blocks.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Pages of all stored records.
    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// The number of slots, used and free; the bound for [`Index::key_at`].
    pub(crate) fn slots(&self) -> u32 {
        (self.chunks.len() * CHUNK) as u32
    }

    /// The key of the block in a slot; None if the slot is free.
    pub(crate) fn key_at(&self, slot: u32) -> Option<BlockKey> {
        let entry = self.chunks.get(slot as usize / CHUNK)?[slot as usize % CHUNK];
        (entry.segment != FREE).then(|| self.key(&entry))
    }

    /// Every space that has blocks, with the number of its blocks and the pages of their records.
    pub(crate) fn spaces(&self) -> impl Iterator<Item = (Space, u64, u64)> {
        self.spaces
            .iter()
            .filter(|totals| totals.blocks > 0)
            .map(|totals| (totals.space, totals.blocks, totals.pages))
    }

    /// The number of a space, which another space may get once this one has lost its last block.
    fn space(&self, space: &Space) -> Option<u32> {
        self.numbers.get(space).copied()
    }

    pub(crate) fn find(&self, key: &BlockKey) -> Option<Location> {
        let slot = self.slot(self.space(&key.space)?, &key.hash)?;
        Some(self.at(slot).location())
    }

    /// Counts a read of the block.
    pub(crate) fn touch(&mut self, key: &BlockKey) {
        let slot = self.space(&key.space).and_then(|space| self.slot(space, &key.hash));
        if let Some(slot) = slot {
            let entry = self.at_mut(slot);
            entry.reads = entry.reads.saturating_add(1);
        }
    }

    /// The policy's memo of the block; None if the block is not stored.
    pub(crate) fn memo(&self, key: &BlockKey) -> Option<Memo> {
        let slot = self.slot(self.space(&key.space)?, &key.hash)?;
        Some(self.at(slot).memo)
    }

    /// Replaces the policy's memo of the block, if the block is stored.
    pub(crate) fn remember(&mut self, key: &BlockKey, memo: Memo) {
        let slot = self.space(&key.space).and_then(|space| self.slot(space, &key.hash));
        if let Some(slot) = slot {
            self.at_mut(slot).memo = memo;
        }
    }

    /// Inserts a block at a location, or moves it there. A move resets its count of reads.
    pub(crate) fn insert(&mut self, key: &BlockKey, location: Location) {
        let space = self.intern(key.space);
        if let Some(slot) = self.slot(space, &key.hash) {
            let old = self.at(slot).location();
            if old == location {
                return;
            }
            self.pages -= u64::from(old.pages);
            self.spaces[space as usize].pages -= u64::from(old.pages);
            self.set_location(slot, location);
            return;
        }
        if self.free.is_empty() {
            self.grow();
        }
        let Some(slot) = self.free.pop() else { return };
        *self.at_mut(slot) = Entry { hash: key.hash, space, ..NO_ENTRY };
        self.set_location(slot, location);
        self.blocks += 1;
        self.spaces[space as usize].blocks += 1;
        let Index { chunks, tables, .. } = self;
        let bits = table_hash(space, &key.hash);
        tables[table_of(bits)].insert_unique(bits, slot, |&slot| {
            let entry = &chunks[slot as usize / CHUNK][slot as usize % CHUNK];
            table_hash(entry.space, &entry.hash)
        });
    }

    /// Moves a block from one location to another. Returns false, and does nothing, if it is no longer at `from`.
    pub(crate) fn relocate(&mut self, key: &BlockKey, from: Location, to: Location) -> bool {
        let still_there = self.find(key) == Some(from);
        if still_there {
            self.insert(key, to);
        }
        still_there
    }

    /// Removes a block. Returns its location, or None if it was not stored.
    pub(crate) fn remove(&mut self, key: &BlockKey) -> Option<Location> {
        let slot = self.slot(self.space(&key.space)?, &key.hash)?;
        let entry = *self.at(slot);
        let bits = table_hash(entry.space, &entry.hash);
        if let Ok(found) = self.tables[table_of(bits)].find_entry(bits, |&other| other == slot) {
            found.remove();
        }
        *self.at_mut(slot) = NO_ENTRY;
        self.free.push(slot);
        self.blocks -= 1;
        self.pages -= u64::from(entry.pages);
        let totals = &mut self.spaces[entry.space as usize];
        totals.blocks -= 1;
        totals.pages -= u64::from(entry.pages);
        if totals.blocks == 0 {
            self.numbers.remove(&totals.space);
            self.free_numbers.push(entry.space);
        }
        Some(entry.location())
    }

    /// Removes a block if it is still at this location. Returns whether it was.
    pub(crate) fn remove_at(&mut self, key: &BlockKey, location: Location) -> bool {
        self.find(key) == Some(location) && self.remove(key).is_some()
    }

    /// The records of a segment that the index has, in the order of their pages.
    pub(crate) fn live(&self, device: u8, segment: SegmentNumber) -> Vec<Live> {
        let slots = &self.segments[usize::from(device)][segment.index()];
        let mut live: Vec<Live> = slots
            .iter()
            .map(|&slot| self.at(slot))
            .filter(|entry| entry.segment == segment && entry.device == device)
            .map(|entry| Live {
                key: self.key(entry),
                page: entry.page,
                pages: entry.pages,
                reads: entry.reads,
                memo: entry.memo,
            })
            .collect();
        live.sort_unstable_by_key(|live| live.page);
        // A segment may list a slot twice.
        live.dedup_by_key(|live| live.page);
        live
    }

    /// Removes all blocks of a device; returns how many it removed.
    pub(crate) fn remove_device(&mut self, device: u8) -> usize {
        let segments = self.segments[usize::from(device)].len() as u32;
        let blocks: Vec<Live> =
            (0..segments).flat_map(|number| self.live(device, SegmentNumber(number))).collect();
        blocks.iter().filter(|live| self.remove(&live.key).is_some()).count()
    }

    /// Clears a segment's list of slots. The segment's blocks must have left the index before.
    pub(crate) fn segment_emptied(&mut self, device: u8, segment: SegmentNumber) {
        self.segments[usize::from(device)][segment.index()] = Vec::new();
    }

    /// Estimated memory of the index in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let tables: usize = self.tables.iter().map(HashTable::allocation_size).sum();
        let lists: usize = self.segments.iter().flatten().map(|list| list.capacity() * 4 + 24).sum();
        let entries = self.chunks.len() * CHUNK * std::mem::size_of::<Entry>() + self.free.capacity() * 4;
        (tables + lists + entries) as u64
    }

    fn set_location(&mut self, slot: u32, location: Location) {
        let Location { device, segment, page, pages } = location;
        let entry = self.at_mut(slot);
        *entry = Entry { segment, page, pages, device, reads: 0, ..*entry };
        self.pages += u64::from(pages);
        let space = self.at(slot).space;
        self.spaces[space as usize].pages += u64::from(pages);
        self.segments[usize::from(device)][segment.index()].push(slot);
    }

    fn key(&self, entry: &Entry) -> BlockKey {
        BlockKey { space: self.spaces[entry.space as usize].space, hash: entry.hash }
    }

    fn intern(&mut self, space: Space) -> u32 {
        let Index { spaces, numbers, free_numbers, .. } = self;
        *numbers.entry(space).or_insert_with(|| {
            let totals = SpaceTotals { space, blocks: 0, pages: 0 };
            match free_numbers.pop() {
                Some(number) => {
                    spaces[number as usize] = totals;
                    number
                }
                None => {
                    spaces.push(totals);
                    (spaces.len() - 1) as u32
                }
            }
        })
    }

    fn slot(&self, space: u32, hash: &BlockHash) -> Option<u32> {
        let bits = table_hash(space, hash);
        let is_it = |&slot: &u32| {
            let entry = self.at(slot);
            entry.hash == *hash && entry.space == space
        };
        self.tables[table_of(bits)].find(bits, is_it).copied()
    }

    fn grow(&mut self) {
        let first = self.slots();
        self.chunks.push(vec![NO_ENTRY; CHUNK].into_boxed_slice());
        self.free.extend((first..first + CHUNK as u32).rev());
    }

    fn at(&self, slot: u32) -> &Entry {
        &self.chunks[slot as usize / CHUNK][slot as usize % CHUNK]
    }

    fn at_mut(&mut self, slot: u32) -> &mut Entry {
        &mut self.chunks[slot as usize / CHUNK][slot as usize % CHUNK]
    }
}

/// Mixes a space and a block hash. Hashes of real engines are uniform; the multiplication also spreads others, and keeps
/// equal hashes of different spaces apart.
fn table_hash(space: u32, hash: &BlockHash) -> u64 {
    let bits = u128::from_le_bytes(hash.0);
    let folded = (bits as u64) ^ ((bits >> 64) as u64).rotate_left(29) ^ u64::from(space).rotate_left(47);
    let product = u128::from(folded) * 0x9E37_79B9_7F4A_7C15;
    (product as u64) ^ ((product >> 64) as u64)
}

/// The table of a hash. Uses bits that hashbrown needs neither for the bucket (low bits) nor for the tag (top seven).
fn table_of(bits: u64) -> usize {
    (bits >> 48) as usize % TABLES
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use kvlane_block::{CutDigest, Namespace};
    use kvlane_policy::{CacheModel, PolicyKind};
    use proptest::prelude::*;

    use super::*;

    fn key(space: u8, hash: u32) -> BlockKey {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&hash.to_le_bytes());
        let space = Space { namespace: Namespace([space; 16]), cut: CutDigest([space; 16]) };
        BlockKey { space, hash: BlockHash(bytes) }
    }

    #[test]
    fn a_million_blocks_take_at_most_64_bytes_each() {
        let mut index = Index::new();
        index.add_device(1000);
        for number in 0..1_000_000u32 {
            let segment = SegmentNumber(number / 1000);
            let location = Location { device: 0, segment, page: number % 1000 + 1, pages: 1 };
            index.insert(&key(0, number.wrapping_mul(0x9E37_79B1)), location);
        }
        let each = index.memory_bytes() as f64 / 1e6;
        assert!(each <= 64.0, "{each} bytes a block");
    }

    /// One after the other, each another one.
    fn memos() -> impl FnMut() -> Memo {
        let mut cache = CacheModel::new(PolicyKind::Learned, 10);
        move || {
            cache.request(&[7, 8], |_| ());
            cache.memo(7).unwrap_or_default()
        }
    }

    proptest! {
        #[test]
        fn it_is_a_map_and_its_segments_list_it(
            steps in prop::collection::vec((0u8..5, 0u8..2, 0u32..24, 0u8..2, 0u32..4, 1u32..32), 1..300)
        ) {
            let mut index = Index::new();
            index.add_device(4);
            index.add_device(4);
            let mut model: BTreeMap<BlockKey, (Location, u8, Memo)> = BTreeMap::new();
            let mut memos = memos();
            for (step, space, hash, device, segment, page) in steps {
                let (key, segment) = (key(space, hash), SegmentNumber(segment));
                // A page of a segment holds one record: who is there leaves.
                let location = Location { device, segment, page, pages: hash % 3 + 1 };
                match step {
                    0 | 1 => {
                        let there = model.iter().find(|(other, (at, ..))| {
                            **other != key && (at.device, at.segment, at.page) == (device, segment, page)
                        });
                        if let Some(other) = there.map(|(other, _)| *other) {
                            model.remove(&other);
                            index.remove(&other);
                        }
                        let memo = model.get(&key).map_or(Memo::NOTHING, |(.., memo)| *memo);
                        if model.get(&key).map(|(at, ..)| *at) != Some(location) {
                            model.insert(key, (location, 0, memo));
                        }
                        index.insert(&key, location);
                    }
                    2 => {
                        let expected = model.remove(&key).map(|(at, ..)| at);
                        prop_assert_eq!(index.remove(&key), expected);
                    }
                    3 => {
                        let memo = memos();
                        index.remember(&key, memo);
                        if let Some((.., known)) = model.get_mut(&key) {
                            *known = memo;
                        }
                    }
                    _ => {
                        index.touch(&key);
                        if let Some((_, reads, _)) = model.get_mut(&key) {
                            *reads += 1;
                        }
                    }
                }
                prop_assert_eq!(index.blocks(), model.len());
                let pages: u64 = model.values().map(|(at, ..)| u64::from(at.pages)).sum();
                prop_assert_eq!(index.pages(), pages);
                for number in 0..2 {
                    let space = super::tests::key(number, 0).space;
                    let of_it: Vec<u64> = model
                        .iter()
                        .filter(|(key, _)| key.space == space)
                        .map(|(_, (at, ..))| u64::from(at.pages))
                        .collect();
                    let expected = (!of_it.is_empty()).then(|| (of_it.len() as u64, of_it.iter().sum::<u64>()));
                    let found = index.spaces().find(|(found, ..)| *found == space);
                    prop_assert_eq!(found.map(|(_, blocks, pages)| (blocks, pages)), expected);
                }
                prop_assert!(index.spaces.len() <= 2, "numbers are used again");
            }
            for device in 0..2 {
                for segment in (0..4).map(SegmentNumber) {
                    let live = index.live(device, segment);
                    let mut expected: Vec<Live> = model
                        .iter()
                        .filter(|(_, (at, ..))| at.device == device && at.segment == segment)
                        .map(|(&key, &(at, reads, memo))| Live { key, page: at.page, pages: at.pages, reads, memo })
                        .collect();
                    expected.sort_by_key(|live| live.page);
                    prop_assert_eq!(live, expected);
                }
            }
            let all: Vec<BlockKey> = (0..index.slots()).filter_map(|slot| index.key_at(slot)).collect();
            prop_assert!(model.iter().all(|(key, (.., memo))| index.memo(key) == Some(*memo)));
            prop_assert_eq!(all.len(), model.len());
            prop_assert!(all.iter().all(|key| model.contains_key(key) && index.find(key).is_some()));
        }
    }
}
