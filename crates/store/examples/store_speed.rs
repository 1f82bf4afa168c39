//! How long the store's calls hold its lock: run with --release. Prints one line a call.
use std::time::{Duration, Instant};

use kvlane_block::{BlockHash, CutDigest, Namespace};
use kvlane_memory::{ExtentAllocator, PAGE_BYTES};
use kvlane_store::{
    Caller, Chain, ClaimOutcome, Index, LookupGroup, OwnerId, ShardClaim, ShardNumber, StoreOptions, WriterId,
};

const BLOCKS: u64 = 1_000_000;
const PROMPT: u64 = 625;

fn hash(number: u64) -> BlockHash {
    let low = u128::from(number).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835) ^ 0x1234;
    BlockHash(low.to_le_bytes())
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// Claims, commits and seals one prompt. Returns how long the claim took.
fn save(index: &mut Index, space: kvlane_store::SpaceId, hashes: &[BlockHash]) -> Duration {
    let now = Instant::now();
    let mut outcomes = Vec::new();
    index.claim(
        &Caller { owner: OwnerId(1), writer: WriterId(1), space, shard: ShardNumber(0), now },
        Chain::Start,
        hashes,
        &mut outcomes,
    );
    let took = now.elapsed();
    let claimed = |outcome: &ClaimOutcome| match outcome {
        ClaimOutcome::Claimed(claim) => Some(*claim),
        _ => None,
    };
    let claims: Vec<ShardClaim> = outcomes.iter().filter_map(claimed).collect();
    assert_eq!(claims.len(), hashes.len(), "everything has room");
    index.commit(&claims, now);
    for check in index.take_unsealed(u64::MAX, usize::MAX) {
        index.finish_seal(check, &[0]);
    }
    took
}

fn main() {
    // Whole slabs, so that exactly all blocks fit.
    let pages = (BLOCKS as u32).next_multiple_of(512);
    let extents = ExtentAllocator::new(pages, std::slice::from_ref(&(0..pages)));
    let mut index = Index::new(extents, u64::from(pages) * PAGE_BYTES, StoreOptions::default());
    let space = index.space(Namespace([1; 16]), "speed", CutDigest([2; 16]), &[PAGE_BYTES]);
    let prompt = |number: u64| (0..PROMPT).map(|block| hash(number * PROMPT + block)).collect::<Vec<_>>();
    let prompts = BLOCKS / PROMPT;

    let times = (0..prompts).map(|number| save(&mut index, space, &prompt(number))).collect();
    println!("claim {PROMPT} blocks, room left:    {:?}", median(times));

    let mut lookups = Vec::new();
    let mut releases = Vec::new();
    for round in 0..prompts {
        let hashes = prompt(round * 7919 % prompts);
        let group = LookupGroup { space, tokens_per_block: 16, window_blocks: 0, hashes: &hashes };
        let start = Instant::now();
        let hit = index.lookup(OwnerId(1), &[group], u64::MAX, start);
        lookups.push(start.elapsed());
        let hit = hit.filter(|hit| hit.tokens == PROMPT * 16);
        let start = Instant::now();
        let lease = hit.map(|hit| hit.lease);
        assert!(lease.is_some(), "every prompt is a hit");
        lease.into_iter().for_each(|lease| index.release(OwnerId(1), lease));
        releases.push(start.elapsed());
    }
    println!("lookup {PROMPT} resident blocks:     {:?}", median(lookups));
    println!("release {PROMPT} blocks:             {:?}", median(releases));

    let times = (prompts..2 * prompts).map(|number| save(&mut index, space, &prompt(number))).collect();
    println!("claim {PROMPT} blocks, all evicting: {:?}", median(times));
    let slowest_lookup = (prompts..2 * prompts).map(|number| {
        let hashes = prompt(number);
        let group = LookupGroup { space, tokens_per_block: 16, window_blocks: 0, hashes: &hashes };
        let start = Instant::now();
        let hit = index.lookup(OwnerId(2), &[group], u64::MAX, start);
        let took = start.elapsed();
        hit.into_iter().for_each(|hit| index.release(OwnerId(2), hit.lease));
        took
    });
    println!("lookup {PROMPT} blocks in used slots: {:?}", median(slowest_lookup.collect()));
}
