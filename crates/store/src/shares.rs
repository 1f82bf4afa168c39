//! Divides a fetch among holders: which of them brings which block. Pure.
//!
//! ```text
//!   blocks in the prompt's order:   0 1 2 3 4 5 6 7 8 9 ..
//!   a run of 8 MiB at a time goes to the holder that would end it first
//!   holder A, 600 MB/s:             0 1 2 . . . 6 7 8 ..
//!   holder B, 300 MB/s:             . . . 3 4 5 . . .
//! ```

use std::time::Duration;

/// Bytes that a holder may be asked for whatever its rate is.
pub(crate) const LEAST_BYTES: u64 = 64 << 20;
/// Most holders of one fetch: each costs a message, and the slowest ends it.
const HOLDERS_MAX: usize = 4;
/// A holder is asked for runs of so many bytes at least, if it has them.
pub(crate) const SHARE_BYTES: u64 = 8 << 20;
/// Taken for the rate of a holder that has not been measured.
const ASSUMED_BYTES_PER_S: f64 = 1e9;
/// A holder may have become twice as fast in each such time since its rate was measured, as far as a plan knows.
const DOUBLES_AFTER: Duration = Duration::from_secs(10);

/// A holder, as a plan sees it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HolderState {
    /// None before the first measurement.
    pub(crate) bytes_per_s: Option<f64>,
    /// Time since that measurement.
    pub(crate) measured_ago: Duration,
    /// Bytes that it has been asked for and has not brought.
    pub(crate) queued_bytes: u64,
    pub(crate) round_trip: Duration,
}

impl HolderState {
    /// Most bytes that it brings within this time, estimated high: at 1.5 times its rate. It may be asked for `LEAST_BYTES`
    /// even if more are queued, but for no more than it brings in that time if nothing is.
    fn most_bytes(&self, within: Duration) -> u64 {
        if self.round_trip > Duration::ZERO && self.round_trip >= within {
            return 0;
        }
        let within = within.saturating_sub(self.round_trip);
        let bytes = self.bytes_per_s.map_or(f64::MAX, |rate| 1.5 * rate * within.as_secs_f64()) as u64;
        // One share at least, so that a rate that was measured too low is measured again.
        let least = bytes.clamp(SHARE_BYTES, LEAST_BYTES);
        bytes.saturating_sub(self.queued_bytes).max(least)
    }

    /// Seconds until it has brought so many more bytes.
    pub(crate) fn seconds(&self, bytes: u64) -> f64 {
        let rate = self.bytes_per_s.unwrap_or(ASSUMED_BYTES_PER_S).max(1.0);
        self.round_trip.as_secs_f64() + (self.queued_bytes + bytes) as f64 / rate
    }

    /// Like [`seconds`](Self::seconds), estimated low: a holder that is never asked would never be measured again.
    pub(crate) fn seconds_at_best(&self, bytes: u64) -> f64 {
        let doublings = self.measured_ago.as_secs_f64() / DOUBLES_AFTER.as_secs_f64();
        let rate = self.bytes_per_s.map_or(f64::INFINITY, |rate| rate.max(1.0) * doublings.exp2());
        self.round_trip.as_secs_f64() + (self.queued_bytes + bytes) as f64 / rate
    }
}

/// Some of the holders that a plan knows, each by its index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HolderSet(u64);

impl HolderSet {
    /// Holders that a plan can know.
    pub(crate) const CAPACITY: usize = 64;

    pub(crate) fn insert(&mut self, holder: usize) {
        self.0 |= 1 << holder;
    }

    pub(crate) fn contains(self, holder: usize) -> bool {
        self.0 & 1 << holder != 0
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// In ascending order.
    pub(crate) fn iter(self) -> impl Iterator<Item = usize> {
        (0..Self::CAPACITY).filter(move |holder| self.contains(*holder))
    }
}

/// A block to bring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) bytes: u64,
    pub(crate) holders: HolderSet,
}

/// The holder of each block, in the order of `blocks`. It ends at the first block that no holder brings within this time,
/// or that would exceed `most_bytes` in all.
pub(crate) fn share(
    blocks: &[Wanted],
    holders: &[HolderState],
    within: Duration,
    mut most_bytes: u64,
) -> Vec<usize> {
    let largest = blocks.iter().map(|block| block.bytes).max().unwrap_or_default();
    // One block at least, however large: a holder that gets none is never measured again.
    let most = |holder: &HolderState| match holder.most_bytes(within) {
        0 => 0,
        bytes => bytes.max(largest),
    };
    let mut left: Vec<u64> = holders.iter().map(most).collect();
    let mut given = vec![0u64; holders.len()];
    let mut used = HolderSet::default();
    let mut left_in_all: u64 = blocks.iter().map(|block| block.bytes).sum();
    let mut shares = Vec::with_capacity(blocks.len());
    while let Some(first) = blocks.get(shares.len()) {
        let rest = &blocks[shares.len()..];
        // The last share takes what would be less than one.
        let goal = if left_in_all < 2 * SHARE_BYTES { left_in_all } else { SHARE_BYTES };
        let may_join = |holder: &usize| used.contains(*holder) || used.len() < HOLDERS_MAX;
        let runs: Vec<(usize, u64)> = first
            .holders
            .iter()
            .filter(may_join)
            .map(|holder| (holder, run_bytes(rest, holder, goal, left[holder])))
            .filter(|(_, bytes)| *bytes > 0)
            .collect();
        let longest = runs.iter().map(|(_, bytes)| *bytes).max().unwrap_or_default().min(goal);
        let seconds = |holder: usize| holders[holder].seconds(given[holder] + longest);
        let best = runs
            .iter()
            .filter(|(_, bytes)| *bytes >= longest)
            .map(|(holder, _)| *holder)
            .min_by(|a, b| seconds(*a).total_cmp(&seconds(*b)));
        let Some(holder) = best else { return shares };
        used.insert(holder);
        let mut of_share = 0;
        for block in rest.iter().take_while(|block| block.holders.contains(holder)) {
            if of_share >= goal || block.bytes > left[holder] {
                break;
            }
            if block.bytes > most_bytes {
                return shares;
            }
            most_bytes -= block.bytes;
            left[holder] -= block.bytes;
            left_in_all -= block.bytes;
            given[holder] += block.bytes;
            of_share += block.bytes;
            shares.push(holder);
        }
    }
    shares
}

/// Bytes of the first blocks, all of which the holder has, up to the block that reaches `goal`; `most` in all.
fn run_bytes(blocks: &[Wanted], holder: usize, goal: u64, most: u64) -> u64 {
    let mut bytes = 0;
    for block in blocks.iter().take_while(|block| block.holders.contains(holder)) {
        if bytes >= goal || bytes + block.bytes > most {
            break;
        }
        bytes += block.bytes;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn set(holders: &[usize]) -> HolderSet {
        let mut set = HolderSet::default();
        holders.iter().for_each(|holder| set.insert(*holder));
        set
    }

    fn at_rate(bytes_per_s: f64) -> HolderState {
        HolderState { bytes_per_s: Some(bytes_per_s), ..HolderState::default() }
    }

    fn bytes_of(shares: &[usize], holder: usize, bytes: u64) -> u64 {
        shares.iter().filter(|share| **share == holder).count() as u64 * bytes
    }

    #[test]
    fn two_holders_bring_shares_by_their_rates() {
        let blocks = vec![Wanted { bytes: 2 << 20, holders: set(&[0, 1]) }; 600];
        let shares = share(&blocks, &[at_rate(300e6), at_rate(600e6)], 10 * SECOND, u64::MAX);
        let (slow, fast) = (bytes_of(&shares, 0, 1), bytes_of(&shares, 1, 1));
        assert_eq!(slow + fast, 600);
        assert!(fast.abs_diff(2 * slow) <= 12, "{slow} and {fast}");
    }

    #[test]
    fn a_small_fetch_goes_to_one_holder() {
        let blocks = vec![Wanted { bytes: 1 << 20, holders: set(&[0, 1]) }; 15];
        let shares = share(&blocks, &[at_rate(1e9), at_rate(2e9)], SECOND, u64::MAX);
        assert_eq!(shares, vec![1; 15]);
    }

    #[test]
    fn a_holder_that_has_more_of_it_is_taken_before_a_faster_one_that_has_one_block() {
        let mut blocks = vec![Wanted { bytes: 1 << 20, holders: set(&[0]) }; 8];
        blocks[0].holders = set(&[0, 1]);
        let shares = share(&blocks, &[at_rate(1e9), at_rate(9e9)], SECOND, u64::MAX);
        assert_eq!(shares, vec![0; 8]);
    }

    #[test]
    fn what_comes_too_late_is_left_out_with_all_after_it() {
        let mut blocks = vec![Wanted { bytes: 32 << 20, holders: set(&[0]) }; 40];
        let slow = HolderState { queued_bytes: 100 << 20, ..at_rate(200e6) };
        // 300 MB within a second, of which 100 MiB are queued: 195 MB are left.
        assert_eq!(share(&blocks, &[slow], SECOND, u64::MAX).len(), 5);
        let slower = HolderState { queued_bytes: 1 << 40, ..slow };
        assert_eq!(share(&blocks, &[slower], SECOND, u64::MAX).len(), 2, "LEAST_BYTES");
        blocks[1].holders = HolderSet::default();
        assert_eq!(share(&blocks, &[slow], SECOND, u64::MAX).len(), 1);
        // 1.5 MB in that time, and one share.
        let slowest = HolderState { queued_bytes: 0, ..at_rate(1e6) };
        let small = vec![Wanted { bytes: 1 << 20, holders: set(&[0]) }; 40];
        assert_eq!(share(&small, &[slowest], SECOND, u64::MAX).len(), 8);
        assert_eq!(
            share(&vec![Wanted { bytes: 32 << 20, holders: set(&[0]) }; 40], &[slowest], SECOND, u64::MAX)
                .len(),
            1
        );
        let far = HolderState { round_trip: SECOND, ..at_rate(1e9) };
        assert!(share(&blocks, &[far], SECOND, u64::MAX).is_empty());
        assert_eq!(share(&blocks, &[at_rate(1e9)], SECOND, 40 << 20).len(), 1);
    }

    proptest! {
        /// Each block comes from a holder that has it, from at most four in all; nothing is left out while there is time; and
        /// the last holder ends no later than two shares after the best division could.
        #[test]
        fn shares_are_sound(
            rates in prop::collection::vec(50u32..4000, 1..7),
            queued in prop::collection::vec(0u64..200, 7),
            masks in prop::collection::vec(0u64..128, 1..200),
            all_have_all in any::<bool>(),
        ) {
            let holders: Vec<HolderState> = rates.iter().zip(&queued).map(|(rate, queued)| HolderState {
                queued_bytes: *queued << 20, ..at_rate(f64::from(*rate) * 1e6)
            }).collect();
            let known = (1u64 << holders.len()) - 1;
            let wanted = |mask: &u64| Wanted {
                bytes: 2 << 20,
                holders: HolderSet(if all_have_all { known } else { mask & known }),
            };
            let blocks: Vec<Wanted> = masks.iter().map(wanted).collect();
            let shares = share(&blocks, &holders, Duration::from_secs(3600), u64::MAX);
            let mut used = HolderSet::default();
            for (block, holder) in blocks.iter().zip(&shares) {
                prop_assert!(block.holders.contains(*holder));
                used.insert(*holder);
            }
            prop_assert!(used.len() <= HOLDERS_MAX);
            if let Some(block) = blocks.get(shares.len()) {
                prop_assert!(block.holders.is_empty() || used.len() == HOLDERS_MAX);
            }
            if all_have_all {
                prop_assert_eq!(shares.len(), blocks.len());
                let ends = used.iter().map(|holder| holders[holder].seconds(bytes_of(&shares, holder, 2 << 20)));
                let last = ends.fold(0.0, f64::max);
                let best = best_end(&holders, used, blocks.len() as u64 * (2 << 20));
                let slowest = used.iter().filter_map(|holder| holders[holder].bytes_per_s).fold(f64::MAX, f64::min);
                prop_assert!(last <= best + (2 * SHARE_BYTES + (2 << 20)) as f64 / slowest, "{} {}", last, best);
            }
        }
    }

    /// When these holders together could have brought so many bytes, by bisection.
    fn best_end(holders: &[HolderState], used: HolderSet, bytes: u64) -> f64 {
        let (mut low, mut high) = (0.0, 1e6);
        for _ in 0..100 {
            let middle = (low + high) / 2.0;
            let brought: f64 = used
                .iter()
                .map(|holder| {
                    let HolderState { bytes_per_s, queued_bytes, .. } = holders[holder];
                    (middle * bytes_per_s.unwrap_or_default() - queued_bytes as f64).max(0.0)
                })
                .sum();
            if brought < bytes as f64 { low = middle } else { high = middle }
        }
        high
    }
}
