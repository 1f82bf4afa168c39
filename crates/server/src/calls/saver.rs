//! Carries out a save, batch by batch: claims the blocks, copies them out of the worker, and commits or aborts the claims.

use std::time::Instant;

use kvlane_block::{BlockHash, BlockId, HashError, Rank, Region, parse_hashes, shard_bytes};
use kvlane_engine_memory::{CopyCondition, Pace, PeerBlocks};
use kvlane_proto::{
    packed::{Outcome, pack_outcomes, pack_pages},
    v1,
};
use kvlane_store::{Caller, Chain, ClaimOutcome, OwnerId, ShardClaim, ShardNumber, WriterId};
use thiserror::Error;

use crate::{engines::OpenGroup, refusal::Refusal, save_gate::Inside, shared::Shared, traces::OpenSave};

/// The worker on whose behalf blocks are saved.
pub(crate) struct Saver<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) owner: OwnerId,
    pub(crate) writer: WriterId,
    pub(crate) rank: Rank,
    /// The worker's regions, group by group.
    pub(crate) regions: &'a [Vec<Region>],
    /// The engine's groups.
    pub(crate) open: &'a [OpenGroup],
    /// Held while the save is worked on, so that CancelSaves waits for it.
    pub(crate) inside: &'a Inside,
}

/// The blocks of one group of a save, parsed and checked.
pub(crate) struct Blocks {
    group: usize,
    chain: Chain,
    hashes: Vec<BlockHash>,
    ids: Vec<BlockId>,
}

/// Claims that were granted to a mapped worker, to be named in its commit.
pub(crate) struct Granted {
    /// The save that they are for.
    pub(crate) job: u64,
    pub(crate) claims: Vec<ShardClaim>,
    /// The traced requests among them.
    pub(crate) traced: Vec<OpenSave>,
}

/// Why a request to save is malformed.
#[derive(Debug, Error)]
pub(crate) enum SaveRequestError {
    #[error("group {group} does not exist: the engine has {groups}")]
    NoSuchGroup { group: usize, groups: usize },
    #[error(transparent)]
    Hashes(#[from] HashError),
    #[error("{hashes} hashes came with {ids} block ids")]
    Ids { hashes: usize, ids: usize },
    #[error("block id {id} is not below the {blocks} blocks that the worker registered")]
    NoSuchBlock { id: BlockId, blocks: u64 },
}

impl From<SaveRequestError> for Refusal {
    fn from(error: SaveRequestError) -> Self {
        Self::invalid(error)
    }
}

impl Saver<'_> {
    /// Checks what came over the wire.
    pub(crate) fn parse(&self, groups: &[v1::SaveGroup]) -> Result<Vec<Blocks>, SaveRequestError> {
        groups.iter().map(|group| self.parse_group(group)).collect()
    }

    fn parse_group(&self, group: &v1::SaveGroup) -> Result<Blocks, SaveRequestError> {
        let index = group.group as usize;
        let regions = self
            .regions
            .get(index)
            .filter(|_| index < self.open.len())
            .ok_or(SaveRequestError::NoSuchGroup { group: index, groups: self.open.len() })?;
        let hashes = parse_hashes(&group.hashes)?;
        if hashes.len() != group.block_ids.len() {
            return Err(SaveRequestError::Ids { hashes: hashes.len(), ids: group.block_ids.len() });
        }
        let blocks = regions.iter().map(|region| region.blocks).min().unwrap_or(0);
        let ids: Vec<BlockId> = group.block_ids.iter().map(|id| BlockId(*id)).collect();
        if let Some(&id) = ids.iter().find(|id| u64::from(id.0) >= blocks) {
            return Err(SaveRequestError::NoSuchBlock { id, blocks });
        }
        let chain = match group.parent.as_ref() {
            _ if self.open[index].window_blocks > 0 => Chain::Unchained,
            [] => Chain::Start,
            bytes => Chain::After(BlockHash::from_engine(bytes)?),
        };
        Ok(Blocks { group: index, chain, hashes, ids })
    }

    /// Copies blocks out of the worker, at its epoch and after its event.
    pub(crate) fn copy_out(
        &self,
        groups: &[Blocks],
        memory: &PeerBlocks,
        condition: CopyCondition,
        pace: &Pace<'_>,
    ) -> v1::SaveResult {
        let mut result = v1::SaveResult::default();
        for blocks in groups {
            let bytes_per_block = shard_bytes(&self.regions[blocks.group]).max(1);
            let step = usize::try_from(memory.batch_bytes() / bytes_per_block).unwrap_or(usize::MAX).max(1);
            let mut chain = blocks.chain;
            for (hashes, ids) in blocks.hashes.chunks(step).zip(blocks.ids.chunks(step)) {
                if self.inside.is_cancelled() {
                    let space = self.open[blocks.group].space;
                    self.shared.store.save_refused(self.owner, space, self.shard(), hashes, Instant::now());
                    result.failed += hashes.len() as u64;
                    continue;
                }
                self.copy_batch(blocks.group, chain, hashes, ids, memory, (condition, pace), &mut result);
                if let (Chain::Start | Chain::After(_), Some(last)) = (chain, hashes.last()) {
                    chain = Chain::After(*last);
                }
            }
        }
        result
    }

    #[allow(clippy::too_many_arguments, reason = "one batch of one loop")]
    fn copy_batch(
        &self,
        group: usize,
        chain: Chain,
        hashes: &[BlockHash],
        ids: &[BlockId],
        memory: &PeerBlocks,
        (condition, pace): (CopyCondition, &Pace<'_>),
        result: &mut v1::SaveResult,
    ) {
        let outcomes = self.claim_shards(group, chain, hashes);
        let mut claims = Vec::new();
        let mut copies = Vec::new();
        for (outcome, id) in outcomes.iter().zip(ids) {
            match outcome {
                ClaimOutcome::Claimed(claim) => {
                    claims.push(*claim);
                    copies.push((*id, claim.page.offset()));
                }
                ClaimOutcome::Present => result.present += 1,
                ClaimOutcome::InFlight => result.in_flight += 1,
                ClaimOutcome::NoRoom => result.no_room += 1,
            }
        }
        if claims.is_empty() {
            return;
        }
        // The claimed extents belong to these claims alone until they are committed or aborted below, and their bytes are
        // not read before they are sealed.
        let arena = &self.shared.arena;
        let copied = memory.copy_out(&self.regions[group], &copies, arena, condition, pace);
        match copied {
            Ok(()) => {
                self.shared.store.commit(&claims, Instant::now());
                result.saved += claims.len() as u64;
                result.bytes += claims.len() as u64 * shard_bytes(&self.regions[group]);
            }
            Err(error) => {
                // Log: these blocks could not be copied from the engine and are not kept; they are computed
                // again. Do: nothing if the engine ended; otherwise read the error.
                tracing::info!(%error, blocks = claims.len(), "save aborted");
                self.shared.store.abort(&claims, Instant::now());
                result.failed += claims.len() as u64;
            }
        }
    }

    /// Claims blocks that the worker will write itself.
    pub(crate) fn grant(&self, groups: &[Blocks]) -> (v1::ClaimResult, Vec<ShardClaim>) {
        let mut granted = Vec::new();
        let mut outcomes = Vec::new();
        let mut pages = Vec::new();
        for blocks in groups {
            for answer in self.claim_shards(blocks.group, blocks.chain, &blocks.hashes) {
                let (outcome, page) = match answer {
                    ClaimOutcome::Claimed(claim) => {
                        granted.push(claim);
                        (Outcome::Claimed, claim.page.0)
                    }
                    ClaimOutcome::Present => (Outcome::Present, 0),
                    ClaimOutcome::InFlight => (Outcome::InFlight, 0),
                    ClaimOutcome::NoRoom => (Outcome::NoRoom, 0),
                };
                outcomes.push(outcome);
                pages.push(page);
            }
        }
        let (outcome, pages) = (pack_outcomes(outcomes), pack_pages(pages));
        (v1::ClaimResult { outcome, pages, claim: 0 }, granted)
    }

    /// A rank saves the shard of its number.
    fn shard(&self) -> ShardNumber {
        ShardNumber(self.rank.0)
    }

    fn claim_shards(&self, group: usize, chain: Chain, hashes: &[BlockHash]) -> Vec<ClaimOutcome> {
        let mut outcomes = Vec::with_capacity(hashes.len());
        let (space, now) = (self.open[group].space, Instant::now());
        self.shared.store.claim(
            &Caller { owner: self.owner, writer: self.writer, space, shard: self.shard(), now },
            chain,
            hashes,
            &mut outcomes,
        );
        outcomes
    }
}
