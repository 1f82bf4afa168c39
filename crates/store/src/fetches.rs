//! Fetches under way: who waits for which block, which reads the tier has, and how fast it answers.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvlane_block::BlockHash;
use parking_lot::Mutex;

use crate::api::{ShardClaim, SpaceId};

/// Bytes that a fetch may claim whatever the tier's rate is.
const LEAST_BYTES: u64 = 64 << 20;

/// Blocks on their way, and who waits for each.
#[derive(Default)]
pub(crate) struct Fetches {
    pub(crate) coming: Mutex<HashMap<(SpaceId, BlockHash), Waiters>>,
    pub(crate) reads: Mutex<Reads>,
}

/// Reads in the order of their prompts.
#[derive(Default)]
pub(crate) struct Reads {
    pub(crate) waiting: VecDeque<(Read, Instant)>,
    /// When nobody waits any more for those that the tier has, by their numbers.
    pub(crate) under_way: BTreeMap<u64, Instant>,
    pub(crate) begun: u64,
    pub(crate) rate: Rate,
    /// Somebody hands reads to the tier, and goes on until there is nothing to hand over.
    pub(crate) is_fed: bool,
}

pub(crate) type Waiters = Vec<Arc<Waiting>>;

impl Reads {
    /// The tier still has a read that nobody waits for any more: it does not answer, or much too slowly.
    pub(crate) fn is_late(&self, now: Instant) -> bool {
        self.under_way.values().any(|deadline| *deadline < now)
    }
}

/// How fast bytes come while any are on their way.
#[derive(Default)]
pub(crate) struct Rate {
    bytes_per_s: Option<f64>,
    /// Since when, and the bytes that came since.
    busy: Option<(Instant, u64)>,
}

impl Rate {
    pub(crate) fn begin(&mut self, now: Instant) {
        self.busy.get_or_insert((now, 0));
    }

    pub(crate) fn came(&mut self, bytes: u64, is_idle: bool, now: Instant) {
        let Some((since, sum)) = &mut self.busy else { return };
        *sum += bytes;
        // Of fewer bytes the time says more of the machine than of the tier.
        if is_idle || *sum >= LEAST_BYTES {
            let seconds = now.saturating_duration_since(*since).as_secs_f64();
            if *sum >= LEAST_BYTES / 4 && seconds > 0.0 {
                let seen = *sum as f64 / seconds;
                self.bytes_per_s = Some(self.bytes_per_s.map_or(seen, |known| 0.5 * known + 0.5 * seen));
            }
            self.busy = (!is_idle).then_some((now, 0));
        }
    }

    /// Bytes that come in this time, or somewhat more; without experience any number.
    pub(crate) fn within(&self, time: Duration) -> u64 {
        let bytes = self.bytes_per_s.map_or(f64::MAX, |rate| 1.5 * rate * time.as_secs_f64());
        (bytes as u64).max(LEAST_BYTES)
    }
}

/// Somebody who waits for a number of blocks.
pub(crate) struct Waiting {
    pub(crate) left: AtomicUsize,
    pub(crate) done: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Waiting {
    /// One block less to wait for.
    pub(crate) fn one_less(&self) {
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            let done = self.done.lock().take();
            done.into_iter().for_each(|done| done());
        }
    }
}

/// A block that was claimed to be read.
pub(crate) struct Read {
    pub(crate) space: SpaceId,
    pub(crate) hash: BlockHash,
    pub(crate) claims: Vec<ShardClaim>,
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_rate_is_learnt_from_much_and_bounds_what_is_asked_for() {
        let start = Instant::now();
        let mut rate = Rate::default();
        assert!(rate.within(SECOND) > 1 << 60);
        rate.begin(start);
        rate.came(1 << 20, true, start + SECOND);
        assert!(rate.within(SECOND) > 1 << 60, "a mebibyte says nothing");
        rate.begin(start);
        rate.came(1 << 30, true, start + SECOND);
        assert_eq!(rate.within(SECOND), 3 << 29);
        assert_eq!(rate.within(Duration::from_millis(1)), LEAST_BYTES);
        // What comes while more is on its way counts from where the last look ended.
        rate.begin(start + SECOND);
        rate.came(3 << 30, false, start + 2 * SECOND);
        rate.came(3 << 30, true, start + 3 * SECOND);
        assert_eq!(rate.within(SECOND), 3 * (5 << 29) / 2);
    }

    #[test]
    fn a_read_that_nobody_waits_for_any_more_is_late_until_it_ends() {
        let start = Instant::now();
        let mut reads = Reads::default();
        reads.under_way.insert(0, start + SECOND);
        assert!(!reads.is_late(start));
        assert!(reads.is_late(start + 2 * SECOND));
        reads.under_way.remove(&0);
        assert!(!reads.is_late(start + 2 * SECOND));
    }
}
