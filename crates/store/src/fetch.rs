//! Fetching: blocks of a prompt that only the tier below has come back into the pool, as if an engine had saved them.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvlane_block::BlockHash;
use kvlane_policy::{Memo, longest_hit};
use parking_lot::Mutex;

use crate::api::{Chain, ClaimOutcome, LookupGroup, OwnerId, ShardClaim, ShardNumber, SpaceId, WriterId};
use crate::claim::Caller;
use crate::needs::needs;
use crate::store::Store;
use crate::tier::{BlockKey, PoolExtent, Tier};

/// Who claims what is fetched: no engine has these.
pub(crate) const FETCHER: OwnerId = OwnerId(u64::MAX);
const FETCHING: WriterId = WriterId(u64::MAX);
/// Blocks that may be on their way at the same time, of all fetches; of a longer prompt the first ones come.
const IN_FLIGHT_BLOCKS: usize = 1 << 16;
/// Bytes that a fetch may claim whatever the tier's rate is.
const LEAST_BYTES: u64 = 64 << 20;
/// Reads that the tier has at the same time; others wait here.
const READS_MAX: usize = 1024;
/// Blocks that are looked at under one hold of the lock.
const BLOCKS_A_HOLD: usize = 4096;

/// Blocks on their way, and who waits for each.
#[derive(Default)]
pub(crate) struct Fetches {
    pub(crate) coming: Mutex<HashMap<(SpaceId, BlockHash), Waiters>>,
    reads: Mutex<Reads>,
}

/// Reads in the order of their prompts.
#[derive(Default)]
struct Reads {
    waiting: VecDeque<(Read, Instant)>,
    /// When nobody waits any more for those that the tier has, by their numbers.
    under_way: BTreeMap<u64, Instant>,
    begun: u64,
    rate: Rate,
    /// Somebody hands reads to the tier, and goes on until there is nothing to hand over.
    is_fed: bool,
}

pub(crate) type Waiters = Vec<Arc<Waiting>>;

impl Reads {
    /// The tier still has a read that nobody waits for any more: it does not answer, or much too slowly.
    fn is_late(&self, now: Instant) -> bool {
        self.under_way.values().any(|deadline| *deadline < now)
    }
}

/// How fast bytes come while any are on their way.
#[derive(Default)]
struct Rate {
    bytes_per_s: Option<f64>,
    /// Since when, and the bytes that came since.
    busy: Option<(Instant, u64)>,
}

impl Rate {
    fn begin(&mut self, now: Instant) {
        self.busy.get_or_insert((now, 0));
    }

    fn came(&mut self, bytes: u64, is_idle: bool, now: Instant) {
        let Some((since, sum)) = &mut self.busy else { return };
        *sum += bytes;
        // Of fewer bytes the time says more of the machine than of the tier.
        if is_idle || *sum >= LEAST_BYTES {
            let seconds = now.saturating_duration_since(*since).as_secs_f64();
            if *sum >= LEAST_BYTES / 4 && seconds > 0.0 {
                let seen = *sum as f64 / seconds;
                self.bytes_per_s = Some(self.bytes_per_s.map_or(seen, |known| 0.5 * known + 0.5 * seen));
            }
            self.busy = (!is_idle).then_some((now, 0));
        }
    }

    /// Bytes that come in this time, or somewhat more; without experience any number.
    fn within(&self, time: Duration) -> u64 {
        let bytes = self.bytes_per_s.map_or(f64::MAX, |rate| 1.5 * rate * time.as_secs_f64());
        (bytes as u64).max(LEAST_BYTES)
    }
}

/// Somebody who waits for a number of blocks.
pub(crate) struct Waiting {
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

/// What a fetch would bring.
pub struct FetchPlan {
    stretches: Vec<Stretch>,
    /// [`Store::drops`] when it was made.
    drops: u64,
}

/// A block that was claimed to be read.
struct Read {
    space: SpaceId,
    hash: BlockHash,
    claims: Vec<ShardClaim>,
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
            let fetcher = Caller { owner: FETCHER, writer: FETCHING, space, shard, now };
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
        let (namespace, cut) = {
            let index = self.index.lock();
            let learns = first.first().is_some_and(|claim| index.policy.memo(claim.block.slot).is_some());
            if !learns {
                return;
            }
            index.names(space)
        };
        for part in claimed.chunks(BLOCKS_A_HOLD) {
            let memo = |(hash, _): &(BlockHash, _)| tier.memo(&BlockKey { namespace, cut, hash: *hash });
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
            let (namespace, cut) = index.names(read.space);
            let bytes = index.shard_bytes(read.space);
            let extent =
                |(claim, &bytes): (&ShardClaim, &u64)| PoolExtent { offset: claim.page.offset(), bytes };
            let extents: Vec<PoolExtent> = read.claims.iter().zip(bytes).map(extent).collect();
            (BlockKey { namespace, cut, hash: read.hash }, extents)
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

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_rate_is_learnt_from_much_and_bounds_what_is_asked_for() {
        let start = Instant::now();
        let mut rate = Rate::default();
        assert!(rate.within(SECOND) > 1 << 60);
        rate.begin(start);
        rate.came(1 << 20, true, start + SECOND);
        assert!(rate.within(SECOND) > 1 << 60, "a mebibyte says nothing");
        rate.begin(start);
        rate.came(1 << 30, true, start + SECOND);
        assert_eq!(rate.within(SECOND), 3 << 29);
        assert_eq!(rate.within(Duration::from_millis(1)), LEAST_BYTES);
        // What comes while more is on its way counts from where the last look ended.
        rate.begin(start + SECOND);
        rate.came(3 << 30, false, start + 2 * SECOND);
        rate.came(3 << 30, true, start + 3 * SECOND);
        assert_eq!(rate.within(SECOND), 3 * (5 << 29) / 2);
    }

    #[test]
    fn a_read_that_nobody_waits_for_any_more_is_late_until_it_ends() {
        let start = Instant::now();
        let mut reads = Reads::default();
        reads.under_way.insert(0, start + SECOND);
        assert!(!reads.is_late(start));
        assert!(reads.is_late(start + 2 * SECOND));
        reads.under_way.remove(&0);
        assert!(!reads.is_late(start + 2 * SECOND));
    }
}
