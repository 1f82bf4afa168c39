//! [`Store`]: the index under one lock, over a pool, maybe a tier below, and sources of blocks. Sessions call it from many threads.
//!
//! Long calls take the lock in parts, so that lookups get in between. Checksums and copies run outside it.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane_block::{BlockHash, CutDigest, Namespace, PoolOffset};
use kvlane_memory::{Arena, ExtentAllocator, PAGE_BYTES};
use kvlane_policy::Choice;
use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};

use crate::api::{
    Caller, Chain, ClaimOutcome, Hit, LeaseId, LookupGroup, Origin, OwnerId, ShardClaim, SpaceId,
    StoreOptions, WriterId,
};
use crate::auto::AutoPolicy;
use crate::below::{Below, Dropped};
use crate::fetches::Fetches;
use crate::index::Index;
use crate::journal::{JournalEntry, JournalRead};
use crate::seal::Check;
use crate::source::Source;
use crate::stats::{SpaceStats, StoreStats};

/// Bytes of one batch of seals. Its blocks become visible together.
const SEAL_BATCH_BYTES: u64 = 16 << 20;
/// Blocks that one hold of the lock claims, seals or drops. Lookups get their turn between two holds.
const BLOCKS_A_HOLD: usize = 64;
/// Parts of that size that are judged as one run, if the policy admits only blocks that are worth their victims.
const PARTS_A_JUDGEMENT: usize = 64;
/// Blocks that may wait for the tier, 8 bytes each. Beyond that the oldest are left out.
const SPILL_QUEUE_BLOCKS: usize = 1 << 18;
/// Slots that a scrub looks at under one hold of the lock.
const SCRUB_STEPS: u32 = 4096;

/// The cache of one pool, shared by all sessions of a daemon. Calls hold one lock for microseconds; bytes are read
/// outside it.
pub struct Store {
    arena: Arc<Arena>,
    pub(crate) below: Option<Arc<dyn Below>>,
    pub(crate) sources: Vec<Arc<dyn Source>>,
    pub(crate) fetches: Fetches,
    /// None if the policy is fixed.
    pub(crate) auto: Option<AutoPolicy>,
    pub(crate) index: Mutex<Index>,
    /// Notified when a block was committed, and when the background is to stop.
    pub(crate) committed: Condvar,
    /// Notified when blocks were sealed.
    sealed: Condvar,
    /// Notified when a block waits for the tier, when the tier is done with one, and when the background is to stop.
    pub(crate) spill_changed: Condvar,
    /// Notified when the scrub thread is to stop.
    pub(crate) scrub_stop: Condvar,
    /// How many namespaces were dropped. Spills and fetches hold it for reading while they hand a block to the tier or
    /// claim one. So the drop sees their block, or they see the drop.
    pub(crate) drops: RwLock<u64>,
    /// The slot where the next scrub starts. Locked while a block is scrubbed.
    scrub_turn: Mutex<u32>,
}

impl Store {
    /// An empty store over the pool. Nothing becomes visible before the background runs
    /// ([`start_background`](Self::start_background)) or [`seal_pending`](Self::seal_pending) is called.
    pub fn new(arena: Arc<Arena>, options: StoreOptions) -> Arc<Self> {
        Self::with_tiers(arena, options, None, Vec::new())
    }

    /// Like [`new`](Self::new). Blocks are written to `below` when they become visible, and [`fetch`](Self::fetch) brings
    /// blocks from `sources`. A tier below that gives its blocks back is one of the sources too.
    pub fn with_tiers(
        arena: Arc<Arena>,
        options: StoreOptions,
        below: Option<Arc<dyn Below>>,
        sources: Vec<Arc<dyn Source>>,
    ) -> Arc<Self> {
        let page = |offset: u64| u32::try_from(offset / PAGE_BYTES).unwrap_or(u32::MAX);
        let nodes: Vec<_> = arena.nodes().iter().map(|node| page(node.start)..page(node.end)).collect();
        let extents = ExtentAllocator::new(page(arena.bytes()), &nodes);
        let mut index = Index::new(extents, arena.bytes(), options);
        if below.is_some() {
            index.set_spill_limit(SPILL_QUEUE_BLOCKS);
            index.set_tier_density(0.0);
        }
        Arc::new(Self {
            arena,
            below,
            sources,
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

    /// Forgets spaces until at most `most` are left, or none can be forgotten. Spaces without blocks go first. Then
    /// those with blocks go, oldest first: the blocks leave the pool, and the tier below keeps what it has.
    ///
    /// `in_use` must name each space whose id is held by a session. Spaces that a plan names, or with blocks that are
    /// leased, being saved or being fetched, stay.
    pub fn forget_spaces(&self, most: usize, in_use: &HashSet<SpaceId>) {
        // Locked until the end: a fetch names its blocks by their space before it claims them, so none may begin meanwhile.
        let in_flight = self.fetches.in_flight.lock();
        let mut in_use = in_use.clone();
        in_use.extend(in_flight.keys().map(|(space, _)| *space));
        in_use.extend(self.fetches.named.lock().keys());
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

    /// A space's name, for people.
    pub fn space_label(&self, space: SpaceId) -> String {
        self.index.lock().spaces[space].name.clone()
    }

    /// Bytes in the pool of a block of this space: of all shards, each in whole pages.
    pub fn block_bytes(&self, space: SpaceId) -> u64 {
        self.index.lock().spaces[space].room_bytes()
    }

    /// See [`Index::lookup`].
    pub fn lookup(
        &self,
        owner: OwnerId,
        groups: &[LookupGroup<'_>],
        max_tokens: u64,
        now: Instant,
    ) -> Option<Hit> {
        let hit = {
            let mut index = self.index.lock();
            let adopted_before = index.counters.adopted_copies;
            let hit = index.lookup(owner, groups, max_tokens, now);
            if index.counters.adopted_copies != adopted_before && index.has_spill() {
                self.spill_changed.notify_all();
            }
            hit
        };
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
        self.claim_in_parts(Origin::Engine, caller, chain, hashes, out);
    }

    /// See [`Index::claim_from`]; long lists are claimed in parts.
    pub(crate) fn claim_in_parts(
        &self,
        origin: Origin,
        caller: &Caller,
        mut chain: Chain,
        hashes: &[BlockHash],
        out: &mut Vec<ClaimOutcome>,
    ) {
        let mut is_worth_victims = true;
        for (number, part) in hashes.chunks(BLOCKS_A_HOLD).enumerate() {
            let mut index = self.index.lock();
            if origin == Origin::Engine && number % PARTS_A_JUDGEMENT == 0 {
                let run = &hashes[number * BLOCKS_A_HOLD..];
                let run = &run[..run.len().min(PARTS_A_JUDGEMENT * BLOCKS_A_HOLD)];
                is_worth_victims = index.judge_run(caller, chain, run);
            }
            index.claim_part(origin, caller, chain, part, is_worth_victims, out);
            let lost = std::mem::take(&mut index.lost);
            MutexGuard::unlock_fair(index);
            if let Some(below) = self.below.as_ref().filter(|_| !lost.is_empty()) {
                below.remember(&lost);
            }
            if let Some(&last) = part.last() {
                chain = chain.behind(last);
            }
        }
    }

    /// See [`Index::commit`]. The caller must no longer write the shards.
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

    /// Drops all blocks that a namespace has now. When this returns they are invisible; their memory is freed when
    /// their leases and writers are done. The tier below forgets them too: [`Dropped::below`] says whether for good.
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
            if let Some(below) = &self.below {
                below.forget_namespace(namespace);
            }
            blocks
        };
        // Without `drops`: a device may be slow or hang, and fetches and spills must not wait for it.
        let below = self.below.as_ref().map_or(Ok(()), |below| below.note_forgotten(namespace));
        Dropped { blocks, below }
    }

    /// Waits until everything committed before this call is visible (or died). False at the timeout.
    pub fn settle(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut index = self.index.lock();
        let goal = index.seals_queued;
        while index.sealed_through() < goal {
            if self.sealed.wait_until(&mut index, deadline).timed_out() {
                return index.sealed_through() >= goal;
            }
        }
        true
    }

    /// Takes the checksums of a batch of committed blocks and makes them visible. False when there was none. Several
    /// threads may call it at once; each gets a batch of its own.
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

    /// Compares the next visible block with its checksums, and drops it if they differ. Returns the bytes read, 0 at
    /// the end of a pass, and whether the block was intact.
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
            // Log: bytes of a block changed in memory; the block is a miss and is computed. Do: test the
            // machine's memory.
            tracing::warn!(
                namespace = %damaged.namespace,
                hash = %damaged.hash,
                "block dropped: its bytes differ from its checksum"
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
        // SAFETY: A `Check` names only blocks whose shards were all committed, so no writer has them any more. Their
        // extents are not reused before the check is given back.
        kvlane_block::crc32c(unsafe { self.arena.bytes_at(offset, bytes) })
    }

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

    /// Blocks of prompts that lookups covered, and that they did not, of all spaces.
    pub fn hit_and_missed_blocks(&self) -> (u64, u64) {
        self.index.lock().hit_and_missed_blocks()
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
