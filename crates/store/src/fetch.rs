//! Brings blocks of a prompt from the tier below back into the pool, as if an engine had saved them.
//!
//! ```text
//!   plan_fetch: would the tier make the hit longer? --> fetch: claim each block --> queue its read --> submit_reads
//!                                                                                                          |
//!   done() when the fetch's last block has come or failed  <-- end_read: visible, or the claim is aborted <'
//! ```
//! A block that another fetch brings already is not read twice: the fetch only waits for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use kvlane_block::{BlockHash, BlockKey, PoolExtent};
use kvlane_policy::{Memo, longest_hit};
use parking_lot::Mutex;

use crate::api::{
    Caller, Chain, ClaimOutcome, LookupGroup, OwnerId, ShardClaim, ShardNumber, SpaceId, WriterId,
};
use crate::fetches::{FetchWaiter, FetchWaiters, Read};
use crate::needs::needs;
use crate::store::Store;
use crate::tier::Tier;

/// Blocks in flight over all fetches. A prompt with more gets its first ones.
const IN_FLIGHT_BLOCKS: usize = 1 << 16;
/// Reads in flight in the tier. Further ones wait in [`Reads::queued`](crate::fetches::Reads::queued).
const READS_MAX: usize = 1024;
/// Blocks that one hold of the lock looks up.
const BLOCKS_A_HOLD: usize = 4096;

/// Missing blocks of one prompt and space that follow each other.
struct Stretch {
    space: SpaceId,
    chain: Chain,
    hashes: Vec<BlockHash>,
}

/// The blocks that a fetch would bring. Void once a namespace was dropped.
pub struct FetchPlan {
    stretches: Vec<Stretch>,
    /// [`Store::drops`] when the plan was made.
    drops: u64,
}

impl Store {
    /// Plans to bring the blocks of a prompt that only the tier has. None if they would not make the hit longer. None
    /// also while the tier is late with another read, because waiting would then take longer than computing.
    pub fn plan_fetch(&self, groups: &[LookupGroup<'_>], max_tokens: u64, now: Instant) -> Option<FetchPlan> {
        let tier = self.tier.as_ref()?;
        let drops = *self.drops.read();
        if self.fetches.reads.lock().is_late(now) {
            return None;
        }
        let stretches = self.missing(tier.as_ref(), groups, max_tokens);
        (!stretches.is_empty()).then_some(FetchPlan { stretches, drops })
    }

    /// Starts a planned fetch. `done` is called exactly once, when every block has come or failed; a lookup then finds
    /// what is there. Blocks that would miss `deadline` at the tier's rate are left out. A block that misses it all the
    /// same may still come later.
    pub fn fetch(
        self: &Arc<Self>,
        plan: FetchPlan,
        now: Instant,
        deadline: Instant,
        done: impl FnOnce() + Send + 'static,
    ) {
        let Some(tier) = &self.tier else { return done() };
        let waiter = Arc::new(FetchWaiter {
            blocks_left: AtomicUsize::new(1),
            done: Mutex::new(Some(Box::new(done))),
        });
        let within = deadline.saturating_duration_since(now);
        let most_bytes = self.fetches.reads.lock().rate.bytes_within(within).min(self.pool_bytes());
        let reads = {
            let drops = self.drops.read();
            if *drops == plan.drops {
                self.claim_missing(plan.stretches, &waiter, most_bytes, now)
            } else {
                Vec::new()
            }
        };
        self.fetches.reads.lock().queued.extend(reads.into_iter().map(|read| (read, deadline)));
        self.submit_reads(tier.as_ref());
        waiter.block_done();
    }

    /// The blocks of the longest hit out of pool and tier that are not visible. Empty if the tier makes the hit no
    /// longer.
    fn missing(&self, tier: &dyn Tier, groups: &[LookupGroup<'_>], max_tokens: u64) -> Vec<Stretch> {
        let Some(needs) = needs(groups, max_tokens) else { return Vec::new() };
        let mut is_visible: Vec<Vec<bool>> = Vec::with_capacity(groups.len());
        for (group, need) in groups.iter().zip(&needs) {
            let mut of_group = Vec::with_capacity(need.blocks as usize);
            for part in group.hashes[..need.blocks as usize].chunks(BLOCKS_A_HOLD) {
                let index = self.index.lock();
                of_group.extend(part.iter().map(|hash| index.is_visible(group.space, hash)));
            }
            is_visible.push(of_group);
        }
        let in_pool = longest_hit(&needs, max_tokens, |group, block| is_visible[group][block as usize]);
        let names: Vec<_> = groups.iter().map(|group| self.index.lock().space_name(group.space)).collect();
        let tokens = longest_hit(&needs, max_tokens, |group, block| {
            let (space, hash) = (names[group], groups[group].hashes[block as usize]);
            is_visible[group][block as usize] || tier.contains(&BlockKey { space, hash })
        });
        if tokens <= in_pool {
            return Vec::new();
        }
        let mut stretches = Vec::new();
        for ((group, need), is_visible) in groups.iter().zip(&needs).zip(&is_visible) {
            let first = need.first_block(tokens) as usize;
            let end = (tokens / u64::from(need.tokens_per_block)) as usize;
            let mut at = first;
            while at < end {
                let there = is_visible[at..end].iter().take_while(|is_visible| **is_visible).count();
                let start = at + there;
                let missing = is_visible[start..end].iter().take_while(|is_visible| !**is_visible).count();
                at = start + missing;
                let chain = match (need.window_blocks, start.checked_sub(1)) {
                    (0, None) => Chain::Start,
                    (0, Some(before)) => Chain::After(group.hashes[before]),
                    _ => Chain::Unchained,
                };
                if missing > 0 {
                    let hashes = group.hashes[start..at].to_vec();
                    stretches.push(Stretch { space: group.space, chain, hashes });
                }
            }
        }
        stretches
    }

    /// Claims the blocks that are not in flight yet. `waiter` waits for those, and for the ones in flight.
    fn claim_missing(
        &self,
        stretches: Vec<Stretch>,
        waiter: &Arc<FetchWaiter>,
        mut most_bytes: u64,
        now: Instant,
    ) -> Vec<Read> {
        let mut reads = Vec::new();
        let mut in_flight = self.fetches.in_flight.lock();
        let wait_for = |waiters: &mut FetchWaiters| {
            waiter.blocks_left.fetch_add(1, Ordering::Relaxed);
            waiters.push(Arc::clone(waiter));
        };
        for Stretch { space, chain, mut hashes } in stretches {
            let block_bytes: u64 = self.index.lock().shard_bytes(space).iter().sum();
            let most_blocks = usize::try_from(most_bytes / block_bytes).unwrap_or(usize::MAX);
            hashes.truncate(most_blocks.min(IN_FLIGHT_BLOCKS.saturating_sub(in_flight.len())));
            most_bytes -= hashes.len() as u64 * block_bytes;
            for hash in &hashes {
                if let Some(waiters) = in_flight.get_mut(&(space, *hash)) {
                    wait_for(waiters);
                }
            }
            let claimed = self.claim_whole(space, chain, &hashes, now);
            self.remember(space, &claimed);
            for (hash, claims) in claimed {
                wait_for(in_flight.entry((space, hash)).or_default());
                reads.push(Read { space, hash, claims });
            }
        }
        reads
    }

    /// Claims all shards of each block. A block of which only some shards were granted is aborted.
    fn claim_whole(
        &self,
        space: SpaceId,
        chain: Chain,
        hashes: &[BlockHash],
        now: Instant,
    ) -> Vec<(BlockHash, Vec<ShardClaim>)> {
        let shards = self.index.lock().shards_of(space);
        let mut claims: Vec<Vec<ShardClaim>> = hashes.iter().map(|_| Vec::with_capacity(shards)).collect();
        let mut outcomes = Vec::new();
        for shard in ShardNumber::all(shards) {
            outcomes.clear();
            let fetcher = Caller { owner: OwnerId::FETCHER, writer: WriterId::FETCHER, space, shard, now };
            // Not judged, because a lookup waits for these, and they can come only by way of the pool.
            self.claim_in_parts(&fetcher, chain, hashes, false, &mut outcomes);
            for (of_block, outcome) in claims.iter_mut().zip(&outcomes) {
                if let ClaimOutcome::Claimed(claim) = outcome {
                    of_block.push(*claim);
                }
            }
        }
        let mut whole = Vec::with_capacity(hashes.len());
        for (hash, of_block) in hashes.iter().zip(claims) {
            // If the block died between two of these claims, the later ones are of its next generation.
            let is_one = |pair: &[ShardClaim]| pair[0].block == pair[1].block;
            if of_block.len() == shards && of_block.windows(2).all(is_one) {
                whole.push((*hash, of_block));
            } else if !of_block.is_empty() {
                self.abort(&of_block, now);
            }
        }
        whole
    }

    /// Gives the policy the memos that the tier kept of these blocks.
    fn remember(&self, space: SpaceId, claimed: &[(BlockHash, Vec<ShardClaim>)]) {
        let (Some(tier), Some((_, first))) = (&self.tier, claimed.first()) else { return };
        let space = {
            let index = self.index.lock();
            let learns = first.first().is_some_and(|claim| index.policy_memo(claim.block.slot).is_some());
            if !learns {
                return;
            }
            index.space_name(space)
        };
        for part in claimed.chunks(BLOCKS_A_HOLD) {
            let memo = |(hash, _): &(BlockHash, _)| tier.memo(&BlockKey { space, hash: *hash });
            let memos: Vec<Option<Memo>> = part.iter().map(memo).collect();
            let mut index = self.index.lock();
            for ((_, claims), memo) in part.iter().zip(memos) {
                if let (Some(claim), Some(memo)) = (claims.first(), memo) {
                    index.remember(claim.block, memo);
                }
            }
        }
    }

    /// Submits queued reads to the tier, up to `READS_MAX` in flight. A tier may complete a read within the call that
    /// starts it, and the completion calls this again. The inner call then leaves the next read to the outer loop.
    fn submit_reads(self: &Arc<Self>, tier: &dyn Tier) {
        loop {
            let (read, deadline, number) = {
                let mut reads = self.fetches.reads.lock();
                if reads.is_submitting || reads.in_flight.len() >= READS_MAX {
                    return;
                }
                let Some((read, deadline)) = reads.queued.pop_front() else { return };
                let number = reads.submitted;
                reads.submitted += 1;
                reads.in_flight.insert(number, deadline);
                reads.rate.begin(Instant::now());
                reads.is_submitting = true;
                (read, deadline, number)
            };
            self.start_read(tier, read, deadline, number);
            self.fetches.reads.lock().is_submitting = false;
        }
    }

    fn start_read(self: &Arc<Self>, tier: &dyn Tier, read: Read, deadline: Instant, number: u64) {
        let (key, extents) = {
            let index = self.index.lock();
            let bytes = index.shard_bytes(read.space);
            let extent =
                |(claim, &bytes): (&ShardClaim, &u64)| PoolExtent { offset: claim.page.offset(), bytes };
            let extents: Vec<PoolExtent> = read.claims.iter().zip(bytes).map(extent).collect();
            (BlockKey { space: index.space_name(read.space), hash: read.hash }, extents)
        };
        let store = Arc::clone(self);
        let bytes: u64 = extents.iter().map(|extent| extent.bytes).sum();
        let done = move |crcs: Option<Vec<u32>>| {
            let read_bytes = if crcs.is_some() { bytes } else { 0 };
            store.end_read(&read, crcs);
            {
                let mut reads = store.fetches.reads.lock();
                reads.in_flight.remove(&number);
                let is_idle = reads.in_flight.is_empty() && reads.queued.is_empty();
                reads.rate.completed(read_bytes, is_idle, Instant::now());
            }
            store.tier.iter().for_each(|tier| store.submit_reads(tier.as_ref()));
        };
        tier.read(key, extents, deadline, Box::new(done));
    }

    fn end_read(&self, read: &Read, crcs: Option<Vec<u32>>) {
        let waiters = {
            // Under both locks: another fetch finds the block in flight, or visible, or free to be claimed.
            let mut in_flight = self.fetches.in_flight.lock();
            let mut index = self.index.lock();
            match crcs {
                Some(crcs) => index.restore(&read.claims, &crcs),
                None => {
                    index.abort(&read.claims, Instant::now());
                    index.note_failed_fetch();
                }
            }
            in_flight.remove(&(read.space, read.hash)).unwrap_or_default()
        };
        waiters.iter().for_each(|waiter| waiter.block_done());
    }
}
