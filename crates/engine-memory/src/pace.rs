//! Limits the share of a GPU's link that a save takes. Usually no request waits for a save. But the engine's own small copies,
//! of a few kilobytes in each step, wait behind any copy on the link. So a save copies for a moment and rests for a while.

use std::time::Duration;

use kvlane_block::{PoolOffset, Run};

/// Bytes between two rests: 75 us of a link of 55 GB/s, which is the longest that a small copy waits.
///
/// Measured on an H200 with a third of the link, as the 99th percentile of an engine's gaps between tokens, in multiples of that
/// without saves: 1.004 beside saves alone, 1.031 beside saves and loads of 10 GB/s. With parts of 1 MiB it was 1.023 beside
/// 7.7 GB/s. But a save then reached 4.0 to 4.5 GB/s instead of 6.8 to 7.9, because each part has a fixed cost.
const PART_BYTES: u64 = 4 << 20;

/// The pace of a save.
#[derive(Clone, Copy)]
pub struct Pace<'a> {
    /// Share of the link's time that the save takes, up to 1.
    pub link_share: f64,
    /// Whether a request or a stopping daemon waits for this save: then it takes all of the link.
    pub is_urgent: &'a dyn Fn() -> bool,
}

impl Pace<'_> {
    /// All of the link, without rests.
    pub const URGENT: Pace<'static> = Pace { link_share: 1.0, is_urgent: &|| true };

    /// The runs to copy before the next rest, and the others.
    pub(crate) fn next<'r>(&self, runs: &'r [Run]) -> (&'r [Run], &'r [Run]) {
        if self.link_share >= 1.0 || (self.is_urgent)() {
            return (runs, &[]);
        }
        let mut bytes = 0;
        let is_full = |run: &Run| {
            bytes += run.len;
            bytes >= PART_BYTES
        };
        let last = runs.iter().position(is_full).map_or(runs.len(), |last| last + 1);
        runs.split_at(last)
    }

    /// How long to rest after copying for this long.
    pub(crate) fn rest(&self, copied: Duration) -> Duration {
        if self.link_share >= 1.0 || (self.is_urgent)() {
            return Duration::ZERO;
        }
        copied.mul_f64(1.0 / self.link_share.max(0.01) - 1.0)
    }
}

/// Cuts runs so that none is longer than [`PART_BYTES`].
pub(crate) fn cut(runs: &[Run]) -> Vec<Run> {
    let pieces = |run: &Run| {
        let run = *run;
        (0..run.len).step_by(PART_BYTES as usize).map(move |at| Run {
            engine_addr: run.engine_addr + at,
            pool_offset: PoolOffset(run.pool_offset.0 + at),
            len: PART_BYTES.min(run.len - at),
        })
    };
    runs.iter().flat_map(pieces).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn run(at: u64, len: u64) -> Run {
        Run { engine_addr: 1 << 40 | at, pool_offset: PoolOffset(at), len }
    }

    #[test]
    fn long_runs_are_cut_and_short_ones_stay() {
        let runs = [run(0, 64 << 10), run(1 << 30, 2 * PART_BYTES + 1)];
        let expected = [
            run(0, 64 << 10),
            run(1 << 30, PART_BYTES),
            run((1 << 30) + PART_BYTES, PART_BYTES),
            run((1 << 30) + 2 * PART_BYTES, 1),
        ];
        assert_eq!(cut(&runs), expected);
    }

    #[test]
    fn a_save_comes_in_parts_until_somebody_waits_for_it() {
        let urgent = Cell::new(false);
        let is_urgent = || urgent.get();
        let pace = Pace { link_share: 0.25, is_urgent: &is_urgent };
        let runs: Vec<Run> = (0..10).map(|at| run(at << 20, 1 << 20)).collect();
        let (first, rest) = pace.next(&runs);
        assert_eq!((first.len(), rest.len()), (4, 6));
        assert_eq!(pace.rest(Duration::from_micros(100)), Duration::from_micros(300));
        let (second, rest) = pace.next(rest);
        assert_eq!((second.len(), rest.len()), (4, 2));
        urgent.set(true);
        assert_eq!(pace.next(rest), (rest, &[][..]));
        assert_eq!(pace.rest(Duration::from_micros(100)), Duration::ZERO);
        let all = Pace { link_share: 1.0, is_urgent: &|| false };
        assert_eq!(all.next(&runs), (&runs[..], &[][..]));
        assert_eq!(all.rest(Duration::from_secs(1)), Duration::ZERO);
    }
}
