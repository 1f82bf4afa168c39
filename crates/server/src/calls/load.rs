//! Load: the daemon copies leased blocks from the pool into a worker's GPU.

use std::sync::Arc;

use kvlane_block::{BlockId, Rank, Region, shard_bytes};
use kvlane_engine_memory::{
    AskedFlags, BlockOffsets, FlagsError, GpuCopyError, GpuMemory, GroupPlaces, Member, PeerBlocks, Seat,
    parts_of,
};
use kvlane_memory::PoolPage;
use kvlane_proto::v1::{self, reply::Body as Answer};
use thiserror::Error;

use super::context::{Context, not_admitted};
use crate::{refusal::Refusal, shared::Shared};

/// Loads blocks for a worker on a GPU. Other workers copy from their own mapping of the pool.
pub(crate) fn load(context: &Context<'_>, load: &v1::Load) -> Result<Answer, Refusal> {
    let worker = context.greeted.worker.as_ref().ok_or_else(|| not_admitted(context.call))?;
    let worker = &worker.registered;
    let Some(PeerBlocks::Gpu(memory)) = &worker.memory else {
        return Err(Refusal::not_allowed("this worker loads by itself, from its mapping of the pool"));
    };
    let who = (context.greeted.info.engine_id.as_str(), worker.rank);
    let result = copy_in(context.shared, who, &worker.slices, memory, load)?;
    Ok(Answer::LoadResult(result))
}

/// Why a load is malformed, or its copy failed.
#[derive(Debug, Error)]
enum LoadError {
    #[error("group {group} does not exist: the worker has {groups}")]
    NoSuchGroup { group: u32, groups: usize },
    #[error("{blocks} block ids of {slices} slices came with {pages} pages")]
    Pages { blocks: usize, slices: usize, pages: usize },
    #[error("a block at page {page} is not inside the pool")]
    OutsidePool { page: PoolPage },
    #[error(transparent)]
    Flags(#[from] FlagsError),
    #[error(transparent)]
    Copy(#[from] GpuCopyError),
}

/// A copy that failed is refused as invalid too, although its request was right: workers treat all refused loads alike.
impl From<LoadError> for Refusal {
    fn from(error: LoadError) -> Self {
        Self::invalid(error)
    }
}

/// Copies leased blocks into the GPU of a rank of an engine. `slices` are the worker's, group by group.
fn copy_in(
    shared: &Shared,
    (engine_id, rank): (&str, Rank),
    slices: &[Vec<Vec<Region>>],
    memory: &Arc<GpuMemory>,
    load: &v1::Load,
) -> Result<v1::LoadResult, LoadError> {
    let flags = load.flags.as_ref().map(|flags| AskedFlags {
        address: flags.address,
        value: flags.value,
        region_ends: flags.region_ends.clone(),
    });
    let mut result = v1::LoadResult::default();
    let mut groups = Vec::with_capacity(load.groups.len());
    for group in &load.groups {
        let slices = slices
            .get(group.group as usize)
            .ok_or(LoadError::NoSuchGroup { group: group.group, groups: slices.len() })?;
        let blocks = group.block_ids.len();
        if group.pages.len() != blocks * slices.len() {
            let (pages, slices) = (group.pages.len(), slices.len());
            return Err(LoadError::Pages { blocks, slices, pages });
        }
        let mut offsets: Vec<BlockOffsets> = Vec::with_capacity(slices.len());
        for (index, slice) in slices.iter().enumerate() {
            let slice_bytes = shard_bytes(slice);
            let is_outside =
                |page: &PoolPage| page.offset().end_inside(slice_bytes, shared.arena.bytes()).is_none();
            let pages = group.pages[index * blocks..][..blocks].iter().map(|page| PoolPage(*page));
            if let Some(page) = pages.clone().find(is_outside) {
                return Err(LoadError::OutsidePool { page });
            }
            let ids = group.block_ids.iter().map(|id| BlockId(*id));
            offsets.push(ids.zip(pages.map(PoolPage::offset)).collect());
            result.bytes += blocks as u64 * slice_bytes;
        }
        groups.push(GroupPlaces { slices, places: offsets });
        result.blocks += blocks as u64;
    }
    let parts = parts_of(&groups, flags.as_ref(), &shared.arena)?;
    let ranks = ranks_that_share(slices, &load.groups);
    let seat = memory.may_share(result.bytes, ranks).then(|| Seat {
        engine_id: engine_id.to_owned(),
        first: rank.first_of(ranks),
        ranks: ranks as u32,
        rank,
    });
    let member = Arc::new(Member {
        memory: Arc::clone(memory),
        parts,
        epoch: load.epoch,
        beside_compute: load.beside_compute,
    });
    carry_out(shared, &member, load.event, seat)?;
    Ok(result)
}

/// How many ranks hold the same blocks in all of these groups; 1 if they differ, or if the rank's blocks are its own.
fn ranks_that_share(slices: &[Vec<Vec<Region>>], groups: &[v1::LoadGroup]) -> usize {
    let mut counts = groups.iter().map(|group| slices.get(group.group as usize).map_or(1, Vec::len));
    let first = counts.next().unwrap_or(1);
    if counts.all(|count| count == first) { first } else { 1 }
}

/// Copies together with the other ranks that load the same blocks now, or alone.
fn carry_out(
    shared: &Shared,
    member: &Arc<Member>,
    event: Option<u32>,
    seat: Option<Seat>,
) -> Result<(), GpuCopyError> {
    member.memory.wait_until_wanted(member.epoch, event)?;
    if let (Some(seat), Some(gpus)) = (seat.filter(|seat| seat.ranks > 1), &shared.gpus) {
        let conduct = GpuMemory::copy_in_together;
        if let Some(loaded) = shared.meetings.meet(seat, member, gpus.meet_within, conduct) {
            return loaded;
        }
    }
    member.memory.copy_in(member)
}
