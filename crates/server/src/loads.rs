//! Loads that the daemon carries out: pool to GPU.

use kvlane_block::{Region, plan, shard_bytes};
use kvlane_memory::PAGE_BYTES;
use kvlane_proto::v1;

use crate::{
    Shared,
    gpu::{GpuMemory, Part},
};

/// Most flags that one load may have.
const FLAGS_MAX: usize = 4096;

/// Copies leased blocks into a worker's GPU. `regions` are the worker's, group by group.
pub(crate) fn load(
    shared: &Shared,
    regions: &[Vec<Region>],
    memory: &GpuMemory,
    load: &v1::Load,
) -> Result<v1::LoadResult, String> {
    if load.flags.is_some() && load.groups.len() != 1 {
        return Err(format!("a load with flags has one group, not {}", load.groups.len()));
    }
    let mut result = v1::LoadResult::default();
    let mut parts = Vec::new();
    for group in &load.groups {
        let regions = regions.get(group.group as usize).ok_or_else(|| {
            format!("group {} does not exist: the worker has {}", group.group, regions.len())
        })?;
        if group.block_ids.len() != group.pages.len() {
            return Err(format!("{} block ids came with {} pages", group.block_ids.len(), group.pages.len()));
        }
        let shard_bytes = shard_bytes(regions);
        let places = group.block_ids.iter().zip(&group.pages);
        let places: Vec<(u32, u64)> = places.map(|(&id, &page)| (id, u64::from(page) * PAGE_BYTES)).collect();
        let end = shared.arena.bytes().saturating_sub(shard_bytes);
        if let Some((_, offset)) = places.iter().find(|(_, offset)| *offset > end) {
            return Err(format!("a block at page {} is not inside the pool", offset / PAGE_BYTES));
        }
        parts.extend(cut(regions, &places, load.flags.as_ref())?);
        result.blocks += places.len() as u64;
        result.bytes += places.len() as u64 * shard_bytes;
    }
    // SAFETY: the runs lie in the arena, as checked above. The engine's scheduler holds a lease on the blocks until it
    // hears of the end of this load, so nobody writes them; what a wrong page names is only read. The engine set the
    // destination blocks aside, and the map lets nothing be written outside what it exported.
    unsafe { memory.copy_in(&parts, shared.arena.base(), load.epoch, load.event) }
        .map_err(|error| error.to_string())?;
    Ok(result)
}

/// The runs of a group's blocks, cut where a flag follows.
fn cut(
    regions: &[Region],
    places: &[(u32, u64)],
    flags: Option<&v1::LoadFlags>,
) -> Result<Vec<Part>, String> {
    let Some(v1::LoadFlags { address, value, region_ends }) = flags else {
        let runs = plan(regions, places).map_err(|error| error.to_string())?;
        return Ok(vec![Part { runs, flag: None }]);
    };
    let last = region_ends.last().map(|end| *end as usize);
    if last != Some(regions.len()) || region_ends.len() > FLAGS_MAX || !region_ends.is_sorted() {
        return Err(format!("flags after regions {region_ends:?} of {}", regions.len()));
    }
    let mut parts = Vec::with_capacity(region_ends.len());
    let (mut first, mut offset) = (0, 0);
    for (index, &end) in (0u64..).zip(region_ends) {
        let regions = &regions[first..end as usize];
        let moved: Vec<(u32, u64)> = places.iter().map(|(id, extent)| (*id, extent + offset)).collect();
        let runs = match regions {
            [] => Vec::new(),
            _ => plan(regions, &moved).map_err(|error| error.to_string())?,
        };
        let address = address.checked_add(index * 4).ok_or("a flag beyond the address space")?;
        parts.push(Part { runs, flag: Some((address, *value)) });
        offset += shard_bytes(regions);
        first = end as usize;
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use kvlane_block::Run;

    use super::*;

    #[test]
    fn parts_are_the_same_bytes_as_the_whole() {
        let region = |layer: u64| Region {
            base: 0x10000 * (layer + 1),
            block_stride: 64,
            blocks: 8,
            piece_bytes: 64,
            piece_offsets: vec![0],
        };
        let regions: Vec<Region> = (0..5).map(region).collect();
        let places = [(3, 0), (1, 4096)];
        let flags = v1::LoadFlags { address: 100, value: 7, region_ends: vec![2, 2, 5] };
        let parts = cut(&regions, &places, Some(&flags)).unwrap();
        let flagged: Vec<_> = parts.iter().map(|part| part.flag).collect();
        assert_eq!(flagged, [Some((100, 7)), Some((104, 7)), Some((108, 7))]);
        assert_eq!(parts.iter().map(|part| part.runs.len()).collect::<Vec<_>>(), [4, 0, 6]);
        let sorted = |mut runs: Vec<Run>| {
            runs.sort_unstable_by_key(|run| run.pool_offset);
            runs
        };
        let whole = cut(&regions, &places, None).unwrap().remove(0).runs;
        assert_eq!(sorted(parts.into_iter().flat_map(|part| part.runs).collect()), sorted(whole));
        for ends in [vec![], vec![4], vec![3, 2, 5], vec![6]] {
            let flags = v1::LoadFlags { region_ends: ends, ..flags.clone() };
            assert!(cut(&regions, &places, Some(&flags)).is_err());
        }
    }
}
