//! A worker's blocks, and the copies that its own process makes between them and its mapping of the pool.
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

/// A worker's blocks, in host memory or on a GPU. The caller of [`new`](Self::new) vouches for them.
#[derive(Debug, Clone)]
pub struct OwnBlocks {
    groups: Vec<WorkerGroupSpec>,
    layouts: Vec<Option<ShardLayout>>,
    layers: Vec<Vec<u32>>,
    gpu: Option<Arc<WorkerGpu>>,
}

impl OwnBlocks {
    /// `gpu` is the GPU that holds the regions; None for host memory.
    ///
    /// # Safety
    /// The regions stay readable and writable memory of this process (of `gpu`, if there is one) until this, its clones and the
    /// [`OwnCopies`] made from them are dropped. From the call that names them to the end of their job, the blocks of a save do
    /// not change, and nothing else uses the blocks of a load.
    pub unsafe fn new(groups: Vec<WorkerGroupSpec>, gpu: Option<Arc<WorkerGpu>>) -> Self {
        Self { groups, layouts: Vec::new(), layers: Vec::new(), gpu }
    }

    /// Adds descriptions of the groups' shards, in the order of the groups; None for a group without one.
    #[must_use]
    pub fn described(self, layouts: Vec<Option<ShardLayout>>) -> Self {
        Self { layouts, ..self }
    }

    /// Tells for each group in which order the model reads its regions: see [`GroupMemory::read_by`].
    #[must_use]
    pub fn read_by(self, layers: Vec<Vec<u32>>) -> Self {
        Self { layers, ..self }
    }

    /// As given to [`new`](Self::new).
    pub fn groups(&self) -> &[WorkerGroupSpec] {
        &self.groups
    }

    /// The GPU that holds the regions.
    pub fn gpu(&self) -> Option<&Arc<WorkerGpu>> {
        self.gpu.as_ref()
    }

    /// The own copies of a rank, for the thread that makes them: it drops this after its last copy.
    ///
    /// # Errors
    /// [`LayoutError`] if a region is inconsistent, or the blocks are too small to be sliced.
    pub fn of_rank(&self, rank: Rank) -> Result<OwnCopies, LayoutError> {
        let layouts = self.layouts.iter().cloned().chain(std::iter::repeat(None));
        let layers = self.layers.iter().cloned().chain(std::iter::repeat(Vec::new()));
        let group = |((spec, layout), layers): ((&WorkerGroupSpec, _), _)| {
            Ok(GroupMemory::new(spec.clone(), rank)?.described(layout).read_by(layers))
        };
        let groups = self.groups.iter().zip(layouts).zip(layers).map(group);
        Ok(OwnCopies { groups: groups.collect::<Result<_, _>>()?, gpu: self.gpu.clone() })
    }
}

/// The size of a copy that this process has made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Copied {
    /// Number of blocks, summed over groups.
    pub blocks: u64,
    /// Bytes of this rank's part of those blocks.
    pub bytes: u64,
}

/// Why this process could not copy.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum OwnError {
    /// The worker has fewer groups.
    #[error("no such group")]
    NoSuchGroup(u32),
    /// The numbers of block ids and pages do not match.
    #[error(transparent)]
    Pages(#[from] WrongPages),
    /// A block or a page does not exist.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A save needs a writable view.
    #[error("the pool is not mapped writable")]
    NotWritable,
    /// A save of blocks on a GPU.
    #[error("blocks on a GPU are copied by the daemon")]
    OnGpu,
    /// From the GPU's driver.
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

    /// Copies blocks of a load from the pool into the engine, on a GPU after this event. The pool's blocks do not change
    /// meanwhile, because they are leased until the scheduler hears of the end of the job. The daemon has no part in the copy.
    ///
    /// # Errors
    /// [`OwnError`]; then the bytes of the engine's blocks are undefined.
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

    /// Copies blocks from the engine's host memory to pages that were claimed for them. Until the claim is committed, no other
    /// uses these pages.
    ///
    /// # Errors
    /// [`OwnError`]; then the bytes of the pages are undefined.
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
