//! Copies that this process does by itself: from the mapped pool into its blocks, and from its blocks into the pool.

use std::sync::Arc;

use kvlane_block::{Region, Run, plan};
use kvlane_engine_memory::OwnMemory;
use kvlane_memory::{PAGE_BYTES, PoolView};

use crate::{
    gpu::WorkerGpu,
    jobs::{Copied, LoadGroup},
    links::group::{GroupMemory, Places},
    pools::Mapped,
};

/// A worker's blocks, for copies of this process. Their memory is valid while the worker runs (`Worker::start`).
#[derive(Debug)]
pub(crate) struct OwnCopies {
    groups: Vec<GroupMemory>,
    gpu: Option<Arc<WorkerGpu>>,
}

impl OwnCopies {
    pub(crate) fn new(groups: Vec<GroupMemory>, gpu: Option<Arc<WorkerGpu>>) -> Self {
        Self { groups, gpu }
    }

    /// Copies blocks of a load from the pool into the engine, on a GPU after this event.
    pub(crate) fn load(
        &self,
        groups: &[LoadGroup],
        event: Option<u32>,
        pool: Option<&Mapped>,
    ) -> Result<Copied, String> {
        let view = &pool.ok_or("the pool of that boot is not mapped")?.reading;
        let mut copied = Copied::default();
        for group in groups {
            let memory = self.groups.get(group.group as usize).ok_or("no such group")?;
            let mut runs = Vec::new();
            for (regions, places) in memory.places(group)? {
                runs.extend(plan_in_pool(regions, &places, view)?);
            }
            // SAFETY: the regions are valid memory while the worker runs (`Worker::start`); the pages are leased
            // until the scheduler hears of the end of this job, and `plan_in_pool` checked that they lie in the view.
            unsafe {
                match &self.gpu {
                    Some(gpu) => {
                        gpu.write(&runs, view.base(), event).map_err(|error| error.to_string())?;
                    }
                    None => OwnMemory.write(&runs, view.base()),
                }
            }
            copied.blocks += group.block_ids.len() as u64;
            copied.bytes += runs.iter().map(|run| run.len).sum::<u64>();
        }
        Ok(copied)
    }

    /// Copies blocks of groups from the engine to pages that were claimed for them.
    pub(crate) fn save(&self, places: &[(u32, Places)], pool: Option<&Mapped>) -> Result<Copied, String> {
        let view = pool.and_then(|pool| pool.writing.as_ref()).ok_or("the pool is not mapped writable")?;
        let mut copied = Copied::default();
        for (group, places) in places {
            let regions = self.groups.get(*group as usize).ok_or("no such group")?.shard();
            let runs = plan_in_pool(regions, places, view)?;
            // SAFETY: the regions are valid memory while the worker runs (`Worker::start`); the daemon gave these pages
            // to this claim alone until it is committed, and `plan_in_pool` checked that they lie in the view.
            unsafe { OwnMemory.read(&runs, view.base()) };
            copied.blocks += places.len() as u64;
            copied.bytes += runs.iter().map(|run| run.len).sum::<u64>();
        }
        Ok(copied)
    }
}

fn plan_in_pool(regions: &[Region], places: &[(u32, u32)], view: &PoolView) -> Result<Vec<Run>, String> {
    let blocks: Vec<(u32, u64)> =
        places.iter().map(|&(id, page)| (id, u64::from(page) * PAGE_BYTES)).collect();
    let runs = plan(regions, &blocks).map_err(|error| error.to_string())?;
    match runs.iter().find(|run| run.pool_offset + run.len > view.bytes()) {
        Some(run) => Err(format!("{} bytes at {} are not inside the pool", run.len, run.pool_offset)),
        None => Ok(runs),
    }
}
