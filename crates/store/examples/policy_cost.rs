//! Cost of each replacement policy in the store, compared with lru: of a claim that evicts, for each evicted block, and of a
//! lookup that hits, for each block.
//!
//! `cargo run --release -p kvlane-store --example policy_cost`
//!
//! A pool of 100,000 blocks. Conversations grow by 16 blocks a turn, beside prompts of 64 blocks that come once. Missing blocks
//! are saved. The policies take turns, a thousand prompts each. Prints medians over the turns in which the pool was full.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a program for developers")]

use std::time::{Duration, Instant};

use kvlane_block::{BlockHash, CutDigest, Namespace};
use kvlane_memory::{ExtentAllocator, PAGE_BYTES};
use kvlane_policy::{Choice, PolicyKind, spread};
use kvlane_store::{
    Caller, Chain, ClaimOutcome, Index, LookupGroup, OwnerId, ShardClaim, ShardNumber, SpaceId, StoreOptions,
    WriterId,
};

const BLOCKS: u32 = 100_000;
const TALKS: u64 = 2000;
const LONGEST: u64 = 160;
/// Prompts of a turn, and turns.
const PROMPTS: u64 = 1000;
const TURNS: u64 = 30;
const ENGINE: OwnerId = OwnerId(1);
const WORKER: WriterId = WriterId(2);

struct Engine {
    index: Index,
    space: SpaceId,
    now: Instant,
}

/// Times of one turn.
#[derive(Default)]
struct Spent {
    claims: Duration,
    evicted: u64,
    lookups: Duration,
    hits: u64,
}

impl Engine {
    fn new(policy: PolicyKind) -> Self {
        let extents = ExtentAllocator::new(BLOCKS, std::slice::from_ref(&(0..BLOCKS)));
        let options = StoreOptions { policy: Choice::Fixed(policy), ..StoreOptions::default() };
        let mut index = Index::new(extents, u64::from(BLOCKS) * PAGE_BYTES, options);
        let space = index.space(Namespace([1; 16]), "a model", CutDigest([2; 16]), &[PAGE_BYTES]);
        Self { index, space, now: Instant::now() }
    }

    fn serve(&mut self, prompt: &[BlockHash], spent: &mut Spent) {
        let group = LookupGroup { space: self.space, tokens_per_block: 1, window_blocks: 0, hashes: prompt };
        let begun = Instant::now();
        let hit = self.index.lookup(ENGINE, &[group], u64::MAX, self.now);
        let took = begun.elapsed();
        let found = hit.as_ref().map_or(0, |hit| hit.tokens as usize);
        // Only prompts that hit as a whole: a miss costs other work.
        if found == prompt.len() {
            spent.lookups += took;
            spent.hits += found as u64;
        }
        if found < prompt.len() {
            self.save(prompt, found, spent);
        }
        if let Some(hit) = hit {
            self.index.release(ENGINE, hit.lease);
        }
    }

    fn save(&mut self, prompt: &[BlockHash], found: usize, spent: &mut Spent) {
        let chain = found.checked_sub(1).map_or(Chain::Start, |before| Chain::After(prompt[before]));
        let mut outcomes = Vec::new();
        let before = self.index.stats().counters.evicted_blocks;
        let begun = Instant::now();
        let (writer, shard, rest) = (WORKER, ShardNumber(0), &prompt[found..]);
        self.index.claim(
            &Caller { owner: ENGINE, writer, space: self.space, shard, now: self.now },
            chain,
            rest,
            &mut outcomes,
        );
        let took = begun.elapsed();
        let evicted = self.index.stats().counters.evicted_blocks - before;
        // Only claims of which each block evicted another one: a refused block costs no eviction.
        if evicted as usize == rest.len() {
            spent.claims += took;
            spent.evicted += evicted;
        }
        let shard = |outcome: &ClaimOutcome| match outcome {
            ClaimOutcome::Claimed(shard) => Some(*shard),
            _ => None,
        };
        let shards: Vec<ShardClaim> = outcomes.iter().filter_map(shard).collect();
        self.index.commit(&shards, self.now);
        for check in self.index.take_unsealed(u64::MAX, usize::MAX) {
            self.index.finish_seal(check, &[1]);
        }
    }
}

fn hashes(prompt: u64, blocks: u64) -> Vec<BlockHash> {
    let hash = |block: u64| {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&spread(prompt << 20 | block).to_le_bytes());
        bytes[8..].copy_from_slice(&prompt.to_le_bytes());
        BlockHash(bytes)
    };
    (0..blocks).map(hash).collect()
}

/// The same for all policies.
fn prompts(turn: u64) -> impl Iterator<Item = Vec<BlockHash>> {
    (turn * PROMPTS..(turn + 1) * PROMPTS).map(|number| {
        let any = spread(number);
        if any.is_multiple_of(3) {
            return hashes(1 << 30 | number, 64);
        }
        // Some are asked far more often than others.
        let talk = (any >> 20) % TALKS * ((any >> 40) % TALKS) / TALKS;
        hashes(talk, 16 + 16 * (number / TALKS + talk) % LONGEST)
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() {
    let mut engines: Vec<(PolicyKind, Engine, Vec<f64>, Vec<f64>)> =
        PolicyKind::ALL.map(|kind| (kind, Engine::new(kind), Vec::new(), Vec::new())).into();
    for turn in 0..TURNS {
        for (_, engine, evictions, hits) in &mut engines {
            let mut spent = Spent::default();
            prompts(turn).for_each(|prompt| engine.serve(&prompt, &mut spent));
            if spent.evicted > 0 && spent.hits > 0 {
                evictions.push(spent.claims.as_secs_f64() * 1e9 / spent.evicted as f64);
                hits.push(spent.lookups.as_secs_f64() * 1e9 / spent.hits as f64);
            }
        }
    }
    println!("ns          evicted block        hit block");
    let mut lru = None;
    for (kind, engine, evictions, hits) in engines {
        let (eviction, hit) = (median(evictions), median(hits));
        let (of_eviction, of_hit) = *lru.get_or_insert((eviction, hit));
        let evicted = engine.index.stats().counters.evicted_blocks;
        let name = kind.name();
        println!(
            "{name:<10} {eviction:6.0} {:5.2}x      {hit:6.0} {:5.2}x   {evicted} evicted",
            eviction / of_eviction,
            hit / of_hit
        );
    }
}
