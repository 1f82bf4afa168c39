//! Engines and the daemon use a store over a small pool, one story a test.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane_block::{BlockHash, CutDigest, Namespace};
use kvlane_memory::{Arena, ArenaOptions, ExtentAllocator, HugePages, Numa, PAGE_BYTES, PoolPage};
use kvlane_store::{
    Caller, Chain, ClaimOutcome, Hit, Index, LeaseId, LookupGroup, OwnerId, ShardClaim, ShardNumber, SpaceId,
    Store, StoreOptions, WriterId,
};

const A: OwnerId = OwnerId(1);
const B: OwnerId = OwnerId(2);
const WORKER: WriterId = WriterId(10);
const OTHER_WORKER: WriterId = WriterId(11);
const MODEL: Namespace = Namespace([1; 16]);
const TTL: Duration = Duration::from_secs(60);
/// Long enough for a loaded machine; reached only by a test that fails.
const PATIENCE: Duration = Duration::from_secs(30);

struct Pool {
    arena: Arc<Arena>,
    store: Arc<Store>,
    now: Instant,
}

fn hashes(prompt: u8, blocks: u8) -> Vec<BlockHash> {
    (0..blocks).map(|block| BlockHash([prompt, block, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3])).collect()
}

impl Pool {
    fn new(pages: u64) -> Self {
        let options = ArenaOptions {
            bytes: pages * PAGE_BYTES,
            hugepages: HugePages::Off,
            numa: Numa::Off,
            threads: 1,
        };
        let arena = Arc::new(Arena::create(&options, &|_| {}).unwrap());
        let store = Store::new(
            Arc::clone(&arena),
            StoreOptions { lease_ttl: TTL, claim_ttl: TTL, ..StoreOptions::default() },
        );
        Self { arena, store, now: Instant::now() }
    }

    fn space(&self, namespace: Namespace, shard_pages: &[u64]) -> SpaceId {
        let bytes: Vec<u64> = shard_pages.iter().map(|pages| pages * PAGE_BYTES).collect();
        self.store.space(namespace, "a model", CutDigest([5; 16]), &bytes)
    }

    /// Checks every visible block once: how many were checked, and how many were bad and dropped.
    fn scrub_all(&self) -> (u64, u64) {
        let (mut checked, mut bad) = (0, 0);
        loop {
            match self.store.scrub_next() {
                (0, _) => return (checked, bad),
                (_, is_intact) => {
                    checked += 1;
                    bad += u64::from(!is_intact);
                }
            }
        }
    }

    fn claim_as(
        &self,
        (owner, writer, shard): (OwnerId, WriterId, u32),
        space: SpaceId,
        chain: Chain,
        hashes: &[BlockHash],
    ) -> Vec<ClaimOutcome> {
        let mut out = Vec::new();
        self.store.claim(
            &Caller { owner, writer, space, shard: ShardNumber(shard), now: self.now },
            chain,
            hashes,
            &mut out,
        );
        out
    }

    fn claim(&self, space: SpaceId, hashes: &[BlockHash]) -> Vec<ClaimOutcome> {
        self.claim_as((A, WORKER, 0), space, Chain::Start, hashes)
    }

    /// Writes each claimed shard full of its hash's second byte and commits. Not sealed yet.
    fn write(&self, hashes: &[BlockHash], outcomes: &[ClaimOutcome], shard_pages: u64) {
        let shards = claimed(outcomes);
        assert_eq!(shards.len(), hashes.len(), "{outcomes:?}");
        for (shard, hash) in shards.iter().zip(hashes) {
            self.fill(shard.page, shard_pages, hash.0[1]);
        }
        self.store.commit(&shards, self.now);
    }

    fn save(&self, space: SpaceId, hashes: &[BlockHash]) {
        self.write(hashes, &self.claim(space, hashes), 1);
        while self.store.seal_pending() {}
    }

    fn fill(&self, page: PoolPage, pages: u64, byte: u8) {
        let offset = page.offset().0 as usize;
        let bytes = (pages * PAGE_BYTES) as usize;
        assert!((offset + bytes) as u64 <= self.arena.bytes());
        // SAFETY: Inside the arena, which lives; the test is the only writer and no check runs meanwhile.
        unsafe { self.arena.base().add(offset).write_bytes(byte, bytes) };
    }

    fn lookup(&self, owner: OwnerId, space: SpaceId, hashes: &[BlockHash]) -> Option<Hit> {
        let group = LookupGroup { space, tokens_per_block: 16, window_blocks: 0, hashes };
        self.store.lookup(owner, &[group], u64::MAX, self.now)
    }

    /// Blocks of the prompt that a lookup finds; leaves no lease.
    fn found(&self, space: SpaceId, hashes: &[BlockHash]) -> u64 {
        let hit = self.lookup(OwnerId(77), space, hashes);
        self.store.release_owner(OwnerId(77));
        hit.map_or(0, |hit| hit.tokens / 16)
    }
}

fn claimed(outcomes: &[ClaimOutcome]) -> Vec<ShardClaim> {
    let shard = |outcome: &ClaimOutcome| match outcome {
        ClaimOutcome::Claimed(shard) => Some(*shard),
        _ => None,
    };
    outcomes.iter().filter_map(shard).collect()
}

#[test]
fn what_was_saved_is_found_by_another_engine() {
    let pool = Pool::new(64);
    let space = pool.space(MODEL, &[1]);
    let prompt = hashes(0, 5);
    pool.save(space, &prompt);
    let longer = [prompt.clone(), hashes(9, 2)].concat();
    let hit = pool.lookup(B, space, &longer).unwrap();
    assert_eq!((hit.tokens, hit.groups[0].first_block, hit.groups[0].pages.len()), (80, 0, 5));
    // SAFETY: The blocks are sealed and leased.
    let third = unsafe { pool.arena.bytes_at(hit.groups[0].pages[3].offset(), PAGE_BYTES) };
    assert!(third.iter().all(|&byte| byte == 3));
    assert_eq!(pool.store.stats().leased_blocks, 5);
    pool.store.release(B, hit.lease);
    assert_eq!(pool.store.stats().leased_blocks, 0);
    let stats = &pool.store.spaces()[0];
    assert_eq!((stats.blocks, stats.bytes, stats.hit_blocks, stats.missed_blocks), (5, 5 * PAGE_BYTES, 5, 2));
    assert_eq!((stats.name.as_str(), stats.shards), ("a model", 1));
}

#[test]
fn a_block_is_visible_when_both_workers_wrote_and_it_is_sealed() {
    let pool = Pool::new(64);
    let space = pool.space(MODEL, &[1, 2]);
    let prompt = hashes(0, 2);
    let first = pool.claim_as((A, WORKER, 0), space, Chain::Start, &prompt);
    let second = pool.claim_as((A, OTHER_WORKER, 1), space, Chain::Start, &prompt);
    assert_eq!(pool.store.stats().used_bytes, 6 * PAGE_BYTES);
    pool.write(&prompt, &first, 1);
    assert!(!pool.store.seal_pending());
    assert_eq!(pool.found(space, &prompt), 0);
    pool.write(&prompt, &second, 2);
    assert_eq!(pool.found(space, &prompt), 0);
    assert!(pool.store.seal_pending());
    assert_eq!(pool.found(space, &prompt), 2);
    let pages = pool.lookup(A, space, &prompt).unwrap().groups.remove(0).pages;
    let pages_of = |outcomes: &[ClaimOutcome]| claimed(outcomes).iter().map(|c| c.page).collect::<Vec<_>>();
    let (first, second) = (pages_of(&first), pages_of(&second));
    assert_eq!(pages, [first[0], second[0], first[1], second[1]]);
}

#[test]
fn two_engines_copy_a_prompt_once() {
    let pool = Pool::new(64);
    let space = pool.space(MODEL, &[1]);
    let prompt = hashes(0, 3);
    let outcomes = pool.claim(space, &prompt);
    let other = pool.claim_as((B, OTHER_WORKER, 0), space, Chain::Start, &prompt);
    assert_eq!(other, [ClaimOutcome::InFlight; 3]);
    // The other engine's next block may be saved already: its parent is on the way.
    let next = hashes(1, 1);
    let other = pool.claim_as((B, OTHER_WORKER, 0), space, Chain::After(prompt[2]), &next);
    assert_eq!(claimed(&other).len(), 1);
    pool.write(&prompt, &outcomes, 1);
    let other = pool.claim_as((B, OTHER_WORKER, 0), space, Chain::Start, &prompt);
    assert_eq!(other, [ClaimOutcome::Present; 3]);
    let counters = pool.store.stats().counters;
    assert_eq!((counters.dedup_in_flight, counters.dedup_present), (3, 3));
}

#[test]
fn a_claim_dies_with_its_writer_and_late_commits_count_for_nothing() {
    let pool = Pool::new(64);
    let space = pool.space(MODEL, &[1, 1]);
    let prompt = hashes(0, 2);
    let first = claimed(&pool.claim_as((A, WORKER, 0), space, Chain::Start, &prompt));
    let second = claimed(&pool.claim_as((A, OTHER_WORKER, 1), space, Chain::Start, &prompt));
    pool.store.commit(&first[..1], pool.now);
    pool.store.writer_gone(WORKER, pool.now);
    // Both blocks died: block 1 lacks the dead worker's shard, and block 0 waits for the other worker only.
    let stats = pool.store.stats();
    assert_eq!(
        (stats.claimed_blocks, stats.limbo_bytes),
        (1, PAGE_BYTES),
        "the other worker still writes one"
    );
    pool.store.commit(&second, pool.now);
    let stats = pool.store.stats();
    assert_eq!((stats.limbo_bytes, stats.used_bytes, stats.counters.stale_commits), (0, 2 * PAGE_BYTES, 1));
    while pool.store.seal_pending() {}
    assert_eq!(pool.found(space, &prompt), 1);
    pool.store.commit(&first, pool.now);
    pool.store.abort(&second, pool.now);
    assert_eq!(pool.store.stats().used_bytes, 2 * PAGE_BYTES, "stale calls free nothing that lives");
}

#[test]
fn a_claim_expires_when_the_second_worker_never_comes() {
    let mut pool = Pool::new(64);
    let space = pool.space(MODEL, &[1, 1]);
    let prompt = hashes(0, 1);
    let first = claimed(&pool.claim_as((A, WORKER, 0), space, Chain::Start, &prompt));
    pool.now += 2 * TTL;
    pool.store.expire(pool.now);
    assert_eq!(pool.store.stats().claimed_blocks, 1, "a shard is being written");
    pool.store.commit(&first, pool.now);
    pool.store.expire(pool.now + TTL);
    assert_eq!(pool.store.stats().claimed_blocks, 1, "the commit was progress");
    pool.store.expire(pool.now + TTL + Duration::from_millis(1));
    let stats = pool.store.stats();
    assert_eq!((stats.claimed_blocks, stats.used_bytes, stats.counters.expired_claims), (0, 0, 1));
}

#[test]
fn a_heartbeat_frees_old_leases_that_it_does_not_name() {
    let mut pool = Pool::new(64);
    let space = pool.space(MODEL, &[1]);
    let prompt = hashes(0, 2);
    pool.save(space, &prompt);
    let lease = |pool: &Pool| pool.lookup(A, space, &prompt).unwrap().lease;
    let (kept, lost) = (lease(&pool), lease(&pool));
    pool.now += TTL + Duration::from_secs(1);
    let young = lease(&pool);
    assert_eq!(pool.store.leases_of(A), 3, "without a heartbeat nothing expires");
    pool.store.heartbeat(B, &[], pool.now);
    assert_eq!(pool.store.leases_of(A), 3, "another owner's heartbeat says nothing");
    pool.store.heartbeat(A, &[kept, LeaseId(999)], pool.now);
    assert_eq!(pool.store.leases_of(A), 2, "the young one may still be on its way to its owner");
    pool.store.release(A, lost);
    pool.store.release(B, kept);
    pool.store.release(A, young);
    assert_eq!(pool.store.leases_of(A), 1);
    pool.now += TTL;
    pool.store.heartbeat(A, &[], pool.now);
    assert_eq!(pool.store.leases_of(A), 1, "it was renewed when it was named");
    pool.now += Duration::from_secs(1);
    pool.store.heartbeat(A, &[], pool.now);
    assert_eq!((pool.store.leases_of(A), pool.store.stats().leased_blocks), (0, 0));
}

#[test]
fn a_reconnected_process_keeps_the_leases_it_names() {
    let pool = Pool::new(64);
    let space = pool.space(MODEL, &[1]);
    let (one, two) = (hashes(1, 2), hashes(2, 3));
    pool.save(space, &one);
    pool.save(space, &two);
    let kept = pool.lookup(A, space, &one).unwrap().lease;
    pool.lookup(A, space, &two).unwrap();
    pool.store.adopt(A, B, &[kept]);
    assert_eq!((pool.store.leases_of(A), pool.store.leases_of(B)), (0, 1));
    assert_eq!(pool.store.stats().leased_blocks, 2);
    pool.store.release(B, kept);
    assert_eq!(pool.store.stats().leased_blocks, 0);
}

#[test]
fn eviction_takes_the_tail_of_the_oldest_prompt_and_no_leased_block() {
    let pool = Pool::new(8);
    let space = pool.space(MODEL, &[1]);
    let (old, leased) = (hashes(1, 4), hashes(2, 4));
    pool.save(space, &leased);
    pool.save(space, &old);
    let lease = pool.lookup(A, space, &leased).unwrap().lease;
    pool.save(space, &hashes(3, 2));
    assert_eq!((pool.found(space, &old), pool.found(space, &leased)), (2, 4));
    let counters = pool.store.stats().counters;
    assert_eq!((counters.evicted_blocks, counters.evicted_bytes), (2, 2 * PAGE_BYTES));
    // Room for four: prompt 3 was used before what is left of the old one was looked up.
    let outcomes = pool.claim(space, &hashes(4, 6));
    assert_eq!(claimed(&outcomes).len(), 4);
    assert_eq!(outcomes[4..], [ClaimOutcome::NoRoom; 2]);
    assert_eq!(pool.found(space, &leased), 4);
    pool.store.release(A, lease);
    let next = pool.claim_as((A, WORKER, 0), space, Chain::After(hashes(4, 4)[3]), &hashes(5, 2));
    assert_eq!(claimed(&next).len(), 2);
}

#[test]
fn the_store_counts_how_long_evicted_blocks_stayed() {
    let mut pool = Pool::new(4);
    let space = pool.space(MODEL, &[1]);
    pool.save(space, &hashes(1, 2));
    pool.now += Duration::from_secs(100);
    pool.save(space, &hashes(2, 2));
    pool.now += Duration::from_secs(30);
    pool.save(space, &hashes(3, 3));
    let residence = pool.store.stats().residence;
    assert_eq!((residence.blocks(), residence.seconds), (3, 130 + 130 + 30));
    assert_eq!(residence.counts[2..4], [1, 2], "up to one minute, and up to five");
    assert_eq!(pool.store.stats().counters.sealed_bytes, 7 * PAGE_BYTES);
}

#[test]
fn a_claim_does_not_evict_the_prefix_it_extends() {
    let pool = Pool::new(4);
    let space = pool.space(MODEL, &[1]);
    let prompt = hashes(0, 6);
    pool.save(space, &prompt[..4]);
    let next = pool.claim_as((A, WORKER, 0), space, Chain::After(prompt[3]), &prompt[4..]);
    assert_eq!(next, [ClaimOutcome::NoRoom; 2]);
    assert_eq!(pool.found(space, &prompt), 4);
    // A block whose parent is nowhere could never be found: it is not stored.
    let orphan = pool.claim_as((A, WORKER, 0), space, Chain::After(prompt[4]), &prompt[5..]);
    assert_eq!(orphan, [ClaimOutcome::NoRoom]);
    assert_eq!(pool.store.stats().counters.evicted_blocks, 0);
}

#[test]
fn saving_a_continuation_keeps_its_prefix_young() {
    let pool = Pool::new(8);
    let space = pool.space(MODEL, &[1]);
    let (used, idle) = (hashes(1, 3), hashes(2, 3));
    pool.save(space, &used);
    pool.save(space, &idle);
    let next = hashes(3, 1);
    let outcomes = pool.claim_as((A, WORKER, 0), space, Chain::After(used[2]), &next);
    pool.write(&next, &outcomes, 1);
    pool.store.seal_pending();
    pool.save(space, &hashes(4, 3));
    let whole = [used, next].concat();
    assert_eq!((pool.found(space, &whole), pool.found(space, &idle)), (4, 1));
}

#[test]
fn a_window_group_needs_its_window_and_does_not_hold_its_past() {
    let pool = Pool::new(8);
    let full = pool.space(MODEL, &[1]);
    let window = pool.space(Namespace([2; 16]), &[1]);
    let prompt = hashes(0, 4);
    pool.save(full, &prompt);
    let outcomes = pool.claim_as((A, WORKER, 0), window, Chain::Unchained, &prompt);
    pool.write(&prompt, &outcomes, 1);
    pool.store.seal_pending();
    let lookup = |window_blocks| {
        let groups = [
            LookupGroup { space: full, tokens_per_block: 16, window_blocks: 0, hashes: &prompt },
            LookupGroup { space: window, tokens_per_block: 16, window_blocks, hashes: &prompt },
        ];
        pool.store.lookup(A, &groups, u64::MAX, pool.now)
    };
    let hit = lookup(2).unwrap();
    assert_eq!((hit.tokens, hit.groups[1].first_block, hit.groups[1].pages.len()), (64, 2, 2));
    // With the rest leased, the window's past is what can be evicted, although what follows it stays.
    let outcomes = pool.claim(full, &hashes(5, 3));
    assert_eq!(claimed(&outcomes).len(), 2);
    assert_eq!(lookup(2).map(|hit| hit.tokens), Some(64));
    assert_eq!(lookup(3), None);
}

#[test]
fn spaces_are_forgotten_when_nobody_uses_them_the_empty_ones_first() {
    let pool = Pool::new(64);
    let spaces: Vec<SpaceId> = (0..8).map(|number| pool.space(Namespace([number + 10; 16]), &[1])).collect();
    let prompt = hashes(0, 3);
    // 0 is in use, 1 has leased blocks, 2 and 3 have blocks, 4 is being saved, the others are empty.
    spaces[1..4].iter().for_each(|space| pool.save(*space, &prompt));
    let lease = pool.lookup(A, spaces[1], &prompt).unwrap().lease;
    let writing = claimed(&pool.claim(spaces[4], &prompt));
    let in_use = HashSet::from([spaces[0]]);
    let left = || -> Vec<u8> { pool.store.spaces().iter().map(|space| space.namespace.0[0] - 10).collect() };
    pool.store.forget_spaces(7, &in_use);
    assert_eq!(left(), [0, 1, 2, 3, 4, 6, 7]);
    pool.store.forget_spaces(4, &in_use);
    assert_eq!(left(), [0, 1, 3, 4], "of those with blocks the oldest goes");
    assert_eq!(pool.store.stats().used_bytes, 9 * PAGE_BYTES);
    pool.store.forget_spaces(0, &in_use);
    assert_eq!(left(), [0, 1, 4], "what is promised or being saved stays");
    pool.store.release(A, lease);
    pool.store.abort(&writing, pool.now);
    pool.store.forget_spaces(0, &in_use);
    assert_eq!(left(), [0]);
    assert_eq!(pool.store.stats().used_bytes, 0);
    // The same namespace later is a new space, without the old one's blocks.
    let again = pool.space(Namespace([12; 16]), &[1]);
    assert!(!spaces.contains(&again));
    assert_eq!(pool.found(again, &prompt), 0);
    pool.save(again, &prompt);
    assert_eq!(pool.found(again, &prompt), 3);
}

#[test]
fn a_dropped_namespace_is_gone_at_once_and_freed_when_its_readers_end() {
    let pool = Pool::new(64);
    let (space, other) = (pool.space(MODEL, &[1]), pool.space(Namespace([2; 16]), &[1]));
    let prompt = hashes(0, 3);
    pool.save(space, &prompt);
    pool.save(other, &prompt);
    let lease = pool.lookup(A, space, &prompt[..2]).unwrap().lease;
    let writing = claimed(&pool.claim_as((A, WORKER, 0), space, Chain::After(prompt[2]), &hashes(1, 1)));
    assert_eq!(pool.store.drop_namespace(MODEL).blocks, 4);
    assert_eq!((pool.found(space, &prompt), pool.found(other, &prompt)), (0, 3));
    let stats = pool.store.stats();
    assert_eq!((stats.blocks, stats.limbo_bytes, stats.used_bytes), (3, 3 * PAGE_BYTES, 6 * PAGE_BYTES));
    // New content under the same keys goes elsewhere, while the old is still read.
    pool.save(space, &prompt);
    assert_eq!(pool.found(space, &prompt), 3);
    pool.store.release(A, lease);
    assert_eq!(pool.store.stats().limbo_bytes, PAGE_BYTES);
    pool.store.abort(&writing, pool.now);
    let stats = pool.store.stats();
    assert_eq!((stats.limbo_bytes, stats.used_bytes), (0, 6 * PAGE_BYTES));
}

#[test]
fn scrub_drops_a_damaged_block_and_a_new_save_heals_the_prefix() {
    let pool = Pool::new(64);
    let space = pool.space(MODEL, &[1]);
    let prompt = hashes(0, 5);
    pool.save(space, &prompt);
    assert_eq!(pool.scrub_all(), (5, 0));
    let hit = pool.lookup(A, space, &prompt).unwrap();
    pool.fill(hit.groups[0].pages[2], 1, 0xEE);
    assert_eq!(pool.scrub_all(), (5, 1));
    assert_eq!(pool.found(space, &prompt), 2);
    let stats = pool.store.stats();
    assert_eq!((stats.blocks, stats.counters.scrub_bad), (4, 1));
    assert_eq!((stats.leased_blocks, stats.limbo_bytes), (4, PAGE_BYTES), "its memory waits for the lease");
    pool.store.release(A, hit.lease);
    assert_eq!(pool.store.stats().limbo_bytes, 0);
    let outcomes = pool.claim(space, &prompt);
    assert_eq!(claimed(&outcomes).len(), 1, "only the damaged one is missing");
    pool.write(&prompt[2..3], &outcomes, 1);
    pool.store.seal_pending();
    assert_eq!(pool.found(space, &prompt), 5);
}

#[test]
fn another_block_size_gets_room_in_a_full_pool() {
    let pool = Pool::new(64);
    let (small, large) = (pool.space(MODEL, &[1]), pool.space(Namespace([2; 16]), &[16]));
    for prompt in 0..16 {
        pool.save(small, &hashes(prompt, 4));
    }
    assert_eq!(pool.store.stats().blocks, 64);
    for prompt in 0..20 {
        let hashes = hashes(prompt, 1);
        pool.write(&hashes, &pool.claim(large, &hashes), 16);
        pool.store.seal_pending();
    }
    let stats = pool.store.spaces();
    assert!(stats[1].blocks >= 3, "{stats:?}");
    let too_large = pool.space(Namespace([3; 16]), &[65]);
    assert_eq!(pool.claim(too_large, &hashes(0, 1)), [ClaimOutcome::NoRoom]);
    assert_eq!(pool.store.spaces()[1], stats[1], "nothing is evicted for what never fits");
}

/// The scrub was reading the last block of the oldest prompt. Eviction passed it over, then each of the blocks before
/// it, which have a child, and gave up: the save got no room in a pool full of blocks that could go.
#[test]
fn a_block_that_is_being_checked_does_not_keep_its_prompt_from_being_evicted() {
    let now = Instant::now();
    let extents = ExtentAllocator::new(1024, std::slice::from_ref(&(0..1024)));
    let mut index = Index::new(extents, 1024 * PAGE_BYTES, StoreOptions::default());
    let space = index.space(MODEL, "a model", CutDigest([5; 16]), &[PAGE_BYTES]);
    let save = |index: &mut Index, first: u16, count: u16| {
        let hash = |block: u16| {
            BlockHash([[first as u8; 2], block.to_le_bytes()].concat().repeat(4).try_into().unwrap())
        };
        let hashes: Vec<BlockHash> = (0..count).map(hash).collect();
        let mut outcomes = Vec::new();
        index.claim(
            &Caller { owner: A, writer: WORKER, space, shard: ShardNumber(0), now },
            Chain::Start,
            &hashes,
            &mut outcomes,
        );
        let shards = claimed(&outcomes);
        index.commit(&shards, now);
        for check in index.take_unsealed(u64::MAX, usize::MAX) {
            index.finish_seal(check, &[0]);
        }
        shards
    };
    let oldest = save(&mut index, 1, 900);
    save(&mut index, 2, 124);
    let mut at_its_tail = oldest[899].block.slot;
    let check = index.next_scrub(&mut at_its_tail, 1).unwrap();
    assert_eq!(save(&mut index, 3, 20).len(), 20, "room for all");
    index.check_consistency().unwrap();
    assert_eq!(index.finish_scrub(check, true), None);
    index.check_consistency().unwrap();
    assert_eq!(index.stats().limbo_bytes, 0);
}

/// Several threads seal, each a batch: the later one may be done first. Who waited for the first one was told that it is
/// sealed, by the number of those that were.
#[test]
fn a_seal_that_ends_before_an_earlier_one_does_not_count_for_it() {
    let now = Instant::now();
    let extents = ExtentAllocator::new(64, std::slice::from_ref(&(0..64)));
    let mut index = Index::new(extents, 64 * PAGE_BYTES, StoreOptions::default());
    let space = index.space(MODEL, "a model", CutDigest([5; 16]), &[PAGE_BYTES]);
    let mut outcomes = Vec::new();
    index.claim(
        &Caller { owner: A, writer: WORKER, space, shard: ShardNumber(0), now },
        Chain::Unchained,
        &hashes(0, 4),
        &mut outcomes,
    );
    let shards = claimed(&outcomes);
    index.commit(&shards, now);
    let [first] = index.take_unsealed(1, 1).try_into().unwrap();
    let [second] = index.take_unsealed(1, 1).try_into().unwrap();
    // The third one dies while it waits.
    index.drop_blocks(&[shards[2].block]);
    assert!(index.stats().seal_queue >= 3);
    index.finish_seal(second, &[0]);
    assert_eq!(index.sealed_through(), 0);
    index.finish_seal(first, &[0]);
    assert_eq!(index.sealed_through(), 2);
    let [last] = index.take_unsealed(u64::MAX, usize::MAX).try_into().unwrap();
    assert_eq!((index.sealed_through(), index.stats().seal_queue), (3, 1));
    index.finish_seal(last, &[0]);
    assert_eq!((index.sealed_through(), index.stats().seal_queue), (4, 0));
}

/// Engines that extend their prompts in turns spread each prompt over the whole pool: then no slab can be emptied
/// without a parent of blocks elsewhere.
#[test]
fn another_block_size_gets_room_among_scattered_prompts() {
    const PROMPTS: u8 = 8;
    const BLOCKS: u8 = 255;
    let pool = Pool::new(2048);
    let (small, large) = (pool.space(MODEL, &[1]), pool.space(Namespace([2; 16]), &[8]));
    let prompts: Vec<_> = (0..PROMPTS).map(|prompt| hashes(prompt, BLOCKS)).collect();
    let lone = hashes(PROMPTS, PROMPTS);
    for block in 0..usize::from(BLOCKS) {
        for prompt in &prompts {
            let chain = block.checked_sub(1).map_or(Chain::Start, |parent| Chain::After(prompt[parent]));
            let one = &prompt[block..=block];
            pool.write(one, &pool.claim_as((A, WORKER, 0), small, chain, one), 1);
        }
        pool.store.seal_pending();
    }
    pool.save(small, &lone);
    assert_eq!(pool.store.stats().blocks, 2048, "the pool is full");

    let wanted = hashes(0, 1);
    pool.write(&wanted, &pool.claim(large, &wanted), 8);
    pool.store.seal_pending();
    assert_eq!(pool.found(large, &wanted), 1);
    let left: u64 = prompts.iter().map(|prompt| pool.found(small, prompt)).sum();
    assert_eq!(
        left + 8,
        pool.store.spaces()[0].blocks,
        "each block that is left is found: no child lost its parent"
    );
}

#[test]
fn the_background_seals_and_scrubs() {
    let pool = Pool::new(64);
    let space = pool.space(MODEL, &[1]);
    let prompt = hashes(0, 4);
    {
        let background = pool.store.start_background(1, 1 << 30).unwrap();
        pool.write(&prompt, &pool.claim(space, &prompt), 1);
        assert!(pool.store.settle(PATIENCE));
        assert_eq!(pool.found(space, &prompt), 4);
        let deadline = Instant::now() + PATIENCE;
        while pool.store.stats().counters.scrub_checked < 4 && Instant::now() < deadline {
            std::thread::yield_now();
        }
        drop(background);
    }
    let stats = pool.store.stats();
    assert!(stats.counters.scrub_checked >= 4 && stats.counters.scrub_bad == 0, "{stats:?}");
    // Without a background nothing is sealed, and settle says so.
    let more = hashes(1, 1);
    pool.write(&more, &pool.claim(space, &more), 1);
    assert!(!pool.store.settle(Duration::from_millis(1)));
    assert!(pool.store.seal_pending() && pool.store.settle(Duration::ZERO));
}

#[test]
fn engines_at_once_read_what_was_saved() {
    let pool = Pool::new(64);
    let space = pool.space(MODEL, &[2]);
    let background = pool.store.start_background(3, 1 << 30).unwrap();
    let pool = &pool;
    let engine = |number: u64| {
        let mut verified = 0;
        for round in 0..300u64 {
            let prompt = hashes(((round * 7 + number) % 11) as u8, 6);
            let outcomes =
                pool.claim_as((OwnerId(number), WriterId(number), 0), space, Chain::Start, &prompt);
            for (hash, outcome) in prompt.iter().zip(&outcomes) {
                if let ClaimOutcome::Claimed(shard) = outcome {
                    pool.fill(shard.page, 2, hash.0[0] * 16 + hash.0[1]);
                }
            }
            pool.store.commit(&claimed(&outcomes), pool.now);
            assert!(pool.store.settle(PATIENCE));
            let Some(hit) = pool.lookup(OwnerId(number), space, &prompt) else { continue };
            for (hash, &page) in prompt.iter().zip(&hit.groups[0].pages) {
                // SAFETY: The block is sealed and leased, so nobody writes it.
                let bytes = unsafe { pool.arena.bytes_at(page.offset(), 2 * PAGE_BYTES) };
                assert!(bytes.iter().all(|&byte| byte == hash.0[0] * 16 + hash.0[1]), "block {hash}");
                verified += 1;
            }
            pool.store.release(OwnerId(number), hit.lease);
        }
        verified
    };
    let verified: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> = (1..=4).map(|number| scope.spawn(move || engine(number))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    drop(background);
    let counters = pool.store.stats().counters;
    assert!(verified > 100 && counters.evicted_blocks > 100, "{verified} verified, {counters:?}");
    assert_eq!((counters.scrub_bad, counters.stale_commits), (0, 0));
}

#[test]
fn sizes_belong_to_the_cut() {
    let pool = Pool::new(64);
    let space = pool.space(MODEL, &[1]);
    assert_eq!(pool.space(MODEL, &[1]), space);
    assert_ne!(pool.space(MODEL, &[2]), space);
    let nothing = LookupGroup { space, tokens_per_block: 0, window_blocks: 0, hashes: &hashes(0, 1) };
    assert_eq!(pool.store.lookup(A, &[nothing], u64::MAX, pool.now), None);
    assert_eq!(pool.store.lookup(A, &[], u64::MAX, pool.now), None);
}
