//! Saves: a worker claims one shard of each block, writes it, and commits or aborts it. A fetch does the same for all
//! shards of a block at once ([`Index::restore`]).

use std::time::Instant;

use kvlane_block::BlockHash;
use kvlane_policy::Memo;

use crate::api::{Caller, Chain, ClaimOutcome, Origin, ShardClaim, ShardNumber, StoredBlock, WriterId};
use crate::claim::{Claim, ShardState};
use crate::entries::{NONE, State};
use crate::evict::Effort;
use crate::index::Index;
use crate::journal::Change;

/// Ancestors that one claim call renews.
const RENEW_LIMIT: usize = 4096;

/// Slot of a block that is stored or being stored: newly claimed by this call, or old.
#[derive(Clone, Copy)]
enum Found {
    New(u32),
    Old(u32),
}

impl Found {
    fn slot(self) -> u32 {
        match self {
            Self::New(slot) | Self::Old(slot) => slot,
        }
    }
}

/// The parent of the next block of the run.
#[derive(Clone, Copy)]
enum Parent {
    None,
    At(u32),
    /// Not in the store: the block would be unreachable, and is refused.
    Missing,
}

impl Index {
    /// Claims one shard of each block for writing and appends one outcome a block to `out`. `hashes` are
    /// consecutive blocks of a prompt.
    ///
    /// The first worker of an engine (the caller's `owner`) to claim a key creates the claim with room for all shards; the
    /// engine's other workers join with theirs. A chained block whose parent is neither stored nor being stored
    /// (by any engine) is answered `NoRoom`. Making room evicts, within a bound of work for each call. If the policy finds
    /// the blocks not worth their victims, only those that find free room come in.
    pub fn claim(
        &mut self,
        caller: &Caller,
        chain: Chain,
        hashes: &[BlockHash],
        out: &mut Vec<ClaimOutcome>,
    ) {
        self.claim_from(Origin::Engine, caller, chain, hashes, out);
    }

    /// Like `claim`, for blocks of any origin. Only an engine's blocks are judged. A copy that would exceed the copies' share
    /// evicts no own block.
    pub fn claim_from(
        &mut self,
        origin: Origin,
        caller: &Caller,
        chain: Chain,
        hashes: &[BlockHash],
        out: &mut Vec<ClaimOutcome>,
    ) {
        let is_worth_victims = origin != Origin::Engine || self.judge_run(caller, chain, hashes);
        self.claim_part(origin, caller, chain, hashes, is_worth_victims, out);
    }

    /// Like `claim_from`, for some of the blocks of a run that [`judge_run`](Self::judge_run) has judged.
    pub(crate) fn claim_part(
        &mut self,
        origin: Origin,
        caller: &Caller,
        chain: Chain,
        hashes: &[BlockHash],
        is_worth_victims: bool,
        out: &mut Vec<ClaimOutcome>,
    ) {
        let Caller { space, shard, .. } = *caller;
        let shards = self.spaces[space].shards();
        assert!(shard.index() < shards, "shard {shard} of a block with {shards} shards");
        self.clock.set(caller.now);
        let evicted_before = self.counters.evicted_blocks;
        let is_copy = origin == Origin::OtherHost;
        let mut effort = Effort::new(is_worth_victims, is_copy);
        let is_chained = chain != Chain::Unchained;
        let mut parent = match chain {
            Chain::Start | Chain::Unchained => Parent::None,
            Chain::After(hash) => match self.entries.find(space, &hash) {
                Some(slot) if self.entries.at(slot).state != State::Gap => Parent::At(slot),
                _ => Parent::Missing,
            },
        };
        let mut tail = None;
        out.reserve(hashes.len());
        for hash in hashes {
            let (outcome, block) = self.claim_block(caller, parent, *hash, &mut effort);
            match outcome {
                ClaimOutcome::Present => self.counters.dedup_present += 1,
                ClaimOutcome::InFlight => self.counters.dedup_in_flight += 1,
                ClaimOutcome::NoRoom if is_worth_victims => self.counters.no_room += 1,
                ClaimOutcome::NoRoom => self.counters.not_admitted += 1,
                ClaimOutcome::Claimed(_) => {}
            }
            self.save_requested(caller.owner, (space, *hash), shard, &outcome, caller.now);
            out.push(outcome);
            match block {
                Some(Found::New(slot)) if is_copy => self.add_copy(slot),
                Some(Found::New(slot)) => self.add_to_run(slot, is_chained),
                Some(Found::Old(slot)) if !is_chained => self.policy.renew(&mut std::iter::once(slot)),
                _ => {}
            }
            if is_chained {
                tail = block.map(Found::slot).or(tail);
                parent = block.map_or(Parent::Missing, |block| Parent::At(block.slot()));
            }
        }
        self.end_run(is_chained);
        let entries = &self.entries;
        let ancestors = std::iter::successors(tail, |&slot| {
            let parent = entries.at(slot).parent;
            (parent != NONE).then_some(parent)
        });
        let mut ancestors = ancestors.take(RENEW_LIMIT);
        if is_copy {
            self.copies.renew(ancestors.clone());
        }
        self.policy.renew(&mut ancestors);
        if self.counters.evicted_blocks > evicted_before {
            self.correct_capacity();
        }
    }

    /// Collects new blocks for the policy, which gets them in runs: each block continues the one before.
    pub(crate) fn add_to_run(&mut self, slot: u32, is_chained: bool) {
        if is_chained && self.run.last().is_some_and(|&last| self.entries.at(slot).parent != last) {
            self.end_run(is_chained);
        }
        self.run.push(slot);
    }

    pub(crate) fn end_run(&mut self, is_chained: bool) {
        let Some(&head) = self.run.first() else { return };
        if !is_chained {
            // No block continues another. The last one, nearest to where the prompt continues, is to stay the longest.
            self.run.reverse();
        }
        let parent = self.entries.at(head).parent;
        self.policy.insert(&self.run, (parent != NONE).then_some(parent), &self.entries);
        self.run.clear();
    }

    /// Returns the outcome, and the block's slot if it is stored or being stored.
    fn claim_block(
        &mut self,
        caller: &Caller,
        parent: Parent,
        hash: BlockHash,
        effort: &mut Effort,
    ) -> (ClaimOutcome, Option<Found>) {
        let slot = match self.entries.find(caller.space, &hash) {
            Some(slot) => match self.entries.at(slot).state {
                State::Gap => slot,
                State::Claimed => return (self.join(caller, slot), Some(Found::Old(slot))),
                _ => return (ClaimOutcome::Present, Some(Found::Old(slot))),
            },
            None => match parent {
                Parent::Missing => return (ClaimOutcome::NoRoom, None),
                Parent::None => self.entries.insert(caller.space, hash, NONE),
                Parent::At(parent) => self.entries.insert(caller.space, hash, parent),
            },
        };
        // A gap keeps the parent that it was inserted with, and that parent counts.
        let parent = self.entries.at(slot).parent;
        if parent != NONE && self.entries.at(parent).state == State::Gap {
            return (ClaimOutcome::NoRoom, None);
        }
        // Claimed before room is made, so that neither it nor its ancestors, which now have a child, can be evicted.
        self.entries.at_mut(slot).state = State::Claimed;
        let Some(pages) = self.allocate_block(caller.space, effort) else {
            self.entries.at_mut(slot).state = State::Gap;
            self.entries.prune(slot);
            return (ClaimOutcome::NoRoom, None);
        };
        self.entries.at_mut(slot).row = self.spaces[caller.space].rows.insert(slot, &pages);
        let shards = vec![ShardState::Waiting; pages.len()].into_boxed_slice();
        self.claims.insert(slot, Claim { owner: caller.owner, since: caller.now, shards });
        (self.join(caller, slot), Some(Found::New(slot)))
    }

    /// Grants the caller's shard of a claimed block, if the claim is its own engine's and the shard is not granted yet.
    fn join(&mut self, caller: &Caller, slot: u32) -> ClaimOutcome {
        let Some(claim) = self.claims.get_mut(&slot) else { return ClaimOutcome::InFlight };
        if claim.owner != caller.owner {
            return ClaimOutcome::InFlight;
        }
        let shard = &mut claim.shards[caller.shard.index()];
        if *shard != ShardState::Waiting {
            return ClaimOutcome::Present;
        }
        *shard = ShardState::Writing(caller.writer);
        let entry = self.entries.at(slot);
        ClaimOutcome::Claimed(ShardClaim {
            block: StoredBlock { slot, generation: entry.generation },
            shard: caller.shard,
            page: self.spaces[entry.space].rows.page(entry.row, caller.shard),
        })
    }

    /// Commits shards that are written. A block whose last shard this was is queued for sealing. If the claim is dead or
    /// unknown, the commit is counted as stale and the shard's memory is freed.
    pub fn commit(&mut self, claims: &[ShardClaim], now: Instant) {
        self.clock.set(now);
        for shard in claims {
            let Some(claim) = self.writing(shard) else {
                self.counters.stale_commits += 1;
                self.writer_done(shard);
                continue;
            };
            claim.shards[shard.shard.index()] = ShardState::Written;
            claim.since = now;
            let is_written = claim.is_written();
            let entry = self.entries.at(shard.block.slot);
            self.watches.committed((entry.space, entry.hash));
            if is_written {
                self.claims.remove(&shard.block.slot);
                let entry = self.entries.at_mut(shard.block.slot);
                entry.state = State::Committed;
                entry.stored_at = self.clock.now();
                self.seal_queue.push_back(shard.block);
                self.seals_queued += 1;
            }
        }
    }

    /// Makes a fetched block visible at once. Its caller has claimed and written all shards, and has compared the bytes
    /// with these crc32c. `origin` is where the bytes came from in the end; the claim's was a plan. If the claim is dead, the
    /// commits are counted as stale and the memory is freed.
    pub fn restore(&mut self, claims: &[ShardClaim], crcs: &[u32], origin: Origin) {
        assert!(claims.len() == crcs.len(), "{} checksums for {} shards", crcs.len(), claims.len());
        let Some(&ShardClaim { block, .. }) = claims.first() else { return };
        if self.entries.current(block).is_none() || self.claims.remove(&block.slot).is_none() {
            self.counters.stale_commits += claims.len() as u64;
            return claims.iter().for_each(|shard| self.writer_done(shard));
        }
        self.correct_copy(block.slot, origin == Origin::OtherHost);
        let entry = self.entries.at_mut(block.slot);
        entry.state = State::Sealed;
        entry.stored_at = self.clock.now();
        let (number, hash) = (entry.space, entry.hash);
        let space = &mut self.spaces[number];
        assert!(claims.len() == space.shards(), "{} of {} shards", claims.len(), space.shards());
        for (claim, &crc) in claims.iter().zip(crcs) {
            space.rows.set_crc(entry.row, claim.shard, crc);
        }
        space.sealed += 1;
        self.counters.fetched_blocks += 1;
        self.counters.fetched_bytes += space.block_bytes();
        if origin == Origin::OtherHost {
            self.counters.fetched_copies += 1;
            self.counters.fetched_copy_bytes += space.block_bytes();
        }
        self.watches.sealed((number, hash));
        self.note_change(Change::Visible, number, hash);
    }

    /// Gives the policy the memo that the tier below kept of a block that is being fetched.
    pub(crate) fn remember(&mut self, block: StoredBlock, memo: Memo) {
        if self.entries.current(block).is_some()
            && let Some(learning) = self.policy.learning_mut()
        {
            learning.remember(block.slot, memo);
        }
    }

    /// A block did not come. `origin` is the holder that was asked last.
    pub(crate) fn note_failed_fetch(&mut self, origin: Origin) {
        self.counters.failed_fetches += 1;
        self.counters.failed_copies += u64::from(origin == Origin::OtherHost);
    }

    /// Gives shards up, so that the claims of their blocks die. Shards that other workers are writing keep their memory
    /// until those commit or abort.
    pub fn abort(&mut self, claims: &[ShardClaim], now: Instant) {
        for shard in claims {
            if let Some(claim) = self.writing(shard) {
                claim.shards[shard.shard.index()] = ShardState::Waiting;
                self.drop_claimed(shard.block.slot, [shard.shard], now);
            } else {
                self.writer_done(shard);
            }
        }
    }

    /// Aborts the unfinished shards of a writer whose process can no longer write.
    pub fn writer_gone(&mut self, writer: WriterId, now: Instant) {
        let mut dying = Vec::new();
        for (&slot, claim) in &mut self.claims {
            for (number, shard) in (0..)
                .map(ShardNumber)
                .zip(&mut claim.shards)
                .filter(|(_, shard)| **shard == ShardState::Writing(writer))
            {
                *shard = ShardState::Waiting;
                dying.push((slot, number));
            }
        }
        for of_block in dying.chunk_by(|(slot, _), (next, _)| slot == next) {
            self.drop_claimed(of_block[0].0, of_block.iter().map(|(_, shard)| *shard), now);
        }
        let unused = self.limbo.writer_gone(writer);
        self.free(unused);
    }

    /// Ends claims older than `claim_ttl` of which no shard is being written, because a worker never came. Forgets old
    /// notes of failed saves, too.
    pub fn expire(&mut self, now: Instant) {
        let claim_ttl = self.options.claim_ttl;
        let expired = |claim: &Claim| {
            !claim.is_being_written() && now.saturating_duration_since(claim.since) > claim_ttl
        };
        let shards = |(&slot, claim): (&u32, &Claim)| (slot, claim.shards.len());
        let dying: Vec<(u32, usize)> =
            self.claims.iter().filter(|(_, claim)| expired(claim)).map(shards).collect();
        self.counters.expired_claims += dying.len() as u64;
        for (slot, shards) in dying {
            // Noted for all shards. One that was never claimed may still be, and loses its note; one that was written is
            // not saved again.
            self.drop_claimed(slot, ShardNumber::all(shards), now);
        }
        self.not_saved.expire(now);
    }

    /// Ends a claim because these shards were not written, and notes that: their workers have no reason to save them again.
    fn drop_claimed(&mut self, slot: u32, shards: impl IntoIterator<Item = ShardNumber>, now: Instant) {
        let entry = self.entries.at(slot);
        let key = (entry.space, entry.hash);
        if let Some(claim) = self.claims.get(&slot) {
            shards.into_iter().for_each(|shard| self.not_saved.note(key, claim.owner, shard, now));
        }
        self.drop_block(slot);
    }

    /// The writer of a dead claim's shard is done with it.
    fn writer_done(&mut self, shard: &ShardClaim) {
        let unused = self.limbo.writer_done(shard.block, shard.shard);
        self.free(unused);
    }

    /// The claim that this shard is being written for, unless it died.
    fn writing(&mut self, shard: &ShardClaim) -> Option<&mut Claim> {
        self.entries.current(shard.block)?;
        let claim = self.claims.get_mut(&shard.block.slot)?;
        claim.writer(shard.shard).is_some().then_some(claim)
    }
}
