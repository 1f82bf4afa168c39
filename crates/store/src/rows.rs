//! The extents of a space's blocks: a row of pages and checksums for each block.

use kvlane_memory::PoolPage;

use crate::api::ShardNumber;

/// Marks the absence of a slot or row.
const NONE: u32 = u32::MAX;

/// Rows a chunk holds.
const CHUNK: usize = 256;

/// Index of a row among those of its space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Row(u32);

impl Row {
    /// The row of a gap, which has no extents.
    pub(crate) const NONE: Row = Row(NONE);
}

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
    pub(crate) fn insert(&mut self, slot: u32, pages: &[PoolPage]) -> Row {
        if self.free == NONE {
            self.grow();
        }
        let row = Row(self.free);
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

    pub(crate) fn remove(&mut self, row: Row) {
        let free = self.free;
        let words = self.words_mut(row);
        words[0] = NONE;
        words[1] = free;
        self.free = row.0;
        self.used -= 1;
        if self.used == 0 {
            self.chunks = Vec::new();
            self.free = NONE;
        }
    }

    /// Page and crc32c of each shard.
    pub(crate) fn shards(&self, row: Row) -> impl Iterator<Item = (PoolPage, u32)> {
        self.words(row)[1..].chunks_exact(2).map(|pair| (PoolPage(pair[0]), pair[1]))
    }

    pub(crate) fn page(&self, row: Row, shard: ShardNumber) -> PoolPage {
        PoolPage(self.words(row)[1 + 2 * shard.index()])
    }

    pub(crate) fn set_crc(&mut self, row: Row, shard: ShardNumber, crc: u32) {
        self.words_mut(row)[2 + 2 * shard.index()] = crc;
    }

    /// Slot and row of each block.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, Row)> {
        let rows = self.chunks.iter().flat_map(|chunk| chunk.chunks_exact(self.width));
        (0u32..).zip(rows).filter(|(_, words)| words[0] != NONE).map(|(row, words)| (words[0], Row(row)))
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

    fn words(&self, Row(row): Row) -> &[u32] {
        let start = row as usize % CHUNK * self.width;
        &self.chunks[row as usize / CHUNK][start..start + self.width]
    }

    fn words_mut(&mut self, Row(row): Row) -> &mut [u32] {
        let start = row as usize % CHUNK * self.width;
        &mut self.chunks[row as usize / CHUNK][start..start + self.width]
    }
}
