//! A store over a tier: visible blocks are spilled, missing ones are fetched, and no call waits for ever.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use kvlane_block::{BlockHash, BlockKey, CutDigest, Namespace, PoolExtent, SealedShard, Space};
use kvlane_memory::{Arena, ArenaOptions, HugePages, Numa, PAGE_BYTES};
use kvlane_policy::{Choice, Memo, PolicyKind, TieredModel};
use kvlane_store::{
    Below, BlockRead, Caller, Chain, ClaimOutcome, FetchPlan, FindDone, Found, Hit, HolderId, LookupGroup,
    NotForGood, OwnerId, Question, ShardClaim, ShardNumber, Source, SpaceId, Store, StoreOptions, WriteDone,
    WriterId,
};
use parking_lot::{Condvar, Mutex};
use proptest::prelude::*;

const ENGINE: OwnerId = OwnerId(1);
const WORKER: WriterId = WriterId(10);
const MODEL: Namespace = Namespace([1; 16]);
/// Long enough for a loaded machine; reached only by a test that fails.
const PATIENCE: Duration = Duration::from_secs(30);

type Work = Box<dyn FnOnce(&Shelf) + Send>;

/// Keeps bytes in a map. Reads and writes wait to be let through while it is held.
#[derive(Default)]
struct Shelf {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    arena: Option<Arc<Arena>>,
    kept: BTreeMap<BlockKey, Vec<Vec<u8>>>,
    memos: BTreeMap<BlockKey, Memo>,
    is_held: bool,
    /// Notes of drops are held with the reads and writes.
    holds_notes: bool,
    held: Vec<Work>,
    /// Reads of these fail.
    unreadable: BTreeSet<BlockKey>,
    /// No block is kept, as by a device that fails.
    refuses: bool,
    writes: u64,
    reads: u64,
}

impl Shelf {
    fn run(&self, work: Work) {
        let mut state = self.state.lock();
        if state.is_held {
            state.held.push(work);
            self.changed.notify_all();
        } else {
            drop(state);
            work(self);
        }
    }

    fn hold(&self) {
        self.state.lock().is_held = true;
    }

    fn wait_for_held(&self, at_least: usize) {
        let mut state = self.state.lock();
        while state.held.len() < at_least {
            assert!(
                !self.changed.wait_for(&mut state, PATIENCE).timed_out(),
                "{} are held",
                state.held.len()
            );
        }
    }

    /// Waits until so much is held, then lets it through, the last first.
    fn let_through(&self, at_least: usize) {
        self.wait_for_held(at_least);
        let mut state = self.state.lock();
        state.is_held = false;
        let held = std::mem::take(&mut state.held);
        drop(state);
        held.into_iter().rev().for_each(|work| work(self));
    }

    fn arena(&self) -> Arc<Arena> {
        Arc::clone(self.state.lock().arena.as_ref().unwrap())
    }
}

#[allow(clippy::mut_from_ref, reason = "the pool is shared memory")]
fn bytes_at(arena: &Arena, at: PoolExtent) -> &mut [u8] {
    // SAFETY: the test's store handed this extent out for as long as it is used here.
    unsafe { std::slice::from_raw_parts_mut(arena.base().add(at.offset.0 as usize), at.bytes as usize) }
}

struct ShelfTier(Arc<Shelf>);

impl Below for ShelfTier {
    fn contains(&self, key: &BlockKey) -> bool {
        self.0.state.lock().kept.contains_key(key)
    }

    fn write(&self, key: BlockKey, shards: Vec<SealedShard>, memo: Memo, done: WriteDone) {
        self.0.state.lock().writes += 1;
        self.0.run(Box::new(move |shelf| {
            let arena = shelf.arena();
            let copy = |shard: &SealedShard| {
                let bytes = bytes_at(&arena, shard.extent).to_vec();
                assert_eq!(kvlane_block::crc32c(&bytes), shard.crc32c, "written bytes are the sealed ones");
                bytes
            };
            let bytes: Vec<Vec<u8>> = shards.iter().map(copy).collect();
            if shelf.state.lock().refuses {
                return done.call(false);
            }
            {
                let mut state = shelf.state.lock();
                state.kept.insert(key, bytes);
                state.memos.insert(key, memo);
            }
            done.call(true);
        }));
    }

    fn memo(&self, key: &BlockKey) -> Option<Memo> {
        self.0.state.lock().memos.get(key).copied()
    }

    fn remember(&self, lost: &[(BlockKey, Memo)]) {
        let mut state = self.0.state.lock();
        for (key, memo) in lost {
            if let Some(kept) = state.memos.get_mut(key) {
                *kept = *memo;
            }
        }
    }

    fn forget_namespace(&self, namespace: Namespace) {
        self.0.state.lock().kept.retain(|key, _| key.space.namespace != namespace);
    }

    fn note_forgotten(&self, _: Namespace) -> Result<(), NotForGood> {
        if !self.0.state.lock().holds_notes {
            return Ok(());
        }
        let (noted, was_noted) = channel();
        self.0.run(Box::new(move |_| noted.send(()).unwrap()));
        was_noted.recv_timeout(PATIENCE).unwrap();
        Ok(())
    }
}

impl Source for ShelfTier {
    fn find(&self, question: Question, done: FindDone) {
        let Question { space, hashes, only_prefix, .. } = question;
        let state = self.0.state.lock();
        let has = |hash: &BlockHash| state.kept.contains_key(&BlockKey { space, hash: *hash });
        let prefix = hashes.iter().take_while(|hash| has(hash)).count();
        let asked = (0..).zip(hashes.iter()).take(if only_prefix { prefix } else { hashes.len() });
        let positions = asked.filter(|(_, hash)| has(hash)).map(|(at, _)| at..at + 1).collect();
        drop(state);
        done.call(vec![Found { holder: HolderId(0), positions, round_trip: Duration::ZERO }]);
    }

    fn read(&self, _: HolderId, blocks: Vec<BlockRead>, _: Instant) {
        for BlockRead { key, extents, done } in blocks {
            self.0.state.lock().reads += 1;
            self.0.run(Box::new(move |shelf| {
                let arena = shelf.arena();
                let kept = {
                    let state = shelf.state.lock();
                    state.kept.get(&key).filter(|_| !state.unreadable.contains(&key)).cloned()
                };
                let crcs = kept.map(|kept| {
                    let copy = |(bytes, at): (&Vec<u8>, &PoolExtent)| {
                        bytes_at(&arena, *at).copy_from_slice(bytes);
                        kvlane_block::crc32c(bytes)
                    };
                    kept.iter().zip(&extents).map(copy).collect()
                });
                done.call(crcs);
            }));
        }
    }
}

/// The plan, which a shelf answers at once.
fn plan(store: &Arc<Store>, groups: &[LookupGroup<'_>]) -> Option<FetchPlan> {
    store.find(groups, u64::MAX).wait_until(Instant::now()).ok().unwrap()
}

struct Pool {
    shelf: Arc<Shelf>,
    arena: Arc<Arena>,
    store: Arc<Store>,
    space: SpaceId,
    _background: kvlane_store::Background,
}

fn hashes(prompt: u8, blocks: u8) -> Vec<BlockHash> {
    (0..blocks).map(|block| BlockHash([prompt, block, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3])).collect()
}

/// What a shard of a block holds.
fn content(hash: &BlockHash, shard: u32) -> u8 {
    hash.0[0].wrapping_mul(31).wrapping_add(hash.0[1].wrapping_mul(7)).wrapping_add(shard as u8)
}

/// Pages of each shard.
const SHARDS: [u64; 2] = [2, 1];

impl Pool {
    /// A fresh pool over what a shelf keeps, as after a restart.
    fn over(shelf: &Arc<Shelf>, pages: u64) -> Self {
        Self::with_policy(shelf, pages, PolicyKind::Lru)
    }

    fn with_policy(shelf: &Arc<Shelf>, pages: u64, policy: PolicyKind) -> Self {
        let options = ArenaOptions {
            bytes: pages * PAGE_BYTES,
            hugepages: HugePages::Off,
            numa: Numa::Off,
            threads: 1,
        };
        let arena = Arc::new(Arena::create(&options, &|_| {}).unwrap());
        shelf.state.lock().arena = Some(Arc::clone(&arena));
        let tier = Arc::new(ShelfTier(Arc::clone(shelf)));
        let options = StoreOptions { policy: Choice::Fixed(policy), ..StoreOptions::default() };
        let store = Store::with_tiers(Arc::clone(&arena), options, Some(Arc::clone(&tier) as _), vec![tier]);
        let space =
            store.space(MODEL, "a model", CutDigest([5; 16]), &SHARDS.map(|pages| pages * PAGE_BYTES));
        let _background = store.start_background(2, 0).unwrap();
        Self { shelf: Arc::clone(shelf), arena, store, space, _background }
    }

    fn save(&self, chain: Chain, hashes: &[BlockHash]) {
        let mut claims: Vec<ShardClaim> = Vec::new();
        for (shard, pages) in (0..).zip(SHARDS) {
            let mut outcomes = Vec::new();
            let now = Instant::now();
            self.store.claim(
                &Caller { owner: ENGINE, writer: WORKER, space: self.space, shard: ShardNumber(shard), now },
                chain,
                hashes,
                &mut outcomes,
            );
            for (outcome, hash) in outcomes.iter().zip(hashes) {
                if let ClaimOutcome::Claimed(claim) = outcome {
                    let at = PoolExtent { offset: claim.page.offset(), bytes: pages * PAGE_BYTES };
                    bytes_at(&self.arena, at).fill(content(hash, shard));
                    claims.push(*claim);
                }
            }
        }
        self.store.commit(&claims, Instant::now());
        assert!(self.store.settle(PATIENCE));
    }

    fn group<'a>(&self, window_blocks: u32, hashes: &'a [BlockHash]) -> LookupGroup<'a> {
        LookupGroup { space: self.space, tokens_per_block: 16, window_blocks, hashes }
    }

    fn fetch(&self, window_blocks: u32, hashes: &[BlockHash]) -> Option<Receiver<()>> {
        let (done, is_done) = channel();
        let groups = [self.group(window_blocks, hashes)];
        let now = Instant::now();
        let plan = plan(&self.store, &groups)?;
        self.store.fetch(plan, now, now + PATIENCE, move || done.send(()).unwrap());
        Some(is_done)
    }

    /// Blocks of a hit, with the bytes looked at.
    fn hit_blocks(&self, window_blocks: u32, hashes: &[BlockHash]) -> u64 {
        let groups = [self.group(window_blocks, hashes)];
        let Some(hit) = self.store.lookup(ENGINE, &groups, u64::MAX, Instant::now()) else { return 0 };
        self.check_bytes(&hit, hashes);
        self.store.release(ENGINE, hit.lease);
        hit.tokens / 16
    }

    fn check_bytes(&self, hit: &Hit, hashes: &[BlockHash]) {
        let group = &hit.groups[0];
        let hashes = &hashes[group.first_block as usize..];
        for (pages, hash) in group.pages.chunks(SHARDS.len()).zip(hashes) {
            for ((shard, page), count) in (0..).zip(pages).zip(SHARDS) {
                let at = PoolExtent { offset: page.offset(), bytes: count * PAGE_BYTES };
                let expected = content(hash, shard);
                assert!(bytes_at(&self.arena, at).iter().all(|byte| *byte == expected), "{hash:?} {shard}");
            }
        }
    }

    fn settle_spill(&self) {
        assert!(self.store.settle_spill(Instant::now() + PATIENCE));
    }
}

#[test]
fn a_prompt_comes_back_into_a_new_pool() {
    let shelf = Arc::new(Shelf::default());
    let prompt = hashes(1, 6);
    let pool = Pool::over(&shelf, 64);
    pool.save(Chain::Start, &prompt);
    pool.settle_spill();
    assert_eq!(pool.store.stats().counters.spilled_blocks, 6);
    drop(pool);

    let pool = Pool::over(&shelf, 64);
    assert_eq!(pool.hit_blocks(0, &prompt), 0);
    pool.fetch(0, &prompt).unwrap().recv_timeout(PATIENCE).unwrap();
    assert_eq!(pool.hit_blocks(0, &prompt), 6);
    let stats = pool.store.stats();
    assert_eq!((stats.counters.fetched_blocks, stats.counters.failed_fetches), (6, 0));
    assert_eq!(stats.counters.fetched_bytes, 6 * 3 * PAGE_BYTES);
    // What came from the tier does not go there again.
    pool.settle_spill();
    assert_eq!(shelf.state.lock().writes, 6);
    // All is here: there is nothing to wait for.
    assert!(pool.fetch(0, &prompt).is_none());
    assert!(pool.fetch(0, &hashes(2, 6)).is_none());
    assert_eq!(shelf.state.lock().reads, 6);
}

#[test]
fn what_was_evicted_comes_back_and_the_prompt_before_it_stays() {
    let shelf = Arc::new(Shelf::default());
    // Room for eight blocks or so.
    let pool = Pool::over(&shelf, 8 * 4);
    let (first, second) = (hashes(1, 6), hashes(2, 6));
    pool.save(Chain::Start, &first);
    pool.settle_spill();
    pool.save(Chain::Start, &second);
    pool.settle_spill();
    let left = pool.hit_blocks(0, &first);
    assert!(left < 6, "nothing was evicted");
    pool.fetch(0, &first).unwrap().recv_timeout(PATIENCE).unwrap();
    assert_eq!(pool.hit_blocks(0, &first), 6);
}

#[test]
fn two_prompts_wait_for_the_blocks_they_share_and_those_are_read_once() {
    let shelf = Arc::new(Shelf::default());
    let (short, long) = (hashes(1, 3), hashes(1, 6));
    let pool = Pool::over(&shelf, 64);
    pool.save(Chain::Start, &long);
    pool.settle_spill();
    drop(pool);

    let pool = Pool::over(&shelf, 64);
    shelf.hold();
    let for_short = pool.fetch(0, &short).unwrap();
    let for_long = pool.fetch(0, &long).unwrap();
    let again = pool.fetch(0, &short).unwrap();
    assert!(for_short.try_recv().is_err() && for_long.try_recv().is_err() && again.try_recv().is_err());
    shelf.let_through(6);
    for done in [for_short, for_long, again] {
        done.recv_timeout(PATIENCE).unwrap();
    }
    assert_eq!(pool.hit_blocks(0, &long), 6);
    assert_eq!(shelf.state.lock().reads, 6);
}

#[test]
fn a_block_that_cannot_be_read_ends_the_hit_and_can_be_saved_again() {
    let shelf = Arc::new(Shelf::default());
    let prompt = hashes(1, 6);
    let pool = Pool::over(&shelf, 64);
    pool.save(Chain::Start, &prompt);
    pool.settle_spill();
    drop(pool);

    let pool = Pool::over(&shelf, 64);
    let key = BlockKey { space: Space { namespace: MODEL, cut: CutDigest([5; 16]) }, hash: prompt[3] };
    shelf.state.lock().unreadable.insert(key);
    pool.fetch(0, &prompt).unwrap().recv_timeout(PATIENCE).unwrap();
    assert_eq!(pool.hit_blocks(0, &prompt), 3);
    assert_eq!(pool.store.stats().counters.failed_fetches, 1);
    pool.save(Chain::Start, &prompt);
    assert_eq!(pool.hit_blocks(0, &prompt), 6);
}

#[test]
fn a_prompt_of_more_blocks_than_the_tier_takes_at_once_comes_whole() {
    let shelf = Arc::new(Shelf::default());
    let prompt: Vec<BlockHash> = (0..3000u16)
        .map(|block| BlockHash([block.to_le_bytes(); 8].as_flattened().try_into().unwrap()))
        .collect();
    let pool = Pool::over(&shelf, 3000 * 4);
    pool.save(Chain::Start, &prompt);
    pool.settle_spill();
    drop(pool);

    let pool = Pool::over(&shelf, 3000 * 4);
    shelf.hold();
    let done = pool.fetch(0, &prompt).unwrap();
    let at_once = shelf.state.lock().held.len();
    assert!((1..3000).contains(&at_once), "{at_once} reads at once");
    shelf.let_through(at_once);
    done.recv_timeout(PATIENCE).unwrap();
    assert_eq!(pool.hit_blocks(0, &prompt), 3000);
}

#[test]
fn a_window_brings_only_its_own_blocks() {
    let shelf = Arc::new(Shelf::default());
    let prompt = hashes(1, 6);
    let pool = Pool::over(&shelf, 64);
    pool.save(Chain::Unchained, &prompt);
    pool.settle_spill();
    drop(pool);

    let pool = Pool::over(&shelf, 64);
    pool.fetch(2, &prompt).unwrap().recv_timeout(PATIENCE).unwrap();
    assert_eq!(shelf.state.lock().reads, 2);
    assert_eq!(pool.hit_blocks(2, &prompt), 6);
}

#[test]
fn memory_that_the_tier_still_writes_is_not_given_to_others() {
    let shelf = Arc::new(Shelf::default());
    let prompt = hashes(1, 6);
    let pool = Pool::over(&shelf, 64);
    pool.save(Chain::Start, &prompt);
    pool.settle_spill();
    drop(pool);

    // Six blocks take all of the pool.
    let pool = Pool::over(&shelf, 6 * 3);
    shelf.hold();
    let done = pool.fetch(0, &prompt).unwrap();
    assert_eq!(pool.store.drop_namespace(MODEL).blocks, 6);
    let mut outcomes = Vec::new();
    let others = hashes(2, 1);
    pool.store.claim(
        &Caller {
            owner: ENGINE,
            writer: WORKER,
            space: pool.space,
            shard: ShardNumber(0),
            now: Instant::now(),
        },
        Chain::Start,
        &others,
        &mut outcomes,
    );
    assert_eq!(outcomes, [ClaimOutcome::NoRoom]);
    shelf.let_through(6);
    done.recv_timeout(PATIENCE).unwrap();
    assert_eq!(pool.hit_blocks(0, &prompt), 0);
    pool.save(Chain::Start, &hashes(2, 6));
    assert_eq!(pool.hit_blocks(0, &hashes(2, 6)), 6);
}

#[test]
fn memory_that_the_tier_still_reads_is_not_given_to_others() {
    let shelf = Arc::new(Shelf::default());
    let pool = Pool::over(&shelf, 6 * 3);
    shelf.hold();
    pool.save(Chain::Start, &hashes(1, 6));
    let mut outcomes = Vec::new();
    shelf.wait_for_held(6);
    pool.store.claim(
        &Caller {
            owner: ENGINE,
            writer: WORKER,
            space: pool.space,
            shard: ShardNumber(0),
            now: Instant::now(),
        },
        Chain::Start,
        &hashes(2, 1),
        &mut outcomes,
    );
    assert_eq!(outcomes, [ClaimOutcome::NoRoom]);
    // The shelf compares the bytes with the checksums.
    shelf.let_through(6);
    pool.settle_spill();
    assert_eq!(shelf.state.lock().kept.len(), 6);
}

#[test]
fn a_dropped_namespace_does_not_come_back() {
    let shelf = Arc::new(Shelf::default());
    let pool = Pool::over(&shelf, 64);
    pool.save(Chain::Start, &hashes(1, 3));
    pool.settle_spill();
    pool.store.drop_namespace(MODEL);
    assert!(pool.fetch(0, &hashes(1, 3)).is_none());
}

/// The store held its lock while the SSD noted a drop. On an SSD that hung, every request that the SSD had something of
/// waited too, and nothing more was written to it.
#[test]
fn a_drop_that_waits_for_the_device_holds_up_nobody_else() {
    let shelf = Arc::new(Shelf::default());
    let pool = Pool::over(&shelf, 64);
    pool.save(Chain::Start, &hashes(1, 3));
    pool.settle_spill();
    drop(pool);

    let pool = Pool::over(&shelf, 64);
    shelf.hold();
    shelf.state.lock().holds_notes = true;
    let store = Arc::clone(&pool.store);
    let dropping = std::thread::spawn(move || store.drop_namespace(Namespace([2; 16])));
    shelf.wait_for_held(1);
    let (store, space, prompt) = (Arc::clone(&pool.store), pool.space, hashes(1, 3));
    let (planned, was_planned) = channel();
    let asking = std::thread::spawn(move || {
        let groups = [LookupGroup { space, tokens_per_block: 16, window_blocks: 0, hashes: &prompt }];
        planned.send(plan(&store, &groups).is_some()).unwrap();
    });
    assert_eq!(was_planned.recv_timeout(PATIENCE / 2), Ok(true));
    // A block that is saved meanwhile reaches the tier.
    pool.save(Chain::Start, &hashes(2, 1));
    shelf.wait_for_held(2);
    assert!(!dropping.is_finished());
    shelf.let_through(2);
    asking.join().unwrap();
    assert_eq!(dropping.join().unwrap().blocks, 0);
}

#[derive(Clone, Debug)]
enum Step {
    Save(u8, u8),
    Fetch(u8, u8),
    Look(u8, u8),
    Drop,
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    let prompt = || (0u8..6, 1u8..8);
    prop_oneof![
        4 => prompt().prop_map(|(prompt, blocks)| Step::Save(prompt, blocks)),
        4 => prompt().prop_map(|(prompt, blocks)| Step::Fetch(prompt, blocks)),
        2 => prompt().prop_map(|(prompt, blocks)| Step::Look(prompt, blocks)),
        1 => Just(Step::Drop),
        1 => Just(Step::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// Whatever was saved, evicted, fetched and forgotten: a hit has the right bytes, is at least as long as what the shelf
    /// has while there is room, and every fetch ends.
    #[test]
    fn a_hit_is_right(steps in prop::collection::vec(step(), 1..40)) {
        let shelf = Arc::new(Shelf::default());
        let mut pool = Pool::over(&shelf, 12 * 3);
        for step in steps {
            match step {
                Step::Save(prompt, blocks) => {
                    pool.save(Chain::Start, &hashes(prompt, blocks));
                    pool.settle_spill();
                }
                Step::Fetch(prompt, blocks) => {
                    let prompt = hashes(prompt, blocks);
                    let is_kept = |hash: &&BlockHash| {
                        let key = BlockKey { space: Space { namespace: MODEL, cut: CutDigest([5; 16]) }, hash: **hash };
                        shelf.state.lock().kept.contains_key(&key)
                    };
                    let kept = prompt.iter().take_while(is_kept).count() as u64;
                    if let Some(done) = pool.fetch(0, &prompt) {
                        done.recv_timeout(PATIENCE).unwrap();
                    }
                    prop_assert!(pool.hit_blocks(0, &prompt) >= kept);
                }
                Step::Look(prompt, blocks) => drop(pool.hit_blocks(0, &hashes(prompt, blocks))),
                Step::Drop => drop(pool.store.drop_namespace(MODEL)),
                Step::Restart => pool = Pool::over(&shelf, 12 * 3),
            }
        }
        drop(pool.shelf);
    }
}

/// Blocks of one page and shard.
struct Engine {
    pool: Pool,
    space: SpaceId,
}

impl Engine {
    fn new(policy: PolicyKind, blocks: u64) -> Self {
        let pool = Pool::with_policy(&Arc::new(Shelf::default()), blocks, policy);
        let space = pool.store.space(MODEL, "a model", CutDigest([6; 16]), &[PAGE_BYTES]);
        Self { pool, space }
    }

    fn key(hash: BlockHash) -> BlockKey {
        BlockKey { space: Space { namespace: MODEL, cut: CutDigest([6; 16]) }, hash }
    }

    fn memo(&self, hash: BlockHash) -> Option<Memo> {
        self.pool.shelf.state.lock().memos.get(&Self::key(hash)).copied()
    }

    /// Looks a prompt up, after what the tier below has of it came back; saves the rest while it has the lease. Answers the
    /// blocks that the pool had before, and then.
    fn serve(&self, prompt: &[BlockHash]) -> (usize, usize) {
        let Pool { store, .. } = &self.pool;
        let groups =
            [LookupGroup { space: self.space, tokens_per_block: 1, window_blocks: 0, hashes: prompt }];
        let now = Instant::now();
        let fetched = || store.stats().counters.fetched_blocks as usize;
        let fetched_before = fetched();
        if let Some(plan) = plan(store, &groups) {
            let (done, is_done) = channel();
            store.fetch(plan, now, now + PATIENCE, move || done.send(()).unwrap());
            is_done.recv_timeout(PATIENCE).unwrap();
        }
        let hit = store.lookup(ENGINE, &groups, u64::MAX, now);
        let known = hit.as_ref().map_or(0, |hit| hit.tokens as usize);
        let chain = known.checked_sub(1).map_or(Chain::Start, |last| Chain::After(prompt[last]));
        let mut outcomes = Vec::new();
        store.claim(
            &Caller { owner: ENGINE, writer: WORKER, space: self.space, shard: ShardNumber(0), now },
            chain,
            &prompt[known..],
            &mut outcomes,
        );
        let claims: Vec<ShardClaim> = outcomes
            .iter()
            .filter_map(|outcome| match outcome {
                ClaimOutcome::Claimed(claim) => Some(*claim),
                _ => None,
            })
            .collect();
        store.commit(&claims, now);
        assert!(store.settle(PATIENCE));
        if let Some(hit) = hit {
            store.release(ENGINE, hit.lease);
        }
        self.pool.settle_spill();
        (known - (fetched() - fetched_before), known)
    }
}

/// Conversations that grow, beside prompts that never come back.
fn prompts() -> Vec<Vec<BlockHash>> {
    let mut random = 1u64;
    let mut turns = [0u64; 12];
    let prompt = |number: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let pick = random >> 33;
        if pick.is_multiple_of(3) {
            let mut once = hashes(0, 3 + (pick % 7) as u8);
            once.iter_mut().for_each(|hash| hash.0[8..].copy_from_slice(&(number + 1).to_le_bytes()));
            return once;
        }
        let talk = (pick / 3 % 12).min(pick / 64 % 12) as usize;
        turns[talk] += 1;
        hashes(talk as u8, 4 + 2 * (turns[talk] % 9) as u8)
    };
    (0..2500).map(prompt).collect()
}

#[test]
fn pool_and_tier_hit_what_a_replay_says() {
    const CAPACITY: u64 = 64;
    for kind in PolicyKind::ALL {
        let engine = Engine::new(kind, CAPACITY);
        let mut model = TieredModel::new(kind, CAPACITY as usize, 1 << 20);
        let (mut hits, mut below) = (0, 0);
        for (number, prompt) in prompts().iter().enumerate() {
            let keys: Vec<u64> =
                prompt.iter().map(|hash| kvlane_store::Index::fingerprint(engine.space, hash)).collect();
            let expected = model.request(&keys);
            let (before, known) = engine.serve(prompt);
            let seen = (before, known - before);
            assert_eq!(seen, (expected.prefix_hits, expected.ssd_prefix_hits), "{kind}, prompt {number}");
            hits += seen.0;
            below += seen.1;
        }
        assert!(hits > 1000 && below > 500, "{kind}: {hits} hits, {below} below");
    }
}

#[test]
fn the_tier_keeps_what_the_policy_knows_of_a_block_and_gives_it_back() {
    let engine = Engine::new(PolicyKind::Learned, 40);
    let (often, once) = (hashes(1, 6), hashes(2, 6));
    let others = |numbers: std::ops::Range<u8>| {
        for number in numbers {
            engine.serve(&hashes(number, 30));
        }
    };
    engine.serve(&often);
    let new = engine.memo(often[5]).unwrap();
    for _ in 0..5 {
        engine.serve(&often);
    }
    assert_eq!(engine.memo(often[5]), Some(new), "the pool has it");
    engine.serve(&once);
    others(10..14);
    let used = engine.memo(often[5]).unwrap();
    assert_ne!(used, new);
    // It comes back, is looked up and lost again: that is one use more, not the first.
    assert_eq!(engine.serve(&often), (0, 6));
    others(20..24);
    let again = engine.memo(often[5]).unwrap();
    assert!(again != used && again != new);
    // Until something is learnt, nothing is said.
    let all = [(Engine::key(often[5]), again), (Engine::key(once[5]), engine.memo(once[5]).unwrap())];
    assert_eq!(engine.pool.store.densities(&all), None);
    for number in 30..200 {
        engine.serve(&hashes(number, 30));
        engine.serve(&often);
    }
    let densities = engine.pool.store.densities(&all).unwrap();
    assert!(densities[0] > 2.0 * densities[1], "{densities:?}: asked for all the time, and once");
    // Of what the pool has it knows better than the tier.
    let unknown = [(Engine::key(often[5]), Memo::NOTHING)];
    assert_eq!(engine.pool.store.densities(&unknown).unwrap()[0], densities[0]);
}

/// What is let into the pool for the tier's sake is lost if the tier keeps nothing.
#[test]
fn over_a_tier_that_keeps_nothing_the_pool_is_guarded_as_without_one() {
    let engine = Engine::new(PolicyKind::Learned, 400);
    let kept_out = |steps: std::ops::Range<u32>| {
        let before = engine.pool.store.stats().counters.not_admitted;
        for step in steps {
            // More is asked for again and again than there is room for; the rest never is.
            engine.serve(&hashes((step % 80) as u8, 6));
            let mut once = hashes(100, 6);
            once.iter_mut().for_each(|hash| hash.0[8..12].copy_from_slice(&step.to_le_bytes()));
            engine.serve(&once);
        }
        engine.pool.store.stats().counters.not_admitted - before
    };
    assert_eq!(kept_out(0..600), 0, "the tier keeps all");
    engine.pool.shelf.state.lock().refuses = true;
    assert!(kept_out(600..1000) > 500);
    // And when it works again.
    engine.pool.shelf.state.lock().refuses = false;
    kept_out(1000..1020);
    assert_eq!(kept_out(1020..1100), 0);
}
