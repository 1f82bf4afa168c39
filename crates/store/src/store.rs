//! The index under a lock, over a pool.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane_block::{BlockHash, CutDigest, Namespace, PoolOffset};
use kvlane_memory::{Arena, ExtentAllocator, PAGE_BYTES};
use kvlane_policy::Choice;
use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};

use crate::api::{
    Caller, Chain, ClaimOutcome, Hit, LeaseId, LookupGroup, OwnerId, ShardClaim, SpaceId, StoreOptions,
    WriterId,
};
use crate::auto::AutoPolicy;
use crate::fetches::Fetches;
use crate::index::Index;
use crate::journal::{JournalEntry, JournalRead};
use crate::seal::Check;
use crate::stats::{SpaceStats, StoreStats};
use crate::tier::{Dropped, Tier};

/// Bytes that are sealed before others get to see them.
const SEAL_BATCH_BYTES: u64 = 16 << 20;
/// Blocks that one hold of the lock claims, seals or drops. Others, lookups first of all, come in between.
const BLOCKS_A_HOLD: usize = 64;
/// So many of those are judged as one where the policy admits only what is worth its victims.
const PARTS_A_JUDGEMENT: usize = 64;
/// Blocks that may wait for the tier, 8 bytes each; of more, those that wait the longest are left out.
const SPILL_QUEUE_BLOCKS: usize = 1 << 18;
/// Slots that a scrub looks at under one hold of the lock.
const SCRUB_STEPS: u32 = 4096;

/// The cache of one pool, shared by all sessions of a daemon. Calls hold one lock for microseconds; bytes are read
/// outside it.
pub struct Store {
    arena: Arc<Arena>,
    pub(crate) tier: Option<Arc<dyn Tier>>,
    pub(crate) fetches: Fetches,
    /// None with a policy that is fixed.
    pub(crate) auto: Option<AutoPolicy>,
    pub(crate) index: Mutex<Index>,
    /// A block was committed, or the background shall stop.
    pub(crate) committed: Condvar,
    /// Blocks were sealed.
    sealed: Condvar,
    /// A block waits for the tier, the tier is done with one, or the background shall stop.
    pub(crate) spill_changed: Condvar,
    /// The scrub thread shall stop.
    pub(crate) scrub_stop: Condvar,
    /// How often a namespace was dropped. Held for reading while a block is handed to the tier, or claimed to come from it:
    /// so either the drop sees it, or it sees the drop.
    pub(crate) drops: RwLock<u64>,
    /// Held while a block is scrubbed; the slot where the next one starts.
    scrub_turn: Mutex<u32>,
}

impl Store {
    /// An empty store over the pool. Nothing becomes visible before the background runs
    /// ([`start_background`](Self::start_background)) or [`seal_pending`](Self::seal_pending) is called.
    pub fn new(arena: Arc<Arena>, options: StoreOptions) -> Arc<Self> {
        Self::with_tier(arena, options, None)
    }

    /// The same, over a tier that gets what becomes visible and gives it back with [`fetch`](Self::fetch).
    pub fn with_tier(arena: Arc<Arena>, options: StoreOptions, tier: Option<Arc<dyn Tier>>) -> Arc<Self> {
        let page = |offset: u64| u32::try_from(offset / PAGE_BYTES).unwrap_or(u32::MAX);
        let nodes: Vec<_> = arena.nodes().iter().map(|node| page(node.start)..page(node.end)).collect();
        let extents = ExtentAllocator::new(page(arena.bytes()), &nodes);
        let mut index = Index::new(extents, arena.bytes(), options);
        if tier.is_some() {
            index.set_spill_limit(SPILL_QUEUE_BLOCKS);
            index.set_below(0.0);
        }
        Arc::new(Self {
            arena,
            tier,
            fetches: Fetches::default(),
            auto: (options.policy == Choice::Auto).then(AutoPolicy::default),
            index: Mutex::new(index),
            committed: Condvar::new(),
            sealed: Condvar::new(),
            spill_changed: Condvar::new(),
            scrub_stop: Condvar::new(),
            drops: RwLock::new(0),
            scrub_turn: Mutex::new(0),
        })
    }

    /// See [`Index::space`].
    pub fn space(&self, namespace: Namespace, name: &str, cut: CutDigest, shard_bytes: &[u64]) -> SpaceId {
        self.index.lock().space(namespace, name, cut, shard_bytes)
    }

    /// Whether a space is alive.
    pub fn has_space(&self, namespace: Namespace, cut: CutDigest, shard_bytes: &[u64]) -> bool {
        self.index.lock().has_space(namespace, cut, shard_bytes)
    }

    /// How many spaces are alive.
    pub fn count_spaces(&self) -> usize {
        self.index.lock().count_spaces()
    }

    /// Forgets spaces until at most `most` are left, or none can be forgotten: first those without blocks, then, the oldest
    /// first, those with blocks, which leave the pool (the tier below keeps what it has). Spaces of which somebody holds the
    /// id or plans a fetch have to be named in `in_use`; those of which blocks are leased, being saved or fetched stay.
    pub fn forget_spaces(&self, most: usize, in_use: &HashSet<SpaceId>) {
        // Held, so that no fetch begins meanwhile: it names its blocks by their space before it claims them.
        let coming = self.fetches.coming.lock();
        let mut in_use = in_use.clone();
        in_use.extend(coming.keys().map(|(space, _)| *space));
        let mut index = self.index.lock();
        let unused = index.unused_spaces(&in_use);
        let mut left = Vec::new();
        for space in unused {
            if index.count_spaces() > most && !index.forget_space(space) {
                left.push(space);
            }
        }
        for space in left {
            if index.count_spaces() <= most {
                return;
            }
            let blocks = index.blocks_in(space);
            if !index.can_lose(&blocks) {
                continue;
            }
            for part in blocks.chunks(BLOCKS_A_HOLD) {
                index.drop_blocks(part);
                MutexGuard::bump(&mut index);
            }
            index.forget_space(space);
        }
    }

    /// The namespace that a space belongs to.
    pub fn namespace(&self, space: SpaceId) -> Namespace {
        self.index.lock().space_name(space).namespace
    }

    /// See [`Index::lookup`].
    pub fn lookup(
        &self,
        owner: OwnerId,
        groups: &[LookupGroup<'_>],
        max_tokens: u64,
        now: Instant,
    ) -> Option<Hit> {
        let hit = self.index.lock().lookup(owner, groups, max_tokens, now);
        if let Some(auto) = &self.auto {
            auto.note(groups);
        }
        hit
    }

    /// See [`Index::release`].
    pub fn release(&self, owner: OwnerId, lease: LeaseId) {
        self.index.lock().release(owner, lease);
    }

    /// See [`Index::heartbeat`].
    pub fn heartbeat(&self, owner: OwnerId, live: &[LeaseId], now: Instant) {
        self.index.lock().heartbeat(owner, live, now);
    }

    /// See [`Index::adopt`].
    pub fn adopt(&self, owner: OwnerId, new_owner: OwnerId, live: &[LeaseId]) {
        self.index.lock().adopt(owner, new_owner, live);
    }

    /// See [`Index::release_owner`].
    pub fn release_owner(&self, owner: OwnerId) {
        self.index.lock().release_owner(owner);
    }

    /// See [`Index::claim`]; long lists are claimed in parts.
    pub fn claim(&self, caller: &Caller, chain: Chain, hashes: &[BlockHash], out: &mut Vec<ClaimOutcome>) {
        self.claim_in_parts(caller, chain, hashes, true, out);
    }

    /// `is_judged` false: whether the blocks are worth what they displace is not asked.
    pub(crate) fn claim_in_parts(
        &self,
        caller: &Caller,
        mut chain: Chain,
        hashes: &[BlockHash],
        is_judged: bool,
        out: &mut Vec<ClaimOutcome>,
    ) {
        let mut is_worth_victims = true;
        for (number, part) in hashes.chunks(BLOCKS_A_HOLD).enumerate() {
            let mut index = self.index.lock();
            if is_judged && number % PARTS_A_JUDGEMENT == 0 {
                let run = &hashes[number * BLOCKS_A_HOLD..];
                let run = &run[..run.len().min(PARTS_A_JUDGEMENT * BLOCKS_A_HOLD)];
                is_worth_victims = index.are_worth_victims(caller, chain, run);
            }
            index.claim_part(caller, chain, part, is_worth_victims, out);
            let lost = std::mem::take(&mut index.lost);
            MutexGuard::unlock_fair(index);
            if let Some(tier) = self.tier.as_ref().filter(|_| !lost.is_empty()) {
                tier.remember(&lost);
            }
            if let (Chain::Start | Chain::After(_), Some(&last)) = (chain, part.last()) {
                chain = Chain::After(last);
            }
        }
    }

    /// See [`Index::commit`]. Nobody writes the shards from here on.
    pub fn commit(&self, claims: &[ShardClaim], now: Instant) {
        let mut index = self.index.lock();
        index.commit(claims, now);
        if index.has_unsealed() {
            self.committed.notify_one();
        }
    }

    /// See [`Index::abort`].
    pub fn abort(&self, claims: &[ShardClaim], now: Instant) {
        self.index.lock().abort(claims, now);
    }

    /// See [`Index::writer_gone`].
    pub fn writer_gone(&self, writer: WriterId, now: Instant) {
        self.index.lock().writer_gone(writer, now);
    }

    /// See [`Index::expire`].
    pub fn expire(&self, now: Instant) {
        self.index.lock().expire(now);
    }

    /// Drops all blocks that a namespace has now: when this returns they are invisible; they are freed when their
    /// leases and writers are done. The tier below forgets them too; whether for good is answered.
    pub fn drop_namespace(&self, namespace: Namespace) -> Dropped {
        let blocks = {
            let mut drops = self.drops.write();
            *drops += 1;
            let blocks = self.index.lock().blocks_of(namespace);
            let drop_part = |part| {
                let mut index = self.index.lock();
                let dropped = index.drop_blocks(part);
                MutexGuard::unlock_fair(index);
                dropped
            };
            let blocks = blocks.chunks(BLOCKS_A_HOLD).map(drop_part).sum();
            if let Some(tier) = &self.tier {
                tier.forget_namespace(namespace);
            }
            blocks
        };
        // A device may take its time, or hang: nobody who plans a fetch or spills waits for it.
        let below = self.tier.as_ref().map_or(Ok(()), |tier| tier.note_forgotten(namespace));
        Dropped { blocks, below }
    }

    /// Waits until everything committed before this call is visible (or died). False at the timeout.
    pub fn settle(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut index = self.index.lock();
        let goal = index.seals_asked;
        while index.sealed_through() < goal {
            if self.sealed.wait_until(&mut index, deadline).timed_out() {
                return index.sealed_through() >= goal;
            }
        }
        true
    }

    /// Takes the checksums of a batch of committed blocks and makes them visible. False when there was none. Several
    /// threads may do so at once, each with a batch of its own.
    pub fn seal_pending(&self) -> bool {
        let mut index = self.index.lock();
        let any = index.has_unsealed();
        let batch = index.take_unsealed(SEAL_BATCH_BYTES, BLOCKS_A_HOLD);
        if index.has_unsealed() {
            self.committed.notify_one();
        }
        drop(index);
        let crcs: Vec<Vec<u32>> = batch.iter().map(|check| self.crcs(check)).collect();
        let mut index = self.index.lock();
        for (check, crcs) in batch.into_iter().zip(&crcs) {
            index.finish_seal(check, crcs);
        }
        self.sealed.notify_all();
        if index.has_spill() {
            self.spill_changed.notify_all();
        }
        any
    }

    /// Compares the next visible block with its checksums; one that differs is dropped. Answers the bytes read, 0
    /// at the end of a pass, and whether the block was intact.
    pub fn scrub_next(&self) -> (u64, bool) {
        let mut cursor = self.scrub_turn.lock();
        let check = loop {
            if let Some(check) = self.index.lock().next_scrub(&mut cursor, SCRUB_STEPS) {
                break check;
            }
            if *cursor == 0 {
                return (0, true);
            }
        };
        let bytes = check.bytes();
        let intact = self.crcs(&check).into_iter().eq(check.shards().map(|(_, _, crc)| crc));
        let damaged = self.index.lock().finish_scrub(check, intact);
        if let Some(damaged) = damaged {
            tracing::warn!(
                namespace = %damaged.namespace,
                hash = %damaged.hash,
                "a block's bytes differ from its checksum; it is dropped"
            );
        }
        (bytes, intact)
    }

    /// crc32c of each shard as it is in the pool.
    fn crcs(&self, check: &Check) -> Vec<u32> {
        check.shards().map(|(page, bytes, _)| self.crc(page.offset(), bytes)).collect()
    }

    #[allow(unsafe_code, reason = "the one place that reads the pool")]
    fn crc(&self, offset: PoolOffset, bytes: u64) -> u32 {
        // SAFETY: A `Check` names only blocks whose shards were all committed, so no writer has them any more, and
        // their extents are not reused before the check is given back.
        crc32c::crc32c(unsafe { self.arena.bytes_at(offset, bytes) })
    }

    /// Bytes of the pool.
    pub(crate) fn pool_bytes(&self) -> u64 {
        self.arena.bytes()
    }

    /// See [`Index::read_journal`].
    pub fn read_journal(
        &self,
        cursor: u64,
        spaces: &[SpaceId],
        most: usize,
        out: &mut Vec<(usize, JournalEntry)>,
    ) -> JournalRead {
        self.index.lock().read_journal(cursor, spaces, most, out)
    }

    /// State and counters.
    pub fn stats(&self) -> StoreStats {
        self.index.lock().stats()
    }

    /// Each space, in order of creation.
    pub fn spaces(&self) -> Vec<SpaceStats> {
        self.index.lock().spaces()
    }

    /// Leases that the owner holds.
    pub fn leases_of(&self, owner: OwnerId) -> usize {
        self.index.lock().leases_of(owner)
    }
}
