//! Plans against a model that says for each pool byte which engine byte belongs there.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use kvlane_block::{BlockId, PoolOffset, Region, plan, shard_bytes};
use proptest::prelude::*;

/// A valid region: pieces in slots of a block, in any order, with gaps, or in rows behind each other.
fn region() -> impl Strategy<Value = Region> {
    let pieces = prop::sample::subsequence((0u64..6).collect::<Vec<_>>(), 1..=6).prop_shuffle();
    (1u64..40, 1u64..9, pieces, 0u64..3, any::<bool>()).prop_map(|(piece_bytes, blocks, slots, gap, rows)| {
        let block_stride = if rows { piece_bytes } else { piece_bytes * 6 } + gap;
        let slot_bytes = if rows { block_stride * blocks } else { piece_bytes };
        let piece_offsets = slots.iter().map(|slot| slot * slot_bytes).collect();
        Region { base: 0, block_stride, blocks, piece_bytes, piece_offsets }
    })
}

fn regions() -> impl Strategy<Value = Vec<Region>> {
    prop::collection::vec(region(), 1..4).prop_map(|mut regions| {
        let mut base = 1000;
        for region in &mut regions {
            region.base = base;
            base += 10_000; // regions do not overlap
        }
        regions
    })
}

proptest! {

    #[test]
    fn every_byte_goes_where_the_model_says_and_no_two_runs_could_be_one(
        regions in regions(),
        ids in prop::collection::vec(0u32..9, 0..8),
        order in any::<u64>(),
    ) {
        for region in &regions {
            region.validate().unwrap();
        }
        let known = regions.iter().map(|region| region.blocks).min().unwrap();
        let shard = shard_bytes(&regions);
        let count = ids.len() as u64;
        let blocks: Vec<(BlockId, PoolOffset)> = ids
            .iter()
            .enumerate()
            // Extents in order, or all in reverse.
            .map(|(i, id)| {
                let extent = if order % 2 == 0 { i as u64 } else { count - 1 - i as u64 };
                (BlockId(id % known as u32), PoolOffset(extent * shard))
            })
            .collect();

        let mut model = BTreeMap::new();
        for &(id, extent) in &blocks {
            let mut pool = extent.0;
            for region in &regions {
                for offset in &region.piece_offsets {
                    for byte in 0..region.piece_bytes {
                        model.insert(pool, region.base + u64::from(id.0) * region.block_stride + offset + byte);
                        pool += 1;
                    }
                }
            }
        }

        let runs = plan(&regions, &blocks).unwrap();
        let mut copied = BTreeMap::new();
        for run in &runs {
            prop_assert!(run.len > 0);
            for byte in 0..run.len {
                let twice = copied.insert(run.pool_offset.0 + byte, run.engine_addr + byte);
                prop_assert!(twice.is_none(), "pool byte {} is written twice", run.pool_offset.0 + byte);
            }
        }
        prop_assert_eq!(copied, model);
        for pair in runs.windows(2) {
            let adjacent = pair[0].engine_addr + pair[0].len == pair[1].engine_addr
                && pair[0].pool_offset.0 + pair[0].len == pair[1].pool_offset.0;
            prop_assert!(!adjacent, "{:?} should be one run", pair);
        }
    }

    /// Whatever the numbers, a region that is found valid has no two pieces on the same byte.
    #[test]
    fn a_valid_region_holds_each_byte_once(
        block_stride in 1u64..24, blocks in 1u64..5, piece_bytes in 1u64..24,
        piece_offsets in prop::collection::vec(0u64..80, 1..4),
    ) {
        let region = Region { base: 0, block_stride, blocks, piece_bytes, piece_offsets };
        if region.validate().is_ok() {
            let mut seen = std::collections::BTreeSet::new();
            for block in 0..blocks {
                for offset in &region.piece_offsets {
                    for byte in 0..piece_bytes {
                        prop_assert!(seen.insert(block * block_stride + offset + byte), "{:?}", region);
                    }
                }
            }
        }
    }
}

/// The connector counts the runs of a block by itself, for its log; tests/connector/test_layout_block_major.py has the same
/// cases.
#[test]
fn the_connector_expects_the_runs_that_are_planned() {
    let cases: Vec<serde_json::Value> = serde_json::from_str(include_str!("../cases/runs.json")).unwrap();
    for case in &cases {
        let numbers = |value: &serde_json::Value| {
            value.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect()
        };
        let region = |value: &serde_json::Value| {
            let field = |index: usize| value[index].as_u64().unwrap();
            Region {
                base: field(0),
                block_stride: field(1),
                blocks: field(2),
                piece_bytes: field(3),
                piece_offsets: numbers(&value[4]),
            }
        };
        let regions: Vec<Region> = case["regions"].as_array().unwrap().iter().map(region).collect();
        regions.iter().for_each(|region| region.validate().unwrap());
        let ids: Vec<u64> = numbers(&case["blocks"]);
        let extents = (0..).step_by(shard_bytes(&regions) as usize).map(PoolOffset);
        let blocks: Vec<_> = ids.iter().map(|id| BlockId(*id as u32)).zip(extents).collect();
        let planned = plan(&regions, &blocks).unwrap();
        let lengths: Vec<u64> = planned.iter().map(|run| run.len).collect();
        assert_eq!(lengths, numbers(&case["lengths"]), "{}", case["name"]);
    }
}
