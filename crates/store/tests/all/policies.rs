//! The replacement policies in the store: victims, refused claims, and `auto`.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use kvlane_block::{BlockHash, CutDigest, Namespace};
use kvlane_memory::{Arena, ArenaOptions, ExtentAllocator, HugePages, Numa, PAGE_BYTES};
use kvlane_policy::{CacheModel, Choice, PolicyKind};
use kvlane_store::{
    Caller, Chain, ClaimOutcome, Index, LookupGroup, OwnerId, ShardClaim, ShardNumber, SpaceId, Store,
    StoreOptions, WriterId,
};

const ENGINE: OwnerId = OwnerId(1);
const WORKER: WriterId = WriterId(10);

fn hashes(prompt: u64, blocks: u64) -> Vec<BlockHash> {
    let hash = |block: u64| {
        let mut bytes = [7; 16];
        bytes[..8].copy_from_slice(&prompt.to_le_bytes());
        bytes[8..].copy_from_slice(&block.to_le_bytes());
        BlockHash(bytes)
    };
    (0..blocks).map(hash).collect()
}

fn claimed(outcomes: &[ClaimOutcome]) -> Vec<ShardClaim> {
    let shard = |outcome: &ClaimOutcome| match outcome {
        ClaimOutcome::Claimed(shard) => Some(*shard),
        _ => None,
    };
    outcomes.iter().filter_map(shard).collect()
}

/// An index over a pool of so many blocks, and an engine with one or more workers.
struct Engine {
    index: Index,
    space: SpaceId,
    now: Instant,
    shards: u32,
}

impl Engine {
    fn new(policy: PolicyKind, blocks: u32, shards: u32) -> Self {
        let pages = blocks * shards;
        let extents = ExtentAllocator::new(pages, std::slice::from_ref(&(0..pages)));
        let options = StoreOptions { policy: Choice::Fixed(policy), ..StoreOptions::default() };
        let mut index = Index::new(extents, u64::from(pages) * PAGE_BYTES, options);
        let bytes = vec![PAGE_BYTES; shards as usize];
        let space = index.space(Namespace([1; 16]), "a model", CutDigest([2; 16]), &bytes);
        Self { index, space, now: Instant::now(), shards }
    }

    /// Blocks that a lookup finds, and of which the lease is given back at once.
    fn look_up(&mut self, prompt: &[BlockHash]) -> usize {
        let group = LookupGroup { space: self.space, tokens_per_block: 1, window_blocks: 0, hashes: prompt };
        let Some(hit) = self.index.lookup(ENGINE, &[group], u64::MAX, self.now) else { return 0 };
        self.index.release(ENGINE, hit.lease);
        hit.tokens as usize
    }

    fn claim(&mut self, shard: u32, prompt: &[BlockHash], from: usize) -> Vec<ClaimOutcome> {
        let chain = from.checked_sub(1).map_or(Chain::Start, |before| Chain::After(prompt[before]));
        let mut outcomes = Vec::new();
        let writer = WriterId(WORKER.0 + u64::from(shard));
        self.index.claim(
            &Caller { owner: ENGINE, writer, space: self.space, shard: ShardNumber(shard), now: self.now },
            chain,
            &prompt[from..],
            &mut outcomes,
        );
        outcomes
    }

    /// Saves what a prompt has beyond its first `from` blocks; answers how many blocks came in.
    fn save(&mut self, prompt: &[BlockHash], from: usize) -> usize {
        let mut came = 0;
        for shard in 0..self.shards {
            let shards = claimed(&self.claim(shard, prompt, from));
            came = shards.len();
            self.index.commit(&shards, self.now);
        }
        for check in self.index.take_unsealed(u64::MAX, usize::MAX) {
            self.index.finish_seal(check, &vec![1; self.shards as usize]);
        }
        assert_eq!(self.index.check_consistency(), Ok(()));
        came
    }

    /// What an engine does with a prompt: looks it up, computes the rest and saves that. Answers the hit. The lease is kept
    /// until then, as a replay takes a request's blocks to be in use; an engine gives it back when they are loaded.
    fn serve(&mut self, prompt: &[BlockHash]) -> usize {
        let group = LookupGroup { space: self.space, tokens_per_block: 1, window_blocks: 0, hashes: prompt };
        let hit = self.index.lookup(ENGINE, &[group], u64::MAX, self.now);
        let tokens = hit.as_ref().map_or(0, |hit| hit.tokens as usize);
        if tokens < prompt.len() {
            self.save(prompt, tokens);
        }
        if let Some(hit) = hit {
            self.index.release(ENGINE, hit.lease);
        }
        tokens
    }
}

/// Conversations that grow, beside prompts that never come back.
fn prompts() -> Vec<Vec<BlockHash>> {
    let mut random = 1u64;
    let mut turns = [0u64; 12];
    let prompt = |n: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let pick = random >> 33;
        if pick.is_multiple_of(3) {
            return hashes(1000 + n, 3 + pick % 7);
        }
        let talk = (pick / 3 % 12).min(pick / 64 % 12);
        turns[talk as usize] += 1;
        hashes(talk, 4 + 2 * (turns[talk as usize] % 9))
    };
    (0..3000).map(prompt).collect()
}

#[test]
fn the_store_hits_what_a_replay_says() {
    const CAPACITY: u32 = 64;
    for kind in PolicyKind::ALL {
        let mut engine = Engine::new(kind, CAPACITY, 1);
        let mut model = CacheModel::new(kind, CAPACITY as usize);
        let (mut hits, mut evicted) = (0, 0);
        for (number, prompt) in prompts().iter().enumerate() {
            let keys: Vec<u64> = prompt.iter().map(|hash| Index::fingerprint(engine.space, hash)).collect();
            let expected = model.request(&keys, |_| evicted += 1).prefix_hits;
            assert_eq!(engine.serve(prompt), expected, "{kind}, prompt {number}");
            hits += expected;
        }
        let counters = engine.index.stats().counters;
        assert!(hits > 1000 && evicted > 1000, "{kind}: {hits} hits, {evicted} evicted");
        assert_eq!(counters.evicted_blocks, evicted, "{kind}");
    }
}

#[test]
fn a_prompt_that_is_saved_block_by_block_is_evicted_from_its_tail() {
    for kind in PolicyKind::ALL.into_iter().filter(|kind| *kind != PolicyKind::TinyLfu) {
        let mut engine = Engine::new(kind, 256, 1);
        let long = hashes(1, 120);
        for end in 1..=long.len() {
            assert_eq!(engine.save(&long[..end], end - 1), 1, "{kind}");
        }
        for number in 0..60 {
            assert_eq!(engine.save(&hashes(100 + number, 16), 0), 16, "{kind}: there is always a victim");
        }
        assert_eq!(engine.index.stats().counters.no_room, 0, "{kind}");
    }
}

#[test]
fn what_is_leased_stays_however_much_comes() {
    for kind in PolicyKind::ALL {
        let mut engine = Engine::new(kind, 64, 1);
        let kept = hashes(1, 40);
        engine.save(&kept, 0);
        let group = LookupGroup { space: engine.space, tokens_per_block: 1, window_blocks: 0, hashes: &kept };
        let hit = engine.index.lookup(ENGINE, &[group], u64::MAX, engine.now).unwrap();
        for number in 0..50 {
            engine.serve(&hashes(100 + number, 16));
        }
        assert!(engine.index.stats().counters.evicted_blocks > 0 || kind == PolicyKind::TinyLfu, "{kind}");
        engine.index.release(ENGINE, hit.lease);
        assert_eq!(engine.look_up(&kept), 40, "{kind}");
    }
}

#[test]
fn tinylfu_keeps_out_only_what_would_displace_something_better() {
    let mut engine = Engine::new(PolicyKind::TinyLfu, 64, 1);
    let used = hashes(1, 40);
    for _ in 0..5 {
        engine.serve(&used);
    }
    // 24 blocks are free: what fits comes in whoever asks for it.
    assert_eq!(engine.serve(&hashes(2, 20)), 0);
    assert_eq!(engine.index.stats().counters.not_admitted, 0);
    // Of 30 blocks 4 fit; the others would cost blocks that were used as often or more.
    engine.serve(&hashes(3, 30));
    let stats = engine.index.stats();
    assert_eq!(
        (stats.counters.not_admitted, stats.counters.evicted_blocks, stats.counters.no_room),
        (26, 0, 0)
    );
    assert_eq!((stats.blocks, engine.look_up(&used)), (64, 40));
    // What is asked for again and again comes in.
    let hits: Vec<usize> = (0..8).map(|_| engine.serve(&hashes(4, 8))).collect();
    assert_eq!((hits[0], hits[7]), (0, 8), "{hits:?}");
}

#[test]
fn the_workers_of_an_engine_are_told_the_same() {
    let mut engine = Engine::new(PolicyKind::TinyLfu, 16, 2);
    let used = hashes(1, 16);
    for _ in 0..3 {
        engine.serve(&used);
    }
    let other = hashes(2, 8);
    assert_eq!(engine.look_up(&other), 0);
    let all_out = [ClaimOutcome::NoRoom; 8];
    assert_eq!(engine.claim(0, &other, 0), all_out);
    // Meanwhile the prompt was asked for by others, and would be worth it.
    (0..9).for_each(|_| assert_eq!(engine.look_up(&other), 0));
    assert_eq!(engine.claim(1, &other, 0), all_out, "half of a block would be of no use");
    assert_eq!(engine.index.stats().claimed_blocks, 0);
    // The next time it is judged anew, whichever worker comes first.
    assert_eq!(claimed(&engine.claim(1, &other, 0)).len(), 8);
    assert_eq!(claimed(&engine.claim(0, &other, 0)).len(), 8);
}

#[test]
fn auto_leaves_what_hits_nothing_where_prompts_that_never_come_back_displace_what_is_used() {
    const BLOCKS: u64 = 512;
    let options =
        ArenaOptions { bytes: BLOCKS * PAGE_BYTES, hugepages: HugePages::Off, numa: Numa::Off, threads: 1 };
    let arena = Arc::new(Arena::create(&options, &|_| {}).unwrap());
    let store = Store::new(arena, StoreOptions { policy: Choice::Auto, ..StoreOptions::default() });
    let space = store.space(Namespace([1; 16]), "a model", CutDigest([2; 16]), &[PAGE_BYTES]);
    let now = Instant::now();
    let serve = |prompt: &[BlockHash]| {
        let group = LookupGroup { space, tokens_per_block: 1, window_blocks: 0, hashes: prompt };
        let hit = store.lookup(ENGINE, &[group], u64::MAX, now);
        store.release_owner(ENGINE);
        let hit = hit.map_or(0, |hit| hit.tokens as usize);
        let chain = hit.checked_sub(1).map_or(Chain::Start, |before| Chain::After(prompt[before]));
        let mut outcomes = Vec::new();
        store.claim(
            &Caller { owner: ENGINE, writer: WORKER, space, shard: ShardNumber(0), now },
            chain,
            &prompt[hit..],
            &mut outcomes,
        );
        store.commit(&claimed(&outcomes), now);
        while store.seal_pending() {}
        hit
    };
    assert!(!store.observe_pending());
    assert_eq!((store.policy().choice, store.policy().active), (Choice::Auto, PolicyKind::Learned));
    let round = |number: u64| {
        // 320 blocks that come back, 640 that do not: the least recently used are always what comes next.
        (0..20)
            .map(|prompt| serve(&hashes(prompt, 16)) + serve(&hashes(1000 + 20 * number + prompt, 32)))
            .sum()
    };
    let first: usize = (0..4).map(round).sum();
    assert_eq!(first, 0, "what has not learnt yet is like LRU, and hits nothing");
    assert!(store.observe_pending());
    let mut seen = BTreeSet::new();
    let hits: Vec<usize> = (4..24)
        .map(|number| {
            let hits = round(number);
            store.observe_pending();
            seen.insert(store.policy().active);
            hits
        })
        .collect();
    let report = store.policy();
    assert!(report.switches > 0 && report.active != PolicyKind::Learned, "{seen:?}, {hits:?}");
    let rate = |kind| report.shadow_hit_rates.iter().find(|(of, _)| *of == kind).unwrap().1;
    assert!(rate(report.active) > rate(PolicyKind::Lru), "{report:?}");
    assert!(hits[10..].iter().sum::<usize>() > 10 * 40, "{seen:?}, {hits:?}");
    assert_eq!((report.left_out, store.stats().policy), (0, report.active));
}
