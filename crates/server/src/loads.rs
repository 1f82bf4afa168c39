//! Loads that the daemon carries out: pool to GPU.

use kvlane_block::{Region, plan, shard_bytes};
use kvlane_memory::PAGE_BYTES;
use kvlane_proto::v1;

use crate::{Shared, gpu::GpuMemory};

/// Copies leased blocks into a worker's GPU. `regions` are the worker's, group by group.
pub(crate) fn load(
    shared: &Shared,
    regions: &[Vec<Region>],
    memory: &GpuMemory,
    load: &v1::Load,
) -> Result<v1::LoadResult, String> {
    let mut result = v1::LoadResult::default();
    let mut runs = Vec::new();
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
        runs.extend(plan(regions, &places).map_err(|error| error.to_string())?);
        result.blocks += places.len() as u64;
        result.bytes += places.len() as u64 * shard_bytes;
    }
    // SAFETY: the runs lie in the arena, as checked above. The engine's scheduler holds a lease on the blocks until it
    // hears of the end of this load, so nobody writes them; what a wrong page names is only read. The engine set the
    // destination blocks aside, and the map lets nothing be written outside what it exported.
    unsafe { memory.copy_in(&runs, shared.arena.base(), load.epoch, load.event) }
        .map_err(|error| error.to_string())?;
    Ok(result)
}
