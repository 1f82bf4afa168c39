//! Fetching: blocks of a prompt that only the tier below has come back into the pool, as if an engine had saved them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use kvlane_block::{BlockHash, BlockKey, PoolExtent};
use kvlane_policy::{Memo, longest_hit};
use parking_lot::Mutex;

use crate::api::{
    Caller, Chain, ClaimOutcome, LookupGroup, OwnerId, ShardClaim, ShardNumber, SpaceId, WriterId,
};
use crate::fetches::{Read, Waiters, Waiting};
use crate::needs::needs;
use crate::store::Store;
use crate::tier::Tier;

/// Blocks that may be on their way at the same time, of all fetches; of a longer prompt the first ones come.
const IN_FLIGHT_BLOCKS: usize = 1 << 16;
/// Reads that the tier has at the same time; others wait here.
const READS_MAX: usize = 1024;
/// Blocks that are looked at under one hold of the lock.
const BLOCKS_A_HOLD: usize = 4096;

/// Blocks of one prompt and space that are missing and follow each other.
struct Stretch {
    space: SpaceId,
    chain: Chain,
    hashes: Vec<BlockHash>,
}

/// What a fetch would bring.
pub struct FetchPlan {
    stretches: Vec<Stretch>,
    /// [`Store::drops`] when it was made.
    drops: u64,
}

impl Store {
    /// What the tier has of a prompt beyond the pool, if the hit grows by it. None too while the tier is late with what
    /// others wait for: waiting for it would only be longer than computing.
    pub fn plan_fetch(&self, groups: &[LookupGroup<'_>], max_tokens: u64, now: Instant) -> Option<FetchPlan> {
        let tier = self.tier.as_ref()?;
        let drops = *self.drops.read();
        if self.fetches.reads.lock().is_late(now) {
            return None;
        }
        let stretches = self.missing(tier.as_ref(), groups, max_tokens);
        (!stretches.is_empty()).then_some(FetchPlan { stretches, drops })
    }

    /// Starts to bring it back. `done` is called once, when every block has come or failed; a lookup then tells what is
    /// there. What cannot come by `deadline`, by the tier's rate, is left away; what has not come by then may come all the
    /// same.
    pub fn fetch(
        self: &Arc<Self>,
        plan: FetchPlan,
        now: Instant,
        deadline: Instant,
        done: impl FnOnce() + Send + 'static,
    ) {
        let Some(tier) = &self.tier else { return done() };
        let waiting = Arc::new(Waiting { left: AtomicUsize::new(1), done: Mutex::new(Some(Box::new(done))) });
        let within = deadline.saturating_duration_since(now);
        let most_bytes = self.fetches.reads.lock().rate.within(within).min(self.pool_bytes());
        let reads = {
            let drops = self.drops.read();
            if *drops == plan.drops {
                self.claim_missing(plan.stretches, &waiting, most_bytes, now)
            } else {
                Vec::new()
            }
        };
        self.fetches.reads.lock().waiting.extend(reads.into_iter().map(|read| (read, deadline)));
        self.feed(tier.as_ref());
        waiting.one_less();
    }

    /// What of a longer hit is not visible. Empty if the tier cannot make the hit longer.
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

    /// Claims what is not on its way already, and lets `waiting` wait for both.
    fn claim_missing(
        &self,
        stretches: Vec<Stretch>,
        waiting: &Arc<Waiting>,
        mut most_bytes: u64,
        now: Instant,
    ) -> Vec<Read> {
        let mut reads = Vec::new();
        let mut coming = self.fetches.coming.lock();
        let wait_for = |waiters: &mut Waiters| {
            waiting.left.fetch_add(1, Ordering::Relaxed);
            waiters.push(Arc::clone(waiting));
        };
        for Stretch { space, chain, mut hashes } in stretches {
            let block_bytes: u64 = self.index.lock().shard_bytes(space).iter().sum();
            let most_blocks = usize::try_from(most_bytes / block_bytes).unwrap_or(usize::MAX);
            hashes.truncate(most_blocks.min(IN_FLIGHT_BLOCKS.saturating_sub(coming.len())));
            most_bytes -= hashes.len() as u64 * block_bytes;
            for hash in &hashes {
                if let Some(waiters) = coming.get_mut(&(space, *hash)) {
                    wait_for(waiters);
                }
            }
            let claimed = self.claim_whole(space, chain, &hashes, now);
            self.remember(space, &claimed);
            for (hash, claims) in claimed {
                wait_for(coming.entry((space, hash)).or_default());
                reads.push(Read { space, hash, claims });
            }
        }
        reads
    }

    /// Claims all shards of blocks. Those of which only some could be had are given back.
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
            // Not judged: somebody waits for these, and the tier gives them only by way of the pool.
            self.claim_in_parts(&fetcher, chain, hashes, false, &mut outcomes);
            for (of_block, outcome) in claims.iter_mut().zip(&outcomes) {
                if let ClaimOutcome::Claimed(claim) = outcome {
                    of_block.push(*claim);
                }
            }
        }
        let mut whole = Vec::with_capacity(hashes.len());
        for (hash, of_block) in hashes.iter().zip(claims) {
            // One of another life was claimed after the first had died.
            let is_one = |pair: &[ShardClaim]| pair[0].block == pair[1].block;
            if of_block.len() == shards && of_block.windows(2).all(is_one) {
                whole.push((*hash, of_block));
            } else if !of_block.is_empty() {
                self.abort(&of_block, now);
            }
        }
        whole
    }

    /// The policy hears what the tier has kept of its knowledge of blocks that come back.
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

    /// Hands reads to the tier, as many as it may have. A tier may end a read within the call that starts it: who comes here
    /// from there leaves the next one to the loop that it came from.
    fn feed(self: &Arc<Self>, tier: &dyn Tier) {
        loop {
            let (read, deadline, number) = {
                let mut reads = self.fetches.reads.lock();
                if reads.is_fed || reads.under_way.len() >= READS_MAX {
                    return;
                }
                let Some((read, deadline)) = reads.waiting.pop_front() else { return };
                let number = reads.begun;
                reads.begun += 1;
                reads.under_way.insert(number, deadline);
                reads.rate.begin(Instant::now());
                reads.is_fed = true;
                (read, deadline, number)
            };
            self.start_read(tier, read, deadline, number);
            self.fetches.reads.lock().is_fed = false;
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
            let came = if crcs.is_some() { bytes } else { 0 };
            store.end_read(&read, crcs);
            {
                let mut reads = store.fetches.reads.lock();
                reads.under_way.remove(&number);
                let is_idle = reads.under_way.is_empty() && reads.waiting.is_empty();
                reads.rate.came(came, is_idle, Instant::now());
            }
            store.tier.iter().for_each(|tier| store.feed(tier.as_ref()));
        };
        tier.read(key, extents, deadline, Box::new(done));
    }

    fn end_read(&self, read: &Read, crcs: Option<Vec<u32>>) {
        let waiters = {
            // Together: who looks for the block finds it on its way, or come, or can claim it anew.
            let mut coming = self.fetches.coming.lock();
            let mut index = self.index.lock();
            match crcs {
                Some(crcs) => index.restore(&read.claims, &crcs),
                None => {
                    index.abort(&read.claims, Instant::now());
                    index.note_failed_fetch();
                }
            }
            coming.remove(&(read.space, read.hash)).unwrap_or_default()
        };
        waiters.iter().for_each(|waiting| waiting.one_less());
    }
}
