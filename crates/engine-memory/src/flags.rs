//! Flags: words in the worker's GPU memory that tell which layers of a load have arrived, so that an engine computes with the
//! first layers while the last are being copied.
//!
//! ```text
//!  engine  step n (idle)          n + 1 (idle)   step n + 2: forward pass
//!          bind: Load(e, flags)-.  vLLM learns    bind: which kind of step? --.- layer 0 -- layer 1 -- ... -- layer 31
//!          get_finished: released \ of step n                                  waits for flag 0 ... 0, 1 ... 7
//!                                  \                                           (cuStreamWaitValue32, in the stream)
//!  daemon                           '-- layers 0-3, flag 0, layers 4-7, flag 1, ..., layers 28-31, flag 7 --> LoadResult
//! ```
//! The daemon copies 256 KiB of each block at a time, and the GPU writes a flag after each part. A load of several groups goes
//! by the model's layers, whichever group they belong to:
//!
//! ```text
//!            layer 0   layer 1   layer 2   layer 3   layer 4   layer 5
//!  full                                              region 0  region 1
//!  window    region 0  region 1  region 2  region 3
//!            '------ flag 0 ---' '------ flag 1 ---' '------ flag 2 ---'     region ends (full, window): 0 2, 0 4, 2 4
//! ```

use std::ops::Range;
use std::sync::Arc;

use kvlane_block::{BlockId, PoolOffset, Region, shard_bytes};
use kvlane_gpu::{AddressMap, GpuError};
use kvlane_memory::Arena;
use thiserror::Error;

use crate::runs::{PlanError, Runs};

/// Offset of the flags in the GPU allocation that holds the worker's fence.
pub(crate) const FLAGS_OFFSET: u64 = 64 << 10;
/// Most copies of a worker in flight. Each holds an event, and that event's [`FLAGS_MAX`] words.
pub const EVENTS: u32 = 256;
/// Most flags of one load.
pub const FLAGS_MAX: usize = 256;
const WORD_BYTES: u64 = 4;
/// Offset of the end of the flags, in the same allocation.
pub(crate) const FLAGS_END: u64 = FLAGS_OFFSET + EVENTS as u64 * FLAGS_MAX as u64 * WORD_BYTES;
const _: () = assert!(FLAGS_OFFSET == 65_536 && FLAGS_END == 327_680, "as the diagram of this crate says");
/// Most flags that the daemon accepts in a request.
const FLAGS_ASKED_MAX: usize = 4096;

/// Blocks of an engine, each with the pool offset of one slice of it.
pub type BlockOffsets = Vec<(BlockId, PoolOffset)>;

/// Address of a flag of the load that waits for this event. `first_word` is the address of event 0's first flag.
pub const fn word_address(first_word: u64, event: u32, flag: u32) -> u64 {
    first_word + (event as u64 * FLAGS_MAX as u64 + flag as u64) * WORD_BYTES
}

/// The flags of one load, as its worker waits for them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flags {
    /// Address of the first word.
    pub address: u64,
    /// Written into each word. A stream that waits for it also resumes at higher values.
    pub value: u32,
    /// The groups of the load, in its order.
    groups: Vec<u32>,
    /// For each flag, how many regions of each group have arrived then.
    region_ends: Vec<Vec<u32>>,
    /// The same, flag by flag, counted in the regions of the blocks' slices, as the request names them.
    pub ends_in_slices: Vec<u32>,
}

impl Flags {
    /// `region_ends` ascends for each of `groups`, and is not empty.
    pub fn new(
        address: u64,
        value: u32,
        groups: Vec<u32>,
        region_ends: Vec<Vec<u32>>,
        ends_in_slices: Vec<u32>,
    ) -> Self {
        Self { address, value, groups, region_ends, ends_in_slices }
    }

    /// Address of the flag that says that this region of a group has arrived; None if the load has no blocks of the group.
    pub fn word_of(&self, group: u32, region: u32) -> Option<u64> {
        let place = self.groups.iter().position(|of| *of == group)?;
        let flag = self.region_ends.partition_point(|ends| ends.get(place).is_some_and(|end| *end <= region));
        Some(self.word(flag.min(self.region_ends.len().saturating_sub(1))))
    }

    /// Address of the flag that says that all has arrived.
    pub fn last_word(&self) -> u64 {
        self.word(self.region_ends.len().saturating_sub(1))
    }

    /// Addresses of all words.
    pub fn words(&self) -> impl Iterator<Item = u64> + '_ {
        (0..self.region_ends.len()).map(|flag| self.word(flag))
    }

    fn word(&self, flag: usize) -> u64 {
        self.address + WORD_BYTES * flag as u64
    }
}

/// One flag, written after a part of a load has arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flag {
    /// Address of the word.
    pub word: u64,
    /// The value to write.
    pub value: u32,
}

impl Flag {
    /// The same flag, by its address in this process.
    ///
    /// # Errors
    /// The word is not mapped here, or its address is no multiple of 4, so that a GPU would not write it as one word.
    pub(crate) fn local(self, map: &AddressMap) -> Result<Self, GpuError> {
        let word = map.local(self.word, WORD_BYTES)?;
        if !word.is_multiple_of(WORD_BYTES) {
            return Err(GpuError::Invalid(format!("a flag at {:#x}, which is no multiple of 4", self.word)));
        }
        Ok(Self { word, ..self })
    }
}

/// Runs of a load up to its next flag, or all runs of a load without flags.
#[derive(Debug)]
pub struct LoadPart {
    /// Empty if the flag ends at the same region as the flag before.
    pub runs: Runs,
    /// Written after the runs have arrived.
    pub flag: Option<Flag>,
}

/// The flags that a worker requests for a load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AskedFlags {
    /// Address of the first word; the others follow, 4 bytes each.
    pub address: u64,
    /// Written into every word. Streams that wait for it also resume at higher values.
    pub value: u32,
    /// Flag i is written once the first `region_ends[i * n + g]` regions of group g of n have arrived, counted over all its
    /// slices.
    pub region_ends: Vec<u32>,
}

/// Why a load cannot be cut into parts.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FlagsError {
    /// There are too many flags, or their ends do not ascend to the last region of each group.
    #[error("flags after regions {region_ends:?} of {regions:?}")]
    RegionEnds {
        /// As in the request.
        region_ends: Vec<u32>,
        /// Number of regions of each group, over all slices.
        regions: Vec<usize>,
    },
    /// The address of a flag overflows.
    #[error("a flag beyond the address space")]
    Address,
    /// A block or a pool offset does not exist.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

/// The blocks of one group of a load.
#[derive(Debug)]
pub struct GroupPlaces<'a> {
    /// The regions of each slice of a block.
    pub slices: &'a [Vec<Region>],
    /// Where each slice of each block lies.
    pub places: Vec<BlockOffsets>,
}

/// Plans a load: without flags the runs of each group's blocks, slice by slice; with flags those of all groups, cut after the
/// regions that a flag follows.
///
/// # Errors
/// [`FlagsError`]; then nothing is planned.
pub fn parts_of(
    groups: &[GroupPlaces<'_>],
    flags: Option<&AskedFlags>,
    pool: &Arc<Arena>,
) -> Result<Vec<LoadPart>, FlagsError> {
    let regions: Vec<usize> = groups.iter().map(|group| group.slices.iter().map(Vec::len).sum()).collect();
    let mut parts = Vec::new();
    let Some(AskedFlags { address, value, region_ends }) = flags else {
        for (group, regions) in groups.iter().zip(regions) {
            let mut runs = Runs::none(pool);
            extend(&mut runs, group, 0..regions)?;
            parts.push(LoadPart { runs, flag: None });
        }
        return Ok(parts);
    };
    let wrong = || FlagsError::RegionEnds { region_ends: region_ends.clone(), regions: regions.clone() };
    let flags = region_ends.chunks_exact(groups.len().max(1));
    let last = flags.clone().last().map(|ends| ends.iter().map(|end| *end as usize));
    if !flags.remainder().is_empty()
        || flags.len() > FLAGS_ASKED_MAX
        || !last.is_some_and(|ends| ends.eq(regions.iter().copied()))
    {
        return Err(wrong());
    }
    let mut begins = vec![0; groups.len()];
    for (index, ends) in (0u64..).zip(flags) {
        let word = address.checked_add(index * WORD_BYTES).ok_or(FlagsError::Address)?;
        let mut runs = Runs::none(pool);
        for ((group, begin), end) in groups.iter().zip(&mut begins).zip(ends) {
            let end = *end as usize;
            if end < *begin {
                return Err(wrong());
            }
            extend(&mut runs, group, *begin..end)?;
            *begin = end;
        }
        parts.push(LoadPart { runs, flag: Some(Flag { word, value: *value }) });
    }
    Ok(parts)
}

/// Adds the runs of these regions of a group, counted over all slices.
fn extend(runs: &mut Runs, group: &GroupPlaces<'_>, wanted: Range<usize>) -> Result<(), PlanError> {
    let mut before = 0;
    for (slice, places) in group.slices.iter().zip(&group.places) {
        let inside = |region: usize| region.saturating_sub(before).min(slice.len());
        let (first, end) = (inside(wanted.start), inside(wanted.end));
        if first < end {
            let offset = shard_bytes(&slice[..first]);
            // Saturates: an offset that overflows is outside the pool, which `extend` refuses.
            let inside = |extent: PoolOffset| PoolOffset(extent.0.saturating_add(offset));
            let moved: BlockOffsets = places.iter().map(|(id, extent)| (*id, inside(*extent))).collect();
            runs.extend(&slice[first..end], &moved)?;
        }
        before += slice.len();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kvlane_block::{Run, slice};
    use kvlane_gpu::MappedImport;
    use kvlane_memory::{ArenaOptions, HugePages, Numa};

    use super::*;

    fn pool() -> Arc<Arena> {
        let options =
            ArenaOptions { bytes: 64 << 10, hugepages: HugePages::Off, numa: Numa::Off, threads: 1 };
        Arc::new(Arena::create(&options, &|_| {}).unwrap())
    }

    fn places(places: &[(u32, u64)]) -> BlockOffsets {
        places.iter().map(|(id, offset)| (BlockId(*id), PoolOffset(*offset))).collect()
    }

    fn layers(count: u64) -> Vec<Region> {
        let layer = |layer: u64| Region {
            base: 0x10000 * (layer + 1),
            block_stride: 1024,
            blocks: 8,
            piece_bytes: 1024,
            piece_offsets: vec![0],
        };
        (0..count).map(layer).collect()
    }

    fn sorted(mut runs: Vec<Run>) -> Vec<Run> {
        runs.sort_unstable_by_key(|run| run.engine_addr);
        runs
    }

    #[test]
    fn parts_are_the_same_bytes_as_the_whole() {
        let groups = [GroupPlaces { slices: &[layers(5)], places: vec![places(&[(3, 0), (1, 8192)])] }];
        let flags = AskedFlags { address: 100, value: 7, region_ends: vec![2, 2, 5] };
        let parts = parts_of(&groups, Some(&flags), &pool()).unwrap();
        let flagged: Vec<_> = parts.iter().map(|part| part.flag).collect();
        assert_eq!(flagged, [100, 104, 108].map(|word| Some(Flag { word, value: 7 })));
        assert_eq!(parts.iter().map(|part| part.runs.as_slice().len()).collect::<Vec<_>>(), [4, 0, 6]);
        let whole = parts_of(&groups, None, &pool()).unwrap().remove(0).runs.as_slice().to_vec();
        assert_eq!(
            sorted(parts.iter().flat_map(|part| part.runs.as_slice()).copied().collect()),
            sorted(whole)
        );
        for ends in [vec![], vec![4], vec![3, 2, 5], vec![6]] {
            let flags = AskedFlags { region_ends: ends, ..flags.clone() };
            assert!(parts_of(&groups, Some(&flags), &pool()).is_err());
        }
    }

    #[test]
    fn parts_of_several_groups_go_by_flags_and_not_by_groups() {
        let (full, window) = ([layers(2)], [layers(4)]);
        let groups = [
            GroupPlaces { slices: &full, places: vec![places(&[(3, 0), (1, 8192)])] },
            GroupPlaces { slices: &window, places: vec![places(&[(6, 16384)])] },
        ];
        let asked =
            |region_ends: &[u32]| AskedFlags { address: 100, value: 7, region_ends: region_ends.to_vec() };
        let parts = parts_of(&groups, Some(&asked(&[0, 2, 1, 2, 2, 4])), &pool()).unwrap();
        let engine = |part: &LoadPart| -> Vec<u64> {
            sorted(part.runs.as_slice().to_vec()).iter().map(|run| run.engine_addr).collect()
        };
        let at = |layer: u64, block: u64| 0x10000 * (layer + 1) + 1024 * block;
        assert_eq!(engine(&parts[0]), [at(0, 6), at(1, 6)]);
        assert_eq!(engine(&parts[1]), [at(0, 1), at(0, 3)]);
        assert_eq!(engine(&parts[2]), [at(1, 1), at(1, 3), at(2, 6), at(3, 6)]);
        assert_eq!(parts_of(&groups, None, &pool()).unwrap().len(), 2, "a part for each group");
        for ends in [vec![2, 4, 2], vec![2, 3], vec![1, 3, 0, 4, 2, 4], vec![1, 4], vec![]] {
            assert!(parts_of(&groups, Some(&asked(&ends)), &pool()).is_err(), "{ends:?}");
        }
    }

    #[test]
    fn a_region_has_come_with_the_first_flag_that_counts_it() {
        let ends = vec![vec![0, 2], vec![0, 4], vec![2, 4]];
        let flags = Flags::new(0x1000, 7, vec![3, 5], ends, vec![0, 2, 0, 4, 2, 4]);
        let words = |group, regions: &[u32]| -> Vec<_> {
            regions.iter().map(|region| flags.word_of(group, *region).map(|word| word - 0x1000)).collect()
        };
        assert_eq!(words(5, &[0, 1, 2, 3, u32::MAX]), [0, 0, 4, 4, 8].map(Some));
        assert_eq!(words(3, &[0, 1]), [8, 8].map(Some));
        assert_eq!(words(4, &[0]), [None], "the load has no blocks of this group");
        assert_eq!((flags.last_word(), flags.words().count()), (0x1008, 3));
    }

    #[test]
    fn a_flag_is_a_whole_word_of_memory_that_is_mapped() {
        let map = MappedImport { engine_base: 0x1000, local_base: 0x50000, bytes: 0x100 };
        let map = AddressMap::new([map]).unwrap();
        let at = |word| Flag { word, value: 7 }.local(&map);
        assert_eq!(at(0x1004), Ok(Flag { word: 0x50004, value: 7 }));
        assert_eq!(at(0x10fc), Ok(Flag { word: 0x500fc, value: 7 }));
        for word in [0x1001, 0x1002, 0x1003, 0x10fa] {
            let sentence = format!("a flag at {word:#x}, which is no multiple of 4");
            assert_eq!(at(word), Err(GpuError::Invalid(sentence)));
        }
        for address in [0xffc, 0x10fd, 0x1100] {
            assert_eq!(at(address), Err(GpuError::NotImported { address, bytes: 4 }));
        }
    }

    #[test]
    fn flags_follow_the_layers_whichever_slice_brings_them() {
        let layers = layers(5);
        // 2560 bytes each: two layers and a half.
        let slices = slice(&layers, 2).unwrap();
        assert_eq!(slices.iter().map(Vec::len).collect::<Vec<_>>(), [3, 3]);
        let places = vec![places(&[(3, 0), (1, 4096)]), places(&[(3, 40960), (1, 8192)])];
        // After layer 1, and after layer 3, of which there are two halves before.
        let flags = AskedFlags { address: 100, value: 7, region_ends: vec![2, 5, 6] };
        let parts = parts_of(&[GroupPlaces { slices: &slices, places }], Some(&flags), &pool()).unwrap();
        let layers_of = |part: &LoadPart| -> Vec<(u64, u64)> {
            sorted(part.runs.as_slice().to_vec()).iter().map(|run| (run.engine_addr >> 16, run.len)).collect()
        };
        assert_eq!(layers_of(&parts[0]), [(1, 1024), (1, 1024), (2, 1024), (2, 1024)]);
        assert_eq!(layers_of(&parts[1]), [(3, 512), (3, 512), (3, 512), (3, 512), (4, 1024), (4, 1024)]);
        assert_eq!(layers_of(&parts[2]), [(5, 1024), (5, 1024)]);
        let halves: Vec<u64> = parts[1]
            .runs
            .as_slice()
            .iter()
            .filter(|run| run.len == 512)
            .map(|run| run.pool_offset.0)
            .collect();
        assert_eq!(halves, [2048, 4096 + 2048, 40960, 8192], "the end of slice 0, the start of slice 1");
    }
}
