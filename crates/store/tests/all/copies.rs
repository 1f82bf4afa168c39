//! Copies of other hosts' blocks: which block makes room for which, when a copy becomes an own block, and that the tier
//! below gets none before.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use kvlane_block::{BlockHash, BlockKey, CutDigest, Namespace, PoolExtent, SealedShard};
use kvlane_memory::{Arena, ArenaOptions, ExtentAllocator, HugePages, Numa, PAGE_BYTES};
use kvlane_policy::{Choice, Memo, PolicyKind};
use kvlane_store::{
    Below, BlockRead, Caller, Chain, Change, ClaimOutcome, FindDone, Found, HolderId, Index, LeaseId,
    LookupGroup, NotForGood, Origin, OwnerId, Question, ShardClaim, ShardNumber, Source, SpaceId, Store,
    StoreOptions, WriteDone, WriterId,
};
use parking_lot::Mutex;
use proptest::prelude::*;

const ENGINE: OwnerId = OwnerId(1);
const WORKER: WriterId = WriterId(10);
const MODEL: Namespace = Namespace([1; 16]);
/// Long enough for a loaded machine; reached only by a test that fails.
const PATIENCE: Duration = Duration::from_secs(30);

/// An index of blocks of one page.
struct Pool {
    index: Index,
    space: SpaceId,
    now: Instant,
}

fn hashes(prompt: u8, blocks: u8) -> Vec<BlockHash> {
    (0..blocks).map(|block| BlockHash([prompt, block, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3])).collect()
}

impl Pool {
    fn new(pages: u32, copies_share: f64) -> Self {
        Self::with_policy(pages, copies_share, PolicyKind::Lru)
    }

    fn with_policy(pages: u32, copies_share: f64, policy: PolicyKind) -> Self {
        let extents = ExtentAllocator::new(pages, std::slice::from_ref(&(0..pages)));
        let options = StoreOptions { copies_share, policy: Choice::Fixed(policy), ..StoreOptions::default() };
        let mut index = Index::new(extents, u64::from(pages) * PAGE_BYTES, options);
        let space = index.space(MODEL, "a model", CutDigest([5; 16]), &[PAGE_BYTES]);
        Self { index, space, now: Instant::now() }
    }

    fn claim(&mut self, origin: Origin, chain: Chain, hashes: &[BlockHash]) -> Vec<ClaimOutcome> {
        let mut outcomes = Vec::new();
        let Self { space, now, .. } = *self;
        let caller = Caller { owner: ENGINE, writer: WORKER, space, shard: ShardNumber(0), now };
        self.index.claim_from(origin, &caller, chain, hashes, &mut outcomes);
        outcomes
    }

    /// Makes blocks visible as an engine or a source does. Returns how many found room.
    fn put(&mut self, origin: Origin, chain: Chain, hashes: &[BlockHash]) -> usize {
        let claimed = claimed(&self.claim(origin, chain, hashes));
        if origin == Origin::Engine {
            self.index.commit(&claimed, self.now);
            for check in self.index.take_unsealed(u64::MAX, usize::MAX) {
                self.index.finish_seal(check, &[0]);
            }
        } else {
            claimed.iter().for_each(|claim| self.index.restore(&[*claim], &[0], origin));
        }
        assert_eq!(self.index.check_consistency(), Ok(()));
        claimed.len()
    }

    fn save(&mut self, hashes: &[BlockHash]) -> usize {
        self.put(Origin::Engine, Chain::Start, hashes)
    }

    fn bring(&mut self, hashes: &[BlockHash]) -> usize {
        self.put(Origin::OtherHost, Chain::Start, hashes)
    }

    fn hold(&mut self, hashes: &[BlockHash]) -> Option<LeaseId> {
        let group = LookupGroup { space: self.space, tokens_per_block: 16, window_blocks: 0, hashes };
        let hit = self.index.lookup(ENGINE, &[group], u64::MAX, self.now)?;
        Some(hit.lease)
    }

    fn hit(&mut self, hashes: &[BlockHash]) {
        let lease = self.hold(hashes).unwrap();
        self.index.release(ENGINE, lease);
        assert_eq!(self.index.check_consistency(), Ok(()));
    }

    /// How many of these are visible, by the index and not by a lookup, which would be a hit.
    fn visible(&self, hashes: &[BlockHash]) -> usize {
        hashes.iter().filter(|hash| self.index.is_visible(self.space, hash)).count()
    }

    fn copied(&self) -> u64 {
        let stats = self.index.stats();
        assert_eq!(stats.copied_bytes, stats.copied_blocks * PAGE_BYTES);
        stats.copied_blocks
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
fn copies_above_their_share_make_room_before_older_own_blocks() {
    let mut pool = Pool::new(16, 0.25);
    let (own, copied) = (hashes(1, 8), hashes(2, 8));
    pool.save(&own);
    assert_eq!(pool.bring(&copied), 8, "there is free memory");
    assert_eq!(pool.copied(), 8);
    pool.save(&hashes(3, 4));
    assert_eq!((pool.visible(&own), pool.visible(&copied[..4]), pool.visible(&copied[4..])), (8, 4, 0));
    let counters = pool.index.stats().counters;
    assert_eq!((counters.evicted_blocks, counters.evicted_copies), (4, 4));
    // The share is not exceeded any more.
    pool.save(&hashes(4, 2));
    assert_eq!((pool.visible(&own), pool.copied()), (6, 4));
}

#[test]
fn the_copy_that_was_hit_last_goes_last() {
    let mut pool = Pool::new(8, 0.0);
    let (first, second) = (hashes(1, 4), hashes(2, 4));
    pool.bring(&first);
    pool.bring(&second);
    pool.hit(&first);
    pool.save(&hashes(3, 4));
    assert_eq!((pool.visible(&first), pool.visible(&second)), (4, 0));
}

#[test]
fn copies_beyond_the_share_displace_only_copies() {
    let mut pool = Pool::new(16, 0.25);
    let own = hashes(1, 16);
    pool.save(&own);
    let copied = hashes(2, 6);
    assert_eq!(pool.bring(&copied), 4, "each is a child of the one before, which is being fetched");
    assert_eq!((pool.visible(&own), pool.copied()), (12, 4));
    let others = hashes(3, 3);
    assert_eq!(pool.bring(&others), 3);
    assert_eq!((pool.visible(&own), pool.visible(&copied), pool.visible(&others)), (12, 1, 3));
    // All copies are in use: there is no room for another one.
    let leases = [pool.hold(&copied[..1]).unwrap(), pool.hold(&others).unwrap()];
    assert_eq!(pool.bring(&hashes(4, 1)), 0);
    leases.into_iter().for_each(|lease| pool.index.release(ENGINE, lease));
    assert_eq!((pool.bring(&hashes(4, 1)), pool.visible(&own)), (1, 12));
}

#[test]
fn within_the_share_copies_go_if_the_policy_has_no_victim() {
    let mut pool = Pool::new(8, 0.5);
    let (copied, own) = (hashes(1, 4), hashes(2, 4));
    pool.bring(&copied);
    pool.save(&own);
    let lease = pool.hold(&own).unwrap();
    pool.save(&hashes(3, 2));
    assert_eq!((pool.visible(&own), pool.visible(&copied)), (4, 2));
    pool.index.release(ENGINE, lease);
    pool.save(&hashes(4, 1));
    assert_eq!((pool.visible(&own), pool.visible(&copied)), (3, 2));
}

#[test]
fn a_copy_becomes_an_own_block_at_its_second_hit() {
    let mut pool = Pool::new(16, 0.25);
    pool.index.set_spill_limit(16);
    let copied = hashes(1, 4);
    pool.bring(&copied);
    // The engine that saves it too changes nothing.
    assert_eq!(pool.claim(Origin::Engine, Chain::Start, &copied), [ClaimOutcome::Present; 4]);
    pool.hit(&copied);
    assert_eq!((pool.copied(), pool.index.has_spill()), (4, false));
    pool.hit(&copied[..3]);
    assert_eq!((pool.copied(), pool.index.stats().counters.adopted_copies), (1, 3));
    // The tier below gets each of them once, in the prompt's order.
    pool.hit(&copied[..3]);
    let spills: Vec<_> = std::iter::from_fn(|| pool.index.take_spill()).collect();
    assert!(spills.iter().map(|spill| &spill.key.hash).eq(&copied[..3]));
    spills.iter().for_each(|spill| pool.index.finish_spill(spill, true));
    // They are in the policy's order now, and what was used before them goes before them.
    pool.save(&hashes(2, 12));
    pool.hit(&copied[..3]);
    pool.index.switch_policy(PolicyKind::Sieve);
    assert_eq!(pool.index.check_consistency(), Ok(()));
    pool.index.switch_policy(PolicyKind::Lru);
    pool.save(&hashes(3, 12));
    assert_eq!((pool.visible(&copied[..3]), pool.visible(&hashes(2, 12)), pool.copied()), (3, 0, 1));
}

#[test]
fn a_switch_of_policy_leaves_copies_as_they_are() {
    for policy in PolicyKind::ALL {
        let mut pool = Pool::with_policy(64, 0.25, policy);
        let (own, copied) = (hashes(1, 8), hashes(1, 16));
        pool.save(&own);
        pool.put(Origin::OtherHost, Chain::After(own[7]), &copied[8..]);
        for other in PolicyKind::ALL {
            pool.index.switch_policy(other);
            assert_eq!((pool.copied(), pool.index.check_consistency()), (8, Ok(())));
        }
        pool.hit(&copied);
        pool.index.switch_policy(policy);
        pool.hit(&copied);
        assert_eq!(pool.copied(), 0);
    }
}

#[test]
fn a_child_protects_its_parent_whichever_of_them_is_a_copy() {
    let mut pool = Pool::new(8, 0.0);
    let prompt = hashes(1, 6);
    pool.bring(&prompt[..4]);
    pool.put(Origin::Engine, Chain::After(prompt[3]), &prompt[4..]);
    let lease = pool.hold(&prompt).unwrap();
    // Two blocks are free. The copies exceed their share, and all have children.
    assert_eq!(pool.save(&hashes(2, 4)), 2);
    assert_eq!(pool.visible(&prompt), 6);
    pool.index.release(ENGINE, lease);
    // The own blocks behind them go from the tail; then the copies, before other own blocks.
    pool.put(Origin::Engine, Chain::Start, &hashes(3, 3));
    assert_eq!(pool.visible(&prompt), 3);
    assert_eq!(pool.visible(&hashes(2, 2)), 2);

    let mut pool = Pool::new(8, 1.0);
    pool.save(&prompt[..4]);
    pool.put(Origin::OtherHost, Chain::After(prompt[3]), &prompt[4..]);
    pool.save(&hashes(2, 2));
    pool.hit(&hashes(2, 2));
    let lease = pool.hold(&hashes(2, 2)).unwrap();
    pool.save(&hashes(3, 3));
    assert_eq!((pool.visible(&prompt), pool.copied()), (3, 0));
    pool.index.release(ENGINE, lease);
}

#[test]
fn a_dropped_namespace_takes_its_copies() {
    let mut pool = Pool::new(16, 0.25);
    let copied = hashes(1, 4);
    pool.bring(&copied);
    let coming = claimed(&pool.claim(Origin::OtherHost, Chain::Start, &hashes(2, 2)));
    assert_eq!(pool.copied(), 6);
    let lease = pool.hold(&copied).unwrap();
    let blocks = pool.index.blocks_of(MODEL);
    assert_eq!(pool.index.drop_blocks(&blocks), 6);
    assert_eq!(pool.index.check_consistency(), Ok(()));
    assert_eq!((pool.copied(), pool.index.stats().limbo_bytes), (0, 6 * PAGE_BYTES));
    coming.iter().for_each(|claim| pool.index.restore(&[*claim], &[0], Origin::OtherHost));
    pool.index.release(ENGINE, lease);
    assert_eq!((pool.copied(), pool.index.stats().used_bytes), (0, 0));
    assert_eq!(pool.index.check_consistency(), Ok(()));
}

#[test]
fn copies_are_journalled_like_others() {
    let mut pool = Pool::new(4, 0.25);
    let mut out = Vec::new();
    let spaces = [pool.space];
    let read = pool.index.read_journal(0, &spaces, 0, &mut out);
    pool.bring(&hashes(1, 2));
    pool.save(&hashes(2, 3));
    pool.index.read_journal(read.cursor, &spaces, usize::MAX, &mut out);
    let told = |prompt: u8| {
        let of_prompt = out.iter().filter(move |(_, entry)| entry.hash.0[0] == prompt);
        of_prompt.map(|(_, entry)| (entry.hash.0[1], entry.change)).collect::<Vec<_>>()
    };
    assert_eq!(told(1), [(0, Change::Visible), (1, Change::Visible), (1, Change::Gone)]);
}

/// A pool that holds mostly copies holds as many blocks as one that holds none.
#[test]
fn copies_do_not_make_the_pool_look_smaller() {
    let mut pool = Pool::with_policy(512, 1.0, PolicyKind::Learned);
    assert_eq!(pool.index.capacity(), 512);
    pool.save(&hashes(0, 4));
    (1..5).for_each(|prompt| assert!(pool.bring(&hashes(prompt, 200)) > 0));
    assert!(pool.index.stats().counters.evicted_blocks > 0);
    assert_eq!(pool.index.capacity(), 512);
}

/// A policy that admits no newcomer in place of blocks that are hit often is not asked about room that copies make.
#[test]
fn room_of_copies_above_their_share_needs_no_admission() {
    for (share, saved) in [(0.0, 4), (0.375, 2), (0.5, 0)] {
        let mut pool = Pool::with_policy(16, share, PolicyKind::TinyLfu);
        let own = hashes(1, 8);
        pool.save(&own);
        (0..8).for_each(|_| pool.hit(&own));
        assert_eq!(pool.bring(&hashes(2, 8)), 8);
        let outcomes = pool.claim(Origin::Engine, Chain::Start, &hashes(3, 4));
        assert_eq!((claimed(&outcomes).len(), pool.visible(&own)), (saved, 8));
    }
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Save(u8),
    Bring(u8),
    Lookup(u8),
    /// A lookup whose lease is kept.
    Hold(u8),
    Release,
}

/// Blocks that continue none, so that only age, leases and shares count.
#[derive(Default)]
struct Model {
    /// The next victim first.
    own: Vec<u8>,
    copies: Vec<u8>,
    hits: BTreeMap<u8, u32>,
    held: Vec<(u8, LeaseId)>,
    pages: usize,
    share: usize,
}

impl Model {
    fn renew(list: &mut Vec<u8>, block: u8) -> bool {
        let at = list.iter().position(|other| *other == block);
        at.map(|at| list.remove(at)).into_iter().for_each(|block| list.push(block));
        at.is_some()
    }

    fn evict(&mut self, from_copies: bool) -> bool {
        let list = if from_copies { &mut self.copies } else { &mut self.own };
        for _ in 0..list.len() {
            let block = list.remove(0);
            if self.held.iter().all(|(held, _)| *held != block) {
                return true;
            }
            list.push(block);
        }
        false
    }

    fn make_room(&mut self, is_copy: bool) -> bool {
        if self.own.len() + self.copies.len() < self.pages {
            return true;
        }
        if self.copies.len() + usize::from(is_copy) > self.share {
            self.evict(true) || !is_copy && self.evict(false)
        } else {
            self.evict(false) || self.evict(true)
        }
    }

    fn put(&mut self, block: u8, is_copy: bool) -> bool {
        if Self::renew(&mut self.own, block) || self.copies.contains(&block) {
            // A save of what is a copy is no use of it; a fetch renews what it continues.
            if is_copy {
                Self::renew(&mut self.copies, block);
            }
            return false;
        }
        let has_room = self.make_room(is_copy);
        if has_room {
            self.hits.remove(&block);
            if is_copy { self.copies.push(block) } else { self.own.push(block) }
        }
        has_room
    }

    fn hit(&mut self, block: u8) -> bool {
        if Self::renew(&mut self.copies, block) {
            let hits = self.hits.entry(block).or_default();
            *hits += 1;
            if *hits == 2 {
                self.copies.pop();
                self.own.push(block);
            }
            return true;
        }
        Self::renew(&mut self.own, block)
    }
}

proptest! {
    #[test]
    fn the_order_of_eviction_is_the_models(
        pages in 1usize..8,
        share in 0usize..9,
        ops in prop::collection::vec(
            prop_oneof![
                4 => (0u8..12).prop_map(Op::Save),
                6 => (0u8..12).prop_map(Op::Bring),
                6 => (0u8..12).prop_map(Op::Lookup),
                2 => (0u8..12).prop_map(Op::Hold),
                2 => Just(Op::Release),
            ],
            1..120,
        ),
    ) {
        let mut pool = Pool::new(pages as u32, share as f64 / pages as f64);
        let mut model = Model { pages, share: share.min(pages), ..Model::default() };
        let hash = |block: u8| [BlockHash([block; 16])];
        for op in ops {
            match op {
                Op::Save(block) => {
                    prop_assert_eq!(pool.save(&hash(block)), usize::from(model.put(block, false)));
                }
                Op::Bring(block) => {
                    prop_assert_eq!(pool.bring(&hash(block)), usize::from(model.put(block, true)));
                }
                Op::Lookup(block) | Op::Hold(block) => {
                    let lease = pool.hold(&hash(block));
                    prop_assert_eq!(lease.is_some(), model.hit(block));
                    match (op, lease) {
                        (Op::Hold(_), Some(lease)) => model.held.push((block, lease)),
                        (_, Some(lease)) => pool.index.release(ENGINE, lease),
                        (_, None) => {}
                    }
                }
                Op::Release => {
                    if !model.held.is_empty() {
                        pool.index.release(ENGINE, model.held.remove(0).1);
                    }
                }
            }
            let visible: Vec<u8> = (0..12).filter(|block| pool.visible(&hash(*block)) > 0).collect();
            let mut expected = [&model.own[..], &model.copies].concat();
            expected.sort_unstable();
            prop_assert_eq!(visible, expected, "after {:?}", op);
            prop_assert_eq!(pool.copied(), model.copies.len() as u64);
            prop_assert_eq!(pool.index.check_consistency(), Ok(()));
        }
    }
}

/// Another host that has every block, and a tier that keeps what it gets.
#[derive(Default)]
struct Elsewhere {
    written: Mutex<Vec<BlockHash>>,
}

impl Source for Elsewhere {
    fn find(&self, question: Question, done: FindDone) {
        let positions = std::iter::once(0..question.hashes.len() as u32).collect();
        done.call(vec![Found { holder: HolderId(7), positions, round_trip: Duration::from_micros(100) }]);
    }

    fn read(&self, _: HolderId, blocks: Vec<BlockRead>, _: Instant) {
        for BlockRead { extents, done, .. } in blocks {
            // The pool's memory is zero, and so is the block.
            let crc = |at: &PoolExtent| kvlane_block::crc32c(&vec![0; at.bytes as usize]);
            done.call(Some(extents.iter().map(crc).collect()));
        }
    }

    fn brings_copies(&self) -> bool {
        true
    }
}

impl Below for Elsewhere {
    fn contains(&self, _: &BlockKey) -> bool {
        false
    }

    fn write(&self, key: BlockKey, _: Vec<SealedShard>, _: Memo, done: WriteDone) {
        self.written.lock().push(key.hash);
        done.call(true);
    }

    fn memo(&self, _: &BlockKey) -> Option<Memo> {
        None
    }

    fn remember(&self, _: &[(BlockKey, Memo)]) {}

    fn forget_namespace(&self, _: Namespace) {}

    fn note_forgotten(&self, _: Namespace) -> Result<(), NotForGood> {
        Ok(())
    }
}

#[test]
fn the_tier_below_gets_a_copy_once_it_is_an_own_block() {
    let options =
        ArenaOptions { bytes: 64 * PAGE_BYTES, hugepages: HugePages::Off, numa: Numa::Off, threads: 1 };
    let arena = Arc::new(Arena::create(&options, &|_| {}).unwrap());
    let elsewhere = Arc::new(Elsewhere::default());
    let store = Store::with_tiers(
        arena,
        StoreOptions::default(),
        Some(Arc::clone(&elsewhere) as _),
        vec![Arc::clone(&elsewhere) as _],
    );
    let _background = store.start_background(1, 0).unwrap();
    let space = store.space(MODEL, "a model", CutDigest([5; 16]), &[2 * PAGE_BYTES]);
    store.let_cross_hosts(space);
    let prompt = hashes(1, 5);
    let group = LookupGroup { space, tokens_per_block: 16, window_blocks: 0, hashes: &prompt };
    let plan = store.find(&[group], u64::MAX).wait_until(Instant::now()).ok().unwrap().unwrap();
    let (done, is_done) = channel();
    let now = Instant::now();
    store.fetch(plan, now, now + PATIENCE, move || done.send(()).unwrap());
    is_done.recv_timeout(PATIENCE).unwrap();
    let hit = |tokens| {
        let hit = store.lookup(ENGINE, &[group], tokens, now).unwrap();
        store.release(ENGINE, hit.lease);
        assert!(store.settle_spill(Instant::now() + PATIENCE));
        hit.tokens / 16
    };
    assert_eq!(hit(u64::MAX), 5);
    let stats = store.stats();
    assert_eq!((stats.copied_blocks, stats.copied_bytes), (5, 10 * PAGE_BYTES));
    assert_eq!(*elsewhere.written.lock(), []);
    assert_eq!((hit(48), hit(48)), (3, 3));
    assert_eq!(*elsewhere.written.lock(), prompt[..3]);
    let stats = store.stats();
    assert_eq!((stats.copied_blocks, stats.counters.adopted_copies), (2, 3));
}
