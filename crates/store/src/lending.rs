//! Lends blocks of the pool to other hosts: which of theirs this one has, and where they lie while it lends them.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use kvlane_block::{BlockHash, PoolExtent, SealedShard, Space};
use kvlane_memory::PoolPage;

use crate::api::{LeaseId, OwnerId, SpaceId, StoredBlock};
use crate::entries::State;
use crate::index::Index;
use crate::store::Store;

/// Blocks that one hold of the lock finds or lends.
const BLOCKS_A_HOLD: usize = 256;

/// Blocks that stay where they are, unchanged, until this is dropped. Drop it only once nothing can read them for the
/// borrower any more.
pub struct Loan {
    store: Arc<Store>,
    lease: LeaseId,
    /// For each block that was asked for: extent and checksum of its shards. None: this pool does not have it.
    pub blocks: Vec<Option<Vec<SealedShard>>>,
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.store.release(OwnerId::LENDER, self.lease);
    }
}

impl Index {
    /// The space whose blocks these are, if they may go to other hosts.
    fn lent_space(&self, space: Space, shard_bytes: &[u64]) -> Option<SpaceId> {
        let mut alike = self.spaces_of(space.namespace, space.cut);
        alike.find(|found| self.spaces[*found].crosses_hosts && *self.shard_bytes(*found) == *shard_bytes)
    }

    /// Leases a visible block for the lender, and says where its shards lie.
    fn lend_block(
        &mut self,
        space: SpaceId,
        hash: &BlockHash,
        leased: &mut Vec<StoredBlock>,
    ) -> Option<Vec<SealedShard>> {
        let slot = self.entries.find(space, hash)?;
        let entry = self.entries.at(slot);
        if entry.state != State::Sealed {
            return None;
        }
        let row = entry.row;
        self.lease_blocks(space, &[slot], leased);
        let space = &self.spaces[space];
        let shard = |((page, crc32c), &bytes): ((PoolPage, u32), &u64)| SealedShard {
            extent: PoolExtent { offset: page.offset(), bytes },
            crc32c,
        };
        Some(space.rows.shards(row).zip(&space.shard_bytes).map(shard).collect())
    }
}

impl Store {
    /// From now on other hosts may have the space's blocks, and this one theirs. Call it only if the namespace means the same
    /// everywhere.
    pub fn let_cross_hosts(&self, space: SpaceId) {
        let mut index = self.index.lock();
        let found = &mut index.spaces[space];
        let has_news = !found.crosses_hosts && found.sealed > 0;
        found.crosses_hosts = true;
        if has_news {
            // Announcers have left these blocks out.
            index.journal.restart();
        }
    }

    /// The visible ones of these blocks, as ascending runs of positions. With `only_prefix` it ends at the first that is not
    /// visible. A block of the same space with other shards is not the same block.
    pub fn visible_runs(
        &self,
        space: Space,
        shard_bytes: &[u64],
        hashes: &[BlockHash],
        only_prefix: bool,
    ) -> Vec<Range<u32>> {
        let mut runs: Vec<Range<u32>> = Vec::new();
        let mut position = 0;
        for part in hashes.chunks(BLOCKS_A_HOLD) {
            let index = self.index.lock();
            // Between two holds the space may be forgotten.
            let Some(space) = index.lent_space(space, shard_bytes) else { break };
            for hash in part {
                if index.is_visible(space, hash) {
                    match runs.last_mut().filter(|run| run.end == position) {
                        Some(run) => run.end += 1,
                        None => runs.push(position..position + 1),
                    }
                } else if only_prefix {
                    return runs;
                }
                position += 1;
            }
        }
        runs
    }

    /// Lends the visible ones of these blocks. None if there is none.
    pub fn lend(
        self: &Arc<Self>,
        space: Space,
        shard_bytes: &[u64],
        hashes: &[BlockHash],
        now: Instant,
    ) -> Option<Loan> {
        let (mut blocks, mut leased) = (Vec::with_capacity(hashes.len()), Vec::new());
        for part in hashes.chunks(BLOCKS_A_HOLD) {
            let mut index = self.index.lock();
            match index.lent_space(space, shard_bytes) {
                Some(space) => {
                    blocks.extend(part.iter().map(|hash| index.lend_block(space, hash, &mut leased)));
                }
                None => blocks.extend(part.iter().map(|_| None)),
            }
        }
        if leased.is_empty() {
            return None;
        }
        let lease = self.index.lock().leases.insert(OwnerId::LENDER, now, leased);
        Some(Loan { store: Arc::clone(self), lease, blocks })
    }
}
