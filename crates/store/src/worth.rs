//! Leaves out of a fetch what the engine computes sooner than it comes.
//!
//! ```text
//!   a prompt:                 | in the pool | a  b  c  d  e  f  g  h |
//!   the blocks come after                    21 22 23 24 25 26 27 28 ms
//!   they are computed after                   5 10 15 20 25 30 35 40 ms
//!                                                         |        '-- a fetch of all 8 ends sooner
//!                                                         '----------- a fetch of the first 4 would not
//! ```
//! Nothing is computed while a prefix is fetched. So its end counts: when all its blocks are there, and when they would
//! have been computed.

use std::time::Instant;

use kvlane_block::BlockHash;

use crate::api::SpaceId;
use crate::fetch::SharedPlan;
use crate::find::FetchPlan;
use crate::shares::{HolderSet, HolderState};
use crate::store::Store;

/// A block of a fetch.
#[derive(Clone, Copy, Debug)]
struct Planned {
    /// 0 if another fetch brings it.
    bytes: u64,
    /// Index of the holder that is to bring it.
    holder: usize,
    /// Tokens to compute up to this block, if the fetch ends before it. None if the fetch cannot end there.
    tokens_before: Option<u64>,
}

/// How many of the first blocks to fetch: the most that come no later than an engine computes their tokens. `tokens`: those
/// of all blocks.
fn worth(
    blocks: impl Iterator<Item = Planned>,
    tokens: u64,
    holders: &[HolderState],
    tokens_per_s: f64,
) -> usize {
    let mut brought = [0; HolderSet::CAPACITY];
    let (mut count, mut worth, mut comes_after) = (0, 0, 0f64);
    let is_sooner = |comes_after: f64, tokens: u64| comes_after <= tokens as f64 / tokens_per_s;
    for Planned { bytes, holder, tokens_before } in blocks {
        if tokens_before.is_some_and(|tokens| is_sooner(comes_after, tokens)) {
            worth = count;
        }
        brought[holder] += bytes;
        comes_after = comes_after.max(holders[holder].seconds_at_best(brought[holder]));
        count += 1;
    }
    if is_sooner(comes_after, tokens) { count } else { worth }
}

impl Store {
    /// The first blocks of a plan, as many as come no later than the engine computes their tokens. None if there are none.
    /// With a rate of 0, which is not known, the whole plan.
    pub fn worth_fetching(
        &self,
        mut plan: FetchPlan,
        tokens_per_s: u32,
        now: Instant,
        deadline: Instant,
    ) -> Option<FetchPlan> {
        if tokens_per_s == 0 {
            return Some(plan);
        }
        let shared = self.share_plan(&plan, now, deadline);
        let mut left = self.count_worth(&plan, &shared, tokens_per_s);
        for stretch in &mut plan.stretches {
            stretch.hashes.truncate(left);
            stretch.holders.truncate(left);
            left -= stretch.hashes.len();
        }
        plan.stretches.retain(|stretch| !stretch.hashes.is_empty());
        (!plan.stretches.is_empty()).then_some(plan)
    }

    fn count_worth(&self, plan: &FetchPlan, shared: &SharedPlan, tokens_per_s: u32) -> usize {
        let to_compute = |end: u64| end.saturating_sub(plan.hit_tokens.start);
        // The deadline may have cut the plan.
        let cut_at = first_tokens(plan).nth(shared.holders.len()).filter(|_| plan.is_prefix);
        let end = cut_at.map_or(plan.hit_tokens.end, |(_, first_token)| first_token);
        let in_flight = self.fetches.in_flight.lock();
        let each = first_tokens(plan).zip(&shared.holders).zip(&shared.wanted);
        let blocks = each.map(|(((key, first_token), holder), wanted)| Planned {
            bytes: if in_flight.contains_key(&key) { 0 } else { wanted.bytes },
            holder: *holder,
            tokens_before: plan.is_prefix.then(|| to_compute(first_token)),
        });
        worth(blocks, to_compute(end), &shared.states, f64::from(tokens_per_s))
    }
}

/// The blocks of a plan, each with the position of its first token.
fn first_tokens(plan: &FetchPlan) -> impl Iterator<Item = ((SpaceId, BlockHash), u64)> {
    plan.stretches.iter().flat_map(|stretch| {
        let first_tokens = (stretch.first_token..).step_by(stretch.tokens_per_block as usize);
        stretch.hashes.iter().map(|hash| (stretch.space, *hash)).zip(first_tokens)
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    const MB: u64 = 1_000_000;

    fn at_rate(megabytes_per_s: f64) -> HolderState {
        HolderState { bytes_per_s: Some(megabytes_per_s * 1e6), ..HolderState::default() }
    }

    /// Blocks of 1 MB and 100 tokens, each from this holder.
    fn prefix(holders: &[usize]) -> Vec<Planned> {
        let block = |(number, holder): (u64, &usize)| Planned {
            bytes: MB,
            holder: *holder,
            tokens_before: Some(number * 100),
        };
        (0..).zip(holders).map(block).collect()
    }

    fn count(blocks: &[Planned], holders: &[HolderState], tokens_per_s: f64) -> usize {
        worth(blocks.iter().copied(), blocks.len() as u64 * 100, holders, tokens_per_s)
    }

    #[test]
    fn a_holder_slower_than_the_engine_is_left_out() {
        let blocks = prefix(&[0; 40]);
        assert_eq!(count(&blocks, &[at_rate(10.0)], 1001.0), 0);
        assert_eq!(count(&blocks, &[at_rate(10.0)], 999.0), 40);
        assert_eq!(count(&blocks, &[HolderState::default()], 1e9), 40, "its rate is not known");
    }

    #[test]
    fn a_fetch_that_begins_late_may_still_end_sooner() {
        // 10 ms a block, from 95 ms on; a block is computed in 20 ms.
        let far = HolderState { round_trip: Duration::from_millis(95), ..at_rate(100.0) };
        assert_eq!(count(&prefix(&[0; 9]), &[far], 5000.0), 0);
        assert_eq!(count(&prefix(&[0; 10]), &[far], 5000.0), 10);
        let queued = HolderState { queued_bytes: 9 * MB + MB / 2, ..at_rate(100.0) };
        assert_eq!(count(&prefix(&[0; 9]), &[queued], 5000.0), 0);
        assert_eq!(count(&prefix(&[0; 10]), &[queued], 5000.0), 10);
    }

    #[test]
    fn a_slow_holder_in_the_middle_is_waited_for_if_enough_follows() {
        let holders = [at_rate(1000.0), at_rate(2.0)];
        let mut from = [0; 40];
        from[10] = 1;
        // Its block comes after 500 ms. The first 10 blocks are computed after 200 ms, 26 after 520 ms.
        assert_eq!(count(&prefix(&from[..24]), &holders, 5000.0), 10);
        assert_eq!(count(&prefix(&from[..26]), &holders, 5000.0), 26);
    }

    #[test]
    fn a_block_that_comes_already_costs_nothing_more() {
        let mut blocks = prefix(&[0; 10]);
        let busy = HolderState { queued_bytes: 10 * MB, ..at_rate(10.0) };
        assert_eq!(count(&blocks, &[busy], 1000.0), 0);
        blocks.iter_mut().for_each(|block| block.bytes = 0);
        assert_eq!(count(&blocks, &[busy], 1000.0), 10);
    }

    #[test]
    fn all_or_nothing_if_a_part_makes_no_hit() {
        let mut blocks = prefix(&[0; 10]);
        blocks.iter_mut().for_each(|block| block.tokens_before = None);
        blocks[9].holder = 1;
        let holders = [at_rate(1000.0), at_rate(1.0)];
        assert_eq!(count(&blocks, &holders, 5000.0), 0);
        assert_eq!(count(&blocks, &holders, 500.0), 10);
    }

    #[test]
    fn a_holder_that_was_too_slow_is_tried_again_after_a_while() {
        let slow = |seconds| HolderState { measured_ago: Duration::from_secs(seconds), ..at_rate(10.0) };
        let count = |seconds| count(&prefix(&[0; 40]), &[slow(seconds)], 3999.0);
        assert_eq!([count(0), count(19), count(20), count(1 << 40)], [0, 0, 40, 40]);
    }

    proptest! {
        /// The longest prefix that comes in time, by trying each.
        #[test]
        fn it_is_the_longest_that_comes_no_later_than_it_is_computed(
            rates in prop::collection::vec(prop::option::of(1u32..2000), 1..5),
            round_trips in prop::collection::vec(0u64..300, 5),
            queued in prop::collection::vec(0u64..100, 5),
            from in prop::collection::vec((0usize..5, any::<bool>(), 1u64..3), 0..80),
            tokens_per_s in 1u32..50_000,
        ) {
            let holders: Vec<HolderState> = rates.iter().zip(round_trips).zip(queued).map(|((rate, ms), queued)| {
                HolderState {
                    bytes_per_s: rate.map(|rate| f64::from(rate) * 1e6),
                    round_trip: Duration::from_millis(ms),
                    queued_bytes: queued * MB,
                    ..HolderState::default()
                }
            }).collect();
            let mut ends = vec![0u64];
            let blocks: Vec<Planned> = from.iter().map(|(holder, is_coming, in_between)| {
                let start = *ends.last().unwrap();
                ends.push(start + 100 * in_between);
                let bytes = if *is_coming { 0 } else { MB };
                Planned { bytes, holder: holder % holders.len(), tokens_before: Some(start) }
            }).collect();
            let comes_after = |count: usize| -> f64 {
                let of_holder = |(number, holder): (usize, &HolderState)| {
                    let its: Vec<u64> =
                        blocks[..count].iter().filter(|block| block.holder == number).map(|block| block.bytes).collect();
                    if its.is_empty() { return 0.0 }
                    let bytes = (holder.queued_bytes + its.iter().sum::<u64>()) as f64;
                    holder.round_trip.as_secs_f64() + holder.bytes_per_s.map_or(0.0, |rate| bytes / rate)
                };
                holders.iter().enumerate().map(of_holder).fold(0.0, f64::max)
            };
            let is_in_time = |count: &usize| comes_after(*count) <= ends[*count] as f64 / f64::from(tokens_per_s);
            let longest = (0..=blocks.len()).rev().find(is_in_time).unwrap();
            let tokens = *ends.last().unwrap();
            prop_assert_eq!(worth(blocks.iter().copied(), tokens, &holders, f64::from(tokens_per_s)), longest);
        }
    }
}
