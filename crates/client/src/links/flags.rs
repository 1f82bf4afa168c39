//! The words that say how far a load is: where they lie in GPU memory, and what is written into them.

use super::group::GroupMemory;

/// Most flags of one load.
pub const FLAGS_MAX: usize = 256;
/// Bytes of each block between two flags: pieces of so many layers are copied about as fast as all layers at once.
const FLAG_BYTES: u64 = 256 << 10;

/// The flags of one load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flags {
    /// Address of the first word.
    pub address: u64,
    /// Written into each word. A stream that waits for it also goes on at higher values.
    pub value: u32,
    /// Flag i says that the block's first `region_ends[i]` regions are there.
    region_ends: Vec<u32>,
    /// The same counted in the regions of the block's slices, as the daemon is told.
    pub ends_in_slices: Vec<u32>,
}

impl Flags {
    /// The word that says that a region is there.
    pub fn word_of(&self, region: u32) -> u64 {
        let flag = self.region_ends.partition_point(|end| *end <= region).min(self.region_ends.len() - 1);
        self.address + 4 * flag as u64
    }

    /// Addresses of all words.
    pub fn words(&self) -> impl Iterator<Item = u64> + '_ {
        (0..self.region_ends.len() as u64).map(|index| self.address + 4 * index)
    }
}

/// Where the flags of each event's load lie, and the value that its next load writes. Values ascend, so that a late write
/// for a former load does not satisfy who waits for a new one.
#[derive(Debug, Clone)]
pub struct FlagTable {
    first_word: u64,
    values: Vec<u32>,
}

impl FlagTable {
    /// For so many events; the words of one lie behind those of the one before.
    pub fn new(first_word: u64, events: u32) -> Self {
        Self { first_word, values: vec![1; events as usize] }
    }

    /// Flags for a load of a group that waits for this event. None where its parts cannot be told apart by flags.
    pub fn next(&mut self, event: u32, group: &GroupMemory) -> Option<Flags> {
        let regions = group.regions();
        let mut region_ends = Vec::new();
        let mut bytes = 0;
        for (end, region) in (1u32..).zip(regions) {
            bytes += region.block_bytes();
            if bytes >= FLAG_BYTES || end as usize == regions.len() {
                region_ends.push(end);
                bytes = 0;
            }
        }
        let next = self.values.get_mut(event as usize)?;
        let value = *next;
        *next = next.wrapping_add(1);
        let address = self.first_word + u64::from(event) * FLAGS_MAX as u64 * 4;
        (!region_ends.is_empty() && region_ends.len() <= FLAGS_MAX).then_some(Flags {
            address,
            value,
            ends_in_slices: group.ends_in_slices(&region_ends),
            region_ends,
        })
    }
}

#[cfg(test)]
mod tests {
    use kvlane_block::Region;

    use super::*;
    use crate::jobs::WorkerGroupSpec;

    fn group(layers: u64, piece_bytes: u64) -> GroupMemory {
        let layer = |layer: u64| Region {
            base: layer << 30,
            block_stride: piece_bytes,
            blocks: 8,
            piece_bytes,
            piece_offsets: vec![0],
        };
        let regions = (0..layers).map(layer).collect();
        GroupMemory::new(WorkerGroupSpec { namespace: [1; 16], layout: [2; 16], regions, replicas: 1 }, 0)
            .unwrap()
    }

    #[test]
    fn each_load_of_an_event_has_the_same_words_and_a_higher_value() {
        let mut table = FlagTable::new(0x1000, 4);
        let group = group(6, 128 << 10);
        let (first, second) = (table.next(2, &group).unwrap(), table.next(2, &group).unwrap());
        assert_eq!(first.address, 0x1000 + 2 * 1024);
        assert_eq!((first.value, second.value, second.address), (1, 2, first.address));
        assert_eq!(first.words().collect::<Vec<_>>(), [0x1800, 0x1804, 0x1808], "a flag for two layers each");
        assert_eq!((first.word_of(1), first.word_of(2), first.word_of(u32::MAX)), (0x1800, 0x1804, 0x1808));
        assert_eq!(table.next(4, &group), None, "there is no such event");
    }
}
