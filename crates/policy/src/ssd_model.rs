//! [`SsdModel`]: an SSD tier without bytes. It keeps the keys that a log of segments would keep as records.

use std::collections::VecDeque;

use crate::cleaning::{Cleaner, Worth};
use crate::ghost::KeyMap;
use crate::memo::Memo;

/// Blocks in a segment: as in one of 64 MiB with blocks of 2 MiB. Fewer in a tier that would have less than
/// `LEAST_SEGMENTS`.
const SEGMENT_BLOCKS: usize = 32;
const LEAST_SEGMENTS: usize = 16;
/// Segments that are kept free.
const FREE_SEGMENTS: usize = 2;

#[derive(Clone, Copy)]
struct Record {
    segment: usize,
    reads: u8,
    memo: Memo,
}

/// A tier that decides as the one in kvlane-ssd does, by a [`Cleaner`]. Memory is in proportion to its capacity.
pub struct SsdModel {
    cleaner: Cleaner,
    records: KeyMap<Record>,
    /// The keys that were written to each segment. Some may be in another segment by now.
    segments: Vec<Vec<u64>>,
    segment_blocks: usize,
    /// Full segments, the oldest first.
    full: VecDeque<usize>,
    free: Vec<usize>,
    open: usize,
}

impl SsdModel {
    /// An empty tier for `capacity` blocks.
    pub fn new(capacity: usize) -> Self {
        let segment_blocks = (capacity / LEAST_SEGMENTS).clamp(1, SEGMENT_BLOCKS);
        // The open segment, the free ones, and at least one that can be emptied.
        let count = (capacity / segment_blocks).max(FREE_SEGMENTS + 2);
        Self {
            cleaner: Cleaner::default(),
            records: KeyMap::default(),
            segments: vec![Vec::new(); count],
            segment_blocks,
            full: VecDeque::new(),
            free: (1..count).rev().collect(),
            open: 0,
        }
    }

    /// True if the tier has the block.
    pub fn contains(&self, key: u64) -> bool {
        self.records.contains_key(&key)
    }

    /// The mean hit density of the blocks given up lately, see [`Cleaner::given_up`].
    pub fn given_up(&self) -> Option<f32> {
        self.cleaner.given_up()
    }

    /// Reads a block, and returns its memo from when it was written or left the pool. None if the tier does not have
    /// it.
    pub fn read(&mut self, key: u64) -> Option<Memo> {
        let record = self.records.get_mut(&key)?;
        record.reads = record.reads.saturating_add(1);
        Some(record.memo)
    }

    /// Keeps the policy's memo of a block that left the pool, if the tier has the block.
    pub fn remember(&mut self, key: u64, memo: Memo) {
        if let Some(record) = self.records.get_mut(&key) {
            record.memo = memo;
        }
    }

    /// Writes a block, unless the tier has it. `density` gives the hit density of other blocks by key and memo, for the
    /// cleaner.
    pub fn write(&mut self, key: u64, memo: Memo, density: impl Fn(u64, Memo) -> Option<f32>) {
        if self.contains(key) {
            return;
        }
        while self.free.len() < FREE_SEGMENTS {
            self.clean(&density);
        }
        self.append(key, memo);
    }

    fn append(&mut self, key: u64, memo: Memo) {
        self.segments[self.open].push(key);
        self.records.insert(key, Record { segment: self.open, reads: 0, memo });
        if self.segments[self.open].len() == self.segment_blocks
            && let Some(next) = self.free.pop()
        {
            self.full.push_back(self.open);
            self.open = next;
        }
    }

    /// The records that are still in this segment.
    fn live(&self, segment: usize) -> Vec<(u64, Record)> {
        let record = |&key: &u64| Some((key, *self.records.get(&key)?));
        let live = self.segments[segment].iter().filter_map(record);
        live.filter(|(_, record)| record.segment == segment).collect()
    }

    fn clean(&mut self, density: &impl Fn(u64, Memo) -> Option<f32>) {
        let worth = |&(key, Record { reads, memo, .. }): &(u64, Record)| Worth {
            pages: 1,
            reads,
            density: density(key, memo),
        };
        let window = self.full.iter().take(Cleaner::window(self.full.len()));
        let live: Vec<Vec<(u64, Record)>> = window.map(|&segment| self.live(segment)).collect();
        let worths: Vec<Vec<Worth>> = live.iter().map(|live| live.iter().map(worth).collect()).collect();
        let Some(chosen) = self.cleaner.choose(&worths) else { return };
        let Some(segment) = self.full.remove(chosen) else { return };
        let kept = self.cleaner.split(&worths[chosen], self.segment_blocks as u32);
        for (key, _) in &live[chosen] {
            self.records.remove(key);
        }
        self.segments[segment].clear();
        self.free.insert(0, segment);
        for ((key, record), _) in live[chosen].iter().zip(kept).filter(|(_, kept)| *kept) {
            self.append(*key, record.memo);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing(_: u64, _: Memo) -> Option<f32> {
        None
    }

    #[test]
    fn it_holds_about_as_many_blocks_as_it_has_room_for_the_latest_ones() {
        for capacity in [1, 20, 500, 5000] {
            let mut ssd = SsdModel::new(capacity);
            (0..20_000).for_each(|key| ssd.write(key, Memo::default(), nothing));
            let held = (0..20_000).filter(|&key| ssd.contains(key)).count();
            assert!(held <= capacity.max(4) && held * 20 >= capacity * 15, "{held} of {capacity}");
            assert!((20_000 - held as u64..20_000).all(|key| ssd.contains(key)));
        }
    }

    #[test]
    fn what_is_read_stays_longer() {
        let mut ssd = SsdModel::new(640);
        for key in 0..5000 {
            ssd.write(key, Memo::default(), nothing);
            if key % 100 == 99 {
                assert_eq!((0..20).filter_map(|key| ssd.read(key)).count(), 20);
            }
        }
        assert!((0..20).all(|key| ssd.contains(key)) && !ssd.contains(100));
    }

    #[test]
    fn what_is_dense_stays_whether_or_not_it_is_read() {
        let mut ssd = SsdModel::new(640);
        let dense = |key: u64, _| Some(if key.is_multiple_of(50) { 0.1 } else { 0.001 });
        (0..3000).for_each(|key| ssd.write(key, Memo::default(), dense));
        let kept = (0..2000).filter(|&key| ssd.contains(key)).count();
        assert!(kept == 40 && ssd.contains(0) && ssd.contains(1950), "{kept}");
        assert!(ssd.given_up().is_some_and(|density| density < 0.002));
    }
}
