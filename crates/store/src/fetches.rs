//! The fetches in flight: which fetch waits for which block, which reads the tier has, and at what rate it completes
//! them.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvlane_block::BlockHash;
use parking_lot::Mutex;

use crate::api::{ShardClaim, SpaceId};

/// Bytes that a fetch may claim whatever the tier's rate is.
const LEAST_BYTES: u64 = 64 << 20;

#[derive(Default)]
pub(crate) struct Fetches {
    /// The fetches that wait for each block. Locked before the index.
    pub(crate) in_flight: Mutex<HashMap<(SpaceId, BlockHash), FetchWaiters>>,
    pub(crate) reads: Mutex<Reads>,
}

#[derive(Default)]
pub(crate) struct Reads {
    /// Not yet submitted, each with its deadline; in the order of their prompts.
    pub(crate) queued: VecDeque<(Read, Instant)>,
    /// The deadlines of submitted reads, by number. After it no lookup waits for the read.
    pub(crate) in_flight: BTreeMap<u64, Instant>,
    /// How many reads were ever submitted.
    pub(crate) submitted: u64,
    pub(crate) rate: Rate,
    /// A thread is in the loop of `submit_reads`, and goes on until the queue is empty or the tier is full.
    pub(crate) is_submitting: bool,
}

pub(crate) type FetchWaiters = Vec<Arc<FetchWaiter>>;

impl Reads {
    /// Whether the tier still has a read whose deadline has passed: it hangs, or is much too slow.
    pub(crate) fn is_late(&self, now: Instant) -> bool {
        self.in_flight.values().any(|deadline| *deadline < now)
    }
}

/// Throughput of the tier while reads are in flight.
#[derive(Default)]
pub(crate) struct Rate {
    bytes_per_s: Option<f64>,
    /// When the present measurement began, and the bytes since then. None while no read is in flight.
    busy: Option<(Instant, u64)>,
}

impl Rate {
    pub(crate) fn begin(&mut self, now: Instant) {
        self.busy.get_or_insert((now, 0));
    }

    /// A read has completed with so many bytes. `is_idle`: nothing is in flight or queued any more.
    pub(crate) fn completed(&mut self, bytes: u64, is_idle: bool, now: Instant) {
        let Some((since, sum)) = &mut self.busy else { return };
        *sum += bytes;
        // With fewer bytes the time measures the machine rather than the tier.
        if is_idle || *sum >= LEAST_BYTES {
            let seconds = now.saturating_duration_since(*since).as_secs_f64();
            if *sum >= LEAST_BYTES / 4 && seconds > 0.0 {
                let measured = *sum as f64 / seconds;
                self.bytes_per_s = Some(self.bytes_per_s.map_or(measured, |old| 0.5 * old + 0.5 * measured));
            }
            self.busy = (!is_idle).then_some((now, 0));
        }
    }

    /// Bytes that the tier reads in this time, estimated high: 1.5 times the rate, `LEAST_BYTES` at least. Unbounded
    /// before the first measurement.
    pub(crate) fn bytes_within(&self, time: Duration) -> u64 {
        let bytes = self.bytes_per_s.map_or(f64::MAX, |rate| 1.5 * rate * time.as_secs_f64());
        (bytes as u64).max(LEAST_BYTES)
    }
}

/// A fetch that waits for its blocks.
pub(crate) struct FetchWaiter {
    pub(crate) blocks_left: AtomicUsize,
    pub(crate) done: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl FetchWaiter {
    /// A block has come or failed. The last one calls `done`.
    pub(crate) fn block_done(&self) {
        if self.blocks_left.fetch_sub(1, Ordering::AcqRel) == 1 {
            let done = self.done.lock().take();
            done.into_iter().for_each(|done| done());
        }
    }
}

/// The read of one block, all of whose shards are claimed.
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
        assert!(rate.bytes_within(SECOND) > 1 << 60);
        rate.begin(start);
        rate.completed(1 << 20, true, start + SECOND);
        assert!(rate.bytes_within(SECOND) > 1 << 60, "a mebibyte says nothing");
        rate.begin(start);
        rate.completed(1 << 30, true, start + SECOND);
        assert_eq!(rate.bytes_within(SECOND), 3 << 29);
        assert_eq!(rate.bytes_within(Duration::from_millis(1)), LEAST_BYTES);
        // While more is in flight, the next measurement begins where this one ends.
        rate.begin(start + SECOND);
        rate.completed(3 << 30, false, start + 2 * SECOND);
        rate.completed(3 << 30, true, start + 3 * SECOND);
        assert_eq!(rate.bytes_within(SECOND), 3 * (5 << 29) / 2);
    }

    #[test]
    fn a_read_that_nobody_waits_for_any_more_is_late_until_it_ends() {
        let start = Instant::now();
        let mut reads = Reads::default();
        reads.in_flight.insert(0, start + SECOND);
        assert!(!reads.is_late(start));
        assert!(reads.is_late(start + 2 * SECOND));
        reads.in_flight.remove(&0);
        assert!(!reads.is_late(start + 2 * SECOND));
    }
}
