//! A host's memory and store, and what its engine does: saves prompts, and looks at the bytes of hits.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use kvlane_block::{BlockHash, CutDigest, Namespace, PoolExtent, Space};
use kvlane_memory::{Arena, ArenaOptions, HugePages, Numa, PAGE_BYTES};
use kvlane_store::{
    Caller, Chain, ClaimOutcome, LeaseId, LookupGroup, OwnerId, ShardClaim, ShardNumber, Source, SpaceId,
    Store, StoreOptions, WriterId,
};

const MODEL: Namespace = Namespace([1; 16]);
const CUT: CutDigest = CutDigest([5; 16]);
pub(crate) const SPACE: Space = Space { namespace: MODEL, cut: CUT };
pub(crate) const SHARD_BYTES: [u64; 2] = [2 * PAGE_BYTES, PAGE_BYTES];
pub(crate) const BLOCK_BYTES: u64 = 3 * PAGE_BYTES;
pub(crate) const POOL_BLOCKS: u64 = 30;
const ENGINE: OwnerId = OwnerId(1);

/// Hashes of a prompt's blocks.
pub(crate) fn prompt(number: u8, blocks: u16) -> Vec<BlockHash> {
    let hash = |block: u16| {
        let mut hash = [number; 16];
        hash[1..3].copy_from_slice(&block.to_le_bytes());
        BlockHash(hash)
    };
    (0..blocks).map(hash).collect()
}

pub(crate) struct Pool {
    pub(crate) arena: Arc<Arena>,
    pub(crate) store: Arc<Store>,
    space: SpaceId,
    /// Blocks whose bytes were changed here. This host's own hits do not show that.
    damaged: HashSet<BlockHash>,
}

/// The bytes of an extent.
#[allow(unsafe_code, clippy::mut_from_ref, reason = "the pool is shared memory, in one thread")]
pub(crate) fn bytes_at(arena: &Arena, at: PoolExtent) -> &mut [u8] {
    // SAFETY: The simulation has one thread, and holds no bytes beyond a statement. Extents lie in the arena.
    unsafe { std::slice::from_raw_parts_mut(arena.base().add(at.offset.0 as usize), at.bytes as usize) }
}

fn content(hash: &BlockHash, shard: usize) -> Vec<u8> {
    let value = hash.0[0].wrapping_mul(31).wrapping_add(hash.0[1].wrapping_mul(7)).wrapping_add(shard as u8);
    let mut bytes = vec![value; SHARD_BYTES[shard] as usize];
    bytes[..16].copy_from_slice(&hash.0);
    bytes
}

impl Pool {
    pub(crate) fn new(source: Arc<dyn Source>) -> Pool {
        let options = ArenaOptions {
            bytes: POOL_BLOCKS * BLOCK_BYTES,
            hugepages: HugePages::Off,
            numa: Numa::Off,
            threads: 1,
        };
        let arena = Arc::new(Arena::create(&options, &|_| {}).unwrap());
        let store = Store::with_tiers(Arc::clone(&arena), StoreOptions::default(), None, vec![source]);
        let space = store.space(MODEL, "a model", CUT, &SHARD_BYTES);
        store.let_cross_hosts(space);
        Pool { arena, store, space, damaged: HashSet::new() }
    }

    pub(crate) fn group<'a>(&self, hashes: &'a [BlockHash]) -> LookupGroup<'a> {
        LookupGroup { space: self.space, tokens_per_block: 16, window_blocks: 0, hashes }
    }

    /// Saves a prompt. Returns the extents that it wrote.
    pub(crate) fn save(&mut self, blocks: &[BlockHash], now: Instant) -> Vec<PoolExtent> {
        let (mut claims, mut extents): (Vec<ShardClaim>, Vec<PoolExtent>) = Default::default();
        for (shard, bytes) in SHARD_BYTES.into_iter().enumerate() {
            let mut outcomes = Vec::new();
            let number = ShardNumber(shard as u32);
            let caller =
                Caller { owner: ENGINE, writer: WriterId(10), space: self.space, shard: number, now };
            self.store.claim(&caller, Chain::Start, blocks, &mut outcomes);
            for (outcome, hash) in outcomes.iter().zip(blocks) {
                if let ClaimOutcome::Claimed(claim) = outcome {
                    let extent = PoolExtent { offset: claim.page.offset(), bytes };
                    bytes_at(&self.arena, extent).copy_from_slice(&content(hash, shard));
                    extents.push(extent);
                    claims.push(*claim);
                }
            }
        }
        self.store.commit(&claims, now);
        while self.store.seal_pending() {}
        extents
    }

    /// Looks a prompt up: the lease, and how many blocks are a hit.
    ///
    /// # Errors
    /// A block of it has wrong bytes.
    pub(crate) fn hit(
        &self,
        blocks: &[BlockHash],
        now: Instant,
    ) -> Result<Option<(LeaseId, u64)>, BlockHash> {
        let Some(hit) = self.store.lookup(ENGINE, &[self.group(blocks)], u64::MAX, now) else {
            return Ok(None);
        };
        for (pages, hash) in hit.groups[0].pages.chunks(SHARD_BYTES.len()).zip(blocks) {
            for (shard, page) in pages.iter().enumerate() {
                let extent = PoolExtent { offset: page.offset(), bytes: SHARD_BYTES[shard] };
                if *bytes_at(&self.arena, extent) != content(hash, shard) && !self.damaged.contains(hash) {
                    return Err(*hash);
                }
            }
        }
        Ok(Some((hit.lease, hit.tokens / 16)))
    }

    pub(crate) fn release(&self, lease: LeaseId) {
        self.store.release(ENGINE, lease);
    }

    /// Changes a bit of a visible block behind the store's back.
    pub(crate) fn damage(&mut self, hash: BlockHash, now: Instant) {
        let Some(loan) = self.store.lend(SPACE, &SHARD_BYTES, &[hash], now) else { return };
        let shard = loan.blocks[0].as_ref().unwrap()[1];
        bytes_at(&self.arena, shard.extent)[77] ^= 4;
        self.damaged.insert(hash);
    }

    pub(crate) fn drop_all(&self) {
        self.store.drop_namespace(MODEL);
    }
}
