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
//! The daemon copies 256 KiB of each block at a time, and the GPU writes a flag after each part.

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
    /// Flag i means that the block's first `region_ends[i]` regions have arrived.
    region_ends: Vec<u32>,
    /// The same ends counted in the regions of the block's slices, as the request names them.
    pub ends_in_slices: Vec<u32>,
}

impl Flags {
    /// `region_ends` ascends and is not empty.
    pub fn new(address: u64, value: u32, region_ends: Vec<u32>, ends_in_slices: Vec<u32>) -> Self {
        Self { address, value, region_ends, ends_in_slices }
    }

    /// Address of the flag that says that this region has arrived.
    pub fn word_of(&self, region: u32) -> u64 {
        let flag = self
            .region_ends
            .partition_point(|end| *end <= region)
            .min(self.region_ends.len().saturating_sub(1));
        self.address + WORD_BYTES * flag as u64
    }

    /// Addresses of all words.
    pub fn words(&self) -> impl Iterator<Item = u64> + '_ {
        (0..self.region_ends.len() as u64).map(|index| self.address + WORD_BYTES * index)
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

/// The flags that a worker requests for a load of one group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AskedFlags {
    /// Address of the first word; the others follow, 4 bytes each.
    pub address: u64,
    /// Written into every word. Streams that wait for it also resume at higher values.
    pub value: u32,
    /// Flag i is written once the group's first `region_ends[i]` regions have arrived, counted over all its slices.
    pub region_ends: Vec<u32>,
}

/// Why a load cannot be cut into parts.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FlagsError {
    /// There are too many flags, or their ends do not ascend to the last region.
    #[error("flags after regions {region_ends:?} of {regions}")]
    RegionEnds {
        /// As in the request.
        region_ends: Vec<u32>,
        /// Number of regions, over all slices.
        regions: usize,
    },
    /// The address of a flag overflows.
    #[error("a flag beyond the address space")]
    Address,
    /// A block or a pool offset does not exist.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

/// Plans a load: the runs of a group's blocks, slice by slice, cut after each region that a flag follows.
///
/// # Errors
/// [`FlagsError`]; then nothing is planned.
pub fn parts_of(
    slices: &[Vec<Region>],
    places: &[BlockOffsets],
    flags: Option<&AskedFlags>,
    pool: &Arc<Arena>,
) -> Result<Vec<LoadPart>, FlagsError> {
    let regions: usize = slices.iter().map(Vec::len).sum();
    let Some(AskedFlags { address, value, region_ends }) = flags else {
        return Ok(vec![LoadPart { runs: runs_of(slices, places, 0..regions, pool)?, flag: None }]);
    };
    let last = region_ends.last().map(|end| *end as usize);
    if last != Some(regions) || region_ends.len() > FLAGS_ASKED_MAX || !region_ends.is_sorted() {
        return Err(FlagsError::RegionEnds { region_ends: region_ends.clone(), regions });
    }
    let mut parts = Vec::with_capacity(region_ends.len());
    let mut first = 0;
    for (index, &end) in (0u64..).zip(region_ends) {
        let end = end as usize;
        let word = address.checked_add(index * WORD_BYTES).ok_or(FlagsError::Address)?;
        let runs = runs_of(slices, places, first..end, pool)?;
        parts.push(LoadPart { runs, flag: Some(Flag { word, value: *value }) });
        first = end;
    }
    Ok(parts)
}

/// The runs of these regions, counted over all slices.
fn runs_of(
    slices: &[Vec<Region>],
    places: &[BlockOffsets],
    wanted: Range<usize>,
    pool: &Arc<Arena>,
) -> Result<Runs, PlanError> {
    let mut runs = Runs::none(pool);
    let mut before = 0;
    for (slice, places) in slices.iter().zip(places) {
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
    Ok(runs)
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
        let (regions, places) = ([layers(5)], [places(&[(3, 0), (1, 8192)])]);
        let flags = AskedFlags { address: 100, value: 7, region_ends: vec![2, 2, 5] };
        let parts = parts_of(&regions, &places, Some(&flags), &pool()).unwrap();
        let flagged: Vec<_> = parts.iter().map(|part| part.flag).collect();
        assert_eq!(flagged, [100, 104, 108].map(|word| Some(Flag { word, value: 7 })));
        assert_eq!(parts.iter().map(|part| part.runs.as_slice().len()).collect::<Vec<_>>(), [4, 0, 6]);
        let whole = parts_of(&regions, &places, None, &pool()).unwrap().remove(0).runs.as_slice().to_vec();
        assert_eq!(
            sorted(parts.iter().flat_map(|part| part.runs.as_slice()).copied().collect()),
            sorted(whole)
        );
        for ends in [vec![], vec![4], vec![3, 2, 5], vec![6]] {
            let flags = AskedFlags { region_ends: ends, ..flags.clone() };
            assert!(parts_of(&regions, &places, Some(&flags), &pool()).is_err());
        }
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
        let places = [places(&[(3, 0), (1, 4096)]), places(&[(3, 40960), (1, 8192)])];
        // After layer 1, and after layer 3, of which there are two halves before.
        let flags = AskedFlags { address: 100, value: 7, region_ends: vec![2, 5, 6] };
        let parts = parts_of(&slices, &places, Some(&flags), &pool()).unwrap();
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
