//! Brings blocks of a prompt from the sources into the pool, as if an engine had saved them.
//!
//! ```text
//!   FetchPlan --> share: who brings which block --> claim each --> queue its read at its holder --> submit_reads
//!                                                                        ^                              |
//!                                              another holder has it too '------ failed <-- end_read <--'
//!   done() when the fetch's last block has come or failed  <------------- visible, or the claim is aborted
//! ```
//! A block that another fetch brings already is not read twice: the fetch only waits for it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvlane_block::{BlockHash, BlockKey, PoolExtent};
use kvlane_policy::Memo;
use parking_lot::Mutex;

use crate::api::{Caller, Chain, ClaimOutcome, Origin, OwnerId, ShardClaim, ShardNumber, SpaceId, WriterId};
use crate::done::Done;
use crate::fetches::{FetchWaiter, FetchWaiters, Holder, Read};
use crate::find::{BLOCKS_A_HOLD, FetchPlan, Stretch};
use crate::shares::{HolderState, Wanted, share};
use crate::source::BlockRead;
use crate::store::Store;

/// Blocks in flight over all fetches. A prompt with more gets its first ones.
const IN_FLIGHT_BLOCKS: usize = 1 << 16;
/// Reads in flight at one holder. Further ones wait in [`Reads::queued`](crate::fetches::Reads::queued).
const READS_MAX: usize = 1024;
/// Reads that one hold of the index's lock prepares.
const READS_A_HOLD: usize = 64;

/// Who brings which block of a plan.
pub(crate) struct SharedPlan {
    /// The plan's blocks, in order.
    pub(crate) wanted: Vec<Wanted>,
    /// The plan's holders.
    pub(crate) states: Vec<HolderState>,
    /// For each block to bring, the index of its holder.
    pub(crate) holders: Vec<usize>,
}

impl Store {
    /// Starts a planned fetch. `done` is called exactly once, when every block has come or failed; a lookup then finds
    /// what is there. Blocks that would miss `deadline` at their holders' rates are left out. A block that misses it all
    /// the same may still come later.
    pub fn fetch(
        self: &Arc<Self>,
        plan: FetchPlan,
        now: Instant,
        deadline: Instant,
        done: impl FnOnce() + Send + 'static,
    ) {
        let waiter = Arc::new(FetchWaiter {
            blocks_left: AtomicUsize::new(1),
            done: Mutex::new(Some(Box::new(done))),
        });
        let shares = self.share_plan(&plan, now, deadline).holders;
        let reads = {
            let drops = self.drops.read();
            if *drops == plan.drops {
                self.claim_missing(plan, &shares, &waiter, now, deadline)
            } else {
                Vec::new()
            }
        };
        let mut asked = BTreeSet::new();
        let mut queues = self.fetches.queues.lock();
        for (holder, read) in reads {
            queues.of(holder).push(read);
            asked.insert(holder);
        }
        drop(queues);
        asked.into_iter().for_each(|holder| self.submit_reads(holder));
        waiter.block_done();
    }

    /// Who brings which block. Ends with the first block that nobody brings in time.
    pub(crate) fn share_plan(&self, plan: &FetchPlan, now: Instant, deadline: Instant) -> SharedPlan {
        let mut wanted = Vec::new();
        for stretch in &plan.stretches {
            let bytes: u64 = self.index.lock().shard_bytes(stretch.space).iter().sum();
            wanted.extend(stretch.holders.iter().map(|holders| Wanted { bytes, holders: *holders }));
        }
        let queues = self.fetches.queues.lock();
        let state = |(holder, round_trip): &(Holder, Duration)| queues.state(*holder, *round_trip, now);
        // A holder that became late since the plan was made gets nothing: its round trip is beyond any deadline.
        let late = HolderState { round_trip: Duration::MAX, ..HolderState::default() };
        let states: Vec<HolderState> =
            plan.holders.iter().map(|holder| state(holder).unwrap_or(late)).collect();
        drop(queues);
        let holders = share(&wanted, &states, deadline.saturating_duration_since(now), self.pool_bytes());
        SharedPlan { wanted, states, holders }
    }

    /// Claims the blocks that are not in flight yet. `waiter` waits for those, and for the ones in flight.
    fn claim_missing(
        &self,
        plan: FetchPlan,
        shares: &[usize],
        waiter: &Arc<FetchWaiter>,
        now: Instant,
        deadline: Instant,
    ) -> Vec<(Holder, Read)> {
        let mut reads = Vec::new();
        let mut shares = shares.iter();
        let mut in_flight = self.fetches.in_flight.lock();
        let wait_for = |waiters: &mut FetchWaiters| {
            waiter.blocks_left.fetch_add(1, Ordering::Relaxed);
            waiters.push(Arc::clone(waiter));
        };
        for Stretch { space, chain, mut hashes, holders, .. } in plan.stretches {
            let of_stretch: Vec<usize> = shares.by_ref().take(hashes.len()).copied().collect();
            hashes.truncate(of_stretch.len().min(IN_FLIGHT_BLOCKS.saturating_sub(in_flight.len())));
            for hash in &hashes {
                if let Some(waiters) = in_flight.get_mut(&(space, *hash)) {
                    wait_for(waiters);
                }
            }
            let origin = |holder: &usize| self.origin(plan.holders[*holder].0);
            let origins: Vec<Origin> = of_stretch.iter().take(hashes.len()).map(origin).collect();
            let claimed = self.claim_whole(space, chain, &hashes, &origins, now);
            self.remember(space, &hashes, &claimed);
            let bytes = self.index.lock().shard_bytes(space).iter().sum();
            for (position, claims) in claimed {
                let (hash, holder) = (hashes[position], of_stretch[position]);
                wait_for(in_flight.entry((space, hash)).or_default());
                let others = holders[position].iter().filter(|other| *other != holder);
                let others = others.map(|other| plan.holders[other]).collect();
                let read = Read { space, hash, claims, bytes, deadline, others };
                reads.push((plan.holders[holder].0, read));
            }
        }
        reads
    }

    /// Claims all shards of each block for its origin, and returns the claimed ones by position. A block of which only some
    /// shards were granted is aborted.
    fn claim_whole(
        &self,
        space: SpaceId,
        chain: Chain,
        hashes: &[BlockHash],
        origins: &[Origin],
        now: Instant,
    ) -> Vec<(usize, Vec<ShardClaim>)> {
        let shards = self.index.lock().shards_of(space);
        let mut claims: Vec<Vec<ShardClaim>> = hashes.iter().map(|_| Vec::with_capacity(shards)).collect();
        let mut outcomes = Vec::new();
        for shard in ShardNumber::all(shards) {
            outcomes.clear();
            let fetcher = Caller { owner: OwnerId::FETCHER, writer: WriterId::FETCHER, space, shard, now };
            // Not judged, because a lookup waits for these, and they can come only by way of the pool.
            let (mut chain, mut rest) = (chain, hashes);
            for alike in origins.chunk_by(|a, b| a == b) {
                let (run, after) = rest.split_at(alike.len());
                self.claim_in_parts(alike[0], &fetcher, chain, run, &mut outcomes);
                chain = run.last().map_or(chain, |last| chain.behind(*last));
                rest = after;
            }
            for (of_block, outcome) in claims.iter_mut().zip(&outcomes) {
                if let ClaimOutcome::Claimed(claim) = outcome {
                    of_block.push(*claim);
                }
            }
        }
        let mut whole = Vec::with_capacity(hashes.len());
        for (position, of_block) in claims.into_iter().enumerate() {
            // If the block died between two of these claims, the later ones are of its next generation.
            let is_one = |pair: &[ShardClaim]| pair[0].block == pair[1].block;
            if of_block.len() == shards && of_block.windows(2).all(is_one) {
                whole.push((position, of_block));
            } else if !of_block.is_empty() {
                self.abort(&of_block, now);
            }
        }
        whole
    }

    /// Gives the policy the memos that the tier below kept of these blocks.
    fn remember(&self, space: SpaceId, hashes: &[BlockHash], claimed: &[(usize, Vec<ShardClaim>)]) {
        let Some(below) = self.below.as_ref().filter(|_| !claimed.is_empty()) else { return };
        let space = {
            let index = self.index.lock();
            if !index.learns() {
                return;
            }
            index.space_name(space)
        };
        for part in claimed.chunks(BLOCKS_A_HOLD) {
            let memo = |(position, _): &(usize, _)| below.memo(&BlockKey { space, hash: hashes[*position] });
            let memos: Vec<Option<Memo>> = part.iter().map(memo).collect();
            let mut index = self.index.lock();
            for ((_, claims), memo) in part.iter().zip(memos) {
                if let (Some(claim), Some(memo)) = (claims.first(), memo) {
                    index.remember(claim.block, memo);
                }
            }
        }
    }

    /// Submits queued reads to their holder, up to `READS_MAX` in flight. A source may complete a read within the call that
    /// starts it, and the completion calls this again. The inner call then leaves the next read to the outer loop.
    pub(crate) fn submit_reads(self: &Arc<Self>, holder: Holder) {
        loop {
            let (batch, deadline) = {
                let mut queues = self.fetches.queues.lock();
                let reads = queues.of(holder);
                let Some(deadline) = reads.queued.front().map(|read| read.deadline) else { return };
                // By halves, because each call to a source costs something.
                if reads.is_submitting || reads.in_flight.len() > READS_MAX / 2 {
                    if !std::mem::replace(&mut queues.is_watched, true) {
                        self.fetches.queue_waits.notify_all();
                    }
                    return;
                }
                reads.begin(Instant::now());
                reads.is_submitting = true;
                let most = READS_MAX - reads.in_flight.len();
                let alike =
                    reads.queued.iter().take(most).take_while(|read| read.deadline == deadline).count();
                let numbers = reads.submitted..;
                reads.submitted += alike as u64;
                reads.in_flight.extend(numbers.clone().take(alike).map(|number| (number, deadline)));
                let batch: Vec<(u64, Read)> = numbers.zip(reads.queued.drain(..alike)).collect();
                (batch, deadline)
            };
            self.start_reads(holder, batch, deadline);
            self.fetches.queues.lock().of(holder).is_submitting = false;
        }
    }

    fn start_reads(self: &Arc<Self>, holder: Holder, batch: Vec<(u64, Read)>, deadline: Instant) {
        let mut blocks = Vec::with_capacity(batch.len());
        let mut batch = batch.into_iter();
        while batch.len() > 0 {
            let index = self.index.lock();
            for (number, read) in batch.by_ref().take(READS_A_HOLD) {
                let bytes = index.shard_bytes(read.space);
                let extent =
                    |(claim, &bytes): (&ShardClaim, &u64)| PoolExtent { offset: claim.page.offset(), bytes };
                let extents: Vec<PoolExtent> = read.claims.iter().zip(bytes).map(extent).collect();
                let key = BlockKey { space: index.space_name(read.space), hash: read.hash };
                let store = Arc::clone(self);
                let done =
                    Done::new(move |crcs: Option<Vec<u32>>| store.read_ended(holder, number, read, crcs));
                blocks.push(BlockRead { key, extents, done });
            }
        }
        self.sources[holder.source].read(holder.id, blocks, deadline);
    }

    /// A holder's read has ended. If it failed, another holder of the block is asked.
    fn read_ended(self: &Arc<Self>, holder: Holder, number: u64, mut read: Read, crcs: Option<Vec<u32>>) {
        let now = Instant::now();
        let brought = if crcs.is_some() { read.bytes } else { 0 };
        let bytes = read.bytes;
        let next = if crcs.is_none() { self.fetches.queues.lock().next_holder(&mut read, now) } else { None };
        if next.is_none() {
            self.end_read(holder, &read, crcs);
        }
        {
            let mut queues = self.fetches.queues.lock();
            queues.of(holder).ended(number, bytes, brought, now);
            if let Some(next) = next {
                queues.of(next).push(read);
            }
        }
        self.submit_reads(holder);
        next.into_iter().for_each(|next| self.submit_reads(next));
    }

    /// Where the blocks of a holder come from.
    pub(crate) fn origin(&self, holder: Holder) -> Origin {
        if self.sources[holder.source].brings_copies() { Origin::OtherHost } else { Origin::ThisHost }
    }

    pub(crate) fn end_read(&self, holder: Holder, read: &Read, crcs: Option<Vec<u32>>) {
        let waiters = {
            // Under both locks: another fetch finds the block in flight, or visible, or free to be claimed.
            let mut in_flight = self.fetches.in_flight.lock();
            let mut index = self.index.lock();
            match crcs {
                Some(crcs) => index.restore(&read.claims, &crcs, self.origin(holder)),
                None => {
                    index.abort(&read.claims, Instant::now());
                    index.note_failed_fetch(self.origin(holder));
                }
            }
            in_flight.remove(&(read.space, read.hash)).unwrap_or_default()
        };
        waiters.iter().for_each(|waiter| waiter.block_done());
    }
}
