//! How fast saved blocks become visible, by the number of threads that seal, measured in turns: run with --release.
use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane_block::{BlockHash, CutDigest, Namespace};
use kvlane_memory::{Arena, ArenaOptions, HugePages, Numa};
use kvlane_store::{
    Caller, Chain, ClaimOutcome, OwnerId, ShardClaim, ShardNumber, Store, StoreOptions, WriterId,
};

const BLOCK_BYTES: u64 = 1 << 20;
const BLOCKS: u64 = 1024;
const ROUNDS: usize = 5;

fn main() -> Result<(), Box<dyn Error>> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let options = ArenaOptions {
        bytes: BLOCKS * BLOCK_BYTES,
        hugepages: HugePages::Auto,
        numa: Numa::Off,
        threads: cpus,
    };
    let arena = Arc::new(Arena::create(&options, &|_| {})?);
    let counts = [1, 2, 4, 8].into_iter().filter(|count| *count <= cpus.max(2));
    let counts: Vec<usize> = counts.collect();
    let mut rates = vec![Vec::new(); counts.len()];
    for _ in 0..ROUNDS {
        for (rates, threads) in rates.iter_mut().zip(&counts) {
            rates.push(seal_all(&arena, *threads)?);
        }
    }
    for (rates, threads) in rates.iter_mut().zip(&counts) {
        rates.sort_by(f64::total_cmp);
        println!("{threads} threads: {:.1} GB/s (median of {ROUNDS})", rates[ROUNDS / 2]);
    }
    Ok(())
}

/// Bytes a second, in GB/s.
fn seal_all(arena: &Arc<Arena>, threads: usize) -> io::Result<f64> {
    let store = Store::new(Arc::clone(arena), StoreOptions::default());
    let space = store.space(Namespace([1; 16]), "speed", CutDigest([2; 16]), &[BLOCK_BYTES]);
    let hashes: Vec<BlockHash> =
        (0..BLOCKS).map(|number| BlockHash(u128::from(number).to_le_bytes())).collect();
    let (now, mut outcomes) = (Instant::now(), Vec::new());
    store.claim(
        &Caller { owner: OwnerId(1), writer: WriterId(1), space, shard: ShardNumber(0), now },
        Chain::Unchained,
        &hashes,
        &mut outcomes,
    );
    let claimed = |outcome: &ClaimOutcome| match outcome {
        ClaimOutcome::Claimed(claim) => Some(*claim),
        _ => None,
    };
    let claims: Vec<ShardClaim> = outcomes.iter().filter_map(claimed).collect();
    let background = store.start_background(threads, 0)?;
    let begun = Instant::now();
    store.commit(&claims, now);
    assert!(store.settle(Duration::from_secs(60)), "everything is sealed");
    let took = begun.elapsed();
    drop(background);
    Ok(claims.len() as f64 * BLOCK_BYTES as f64 / took.as_secs_f64() / 1e9)
}
