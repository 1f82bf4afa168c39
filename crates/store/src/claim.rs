//! Saving: claim, write, commit.

use std::time::Instant;

use kvlane_block::BlockHash;

use crate::api::{Chain, ClaimOutcome, OwnerId, ShardClaim, SpaceId, WriterId};
use crate::entries::{NONE, State};
use crate::evict::Effort;
use crate::index::Index;

/// Ancestors that one claim call marks as used.
const TOUCH_LIMIT: usize = 4096;

/// A block being saved by the workers of one engine.
pub(crate) struct Claim {
    owner: OwnerId,
    /// Of the claim or its last commit.
    since: Instant,
    shards: Box<[Shard]>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Shard {
    Waiting,
    Writing(WriterId),
    Written,
}

impl Claim {
    /// Who may be writing this shard.
    pub(crate) fn writer(&self, shard: u32) -> Option<WriterId> {
        match self.shards.get(shard as usize) {
            Some(&Shard::Writing(writer)) => Some(writer),
            _ => None,
        }
    }

    fn is_being_written(&self) -> bool {
        self.shards.iter().any(|shard| matches!(shard, Shard::Writing(_)))
    }

    fn is_written(&self) -> bool {
        self.shards.iter().all(|&shard| shard == Shard::Written)
    }
}

/// What is the same for all blocks of a call.
struct Caller {
    owner: OwnerId,
    writer: WriterId,
    space: SpaceId,
    shard: u32,
    now: Instant,
}

/// Where the next block hangs.
#[derive(Clone, Copy)]
enum Parent {
    None,
    At(u32),
    /// Not in the store: the block would be unreachable.
    Missing,
}

impl Index {
    /// Claims one shard of each block for writing and appends one outcome a block to `out`. `hashes` are
    /// consecutive blocks of a prompt.
    ///
    /// The first worker of an engine (`owner`) to claim a key creates the claim with room for all shards; the
    /// engine's other workers join with theirs. A chained block whose parent is neither stored nor being stored
    /// (by anyone) is answered `NoRoom`. Making room evicts, within a bound of work for each call.
    #[allow(clippy::too_many_arguments, reason = "one call of the wire; each argument is a different thing")]
    pub fn claim(
        &mut self,
        owner: OwnerId,
        writer: WriterId,
        space: SpaceId,
        shard: u32,
        chain: Chain,
        hashes: &[BlockHash],
        now: Instant,
        out: &mut Vec<ClaimOutcome>,
    ) {
        let shards = self.spaces[space.0 as usize].shards();
        assert!((shard as usize) < shards, "shard {shard} of a block with {shards} shards");
        let caller = Caller { owner, writer, space, shard, now };
        let mut effort = Effort::new();
        let mut parent = match chain {
            Chain::Start | Chain::Unchained => Parent::None,
            Chain::After(hash) => match self.entries.find(space.0, &hash) {
                Some(slot) if self.entries.at(slot).state != State::Gap => Parent::At(slot),
                _ => Parent::Missing,
            },
        };
        let mut tail = None;
        out.reserve(hashes.len());
        for hash in hashes {
            let (outcome, block) = self.claim_block(&caller, parent, *hash, &mut effort);
            match outcome {
                ClaimOutcome::Present => self.counters.dedup_present += 1,
                ClaimOutcome::InFlight => self.counters.dedup_in_flight += 1,
                ClaimOutcome::NoRoom => self.counters.no_room += 1,
                ClaimOutcome::Claimed(_) => {}
            }
            out.push(outcome);
            match (chain, block) {
                (Chain::Unchained, Some(slot)) => self.lru.touch(slot),
                (Chain::Unchained, None) => {}
                (_, Some(slot)) => {
                    parent = Parent::At(slot);
                    tail = block;
                }
                (_, None) => parent = Parent::Missing,
            }
        }
        // The whole prefix was used: tail first, so that parents end up newer.
        let ancestors = std::iter::successors(tail, |&slot| {
            let parent = self.entries.at(slot).parent;
            (parent != NONE).then_some(parent)
        });
        for slot in ancestors.take(TOUCH_LIMIT) {
            self.lru.touch(slot);
        }
    }

    /// The outcome, and the block's slot if it is stored or being stored.
    fn claim_block(
        &mut self,
        caller: &Caller,
        parent: Parent,
        hash: BlockHash,
        effort: &mut Effort,
    ) -> (ClaimOutcome, Option<u32>) {
        let slot = match self.entries.find(caller.space.0, &hash) {
            Some(slot) => match self.entries.at(slot).state {
                State::Gap => slot,
                State::Claimed => return (self.join(caller, slot), Some(slot)),
                _ => return (ClaimOutcome::Present, Some(slot)),
            },
            None => match parent {
                Parent::Missing => return (ClaimOutcome::NoRoom, None),
                Parent::None => self.entries.insert(caller.space.0, hash, NONE),
                Parent::At(parent) => self.entries.insert(caller.space.0, hash, parent),
            },
        };
        // A gap hangs where it was first put; that parent counts.
        let parent = self.entries.at(slot).parent;
        if parent != NONE && self.entries.at(parent).state == State::Gap {
            return (ClaimOutcome::NoRoom, None);
        }
        // Claimed before room is made: so neither it nor its ancestors, which now have a child, can be evicted.
        self.entries.at_mut(slot).state = State::Claimed;
        let Some(pages) = self.allocate_block(caller.space, effort) else {
            self.entries.at_mut(slot).state = State::Gap;
            self.entries.prune(slot);
            return (ClaimOutcome::NoRoom, None);
        };
        self.entries.at_mut(slot).row = self.spaces[caller.space.0 as usize].rows.insert(slot, &pages);
        let shards = vec![Shard::Waiting; pages.len()].into_boxed_slice();
        self.claims.insert(slot, Claim { owner: caller.owner, since: caller.now, shards });
        (self.join(caller, slot), Some(slot))
    }

    /// Starts to write a shard of a claim.
    fn join(&mut self, caller: &Caller, slot: u32) -> ClaimOutcome {
        let Some(claim) = self.claims.get_mut(&slot) else { return ClaimOutcome::InFlight };
        if claim.owner != caller.owner {
            return ClaimOutcome::InFlight;
        }
        let shard = &mut claim.shards[caller.shard as usize];
        if *shard != Shard::Waiting {
            return ClaimOutcome::Present;
        }
        *shard = Shard::Writing(caller.writer);
        let entry = self.entries.at(slot);
        ClaimOutcome::Claimed(ShardClaim {
            slot,
            generation: entry.generation,
            shard: caller.shard,
            page: self.spaces[entry.space as usize].rows.page(entry.row, caller.shard as usize),
        })
    }

    /// These shards are written. A block whose last shard this was is queued for sealing. Dead or unknown claims
    /// are counted; their memory is free from here on.
    pub fn commit(&mut self, claims: &[ShardClaim], now: Instant) {
        for shard in claims {
            let Some(claim) = self.writing(shard) else {
                self.counters.stale_commits += 1;
                let unused = self.limbo.writer_done(shard.slot, shard.generation, shard.shard);
                self.free(unused);
                continue;
            };
            claim.shards[shard.shard as usize] = Shard::Written;
            claim.since = now;
            if claim.is_written() {
                self.claims.remove(&shard.slot);
                self.entries.at_mut(shard.slot).state = State::Committed;
                self.seal_queue.push_back((shard.slot, shard.generation));
                self.seals_asked += 1;
            }
        }
    }

    /// All shards of one block are written, by whoever claimed all of them, with bytes that were compared with these
    /// crc32c: it becomes visible at once. A dead claim is counted; its memory is free from here on.
    pub fn restore(&mut self, claims: &[ShardClaim], crcs: &[u32]) {
        assert!(claims.len() == crcs.len(), "{} checksums for {} shards", crcs.len(), claims.len());
        let Some(&ShardClaim { slot, generation, .. }) = claims.first() else { return };
        if self.entries.current(slot, generation).is_none() || self.claims.remove(&slot).is_none() {
            self.counters.stale_commits += claims.len() as u64;
            return self.abort(claims);
        }
        let entry = self.entries.at_mut(slot);
        entry.state = State::Sealed;
        let space = &mut self.spaces[entry.space as usize];
        assert!(claims.len() == space.shards(), "{} of {} shards", claims.len(), space.shards());
        for (claim, &crc) in claims.iter().zip(crcs) {
            space.rows.set_crc(entry.row, claim.shard as usize, crc);
        }
        space.sealed += 1;
        self.counters.fetched_blocks += 1;
        self.counters.fetched_bytes += space.block_bytes();
        self.make_evictable(slot);
    }

    pub(crate) fn note_failed_fetch(&mut self) {
        self.counters.failed_fetches += 1;
    }

    /// These shards will not be written: their blocks' claims die. Shards that other workers write meanwhile keep
    /// their memory until they commit or abort.
    pub fn abort(&mut self, claims: &[ShardClaim]) {
        for shard in claims {
            if let Some(claim) = self.writing(shard) {
                claim.shards[shard.shard as usize] = Shard::Waiting;
                self.drop_block(shard.slot);
            } else {
                let unused = self.limbo.writer_done(shard.slot, shard.generation, shard.shard);
                self.free(unused);
            }
        }
    }

    /// The process behind `writer` can write no more: its unfinished shards abort.
    pub fn writer_gone(&mut self, writer: WriterId) {
        let mut dying = Vec::new();
        for (&slot, claim) in &mut self.claims {
            for shard in claim.shards.iter_mut().filter(|shard| **shard == Shard::Writing(writer)) {
                *shard = Shard::Waiting;
                dying.push(slot);
            }
        }
        dying.dedup();
        for slot in dying {
            self.drop_block(slot);
        }
        let unused = self.limbo.writer_gone(writer);
        self.free(unused);
    }

    /// Claims die that are older than `claim_ttl` and of which no shard is being written: a worker never came.
    pub fn expire(&mut self, now: Instant) {
        let claim_ttl = self.options.claim_ttl;
        let expired = |claim: &Claim| {
            !claim.is_being_written() && now.saturating_duration_since(claim.since) > claim_ttl
        };
        let slots: Vec<u32> =
            self.claims.iter().filter(|(_, claim)| expired(claim)).map(|(&slot, _)| slot).collect();
        self.counters.expired_claims += slots.len() as u64;
        for slot in slots {
            self.drop_block(slot);
        }
    }

    /// The claim that this shard is being written for, unless it died.
    fn writing(&mut self, shard: &ShardClaim) -> Option<&mut Claim> {
        self.entries.current(shard.slot, shard.generation)?;
        let claim = self.claims.get_mut(&shard.slot)?;
        claim.writer(shard.shard).is_some().then_some(claim)
    }
}
