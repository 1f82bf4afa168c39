//! A worker's blocks, and the copies that its process does by itself: from its mapping of the pool into its blocks, and from
//! its blocks into the pool.
#![expect(unsafe_code, reason = "blocks of the engine are vouched for where they are named, once")]

use std::sync::Arc;

use kvlane_block::{BlockId, LayoutError, PoolOffset, Rank, Region, Run, ShardLayout};
use kvlane_gpu::GpuError;
use kvlane_memory::{PoolPage, PoolView};
use thiserror::Error;

use crate::blocks::{BlockPages, GroupMemory, LoadGroup, WorkerGroupSpec, WrongPages};
use crate::gpu_worker::WorkerGpu;
use crate::own_copies::OwnMemory;
use crate::runs::{PlanError, plan_inside};

/// A worker's blocks, in host memory or on a GPU, which its owner vouches for.
#[derive(Debug, Clone)]
pub struct OwnBlocks {
    groups: Vec<WorkerGroupSpec>,
    layouts: Vec<Option<ShardLayout>>,
    gpu: Option<Arc<WorkerGpu>>,
}

impl OwnBlocks {
    /// `gpu` is the one that the regions lie on; None for host memory.
    ///
    /// # Safety
    /// Until this, its clones and what is made of them are dropped, the regions stay memory of this process (of `gpu`, if
    /// there is one), readable and writable. The blocks of a save do not change, and those of a load are used by nobody
    /// else, from the call that names them to the end of their job.
    pub unsafe fn new(groups: Vec<WorkerGroupSpec>, gpu: Option<Arc<WorkerGpu>>) -> Self {
        Self { groups, layouts: Vec::new(), gpu }
    }

    /// What the groups' shards consist of, in the order of the groups; a group without a layout is not described.
    #[must_use]
    pub fn described(self, layouts: Vec<Option<ShardLayout>>) -> Self {
        Self { layouts, ..self }
    }

    /// As they were described.
    pub fn groups(&self) -> &[WorkerGroupSpec] {
        &self.groups
    }

    /// The GPU that they lie on.
    pub fn gpu(&self) -> Option<&Arc<WorkerGpu>> {
        self.gpu.as_ref()
    }

    /// The copies that a rank does by itself. For the thread that copies: it drops this after its last copy.
    ///
    /// # Errors
    /// [`LayoutError`] for regions that make no sense, or too small to be shared.
    pub fn of_rank(&self, rank: Rank) -> Result<OwnCopies, LayoutError> {
        let layouts = self.layouts.iter().cloned().chain(std::iter::repeat(None));
        let group = |(spec, layout): (&WorkerGroupSpec, _)| {
            Ok(GroupMemory::new(spec.clone(), rank)?.described(layout))
        };
        let groups = self.groups.iter().zip(layouts).map(group);
        Ok(OwnCopies { groups: groups.collect::<Result<_, _>>()?, gpu: self.gpu.clone() })
    }
}

/// What a copy of this process brought.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Copied {
    /// Blocks of whichever groups.
    pub blocks: u64,
    /// Of this rank's part of those blocks.
    pub bytes: u64,
}

/// Why this process could not copy.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum OwnError {
    /// The worker has fewer groups.
    #[error("no such group")]
    NoSuchGroup(u32),
    /// Block ids and pages that do not fit together.
    #[error(transparent)]
    Pages(#[from] WrongPages),
    /// Blocks or places that do not exist.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A save into a view that is only read.
    #[error("the pool is not mapped writable")]
    NotWritable,
    /// A save of a worker on a GPU.
    #[error("blocks on a GPU are copied by the daemon")]
    OnGpu,
    /// What the driver says.
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

/// The copies of one rank's process.
#[derive(Debug)]
pub struct OwnCopies {
    groups: Vec<GroupMemory>,
    gpu: Option<Arc<WorkerGpu>>,
}

impl OwnCopies {
    /// The groups, with the slices of this rank.
    pub fn groups(&self) -> &[GroupMemory] {
        &self.groups
    }

    /// Copies blocks of a load from the pool into the engine, on a GPU after this event. The daemon has no part in it: the
    /// blocks are leased until the scheduler hears of the end of the job.
    ///
    /// # Errors
    /// [`OwnError`]; then what the engine's blocks hold is worth nothing.
    pub fn load(
        &self,
        groups: &[LoadGroup],
        event: Option<u32>,
        view: &PoolView,
    ) -> Result<Copied, OwnError> {
        let mut copied = Copied::default();
        for group in groups {
            let memory = self.group(group.group)?;
            let mut runs = Vec::new();
            for (regions, places) in memory.places(group)? {
                runs.extend(plan_in_view(regions, &places, view)?);
            }
            // SAFETY: the regions are valid memory, and these blocks this copy's, by the promise of `OwnBlocks::new`;
            // it was checked that the runs lie in the view.
            unsafe {
                match &self.gpu {
                    Some(gpu) => gpu.write(&runs, view.base(), event)?,
                    None => OwnMemory.write(&runs, view.base()),
                }
            }
            copied.blocks += group.block_ids.len() as u64;
            copied.bytes += runs.iter().map(|run| run.len).sum::<u64>();
        }
        Ok(copied)
    }

    /// Copies blocks of groups from the engine's host memory to pages that were claimed for them: the daemon gave them to this
    /// claim alone until it is committed.
    ///
    /// # Errors
    /// [`OwnError`]; then what the pages hold is worth nothing.
    pub fn save(&self, places: &[(u32, BlockPages)], view: &PoolView) -> Result<Copied, OwnError> {
        if self.gpu.is_some() {
            return Err(OwnError::OnGpu);
        }
        if !view.writable() {
            return Err(OwnError::NotWritable);
        }
        let mut copied = Copied::default();
        for (group, places) in places {
            let runs = plan_in_view(self.group(*group)?.shard(), places, view)?;
            // SAFETY: the regions are valid memory, and these blocks do not change, by the promise of `OwnBlocks::new`;
            // it was checked that the runs lie in the view, which is writable.
            unsafe { OwnMemory.read(&runs, view.base()) };
            copied.blocks += places.len() as u64;
            copied.bytes += runs.iter().map(|run| run.len).sum::<u64>();
        }
        Ok(copied)
    }

    fn group(&self, group: u32) -> Result<&GroupMemory, OwnError> {
        self.groups.get(group as usize).ok_or(OwnError::NoSuchGroup(group))
    }
}

fn plan_in_view(
    regions: &[Region],
    places: &[(BlockId, PoolPage)],
    view: &PoolView,
) -> Result<Vec<Run>, PlanError> {
    let blocks: Vec<(BlockId, PoolOffset)> = places.iter().map(|(id, page)| (*id, page.offset())).collect();
    plan_inside(regions, &blocks, view.bytes())
}
