//! Random use compared with a map, over restarts: the tier returns only right blocks, and has the blocks that it must
//! have.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::collections::BTreeMap;
use std::time::Duration;

use crate::support::*;
use kvlane_ssd::{Options, ReadEnd, WriteEnd};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Step {
    Write(u64, usize),
    Read(u64),
    Remove(u64),
    Restart { orderly: bool },
}

/// Lengths of shards; the block's number picks some.
const SHAPES: [&[u64]; 5] = [&[1], &[4096, 4096], &[5000, 77, 12_288], &[60_000], &[300; 14]];

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (0u64..60, 0usize..5).prop_map(|(block, shape)| Step::Write(block, shape)),
        6 => (0u64..60).prop_map(Step::Read),
        1 => (0u64..60).prop_map(Step::Remove),
        1 => any::<bool>().prop_map(|orderly| Step::Restart { orderly }),
    ];
    prop::collection::vec(step, 1..120)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: std::env::var("PROPTEST_CASES").map_or(10, |cases| cases.parse().unwrap()), ..ProptestConfig::default() })]
    #[test]
    fn a_tier_is_a_map_that_may_forget_the_oldest(steps in steps(), threads in any::<bool>()) {
        let (directory, mut pool) = (tempfile::tempdir().unwrap(), Pool::new(MIB));
        let path = directory.path().join("tier");
        let options = |path: &std::path::Path| Options {
            threads,
            segment_bytes: Some(128 * KIB),
            checkpoint_interval: Duration::from_millis(5),
            ..options_for(vec![device(path, MIB + 64 * KIB)])
        };
        let mut tier = open(options(&path), &pool);
        // What was stored last under each number, and in which order. Removed blocks may come back by a restart.
        let mut model: BTreeMap<u64, (Block, usize)> = BTreeMap::new();
        let (mut clock, mut file) = (0, path.clone());
        for (number, step) in steps.into_iter().enumerate() {
            match step {
                Step::Write(block, shape) => {
                    let block_bytes = Block::new(block, SHAPES[shape]);
                    if tier.contains(&block_bytes.key) {
                        continue;
                    }
                    pool.reset();
                    prop_assert_eq!(write(&tier, &mut pool, &block_bytes), WriteEnd::Stored);
                    clock += 1;
                    model.insert(block, (block_bytes, clock));
                }
                Step::Read(block) => {
                    pool.reset();
                    let Some((block, _)) = model.get(&block) else { continue };
                    if !tier.contains(&block.key) {
                        continue;
                    }
                    // `fetch` compares the bytes.
                    let end = fetch(&tier, &mut pool, block);
                    // The tier makes room behind our back: it may have forgotten the block since we asked.
                    let is_forgotten = end.is_none() && !tier.contains(&block.key);
                    prop_assert!(is_forgotten || matches!(end, Some(ReadEnd::Found { .. })), "{end:?}");
                }
                Step::Remove(block) => {
                    if let Some((stored, _)) = model.remove(&block) {
                        tier.remove(&stored.key);
                    }
                }
                Step::Restart { orderly } => {
                    if orderly {
                        close(tier);
                    } else {
                        // What a crash leaves: the file as it is now, without an end.
                        let copy = directory.path().join(format!("copy{number}"));
                        std::fs::copy(&file, &copy).unwrap();
                        close(tier);
                        file = copy;
                    }
                    tier = open(options(&file), &pool);
                }
            }
            // Of 8 segments of 128 KiB at least 4 hold blocks; one record is 68 KiB at most, so that two fill a segment.
            let newest = model.values().filter(|(_, at)| at + 4 > clock);
            for (block, _) in newest {
                prop_assert!(tier.contains(&block.key), "{:?} of the newest is not there", block.key.hash);
            }
        }
        let stored: Vec<Block> = model.values().map(|(block, _)| block.clone()).collect();
        for block in stored {
            pool.reset();
            if tier.contains(&block.key) {
                let end = fetch(&tier, &mut pool, &block);
                let is_forgotten = end.is_none() && !tier.contains(&block.key);
                prop_assert!(is_forgotten || matches!(end, Some(ReadEnd::Found { .. })), "{end:?}");
            }
        }
        close(tier);
    }
}
