//! How much of the daemon's own memory a block costs. Alone in its file, because it counts all allocations of a thread.
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Instant;

use kvlane_block::{BlockHash, CutDigest, Namespace};
use kvlane_memory::{ExtentAllocator, PAGE_BYTES};
use kvlane_store::{Caller, Chain, ClaimOutcome, Index, OwnerId, ShardNumber, StoreOptions, WriterId};

struct Counting;

thread_local! {
    /// The test harness allocates too, in threads of its own.
    static LIVE: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    // Fails while a thread ends.
    let _ = LIVE.try_with(|live| live.set(live.get() + bytes));
}

// SAFETY: Everything is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: The caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: The caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const PROMPT: u64 = 500;

fn hash(prompt: u64, block: u64) -> BlockHash {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&(prompt * PROMPT + block).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
    bytes[8..].copy_from_slice(&prompt.to_le_bytes());
    BlockHash(bytes)
}

/// Bytes for each of `blocks` sealed blocks of `shards` shards, in chains of 500; everything included, the extents'
/// bookkeeping too.
fn bytes_per_block(blocks: u64, shards: usize) -> f64 {
    let now = Instant::now();
    let (owner, writer) = (OwnerId(1), WriterId(1));
    let before = LIVE.get();
    let pages = (blocks as usize * shards * 2) as u32;
    let extents = ExtentAllocator::new(pages, std::slice::from_ref(&(0..pages)));
    let mut index = Index::new(extents, u64::from(pages) * PAGE_BYTES, StoreOptions::default());
    let space = index.space(Namespace([1; 16]), "test", CutDigest([2; 16]), &vec![PAGE_BYTES; shards]);
    for prompt in 0..blocks / PROMPT {
        let hashes: Vec<BlockHash> = (0..PROMPT).map(|block| hash(prompt, block)).collect();
        for shard in 0..shards as u32 {
            let mut outcomes = Vec::new();
            index.claim(
                &Caller { owner, writer, space, shard: ShardNumber(shard), now },
                Chain::Start,
                &hashes,
                &mut outcomes,
            );
            let claimed = outcomes.into_iter().filter_map(|outcome| match outcome {
                ClaimOutcome::Claimed(claim) => Some(claim),
                _ => None,
            });
            let claims: Vec<_> = claimed.collect();
            index.commit(&claims, now);
        }
        for check in index.take_unsealed(u64::MAX, usize::MAX) {
            index.finish_seal(check, &vec![0; shards]);
        }
    }
    assert_eq!(index.stats().blocks, blocks);
    (LIVE.get() - before) as f64 / blocks as f64
}

#[test]
fn blocks_stay_within_96_bytes_each_and_16_for_each_further_shard() {
    // Tables double when they are seven eighths full: 2^18 entries are too few for 250,000 blocks, as 2^20 are for a million, so a
    // block costs the same of either.
    let one = bytes_per_block(250_000, 1);
    let further = (bytes_per_block(50_000, 3) - bytes_per_block(50_000, 1)) / 2.0;
    println!("{one:.1} bytes a block with one shard, {further:.1} for each further one");
    // Less than the entry, its links and its row cannot be: then the counter would be broken.
    assert!((64.0..=96.0).contains(&one), "{one} bytes a block");
    // An extent takes 8. The table of claims doubles by chance of its hashes, in one of the two stores or both: less than 1 byte.
    assert!((7.0..=16.0).contains(&further), "{further} bytes a further shard");
}
