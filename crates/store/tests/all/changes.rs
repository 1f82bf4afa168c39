//! A reader of all spaces: snapshot and journal together are exactly the visible blocks, and it waits for the next change.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvlane_block::{BlockHash, CutDigest, Namespace};
use kvlane_memory::{Arena, ArenaOptions, ExtentAllocator, HugePages, Numa, PAGE_BYTES};
use kvlane_store::{
    Caller, Chain, Change, Changes, ClaimOutcome, Index, LookupGroup, Origin, OwnerId, ShardNumber,
    SnapshotPosition, SpaceDescription, SpaceId, Store, StoreOptions, WriterId,
};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

const ENGINE: OwnerId = OwnerId(1);
const WORKER: WriterId = WriterId(10);
const SPACES: u8 = 3;
/// Long enough for a loaded machine; reached only by a test that fails.
const PATIENCE: Duration = Duration::from_secs(30);

/// A block as another process names it: namespace and hash.
type Key = (Namespace, BlockHash);

#[derive(Clone, Copy, Debug)]
enum Op {
    Save {
        space: u8,
        prompt: u8,
        blocks: u8,
        are_copies: bool,
    },
    Hit {
        space: u8,
        prompt: u8,
    },
    Drop(u8),
    /// The space gets another id when it is used again.
    Forget(u8),
    ReadJournal(usize),
    ReadSnapshot(usize),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0..SPACES, 0u8..4, 1u8..7, any::<bool>()).prop_map(|(space, prompt, blocks, are_copies)| {
            Op::Save { space, prompt, blocks, are_copies }
        }),
        1 => (0..SPACES, 0u8..4).prop_map(|(space, prompt)| Op::Hit { space, prompt }),
        1 => (0..SPACES).prop_map(Op::Drop),
        1 => (0..SPACES).prop_map(Op::Forget),
        2 => (1usize..20).prop_map(Op::ReadJournal),
        4 => (0usize..6).prop_map(Op::ReadSnapshot),
    ]
}

fn namespace(space: u8) -> Namespace {
    Namespace([space + 1; 16])
}

static NEVER: AtomicBool = AtomicBool::new(false);

fn hashes(prompt: u8, blocks: u8) -> Vec<BlockHash> {
    (0..blocks).map(|block| BlockHash([prompt, block, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3])).collect()
}

fn describe(space: u8) -> SpaceDescription {
    SpaceDescription {
        space: kvlane_block::Space { namespace: namespace(space), cut: CutDigest([9; 16]) },
        shard_bytes: vec![PAGE_BYTES, u64::from(space + 1) * PAGE_BYTES].into(),
        crosses_hosts: false,
    }
}

struct World {
    index: Index,
}

impl World {
    fn new() -> Self {
        let extents = ExtentAllocator::new(64, std::slice::from_ref(&(0..64)));
        Self { index: Index::new(extents, 64 * PAGE_BYTES, StoreOptions::default()) }
    }

    fn space(&mut self, space: u8) -> SpaceId {
        let SpaceDescription { space, shard_bytes, .. } = describe(space);
        self.index.space(space.namespace, "model", space.cut, &shard_bytes)
    }

    fn save(&mut self, space: u8, prompt: u8, blocks: u8, are_copies: bool) {
        let (id, now) = (self.space(space), Instant::now());
        let hashes = hashes(prompt, blocks);
        let mut outcomes = Vec::new();
        let mut claims: BTreeMap<usize, Vec<_>> = BTreeMap::new();
        let origin = if are_copies { Origin::OtherHost } else { Origin::Engine };
        for shard in 0..2 {
            outcomes.clear();
            let caller = Caller { owner: ENGINE, writer: WORKER, space: id, shard: ShardNumber(shard), now };
            self.index.claim_from(origin, &caller, Chain::Start, &hashes, &mut outcomes);
            for (at, outcome) in outcomes.iter().enumerate() {
                if let ClaimOutcome::Claimed(claim) = outcome {
                    claims.entry(at).or_default().push(*claim);
                }
            }
        }
        for claims in claims.into_values() {
            if claims.len() == 2 && are_copies {
                self.index.restore(&claims, &[1, 1], origin);
            } else if claims.len() == 2 {
                self.index.commit(&claims, now);
            } else {
                self.index.abort(&claims, now);
            }
        }
        for check in self.index.take_unsealed(u64::MAX, usize::MAX) {
            self.index.finish_seal(check, &[1, 1]);
        }
    }

    fn visible(&mut self) -> BTreeSet<Key> {
        let mut visible = BTreeSet::new();
        for space in 0..SPACES {
            let id = self.space(space);
            for hash in (0..4).flat_map(|prompt| hashes(prompt, 7)) {
                if self.index.is_visible(id, &hash) {
                    visible.insert((namespace(space), hash));
                }
            }
        }
        visible
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Save { space, prompt, blocks, are_copies } => self.save(space, prompt, blocks, are_copies),
            Op::Hit { space, prompt } => {
                let hashes = hashes(prompt, 7);
                let space = self.space(space);
                let group = LookupGroup { space, tokens_per_block: 1, window_blocks: 0, hashes: &hashes };
                let hit = self.index.lookup(ENGINE, &[group], u64::MAX, Instant::now());
                hit.into_iter().for_each(|hit| self.index.release(ENGINE, hit.lease));
            }
            Op::Drop(space) | Op::Forget(space) => {
                let id = self.space(space);
                let blocks = self.index.blocks_in(id);
                self.index.drop_blocks(&blocks);
                if matches!(op, Op::Forget(_)) {
                    assert!(self.index.forget_space(id));
                }
            }
            Op::ReadJournal(_) | Op::ReadSnapshot(_) => {}
        }
    }
}

/// A reader that keeps the set of visible blocks.
#[derive(Default)]
struct Reader {
    cursor: u64,
    position: SnapshotPosition,
    is_snapshot_whole: bool,
    visible: BTreeSet<Key>,
    spaces: BTreeSet<SpaceId>,
}

impl Reader {
    fn read_journal(&mut self, index: &mut Index, most: usize) -> bool {
        let mut changes = Changes::default();
        let read = index.read_changes(self.cursor, most, &mut changes);
        if read.start_again {
            assert!(changes.entries.is_empty());
            *self = Self { cursor: read.cursor, ..Self::default() };
        }
        self.cursor = read.cursor;
        self.take(changes);
        read.has_more
    }

    fn read_snapshot(&mut self, index: &Index, most: usize) {
        let mut changes = Changes::default();
        if !self.is_snapshot_whole {
            self.is_snapshot_whole = !index.read_snapshot(&mut self.position, most, &mut changes).0;
            assert!(changes.entries.len() <= most.max(1));
        }
        self.take(changes);
    }

    fn take(&mut self, changes: Changes) {
        for entry in changes.entries {
            let description = &changes.spaces[&entry.space];
            assert_eq!(*description, describe(description.space.namespace.0[0] - 1));
            self.spaces.insert(entry.space);
            let key = (description.space.namespace, entry.hash);
            match entry.change {
                Change::Visible => drop(self.visible.insert(key)),
                Change::Gone => drop(self.visible.remove(&key)),
            }
        }
    }

    fn finish(&mut self, index: &mut Index) {
        while !self.is_snapshot_whole {
            self.read_snapshot(index, 3);
        }
        while self.read_journal(index, 5) {}
    }
}

#[test]
fn snapshot_and_journal_together_are_exactly_what_is_visible() {
    let seen = std::cell::RefCell::new(BTreeMap::<&str, u64>::new());
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    let cases = (prop::collection::vec(op(), 0..40), prop::collection::vec(op(), 1..60));
    let run = TestRunner::new(config).run(&cases, |(before, during)| {
        let mut world = World::new();
        before.into_iter().for_each(|op| world.apply(op));
        let mut reader = Reader::default();
        assert!(!reader.read_journal(&mut world.index, 1), "a new reader has missed nothing");
        // Controls: the snapshot alone, the journal alone, and a cursor from after the snapshot.
        let (mut without_journal, mut without_snapshot) = (Reader::default(), Reader::default());
        without_snapshot.read_journal(&mut world.index, 1);
        let mut late = Reader::default();
        for op in during {
            match op {
                Op::ReadJournal(most) => drop(reader.read_journal(&mut world.index, most)),
                Op::ReadSnapshot(most) => {
                    reader.read_snapshot(&world.index, most);
                    without_journal.read_snapshot(&world.index, most);
                    late.read_snapshot(&world.index, most);
                }
                _ => world.apply(op),
            }
        }
        reader.finish(&mut world.index);
        while !late.is_snapshot_whole {
            late.read_snapshot(&world.index, 3);
            without_journal.read_snapshot(&world.index, 3);
        }
        while without_snapshot.read_journal(&mut world.index, 5) {}
        let forgotten = reader.spaces.len() > SPACES.into();
        let visible = world.visible();
        assert_eq!(reader.visible, visible);
        let mut seen = seen.borrow_mut();
        let mut count = |what, times: bool| *seen.entry(what).or_default() += u64::from(times);
        count("the snapshot alone is wrong", without_journal.visible != visible);
        count("the journal alone is wrong", without_snapshot.visible != visible);
        count("a cursor from after the snapshot is too late", late.visible != visible);
        count("spaces forgotten while the journal names them", forgotten);
        count("evictions", world.index.stats().counters.evicted_blocks > 0);
        Ok(())
    });
    assert!(run.is_ok(), "{}", run.unwrap_err());
    let seen = seen.into_inner();
    println!("{seen:?}");
    assert!(seen.values().all(|times| *times > 10), "{seen:?}");
}

/// Prompts of 64 blocks of one page, each with hashes of its own.
fn prompt(number: u16) -> Vec<BlockHash> {
    let hash = |block: u8| {
        let [low, high] = number.to_le_bytes();
        BlockHash([low, high, block, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1])
    };
    (0..64).map(hash).collect()
}

struct Pool {
    store: Arc<Store>,
    space: SpaceId,
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
        let store = Store::new(arena, StoreOptions::default());
        let space = store.space(Namespace([1; 16]), "model", CutDigest([9; 16]), &[PAGE_BYTES]);
        Self { store, space }
    }

    fn save(&self, number: u16) {
        let now = Instant::now();
        let caller = Caller { owner: ENGINE, writer: WORKER, space: self.space, shard: ShardNumber(0), now };
        let mut outcomes = Vec::new();
        self.store.claim(&caller, Chain::Start, &prompt(number), &mut outcomes);
        let claim = |outcome: &ClaimOutcome| match outcome {
            ClaimOutcome::Claimed(claim) => Some(*claim),
            _ => None,
        };
        let claims: Vec<_> = outcomes.iter().filter_map(claim).collect();
        self.store.commit(&claims, now);
        while self.store.seal_pending() {}
    }

    fn apply(changes: &Changes, visible: &mut BTreeSet<BlockHash>) {
        for entry in &changes.entries {
            match entry.change {
                Change::Visible => drop(visible.insert(entry.hash)),
                Change::Gone => drop(visible.remove(&entry.hash)),
            }
        }
    }

    /// The visible blocks, by snapshot and journal, and how many parts the snapshot had.
    fn follow(&self, mut cursor: u64, visible: &mut BTreeSet<BlockHash>) -> usize {
        visible.clear();
        let (mut position, mut parts, mut has_more) = (SnapshotPosition::default(), 0, true);
        while has_more {
            let mut changes = Changes::default();
            has_more = self.store.read_snapshot(&mut position, usize::MAX, &mut changes).0;
            Self::apply(&changes, visible);
            parts += 1;
        }
        loop {
            let mut changes = Changes::default();
            let read = self.store.wait_journal(cursor, Instant::now(), usize::MAX, &NEVER, &mut changes);
            assert!(!read.start_again);
            Self::apply(&changes, visible);
            cursor = read.cursor;
            if !read.has_more {
                return parts;
            }
        }
    }
}

#[test]
fn a_reader_that_falls_behind_starts_again_with_a_snapshot_in_bounded_parts() {
    let pool = Pool::new(9 * 1024);
    let mut changes = Changes::default();
    let start = pool.store.wait_journal(0, Instant::now() + PATIENCE, 10, &NEVER, &mut changes);
    assert!(start.start_again, "a new reader need not wait");
    // More changes than the journal keeps.
    (0..700).for_each(|number| pool.save(number));
    let behind = pool.store.wait_journal(start.cursor, Instant::now() + PATIENCE, 10, &NEVER, &mut changes);
    assert!(behind.start_again && changes.entries.is_empty());
    let mut visible = BTreeSet::new();
    let parts = pool.follow(behind.cursor, &mut visible);
    assert!(parts >= 2, "{parts} parts");
    assert_eq!(visible.len() as u64, pool.store.stats().blocks);
    assert!((600..700).flat_map(prompt).all(|hash| visible.contains(&hash)));
}

#[test]
fn a_reader_waits_for_the_next_change_and_holds_nobody_up() {
    let pool = Pool::new(1024);
    let mut changes = Changes::default();
    let start = pool.store.wait_journal(0, Instant::now(), 10, &NEVER, &mut changes);
    let began = Instant::now();
    let until = began + Duration::from_millis(20);
    let nothing = pool.store.wait_journal(start.cursor, until, 10, &NEVER, &mut changes);
    assert!(Instant::now() >= until);
    assert_eq!((nothing.cursor, nothing.start_again, nothing.has_more), (start.cursor, false, false));
    let is_waiting = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut changes = Changes::default();
            is_waiting.store(true, Ordering::Release);
            let read =
                pool.store.wait_journal(start.cursor, Instant::now() + PATIENCE, 1, &NEVER, &mut changes);
            (read, changes)
        });
        while !is_waiting.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(20));
        pool.save(0);
        let (read, changes) = reader.join().unwrap();
        assert_eq!((changes.entries.len(), changes.entries[0].hash), (1, prompt(0)[0]));
        assert!(read.has_more, "the others of the prompt");
    });
    assert!(began.elapsed() < PATIENCE);
}

#[test]
fn two_readers_follow_a_writer_beside_them() {
    let pool = Pool::new(1024);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let follow = || {
            let mut visible = BTreeSet::new();
            let mut cursor = 0;
            loop {
                let was_over = is_over.load(Ordering::Acquire);
                let mut changes = Changes::default();
                let until = Instant::now() + Duration::from_millis(50);
                let read = pool.store.wait_journal(cursor, until, 100, &NEVER, &mut changes);
                cursor = read.cursor;
                if read.start_again {
                    pool.follow(cursor, &mut visible);
                }
                Pool::apply(&changes, &mut visible);
                if was_over && !read.has_more && !read.start_again {
                    return visible;
                }
            }
        };
        let readers = [scope.spawn(follow), scope.spawn(follow)];
        (0..200).for_each(|number| pool.save(number));
        is_over.store(true, Ordering::Release);
        for reader in readers {
            let visible = reader.join().unwrap();
            assert_eq!(visible.len() as u64, pool.store.stats().blocks);
            assert!((190..200).flat_map(prompt).all(|hash| visible.contains(&hash)));
        }
    });
}

#[test]
fn a_reader_that_is_called_waits_no_longer() {
    let pool = Pool::new(1024);
    let start = pool.store.wait_journal(0, Instant::now(), 10, &NEVER, &mut Changes::default());
    let (is_called, began) = (AtomicBool::new(false), Instant::now());
    let until = began + PATIENCE;
    let wait = || pool.store.wait_journal(start.cursor, until, 10, &is_called, &mut Changes::default());
    std::thread::scope(|scope| {
        let reader = scope.spawn(wait);
        is_called.store(true, Ordering::Release);
        pool.store.wake_journal_readers();
        assert_eq!(reader.join().unwrap().cursor, start.cursor);
    });
    assert!(began.elapsed() < PATIENCE);
}

/// An announcer has left the blocks of such a space out. No entry of the journal would tell it that they may go now.
#[test]
fn readers_start_again_when_a_space_with_blocks_begins_to_cross_hosts() {
    let pool = Pool::new(1024);
    let read = |cursor| {
        let mut changes = Changes::default();
        let read = pool.store.wait_journal(cursor, Instant::now(), usize::MAX, &NEVER, &mut changes);
        (read.start_again, read.cursor, changes)
    };
    let (_, cursor, _) = read(0);
    pool.save(1);
    let (starts_again, cursor, changes) = read(cursor);
    assert!(!starts_again && !changes.spaces[&pool.space].crosses_hosts);
    pool.store.let_cross_hosts(pool.space);
    let (starts_again, cursor, _) = read(cursor);
    assert!(starts_again);
    pool.store.let_cross_hosts(pool.space);
    pool.save(2);
    let (starts_again, _, changes) = read(cursor);
    assert!(!starts_again && changes.entries.len() == 64 && changes.spaces[&pool.space].crosses_hosts);
}
