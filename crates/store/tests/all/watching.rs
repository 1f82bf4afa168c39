//! A watch is notified of each step of its blocks, and of blocks that will not come.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail like tests")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane_block::{BlockHash, CutDigest, Namespace};
use kvlane_memory::{Arena, ArenaOptions, HugePages, Numa, PAGE_BYTES};
use kvlane_store::{
    Caller, Chain, ClaimOutcome, LookupGroup, OwnerId, ShardClaim, ShardNumber, SpaceId, Store, StoreOptions,
    Watch, WatchEvent, Watching, WriterId,
};
use parking_lot::Mutex;
use proptest::prelude::*;

const P: OwnerId = OwnerId(1);
const D: OwnerId = OwnerId(2);
const X: OwnerId = OwnerId(3);
const WRITER: WriterId = WriterId(10);
const TOKENS: u32 = 16;
const TTL: Duration = Duration::from_secs(60);
const SECOND: Duration = Duration::from_secs(1);
/// Of the model's block.
const SHARDS: usize = 2;

use WatchEvent::{Complete, Lost, Progress};

struct Play {
    store: Arc<Store>,
    space: SpaceId,
    now: Instant,
    heard: Arc<Mutex<Vec<WatchEvent>>>,
}

fn hashes(count: u32) -> Vec<BlockHash> {
    (0..count)
        .map(|block| BlockHash((u128::from(block) + 1).wrapping_mul(1 << 70 | 1).to_le_bytes()))
        .collect()
}

impl Play {
    fn new(pages: u64, shards: usize) -> Self {
        let options = ArenaOptions {
            bytes: pages * PAGE_BYTES,
            hugepages: HugePages::Off,
            numa: Numa::Off,
            threads: 1,
        };
        let arena = Arc::new(Arena::create(&options, &|_| {}).unwrap());
        let store =
            Store::new(arena, StoreOptions { lease_ttl: TTL, claim_ttl: TTL, ..StoreOptions::default() });
        let space = store.space(Namespace([1; 16]), "m", CutDigest([5; 16]), &vec![PAGE_BYTES; shards]);
        Self { store, space, now: Instant::now(), heard: Arc::default() }
    }

    fn group<'a>(&self, window_blocks: u32, hashes: &'a [BlockHash]) -> LookupGroup<'a> {
        LookupGroup { space: self.space, tokens_per_block: TOKENS, window_blocks, hashes }
    }

    fn watch(&self, groups: &[LookupGroup<'_>], tokens: u64) -> Watching {
        let heard = Arc::clone(&self.heard);
        self.store.watch((D, P), groups, tokens, self.now, Box::new(move |stir| heard.lock().push(stir)))
    }

    fn waits(&self, groups: &[LookupGroup<'_>], tokens: u64) -> Watch {
        let Watching::Waits(watch) = self.watch(groups, tokens) else { panic!("nothing to wait for") };
        watch
    }

    fn heard(&self) -> Vec<WatchEvent> {
        std::mem::take(&mut *self.heard.lock())
    }

    fn claim(&self, owner: OwnerId, shard: u32, chain: Chain, hashes: &[BlockHash]) -> Vec<ClaimOutcome> {
        let mut out = Vec::new();
        self.store.claim(
            &Caller { owner, writer: WRITER, space: self.space, shard: ShardNumber(shard), now: self.now },
            chain,
            hashes,
            &mut out,
        );
        out
    }

    fn commit(&self, outcomes: &[ClaimOutcome]) {
        self.store.commit(&claims(outcomes), self.now);
    }

    fn abort(&self, outcomes: &[ClaimOutcome]) {
        self.store.abort(&claims(outcomes), self.now);
    }

    fn save(&self, owner: OwnerId, chain: Chain, hashes: &[BlockHash]) {
        self.commit(&self.claim(owner, 0, chain, hashes));
        while self.store.seal_pending() {}
    }

    fn leased(&self) -> u64 {
        self.store.stats().leased_blocks
    }

    /// Nothing is watched or leased.
    fn rests(&self) {
        assert_eq!((self.store.watched_blocks(), self.leased(), self.store.leases_of(D)), (0, 0, 0));
    }
}

fn claims(outcomes: &[ClaimOutcome]) -> Vec<ShardClaim> {
    let claimed = |outcome: &ClaimOutcome| match outcome {
        ClaimOutcome::Claimed(claim) => Some(*claim),
        _ => None,
    };
    outcomes.iter().filter_map(claimed).collect()
}

#[test]
fn each_step_is_heard_and_the_last_one_completes() {
    let play = Play::new(64, 2);
    let all = hashes(3);
    let watch = play.waits(&[play.group(0, &all)], 40);
    assert_eq!(play.store.watched_blocks(), 2, "40 tokens are two blocks");
    let first = play.claim(P, 0, Chain::Start, &all[..2]);
    assert_eq!(play.heard(), [Progress; 2]);
    play.commit(&first);
    let second = play.claim(P, 1, Chain::Start, &all[..2]);
    play.commit(&second);
    assert_eq!(play.heard(), [Progress; 6], "two of each shard: claimed, written");
    play.store.seal_pending();
    assert_eq!(play.heard(), [Progress, Complete]);
    // What is not awaited is not told.
    play.claim(P, 0, Chain::After(all[1]), &all[2..]);
    assert_eq!(play.heard(), []);
    drop(watch);
    play.rests();
}

#[test]
fn what_is_there_is_leased_and_only_the_rest_is_watched() {
    let play = Play::new(64, 1);
    let all = hashes(4);
    play.save(P, Chain::Start, &all[..2]);
    let watch = play.waits(&[play.group(0, &all)], u64::MAX);
    assert_eq!((play.store.watched_blocks(), play.leased()), (2, 2));
    let stats = play.store.spaces();
    assert_eq!((stats[0].hit_blocks, stats[0].missed_blocks), (0, 0), "it is no lookup");
    play.save(P, Chain::After(all[1]), &all[2..]);
    assert_eq!(play.heard().last(), Some(&Complete));
    drop(watch);
    play.rests();
    assert!(matches!(play.watch(&[play.group(0, &all)], u64::MAX), Watching::Complete));
    assert!(matches!(play.watch(&[play.group(0, &all)], 0), Watching::Complete));
    assert!(matches!(play.watch(&[], 64), Watching::Complete));
    play.rests();
}

#[test]
fn of_a_window_only_its_blocks_are_watched() {
    let play = Play::new(64, 1);
    let all = hashes(6);
    let watch = play.waits(&[play.group(2, &all)], 6 * 16);
    assert_eq!(play.store.watched_blocks(), 2);
    play.save(P, Chain::Unchained, &all[..4]);
    assert_eq!(play.heard(), []);
    play.save(P, Chain::Unchained, &all[4..]);
    assert_eq!(play.heard().last(), Some(&Complete));
    drop(watch);
    play.rests();
}

#[test]
fn a_block_that_its_saver_loses_is_lost() {
    type Way = fn(&Play, &[BlockHash]);
    let aborted: Way = |play, all| play.abort(&play.claim(P, 0, Chain::Start, all));
    let worker_died: Way = |play, all| {
        play.claim(P, 0, Chain::Start, all);
        play.store.writer_gone(WRITER, play.now);
    };
    let half_expired: Way = |play, all| {
        play.commit(&play.claim(P, 0, Chain::Start, all));
        play.store.expire(play.now + TTL + Duration::from_secs(1));
    };
    let refused: Way = |play, all| drop(play.claim(P, 0, Chain::After(BlockHash([9; 16])), all));
    let never_claimed: Way =
        |play, all| play.store.save_refused(P, play.space, ShardNumber(0), all, play.now);
    let dropped: Way = |play, all| {
        for shard in [0, 1] {
            play.commit(&play.claim(P, shard, Chain::Start, all));
        }
        play.store.drop_namespace(Namespace([1; 16]));
    };
    let left_to_another: Way = |play, all| {
        let of_other = play.claim(X, 0, Chain::Start, all);
        assert!(play.claim(P, 0, Chain::Start, all).iter().all(|of| *of == ClaimOutcome::InFlight));
        play.abort(&of_other);
    };
    for way in [aborted, worker_died, half_expired, refused, never_claimed, dropped, left_to_another] {
        let play = Play::new(64, 2);
        let all = hashes(1);
        let watch = play.waits(&[play.group(0, &all)], 16);
        way(&play, &all);
        assert_eq!(play.heard().last(), Some(&Lost));
        drop(watch);
        play.rests();
    }
}

#[test]
fn what_others_lose_may_still_come() {
    let play = Play::new(64, 1);
    let all = hashes(2);
    let watch = play.waits(&[play.group(0, &all)], 32);
    play.abort(&play.claim(X, 0, Chain::Start, &all));
    play.claim(X, 0, Chain::After(BlockHash([9; 16])), &all);
    play.store.save_refused(X, play.space, ShardNumber(0), &all, play.now);
    assert!(!play.heard().contains(&Lost));
    // It was visible, and goes before its saver has asked: it is missing again.
    play.save(X, Chain::Start, &all[..1]);
    play.store.drop_namespace(Namespace([1; 16]));
    play.save(X, Chain::Start, &all[..1]);
    assert!(!play.heard().contains(&Lost) && !play.heard().contains(&Complete));
    play.save(P, Chain::Start, &all);
    assert_eq!(play.heard().last(), Some(&Complete));
    // What another engine has stored is no loss for a saver that came too late.
    play.store.save_refused(P, play.space, ShardNumber(0), &all, play.now);
    assert_eq!(play.heard(), []);
    drop(watch);
    play.rests();
}

#[test]
fn a_block_that_is_evicted_again_is_lost() {
    let play = Play::new(4, 1);
    let all = hashes(9);
    let watch = play.waits(&[play.group(0, &all[..3])], 48);
    play.save(P, Chain::Start, &all[..2]);
    assert!(!play.heard().contains(&Lost));
    // Another prompt needs all the room.
    play.save(X, Chain::Start, &all[4..8]);
    assert!(play.heard().contains(&Lost));
    drop(watch);
    play.rests();
}

/// Claimed or written before anybody waited: whose it is matters, not since when.
#[test]
fn saves_that_began_before_the_wait_count() {
    let play = Play::new(64, 1);
    let all = hashes(2);
    let claimed = play.claim(P, 0, Chain::Start, &all);
    let watch = play.waits(&[play.group(0, &all)], 32);
    play.abort(&claimed);
    assert_eq!(play.heard().last(), Some(&Lost));
    drop(watch);
    play.commit(&play.claim(P, 0, Chain::Start, &all));
    let watch = play.waits(&[play.group(0, &all)], 32);
    play.store.seal_pending();
    assert_eq!(play.heard().last(), Some(&Complete));
    drop(watch);
    play.rests();
}

/// For some seconds: a watch that begins then hears of it at once.
#[test]
fn a_block_that_its_saver_lost_before_the_wait_is_lost_at_once() {
    type Way = fn(&mut Play, &[BlockHash]);
    let aborted: Way = |play, all| play.abort(&play.claim(P, 0, Chain::Start, all));
    let worker_died: Way = |play, all| {
        play.claim(P, 0, Chain::Start, all);
        play.store.writer_gone(WRITER, play.now);
    };
    let half_expired: Way = |play, all| {
        play.commit(&play.claim(P, 0, Chain::Start, all));
        play.now += TTL + SECOND;
        play.store.expire(play.now);
    };
    let refused: Way = |play, all| drop(play.claim(P, 0, Chain::After(BlockHash([9; 16])), all));
    let never_claimed: Way =
        |play, all| play.store.save_refused(P, play.space, ShardNumber(0), all, play.now);
    for way in [aborted, worker_died, half_expired, refused, never_claimed] {
        let mut play = Play::new(64, 2);
        let all = hashes(2);
        way(&mut play, &all[1..]);
        let watch = play.waits(&[play.group(0, &all)], 32);
        assert_eq!(play.heard(), [Lost]);
        drop(watch);
        drop(play.waits(&[play.group(0, &all)], 16));
        assert_eq!(play.heard(), [], "the first block may come");
        play.now += 6 * SECOND;
        play.store.expire(play.now);
        drop(play.waits(&[play.group(0, &all)], 32));
        assert_eq!(play.heard(), [], "that was long ago");
        play.rests();
    }
}

#[test]
fn what_its_saver_does_not_save_may_come_by_others() {
    let play = Play::new(64, 1);
    let all = hashes(1);
    let group = [play.group(0, &all)];
    play.store.save_refused(P, play.space, ShardNumber(0), &all, play.now);
    let of_other = play.claim(X, 0, Chain::Start, &all);
    let watch = play.waits(&group, 16);
    assert_eq!(play.heard(), [], "another one is saving it");
    play.abort(&of_other);
    assert_eq!(play.heard(), [Lost], "and there is nobody else");
    drop(watch);
    play.save(X, Chain::Start, &all);
    assert!(matches!(play.watch(&group, 16), Watching::Complete));
    assert_eq!(play.heard(), []);
    play.rests();
}

/// A block's shards are saved by workers of their own, each in its time.
#[test]
fn a_block_of_which_one_shard_was_refused_is_lost_until_that_shard_is_claimed() {
    let play = Play::new(64, 2);
    let all = hashes(1);
    let group = [play.group(0, &all)];
    assert_eq!(play.claim(P, 0, Chain::After(BlockHash([9; 16])), &all), [ClaimOutcome::NoRoom]);
    let second = play.claim(P, 1, Chain::Start, &all);
    for _ in 0..2 {
        drop(play.waits(&group, 16));
        assert_eq!(play.heard(), [Lost], "the first worker does not ask again");
        play.commit(&second);
    }
    let first = play.claim(P, 0, Chain::Start, &all);
    let watch = play.waits(&group, 16);
    assert_eq!(play.heard(), [], "it did");
    play.commit(&first);
    play.store.seal_pending();
    assert_eq!(play.heard(), [Progress, Complete]);
    drop(watch);
    play.rests();
}

/// What a worker has claimed already, another save of it that is refused takes nothing from.
#[test]
fn a_shard_that_is_on_its_way_is_not_lost_by_a_save_that_repeats_it() {
    let play = Play::new(64, 2);
    let all = hashes(1);
    play.commit(&play.claim(P, 0, Chain::Start, &all));
    let watch = play.waits(&[play.group(0, &all)], 16);
    play.store.save_refused(P, play.space, ShardNumber(0), &all, play.now);
    drop(play.waits(&[play.group(0, &all)], 16));
    assert!(!play.heard().contains(&Lost));
    play.store.save_refused(P, play.space, ShardNumber(1), &all, play.now);
    assert_eq!(play.heard(), [Lost]);
    drop(watch);
    play.rests();
}

#[derive(Clone, Debug)]
enum Op {
    Claim(OwnerId, usize),
    ClaimAfterNothing(OwnerId, usize),
    NotSaved(OwnerId, usize),
    Commit(usize),
    Abort(usize),
    WriterGone,
    Seal,
    Drop,
    Pass(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let worker = (prop_oneof![Just(P), Just(X)], 0..SHARDS);
    prop_oneof![
        5 => worker.clone().prop_map(|(owner, shard)| Op::Claim(owner, shard)),
        1 => worker.clone().prop_map(|(owner, shard)| Op::ClaimAfterNothing(owner, shard)),
        1 => worker.prop_map(|(owner, shard)| Op::NotSaved(owner, shard)),
        4 => (0..SHARDS).prop_map(Op::Commit),
        2 => (0..SHARDS).prop_map(Op::Abort),
        1 => Just(Op::WriterGone),
        2 => Just(Op::Seal),
        1 => Just(Op::Drop),
        2 => (0..4000u64).prop_map(Op::Pass),
        1 => Just(Op::Pass(61_000)),
    ]
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Shard {
    Waiting,
    Writing(ClaimOutcome),
    Written,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Is {
    Absent,
    Claimed(OwnerId, [Shard; SHARDS], Instant),
    Committed,
    Visible,
}

/// The model of one block: what it is, and when P's workers have last asked for their shards in vain.
struct Model {
    is: Is,
    not_saved: [Option<Instant>; SHARDS],
}

impl Model {
    /// A claim dies for want of these shards.
    fn dies(&mut self, owner: OwnerId, shards: impl Iterator<Item = usize>, now: Instant) {
        self.is = Is::Absent;
        shards.filter(|_| owner == P).for_each(|shard| self.not_saved[shard] = Some(now));
    }

    fn asked(&mut self, owner: OwnerId, shard: usize, outcome: ClaimOutcome, now: Instant) {
        if let ClaimOutcome::Claimed(_) = outcome {
            let (mut shards, mut since) = ([Shard::Waiting; SHARDS], now);
            if let Is::Claimed(_, former, at) = self.is {
                (shards, since) = (former, at);
            }
            shards[shard] = Shard::Writing(outcome);
            self.is = Is::Claimed(owner, shards, since);
        }
        match outcome {
            ClaimOutcome::Claimed(_) if owner == P => self.not_saved[shard] = None,
            ClaimOutcome::NoRoom if owner == P => self.not_saved[shard] = Some(now),
            _ => {}
        }
    }

    /// This worker may claim it.
    fn is_free(&self, owner: OwnerId, shard: usize) -> bool {
        match self.is {
            Is::Absent => true,
            Is::Claimed(by, shards, _) => by == owner && shards[shard] == Shard::Waiting,
            Is::Committed | Is::Visible => false,
        }
    }

    fn is_lost(&self, now: Instant) -> bool {
        let is_known = self.not_saved.iter().flatten().any(|at| now - *at <= 5 * SECOND);
        is_known && matches!(self.is, Is::Absent | Is::Claimed(P, ..))
    }
}

proptest! {
    #[test]
    fn a_watch_that_begins_hears_of_what_its_saver_has_not_saved(ops in prop::collection::vec(op(), 1..80)) {
        let mut play = Play::new(256, SHARDS);
        let all = hashes(1);
        let mut model = Model { is: Is::Absent, not_saved: [None; SHARDS] };
        for op in ops {
            match op {
                Op::Claim(owner, shard) => {
                    let outcome = play.claim(owner, shard as u32, Chain::Start, &all)[0];
                    let is_free = model.is_free(owner, shard);
                    prop_assert_eq!(matches!(outcome, ClaimOutcome::Claimed(_)), is_free);
                    model.asked(owner, shard, outcome, play.now);
                }
                Op::ClaimAfterNothing(owner, shard) => {
                    let outcome = play.claim(owner, shard as u32, Chain::After(BlockHash([9; 16])), &all)[0];
                    prop_assert_eq!(outcome == ClaimOutcome::NoRoom, model.is == Is::Absent);
                    model.asked(owner, shard, outcome, play.now);
                }
                Op::NotSaved(owner, shard) => {
                    play.store.save_refused(owner, play.space, ShardNumber(shard as u32), &all, play.now);
                    if model.is_free(owner, shard) {
                        model.asked(owner, shard, ClaimOutcome::NoRoom, play.now);
                    }
                }
                Op::Commit(shard) => if let Is::Claimed(owner, mut shards, _) = model.is
                    && let Shard::Writing(claim) = shards[shard]
                {
                    play.commit(&[claim]);
                    shards[shard] = Shard::Written;
                    let is_whole = shards == [Shard::Written; SHARDS];
                    model.is = if is_whole { Is::Committed } else { Is::Claimed(owner, shards, play.now) };
                },
                Op::Abort(shard) => if let Is::Claimed(owner, shards, _) = model.is
                    && let Shard::Writing(claim) = shards[shard]
                {
                    play.abort(&[claim]);
                    model.dies(owner, [shard].into_iter(), play.now);
                },
                Op::WriterGone => {
                    play.store.writer_gone(WRITER, play.now);
                    if let Is::Claimed(owner, shards, _) = model.is {
                        let is_writing = |shard: &usize| matches!(shards[*shard], Shard::Writing(_));
                        if (0..SHARDS).any(|shard| is_writing(&shard)) {
                            model.dies(owner, (0..SHARDS).filter(is_writing), play.now);
                        }
                    }
                }
                Op::Seal => {
                    play.store.seal_pending();
                    model.is = if model.is == Is::Committed { Is::Visible } else { model.is };
                }
                Op::Drop => {
                    play.store.drop_namespace(Namespace([1; 16]));
                    model.is = Is::Absent;
                }
                Op::Pass(ms) => {
                    play.now += Duration::from_millis(ms);
                    play.store.expire(play.now);
                    if let Is::Claimed(owner, shards, since) = model.is
                        && play.now - since > TTL
                        && !shards.iter().any(|shard| matches!(shard, Shard::Writing(_)))
                    {
                        model.dies(owner, 0..SHARDS, play.now);
                    }
                }
            }
            let watching = play.watch(&[play.group(0, &all)], 16);
            prop_assert_eq!(matches!(watching, Watching::Complete), model.is == Is::Visible);
            let expected = if model.is_lost(play.now) { vec![Lost] } else { vec![] };
            prop_assert_eq!(play.heard(), expected, "{:?}", model.is);
            drop(watching);
            play.rests();
        }
    }
}

#[test]
fn many_may_wait_for_the_same_and_those_that_went_hear_nothing() {
    let play = Play::new(64, 1);
    let all = hashes(2);
    // A hash that is named twice is one block.
    let twice = [all[0], all[0]];
    let mut watches: Vec<Watch> = (0..50).map(|_| play.waits(&[play.group(0, &twice)], 32)).collect();
    assert_eq!(play.store.watched_blocks(), 50);
    watches.truncate(25);
    watches.remove(0);
    play.claim(P, 0, Chain::Start, &all);
    assert_eq!(play.heard().len(), 24);
    watches.clear();
    play.rests();
}

#[test]
fn the_blocks_that_are_watched_are_bounded() {
    const MOST: usize = 1 << 18;
    let play = Play::new(64, 1);
    let all = hashes(MOST as u32 + 1);
    assert!(matches!(play.watch(&[play.group(0, &all)], u64::MAX), Watching::TooMany));
    play.rests();
    let watch = play.waits(&[play.group(0, &all[..MOST])], u64::MAX);
    assert!(matches!(play.watch(&[play.group(0, &all[..1])], 16), Watching::TooMany));
    drop(watch);
    play.rests();
    drop(play.waits(&[play.group(0, &all[..1])], 16));
}
