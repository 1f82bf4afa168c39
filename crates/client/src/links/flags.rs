//! Assigns each load its flags: words in GPU memory that tell the engine's stream which layers have arrived.

use kvlane_block::Region;
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

    /// Flags for a load of these groups that waits for this event, in the order in which the model reads the regions. None if
    /// there is no such event, no group has regions, or the load would need more than [`FLAGS_MAX`] flags.
    pub fn next(&mut self, event: u32, groups: &[(u32, &GroupMemory)]) -> Option<Flags> {
        let region_ends = region_ends(groups);
        let next = self.values.get_mut(event as usize)?;
        let value = *next;
        *next = next.wrapping_add(1);
        let address = word_address(self.first_word, event, 0);
        (!region_ends.is_empty() && region_ends.len() <= FLAGS_MAX).then(|| {
            let ends_in_slices = ends_in_slices(groups, &region_ends);
            let numbers = groups.iter().map(|(number, _)| *number).collect();
            Flags::new(address, value, numbers, region_ends, ends_in_slices)
        })
    }
}

/// For each flag, how many regions of each group come before it.
fn region_ends(groups: &[(u32, &GroupMemory)]) -> Vec<Vec<u32>> {
    let regions = |(place, (_, group)): (usize, &(u32, &GroupMemory))| {
        let bytes = group.regions().iter().map(Region::block_bytes).enumerate();
        let layers = bytes.map(|(region, bytes)| (group.layer_of(region), place, bytes));
        layers.collect::<Vec<_>>()
    };
    let mut order: Vec<(u32, usize, u64)> = groups.iter().enumerate().flat_map(regions).collect();
    // Stable, so that a group's regions stay in their order.
    order.sort_by_key(|(layer, place, _)| (*layer, *place));
    let (mut found, mut ends, mut bytes) = (Vec::new(), vec![0; groups.len()], 0);
    for (count, (_, place, of_block)) in (1..).zip(&order) {
        ends[*place] += 1;
        bytes += of_block;
        if bytes >= FLAG_BYTES || count == order.len() {
            found.push(ends.clone());
            bytes = 0;
        }
    }
    found
}

/// The same ends, flag by flag, counted in the regions of slices.
fn ends_in_slices(groups: &[(u32, &GroupMemory)], region_ends: &[Vec<u32>]) -> Vec<u32> {
    let of_group = |(place, (_, group)): (usize, &(u32, &GroupMemory))| {
        group.ends_in_slices(&region_ends.iter().map(|ends| ends[place]).collect::<Vec<_>>())
    };
    let by_group: Vec<Vec<u32>> = groups.iter().enumerate().map(of_group).collect();
    (0..region_ends.len()).flat_map(|flag| by_group.iter().map(move |ends| ends[flag])).collect()
}

#[cfg(test)]
mod tests {
    use kvlane_block::Rank;

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
        let groups = [(0, &group)];
        let (first, second) = (table.next(2, &groups).unwrap(), table.next(2, &groups).unwrap());
        assert_eq!(first.address, 0x1000 + 2 * 1024);
        assert_eq!((first.value, second.value, second.address), (1, 2, first.address));
        assert_eq!(first.words().collect::<Vec<_>>(), [0x1800, 0x1804, 0x1808], "a flag for two layers each");
        assert_eq!(
            [1, 2, u32::MAX].map(|region| first.word_of(0, region)),
            [0x1800, 0x1804, 0x1808].map(Some)
        );
        assert_eq!(table.next(4, &groups), None, "there is no such event");
    }

    #[test]
    fn groups_take_turns_as_the_model_reads_their_layers() {
        // Layers 0, 1, 3 and 4 have windows, 2 and 5 do not.
        let window = group(4, 128 << 10).read_by(vec![0, 1, 3, 4]);
        let full = group(2, 256 << 10).read_by(vec![2, 5]);
        let flags = FlagTable::new(0x1000, 4).next(0, &[(0, &full), (1, &window)]).unwrap();
        assert_eq!(flags.ends_in_slices, [0, 2, 1, 2, 1, 4, 2, 4]);
        let words = |group, regions: &[u32]| -> Vec<_> {
            regions.iter().map(|region| flags.word_of(group, *region).map(|word| word - 0x1000)).collect()
        };
        assert_eq!(words(1, &[0, 1, 2, 3]), [0, 0, 8, 8].map(Some));
        assert_eq!(words(0, &[0, 1]), [4, 12].map(Some));
    }
}
