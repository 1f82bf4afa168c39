//! Load: the daemon copies from the pool into a worker's GPU.

use std::{ops::Range, sync::Arc};

use kvlane_block::{Region, Run, plan, shard_bytes};
use kvlane_memory::PAGE_BYTES;
use kvlane_proto::v1::{self, reply::Body as Answer};

use super::context::{Context, not_admitted};
use crate::{
    gpu::{GpuCopyError, GpuMemory, Part},
    meetings::{Member, Seat},
    refusal::Refusal,
    shared::Shared,
    worker_memory::WorkerMemory,
};

/// Most flags that one load may have.
const FLAGS_MAX: usize = 4096;

/// Where the blocks of a load go, and where one slice of each lies in the pool: block id and byte offset.
type Places = Vec<(u32, u64)>;

/// What was promised to a worker on a GPU.
pub(crate) fn load(context: &Context<'_>, load: &v1::Load) -> Result<Answer, Refusal> {
    let worker = context.greeted.worker.as_ref().ok_or_else(|| not_admitted(context.call))?;
    let worker = &worker.registered;
    let Some(WorkerMemory::Gpu(memory)) = &worker.memory else {
        return Err(Refusal::not_allowed("this worker loads by itself, from its mapping of the pool"));
    };
    let who = (context.greeted.info.engine_id.as_str(), worker.rank);
    let result = copy_in(context.shared, who, &worker.slices, memory, load).map_err(Refusal::invalid)?;
    Ok(Answer::LoadResult(result))
}

/// Copies leased blocks into the GPU of a rank of an engine. `slices` are the worker's, group by group.
fn copy_in(
    shared: &Shared,
    (engine_id, rank): (&str, u32),
    slices: &[Vec<Vec<Region>>],
    memory: &Arc<GpuMemory>,
    load: &v1::Load,
) -> Result<v1::LoadResult, String> {
    if load.flags.is_some() && load.groups.len() != 1 {
        return Err(format!("a load with flags has one group, not {}", load.groups.len()));
    }
    let mut result = v1::LoadResult::default();
    let mut parts = Vec::new();
    for group in &load.groups {
        let slices = slices.get(group.group as usize).ok_or_else(|| {
            format!("group {} does not exist: the worker has {}", group.group, slices.len())
        })?;
        let blocks = group.block_ids.len();
        if group.pages.len() != blocks * slices.len() {
            let (pages, slices) = (group.pages.len(), slices.len());
            return Err(format!("{blocks} block ids of {slices} slices came with {pages} pages"));
        }
        let mut places: Vec<Places> = Vec::with_capacity(slices.len());
        for (index, slice) in slices.iter().enumerate() {
            let pages = &group.pages[index * blocks..][..blocks];
            let offsets = pages.iter().map(|page| u64::from(*page) * PAGE_BYTES);
            let found: Places = group.block_ids.iter().copied().zip(offsets).collect();
            let slice_bytes = shard_bytes(slice);
            let end = shared.arena.bytes().saturating_sub(slice_bytes);
            if let Some((_, offset)) = found.iter().find(|(_, offset)| *offset > end) {
                return Err(format!("a block at page {} is not inside the pool", offset / PAGE_BYTES));
            }
            places.push(found);
            result.bytes += blocks as u64 * slice_bytes;
        }
        parts.extend(cut(slices, &places, load.flags.as_ref())?);
        result.blocks += blocks as u64;
    }
    let ranks = ranks_that_share(slices, &load.groups);
    let seat = memory.may_share(result.bytes, ranks).then(|| Seat {
        engine_id: engine_id.to_owned(),
        first: rank - rank % ranks as u32,
        ranks: ranks as u32,
        rank,
    });
    let member = Arc::new(Member {
        memory: Arc::clone(memory),
        parts,
        epoch: load.epoch,
        beside_compute: load.beside_compute,
    });
    carry_out(shared, &member, load.event, seat).map_err(|error| error.to_string())?;
    Ok(result)
}

/// How many ranks hold all these groups' blocks alike; 1 for blocks of its own.
fn ranks_that_share(slices: &[Vec<Vec<Region>>], groups: &[v1::LoadGroup]) -> usize {
    let mut counts = groups.iter().map(|group| slices.get(group.group as usize).map_or(1, Vec::len));
    let first = counts.next().unwrap_or(1);
    if counts.all(|count| count == first) { first } else { 1 }
}

/// With the other ranks that have a seat, or alone.
fn carry_out(
    shared: &Shared,
    member: &Arc<Member>,
    event: Option<u32>,
    seat: Option<Seat>,
) -> Result<(), GpuCopyError> {
    member.memory.wait_until_wanted(member.epoch, event)?;
    let base = shared.arena.base();
    if let (Some(seat), Some(gpus)) = (seat.filter(|seat| seat.ranks > 1), &shared.gpus) {
        // SAFETY: as below, for each of them: none ends its load before this is over.
        let conduct = |members: &[Arc<Member>]| unsafe { GpuMemory::copy_in_together(members, base) };
        if let Some(loaded) = gpus.meetings.meet(seat, member, gpus.meet_within, conduct) {
            return loaded;
        }
    }
    // SAFETY: the runs lie in the arena, as checked before. The engine's scheduler holds a lease on the blocks until it
    // hears of the end of this load, so nobody writes them; what a wrong page names is only read. The engine set the
    // destination blocks aside, and the map lets nothing be written outside what it exported.
    unsafe { member.memory.copy_in(member, base) }
}

/// The runs of a group's blocks, cut where a flag follows.
fn cut(
    slices: &[Vec<Region>],
    places: &[Places],
    flags: Option<&v1::LoadFlags>,
) -> Result<Vec<Part>, String> {
    let regions: usize = slices.iter().map(Vec::len).sum();
    let Some(v1::LoadFlags { address, value, region_ends }) = flags else {
        return Ok(vec![Part { runs: runs_of(slices, places, 0..regions)?, flag: None }]);
    };
    let last = region_ends.last().map(|end| *end as usize);
    if last != Some(regions) || region_ends.len() > FLAGS_MAX || !region_ends.is_sorted() {
        return Err(format!("flags after regions {region_ends:?} of {regions}"));
    }
    let mut parts = Vec::with_capacity(region_ends.len());
    let mut first = 0;
    for (index, &end) in (0u64..).zip(region_ends) {
        let end = end as usize;
        let address = address.checked_add(index * 4).ok_or("a flag beyond the address space")?;
        parts.push(Part { runs: runs_of(slices, places, first..end)?, flag: Some((address, *value)) });
        first = end;
    }
    Ok(parts)
}

/// The runs of these regions, counted over all slices.
fn runs_of(slices: &[Vec<Region>], places: &[Places], wanted: Range<usize>) -> Result<Vec<Run>, String> {
    let mut runs = Vec::new();
    let mut before = 0;
    for (slice, places) in slices.iter().zip(places) {
        let inside = |region: usize| region.saturating_sub(before).min(slice.len());
        let (first, end) = (inside(wanted.start), inside(wanted.end));
        if first < end {
            let offset = shard_bytes(&slice[..first]);
            let moved: Places = places.iter().map(|(id, extent)| (*id, extent + offset)).collect();
            runs.extend(plan(&slice[first..end], &moved).map_err(|error| error.to_string())?);
        }
        before += slice.len();
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use kvlane_block::slice;

    use super::*;

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
        let (regions, places) = ([layers(5)], [vec![(3, 0), (1, 8192)]]);
        let flags = v1::LoadFlags { address: 100, value: 7, region_ends: vec![2, 2, 5] };
        let parts = cut(&regions, &places, Some(&flags)).unwrap();
        let flagged: Vec<_> = parts.iter().map(|part| part.flag).collect();
        assert_eq!(flagged, [Some((100, 7)), Some((104, 7)), Some((108, 7))]);
        assert_eq!(parts.iter().map(|part| part.runs.len()).collect::<Vec<_>>(), [4, 0, 6]);
        let whole = cut(&regions, &places, None).unwrap().remove(0).runs;
        assert_eq!(sorted(parts.into_iter().flat_map(|part| part.runs).collect()), sorted(whole));
        for ends in [vec![], vec![4], vec![3, 2, 5], vec![6]] {
            let flags = v1::LoadFlags { region_ends: ends, ..flags.clone() };
            assert!(cut(&regions, &places, Some(&flags)).is_err());
        }
    }

    #[test]
    fn flags_follow_the_layers_whichever_slice_brings_them() {
        let layers = layers(5);
        // 2560 bytes each: two layers and a half.
        let slices = slice(&layers, 2).unwrap();
        assert_eq!(slices.iter().map(Vec::len).collect::<Vec<_>>(), [3, 3]);
        let places = [vec![(3, 0), (1, 4096)], vec![(3, 40960), (1, 8192)]];
        // After layer 1, and after layer 3, of which there are two halves before.
        let flags = v1::LoadFlags { address: 100, value: 7, region_ends: vec![2, 5, 6] };
        let parts = cut(&slices, &places, Some(&flags)).unwrap();
        let layers_of = |part: &Part| -> Vec<(u64, u64)> {
            sorted(part.runs.clone()).iter().map(|run| (run.engine_addr >> 16, run.len)).collect()
        };
        assert_eq!(layers_of(&parts[0]), [(1, 1024), (1, 1024), (2, 1024), (2, 1024)]);
        assert_eq!(layers_of(&parts[1]), [(3, 512), (3, 512), (3, 512), (3, 512), (4, 1024), (4, 1024)]);
        assert_eq!(layers_of(&parts[2]), [(5, 1024), (5, 1024)]);
        let halves: Vec<u64> =
            parts[1].runs.iter().filter(|run| run.len == 512).map(|run| run.pool_offset).collect();
        assert_eq!(halves, [2048, 4096 + 2048, 40960, 8192], "the end of slice 0, the start of slice 1");
    }
}
