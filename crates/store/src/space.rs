//! Spaces and the extents of their blocks: a row of pages and checksums for each block.

use std::collections::BTreeMap;
use std::ops::{Index, IndexMut};

use kvlane_block::{CutDigest, Namespace};
use kvlane_memory::PoolPage;

use crate::entries::NONE;

/// A namespace with one cut.
pub(crate) struct Space {
    pub(crate) namespace: Namespace,
    pub(crate) name: String,
    pub(crate) cut: CutDigest,
    pub(crate) shard_bytes: Box<[u64]>,
    pub(crate) rows: Rows,
    /// Visible blocks.
    pub(crate) sealed: u64,
    pub(crate) hit_blocks: u64,
    pub(crate) missed_blocks: u64,
}

impl Space {
    pub(crate) fn block_bytes(&self) -> u64 {
        self.shard_bytes.iter().sum()
    }

    pub(crate) fn shards(&self) -> usize {
        self.shard_bytes.len()
    }
}

/// All spaces that are alive, by their number. The number of one that was forgotten is never given to another one.
#[derive(Default)]
pub(crate) struct Spaces {
    living: BTreeMap<u32, Space>,
    next: u32,
}

impl Spaces {
    /// Adds a space and answers its number.
    pub(crate) fn add(&mut self, space: Space) -> u32 {
        let number = self.next;
        self.next = number.checked_add(1).unwrap_or_else(|| unreachable!("four billion spaces"));
        self.living.insert(number, space);
        number
    }

    pub(crate) fn remove(&mut self, number: u32) -> Option<Space> {
        self.living.remove(&number)
    }

    /// In order of creation.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Space> {
        self.living.values()
    }

    /// The same with their numbers.
    pub(crate) fn numbered(&self) -> impl Iterator<Item = (u32, &Space)> {
        self.living.iter().map(|(number, space)| (*number, space))
    }
}

/// Of a space that is alive; who holds the number of one sees to that it stays so.
impl Index<usize> for Spaces {
    type Output = Space;

    fn index(&self, number: usize) -> &Space {
        &self.living[&(number as u32)]
    }
}

impl IndexMut<usize> for Spaces {
    fn index_mut(&mut self, number: usize) -> &mut Space {
        match self.living.get_mut(&(number as u32)) {
            Some(space) => space,
            None => unreachable!("space {number} was forgotten and is still in use"),
        }
    }
}

/// Rows a chunk holds.
const CHUNK: usize = 256;

/// One row a block: its slot, then page and crc32c of each shard; 4 + 8 bytes a shard, in chunks that never move.
pub(crate) struct Rows {
    /// Words a row has.
    width: usize,
    chunks: Vec<Box<[u32]>>,
    free: u32,
    used: usize,
}

impl Rows {
    pub(crate) fn new(shards: usize) -> Self {
        Self { width: 1 + 2 * shards, chunks: Vec::new(), free: NONE, used: 0 }
    }

    /// Stores the pages of a block's shards; the checksums are 0 until they are set.
    pub(crate) fn insert(&mut self, slot: u32, pages: &[PoolPage]) -> u32 {
        if self.free == NONE {
            self.grow();
        }
        let row = self.free;
        let words = self.words_mut(row);
        let next_free = words[1];
        words[0] = slot;
        for (pair, page) in words[1..].chunks_exact_mut(2).zip(pages) {
            pair.copy_from_slice(&[page.0, 0]);
        }
        self.free = next_free;
        self.used += 1;
        row
    }

    pub(crate) fn remove(&mut self, row: u32) {
        let free = self.free;
        let words = self.words_mut(row);
        words[0] = NONE;
        words[1] = free;
        self.free = row;
        self.used -= 1;
        if self.used == 0 {
            self.chunks = Vec::new();
            self.free = NONE;
        }
    }

    /// Page and crc32c of each shard.
    pub(crate) fn shards(&self, row: u32) -> impl Iterator<Item = (PoolPage, u32)> {
        self.words(row)[1..].chunks_exact(2).map(|pair| (PoolPage(pair[0]), pair[1]))
    }

    pub(crate) fn page(&self, row: u32, shard: usize) -> PoolPage {
        PoolPage(self.words(row)[1 + 2 * shard])
    }

    pub(crate) fn set_crc(&mut self, row: u32, shard: usize, crc: u32) {
        self.words_mut(row)[2 + 2 * shard] = crc;
    }

    /// Slot and row of each block.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, u32)> {
        let rows = self.chunks.iter().flat_map(|chunk| chunk.chunks_exact(self.width));
        (0u32..).zip(rows).filter(|(_, words)| words[0] != NONE).map(|(row, words)| (words[0], row))
    }

    /// Whether there is no row.
    pub(crate) fn is_empty(&self) -> bool {
        self.used == 0
    }

    fn grow(&mut self) {
        let first = (self.chunks.len() * CHUNK) as u32;
        let mut chunk = vec![0; CHUNK * self.width].into_boxed_slice();
        for (row, words) in (first..).zip(chunk.chunks_exact_mut(self.width)) {
            words[0] = NONE;
            words[1] = row + 1;
        }
        chunk[(CHUNK - 1) * self.width + 1] = NONE;
        self.chunks.push(chunk);
        self.free = first;
    }

    fn words(&self, row: u32) -> &[u32] {
        let start = row as usize % CHUNK * self.width;
        &self.chunks[row as usize / CHUNK][start..start + self.width]
    }

    fn words_mut(&mut self, row: u32) -> &mut [u32] {
        let start = row as usize % CHUNK * self.width;
        &mut self.chunks[row as usize / CHUNK][start..start + self.width]
    }
}
