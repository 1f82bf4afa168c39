//! Assigns each load its flags: words in GPU memory that tell the engine's stream which layers have arrived.

use kvlane_engine_memory::{FLAGS_MAX, word_address};

pub use kvlane_engine_memory::Flags;

use super::group::GroupMemory;

/// Bytes of each block between two flags. Copies of this size are about as fast as one copy of all layers.
const FLAG_BYTES: u64 = 256 << 10;

/// The flags of each event's load: where they lie, and the value that the next load writes. Values ascend, so that a late
/// write for a former load does not satisfy a stream that waits for a new one.
#[derive(Debug, Clone)]
pub struct FlagTable {
    first_word: u64,
    values: Vec<u32>,
}

impl FlagTable {
    /// `first_word`: address of the first flag of event 0. Each event's words follow those of the event before.
    pub fn new(first_word: u64, events: u32) -> Self {
        Self { first_word, values: vec![1; events as usize] }
    }

    /// Flags for a load of this group that waits for this event. None if there is no such event, the group has no regions, or
    /// the load would need more than [`FLAGS_MAX`] flags.
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
        let address = word_address(self.first_word, event, 0);
        (!region_ends.is_empty() && region_ends.len() <= FLAGS_MAX).then(|| {
            let ends_in_slices = group.ends_in_slices(&region_ends);
            Flags::new(address, value, region_ends, ends_in_slices)
        })
    }
}

#[cfg(test)]
mod tests {
    use kvlane_block::{Rank, Region};

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
        GroupMemory::new(
            WorkerGroupSpec { namespace: [1; 16], layout: [2; 16], regions, replicas: 1 },
            Rank(0),
        )
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
