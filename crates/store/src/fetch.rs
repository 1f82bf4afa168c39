//! Fetching: blocks of a prompt that only the tier below has come back into the pool, as if an engine had saved them.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use kvlane_block::BlockHash;
use kvlane_memory::PAGE_BYTES;
use kvlane_policy::{PrefixGroup, longest_hit};
use parking_lot::Mutex;

use crate::api::{Chain, ClaimOutcome, LookupGroup, OwnerId, ShardClaim, SpaceId, WriterId};
use crate::store::Store;
use crate::tier::{BlockKey, PoolExtent, Tier};

/// Who claims what is fetched: no engine has these.
const FETCHER: OwnerId = OwnerId(u64::MAX);
const FETCHING: WriterId = WriterId(u64::MAX);
/// Blocks that may be on their way at the same time, of all fetches; of a longer prompt the first ones come.
const IN_FLIGHT_BLOCKS: usize = 1 << 16;
/// Reads that the tier has at the same time; others wait here.
const READS_MAX: usize = 1024;
/// Blocks that are looked at under one hold of the lock.
const BLOCKS_A_HOLD: usize = 4096;

/// Blocks on their way, and who waits for each.
#[derive(Default)]
pub(crate) struct Fetches {
    coming: Mutex<HashMap<(SpaceId, BlockHash), Waiters>>,
    reads: Mutex<Reads>,
}

/// Reads in the order of their prompts.
#[derive(Default)]
struct Reads {
    waiting: VecDeque<(Read, Instant)>,
    /// That the tier has.
    under_way: usize,
    /// Somebody hands reads to the tier, and goes on until there is nothing to hand over.
    is_fed: bool,
}

type Waiters = Vec<Arc<Waiting>>;

/// Somebody who waits for a number of blocks.
struct Waiting {
    left: AtomicUsize,
    done: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Waiting {
    /// One block less to wait for.
    fn one_less(&self) {
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            let done = self.done.lock().take();
            done.into_iter().for_each(|done| done());
        }
    }
}

/// Blocks of one prompt and space that are missing and follow each other.
struct Stretch {
    space: SpaceId,
    chain: Chain,
    hashes: Vec<BlockHash>,
}

/// A block that was claimed to be read.
struct Read {
    space: SpaceId,
    hash: BlockHash,
    claims: Vec<ShardClaim>,
}

impl Store {
    /// Starts to bring back what the tier has of a prompt beyond the pool, if the hit grows by it. `done` is called once,
    /// when every block has come or failed; a lookup then tells what is there. False: nothing to wait for, and `done` is
    /// dropped. What has not come by `deadline` may fail, but may come all the same.
    pub fn fetch(
        self: &Arc<Self>,
        groups: &[LookupGroup<'_>],
        max_tokens: u64,
        now: Instant,
        deadline: Instant,
        done: impl FnOnce() + Send + 'static,
    ) -> bool {
        let Some(tier) = &self.tier else { return false };
        let stretches = self.missing(tier.as_ref(), groups, max_tokens);
        if stretches.is_empty() {
            return false;
        }
        let waiting = Arc::new(Waiting { left: AtomicUsize::new(1), done: Mutex::new(Some(Box::new(done))) });
        let reads = self.claim_missing(stretches, &waiting, now);
        self.fetches.reads.lock().waiting.extend(reads.into_iter().map(|read| (read, deadline)));
        self.feed(tier.as_ref());
        waiting.one_less();
        true
    }

    /// What of a longer hit is not visible. Empty if the tier cannot make the hit longer.
    fn missing(&self, tier: &dyn Tier, groups: &[LookupGroup<'_>], max_tokens: u64) -> Vec<Stretch> {
        if groups.iter().any(|group| group.tokens_per_block == 0) {
            return Vec::new();
        }
        let need = |group: &LookupGroup<'_>| PrefixGroup {
            tokens_per_block: group.tokens_per_block,
            window_blocks: group.window_blocks,
            blocks: (group.hashes.len() as u64).min(max_tokens / u64::from(group.tokens_per_block)),
        };
        let needs: Vec<PrefixGroup> = groups.iter().map(need).collect();
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
        let names: Vec<_> = groups.iter().map(|group| self.index.lock().names(group.space)).collect();
        let tokens = longest_hit(&needs, max_tokens, |group, block| {
            let (namespace, cut) = names[group];
            let hash = groups[group].hashes[block as usize];
            is_visible[group][block as usize] || tier.contains(&BlockKey { namespace, cut, hash })
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
    fn claim_missing(&self, stretches: Vec<Stretch>, waiting: &Arc<Waiting>, now: Instant) -> Vec<Read> {
        let mut reads = Vec::new();
        let mut coming = self.fetches.coming.lock();
        let wait_for = |waiters: &mut Waiters| {
            waiting.left.fetch_add(1, Ordering::Relaxed);
            waiters.push(Arc::clone(waiting));
        };
        for Stretch { space, chain, mut hashes } in stretches {
            hashes.truncate(IN_FLIGHT_BLOCKS.saturating_sub(coming.len()));
            for hash in &hashes {
                if let Some(waiters) = coming.get_mut(&(space, *hash)) {
                    wait_for(waiters);
                }
            }
            for (hash, claims) in self.claim_whole(space, chain, &hashes, now) {
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
        for shard in 0..shards {
            outcomes.clear();
            self.claim(FETCHER, FETCHING, space, shard as u32, chain, hashes, now, &mut outcomes);
            for (of_block, outcome) in claims.iter_mut().zip(&outcomes) {
                if let ClaimOutcome::Claimed(claim) = outcome {
                    of_block.push(*claim);
                }
            }
        }
        let mut whole = Vec::with_capacity(hashes.len());
        for (hash, of_block) in hashes.iter().zip(claims) {
            if of_block.len() == shards {
                whole.push((*hash, of_block));
            } else if !of_block.is_empty() {
                self.abort(&of_block);
            }
        }
        whole
    }

    /// Hands reads to the tier, as many as it may have. A tier may end a read within the call that starts it: who comes here
    /// from there leaves the next one to the loop that it came from.
    fn feed(self: &Arc<Self>, tier: &dyn Tier) {
        loop {
            let (read, deadline) = {
                let mut reads = self.fetches.reads.lock();
                if reads.is_fed || reads.under_way >= READS_MAX {
                    return;
                }
                let Some(next) = reads.waiting.pop_front() else { return };
                reads.under_way += 1;
                reads.is_fed = true;
                next
            };
            self.start_read(tier, read, deadline);
            self.fetches.reads.lock().is_fed = false;
        }
    }

    fn start_read(self: &Arc<Self>, tier: &dyn Tier, read: Read, deadline: Instant) {
        let (key, extents) = {
            let index = self.index.lock();
            let (namespace, cut) = index.names(read.space);
            let bytes = index.shard_bytes(read.space);
            let extent = |(claim, &bytes): (&ShardClaim, &u64)| PoolExtent {
                offset: u64::from(claim.page) * PAGE_BYTES,
                bytes,
            };
            let extents: Vec<PoolExtent> = read.claims.iter().zip(bytes).map(extent).collect();
            (BlockKey { namespace, cut, hash: read.hash }, extents)
        };
        let store = Arc::clone(self);
        let done = move |crcs: Option<Vec<u32>>| {
            store.end_read(&read, crcs);
            store.fetches.reads.lock().under_way -= 1;
            store.tier.iter().for_each(|tier| store.feed(tier.as_ref()));
        };
        tier.read(key, extents, deadline, Box::new(done));
    }

    fn end_read(&self, read: &Read, crcs: Option<Vec<u32>>) {
        match crcs {
            Some(crcs) => self.index.lock().restore(&read.claims, &crcs),
            None => {
                let mut index = self.index.lock();
                index.abort(&read.claims);
                index.note_failed_fetch();
            }
        }
        let waiters = self.fetches.coming.lock().remove(&(read.space, read.hash)).unwrap_or_default();
        waiters.iter().for_each(|waiting| waiting.one_less());
    }
}
