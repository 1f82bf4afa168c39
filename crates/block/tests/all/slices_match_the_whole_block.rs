//! Slices hold each byte of a block once, in the order of the whole.
#![allow(clippy::unwrap_used)]

use kvlane_block::{BlockId, PoolOffset, Region, SLICE_STEP, merge, plan, shard_bytes, slice};
use proptest::prelude::*;

/// Valid regions of pieces in any order, with gaps, or in rows behind each other.
fn regions() -> impl Strategy<Value = Vec<Region>> {
    let pieces = prop::sample::subsequence((0u64..6).collect::<Vec<_>>(), 1..=6).prop_shuffle();
    let region = (1u64..3000, 1u64..9, pieces, 0u64..3, any::<bool>());
    prop::collection::vec(region, 1..5).prop_map(|regions| {
        let region =
            |(base, (piece_bytes, blocks, slots, gap, rows)): (u64, (u64, u64, Vec<u64>, u64, bool))| {
                let block_stride = if rows { piece_bytes } else { piece_bytes * 6 } + gap;
                let slot_bytes = if rows { block_stride * blocks } else { piece_bytes };
                let piece_offsets = slots.iter().map(|slot| slot * slot_bytes).collect();
                Region { base: base << 32, block_stride, blocks, piece_bytes, piece_offsets }
            };
        (1..).zip(regions).map(region).collect()
    })
}

proptest! {
    #[test]
    fn slices_are_the_block_cut_into_even_parts(regions in regions(), count in 1usize..9, id in 0u32..9) {
        let bytes = shard_bytes(&regions);
        let id = BlockId(id % regions.iter().map(|region| region.blocks).min().unwrap() as u32);
        let sliced = slice(&regions, count);
        prop_assert_eq!(sliced.is_ok(), bytes / SLICE_STEP >= count as u64);
        let Ok(slices) = sliced else { return Ok(()) };
        prop_assert_eq!(slices.len(), count);

        let mut runs = Vec::new();
        let mut at = 0;
        for part in &slices {
            part.iter().try_for_each(Region::validate).unwrap();
            let share = bytes.abs_diff(shard_bytes(part) * count as u64);
            prop_assert!(!part.is_empty() && share <= SLICE_STEP * count as u64, "{} of {}", shard_bytes(part), bytes);
            runs.extend(plan(part, &[(id, PoolOffset(at))]).unwrap());
            at += shard_bytes(part);
        }
        prop_assert_eq!(merge(runs), merge(plan(&regions, &[(id, PoolOffset(0))]).unwrap()));
    }
}
