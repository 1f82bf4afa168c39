//! The fetches in flight: which fetch waits for which block, which reads each holder has, at what rate it completes them,
//! and which reads leave the queue of a holder that has stalled. The queues have no clock: time is an argument.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvlane_block::BlockHash;
use parking_lot::{Condvar, Mutex};

use crate::api::{ShardClaim, SpaceId};
use crate::shares::{HolderState, LEAST_BYTES, SHARE_BYTES};
use crate::source::HolderId;

/// Holders whose rates are kept while they have no read.
const IDLE_HOLDERS_MAX: usize = 256;
/// A holder that brought something so short a time ago has not stalled.
const SHORTEST_STALL: Duration = Duration::from_millis(100);

#[derive(Default)]
pub(crate) struct Fetches {
    /// The fetches that wait for each block. Locked before the index.
    pub(crate) in_flight: Mutex<HashMap<(SpaceId, BlockHash), FetchWaiters>>,
    pub(crate) queues: Mutex<Queues>,
    /// Notified when a read has to wait in a queue and the watch sleeps, and when the watch is to stop.
    pub(crate) queue_waits: Condvar,
    /// Spaces that a question or a plan names, with how many do. They must not be forgotten.
    pub(crate) named: Mutex<HashMap<SpaceId, usize>>,
}

/// One holder of one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Holder {
    /// Position of the source in [`Store::sources`](crate::store::Store).
    pub(crate) source: usize,
    pub(crate) id: HolderId,
}

/// The reads of each holder.
#[derive(Default)]
pub(crate) struct Queues {
    all: HashMap<Holder, Reads>,
    /// The watch looks at the queues again soon, without being notified.
    pub(crate) is_watched: bool,
}

/// Reads that have left the queues of stalled holders.
#[derive(Default)]
pub(crate) struct Stalled {
    /// The holders in whose queues they are now.
    pub(crate) moved_to: BTreeSet<Holder>,
    /// Those that no other holder brings in time, each with its holder.
    pub(crate) ended: Vec<(Holder, Read)>,
}

impl Queues {
    pub(crate) fn of(&mut self, holder: Holder) -> &mut Reads {
        if self.all.len() >= IDLE_HOLDERS_MAX && !self.all.contains_key(&holder) {
            self.all.retain(|_, reads| !reads.is_idle());
        }
        self.all.entry(holder).or_default()
    }

    /// Whether a read waits for a holder that has enough in flight.
    pub(crate) fn has_waiting(&self) -> bool {
        self.all.values().any(|reads| !reads.queued.is_empty())
    }

    /// The other holder that would bring the block first, if it is before the deadline. It is taken off the list.
    pub(crate) fn next_holder(&self, read: &mut Read, now: Instant) -> Option<Holder> {
        let is_usable = |holder: &Holder| {
            self.all.get(holder).is_none_or(|reads| !reads.is_late(now) && !reads.has_stalled(now))
        };
        self.next_usable(read, now, is_usable)
    }

    fn next_usable(
        &self,
        read: &mut Read,
        now: Instant,
        is_usable: impl Fn(&Holder) -> bool,
    ) -> Option<Holder> {
        let left = read.deadline.saturating_duration_since(now).as_secs_f64();
        let seconds = |(holder, round_trip): &(Holder, Duration)| {
            let seconds = self.measured(holder, *round_trip, now).seconds(read.bytes);
            (seconds < left && is_usable(holder)).then_some(seconds)
        };
        let in_time = read.others.iter().enumerate().filter_map(|(at, other)| Some((at, seconds(other)?)));
        let (first, _) = in_time.min_by(|(_, a), (_, b)| a.total_cmp(b))?;
        Some(read.others.swap_remove(first).0)
    }

    /// Moves reads from the queue of each holder that has stalled to other holders of their blocks. Without another one a
    /// read stays until the holder is late, and then ends.
    pub(crate) fn leave_stalled(&mut self, now: Instant) -> Stalled {
        // Once for all reads, because it takes a look at all that is in flight.
        let all_that = |holds: fn(&Reads, Instant) -> bool| -> BTreeSet<Holder> {
            self.all.iter().filter(|(_, reads)| holds(reads, now)).map(|(holder, _)| *holder).collect()
        };
        let (stalled, late) = (all_that(Reads::has_stalled), all_that(Reads::is_late));
        let is_usable = |holder: &Holder| !late.contains(holder) && !stalled.contains(holder);
        let mut left = Stalled::default();
        for &holder in &stalled {
            let is_late = late.contains(&holder);
            for mut read in std::mem::take(&mut self.of(holder).queued) {
                let next = self.next_usable(&mut read, now, is_usable);
                if next.is_some() || is_late {
                    self.of(holder).bytes -= read.bytes;
                }
                match next {
                    Some(next) => {
                        self.of(next).push(read);
                        left.moved_to.insert(next);
                    }
                    None if is_late => left.ended.push((holder, read)),
                    None => self.of(holder).queued.push_back(read),
                }
            }
        }
        left
    }

    /// The state of a holder, for a plan. None while it is late.
    pub(crate) fn state(&self, holder: Holder, round_trip: Duration, now: Instant) -> Option<HolderState> {
        let is_late = self.all.get(&holder).is_some_and(|reads| reads.is_late(now));
        (!is_late).then(|| self.measured(&holder, round_trip, now))
    }

    fn measured(&self, holder: &Holder, round_trip: Duration, now: Instant) -> HolderState {
        let Some(reads) = self.all.get(holder) else {
            return HolderState { round_trip, ..HolderState::default() };
        };
        HolderState {
            bytes_per_s: reads.rate.bytes_per_s(),
            measured_ago: reads.rate.age(now),
            queued_bytes: reads.bytes,
            round_trip,
        }
    }
}

/// The reads of one holder.
#[derive(Default)]
pub(crate) struct Reads {
    /// Not yet submitted; in the order of their prompts.
    pub(crate) queued: VecDeque<Read>,
    /// The deadlines of submitted reads, by number. After it no lookup waits for the read.
    pub(crate) in_flight: BTreeMap<u64, Instant>,
    /// How many reads were ever submitted.
    pub(crate) submitted: u64,
    /// Bytes queued and in flight.
    pub(crate) bytes: u64,
    pub(crate) rate: Rate,
    /// When the holder last brought a block, or was asked after it had nothing to bring.
    active: Option<Instant>,
    /// A thread is in the loop of `submit_reads`, and goes on until the queue is empty or the holder has `READS_MAX`.
    pub(crate) is_submitting: bool,
}

pub(crate) type FetchWaiters = Vec<Arc<FetchWaiter>>;

impl Reads {
    /// Whether the holder still has a read whose deadline has passed: it hangs, or is much too slow.
    pub(crate) fn is_late(&self, now: Instant) -> bool {
        self.in_flight.values().any(|deadline| *deadline <= now)
    }

    /// Whether the holder has brought nothing for half of the time that its most urgent read had. Later, reads that wait in
    /// its queue would be too late elsewhere.
    fn has_stalled(&self, now: Instant) -> bool {
        let (Some(active), Some(deadline)) = (self.active, self.in_flight.values().min()) else {
            return false;
        };
        let half = deadline.saturating_duration_since(active) / 2;
        now.saturating_duration_since(active) >= half.max(SHORTEST_STALL)
    }

    /// Reads are being submitted.
    pub(crate) fn begin(&mut self, now: Instant) {
        self.rate.begin(now);
        self.active.get_or_insert(now);
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && self.queued.is_empty() && !self.is_submitting
    }

    pub(crate) fn push(&mut self, read: Read) {
        self.bytes += read.bytes;
        self.queued.push_back(read);
    }

    /// A read has ended, and brought so many of its bytes.
    pub(crate) fn ended(&mut self, number: u64, bytes: u64, brought: u64, now: Instant) {
        let deadline = self.in_flight.remove(&number);
        self.bytes -= bytes;
        if brought == 0 && deadline.is_some_and(|deadline| deadline <= now) {
            self.rate.was_late();
        }
        let is_idle = self.in_flight.is_empty() && self.queued.is_empty();
        if is_idle {
            self.active = None;
        } else if brought > 0 {
            self.active = Some(now);
        }
        self.rate.completed(brought, is_idle, now);
    }
}

/// Throughput of a holder while reads are in flight.
#[derive(Default)]
pub(crate) struct Rate {
    bytes_per_s: Option<f64>,
    measured: Option<Instant>,
    /// When the present measurement began, and the bytes since then. None while no read is in flight.
    busy: Option<(Instant, u64)>,
    /// A read has missed its deadline since then.
    is_late: bool,
}

impl Rate {
    pub(crate) fn begin(&mut self, now: Instant) {
        self.busy.get_or_insert((now, 0));
    }

    /// A read has missed its deadline. Then even a few bytes say how slow the holder is.
    pub(crate) fn was_late(&mut self) {
        self.is_late = true;
    }

    /// A read has completed with so many bytes. `is_idle`: nothing is in flight or queued any more.
    pub(crate) fn completed(&mut self, bytes: u64, is_idle: bool, now: Instant) {
        let Some((since, sum)) = &mut self.busy else { return };
        *sum += bytes;
        // With fewer bytes the time measures the machine rather than the holder.
        if is_idle || *sum >= LEAST_BYTES {
            let seconds = now.saturating_duration_since(*since).as_secs_f64();
            let measured = *sum as f64 / seconds;
            // A holder that once was late gets one share at a time, and that may say that it is faster than it was.
            let is_faster = *sum >= SHARE_BYTES / 2 && self.bytes_per_s.is_some_and(|old| measured > old);
            if (*sum >= LEAST_BYTES / 4 || self.is_late || is_faster) && seconds > 0.0 {
                self.bytes_per_s = Some(self.bytes_per_s.map_or(measured, |old| 0.5 * old + 0.5 * measured));
                self.measured = Some(now);
            }
            self.busy = (!is_idle).then_some((now, 0));
            self.is_late = false;
        }
    }

    /// None before the first measurement.
    pub(crate) fn bytes_per_s(&self) -> Option<f64> {
        self.bytes_per_s
    }

    /// Time since the last measurement; 0 before the first.
    fn age(&self, now: Instant) -> Duration {
        self.measured.map_or(Duration::ZERO, |measured| now.saturating_duration_since(measured))
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
    /// Sum over the shards.
    pub(crate) bytes: u64,
    pub(crate) deadline: Instant,
    /// The other holders of the block, each with its round trip.
    pub(crate) others: Vec<(Holder, Duration)>,
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_rate_is_learnt_from_much() {
        let start = Instant::now();
        let mut rate = Rate::default();
        rate.begin(start);
        rate.completed(1 << 20, true, start + SECOND);
        assert_eq!(rate.bytes_per_s(), None, "a mebibyte says nothing");
        rate.begin(start);
        rate.completed(1 << 30, true, start + SECOND);
        assert_eq!(rate.bytes_per_s(), Some(f64::from(1 << 30)));
        // While more is in flight, the next measurement begins where this one ends.
        rate.begin(start + SECOND);
        rate.completed(3 << 30, false, start + 2 * SECOND);
        rate.completed(3 << 30, true, start + 3 * SECOND);
        assert_eq!(rate.bytes_per_s(), Some(5.0 * f64::from(1 << 29)));
        assert_eq!(rate.age(start + 10 * SECOND), 7 * SECOND);
    }

    /// A host behind a slow wire was taken for a fast one, because less came before each deadline than says something.
    #[test]
    fn a_holder_that_misses_deadlines_is_known_to_be_slow() {
        let start = Instant::now();
        let mut reads = Reads::default();
        for number in 0..2 {
            reads.in_flight.insert(number, start + SECOND);
            reads.bytes += 8 << 20;
        }
        reads.rate.begin(start);
        reads.ended(0, 8 << 20, 8 << 20, start + SECOND / 2);
        reads.ended(1, 8 << 20, 0, start + SECOND);
        assert_eq!(reads.rate.bytes_per_s(), Some(f64::from(8 << 20)));
        assert_eq!(reads.bytes, 0);
    }

    /// A host that had been stopped brought one share of each prompt from then on, because less than two say nothing.
    #[test]
    fn a_holder_that_was_late_is_known_to_be_fast_again() {
        let start = Instant::now();
        let mut rate = Rate::default();
        rate.begin(start);
        rate.was_late();
        rate.completed(0, true, start + SECOND);
        assert_eq!(rate.bytes_per_s(), Some(0.0));
        rate.begin(start + SECOND);
        rate.completed(1 << 20, true, start + SECOND * 2);
        assert_eq!(rate.bytes_per_s(), Some(0.0), "a mebibyte says nothing");
        for round in 2..9 {
            rate.begin(start + SECOND * round);
            rate.completed(6 << 20, true, start + SECOND * round + SECOND / 100);
        }
        assert!(rate.bytes_per_s().is_some_and(|rate| rate > 5e8));
        // So few bytes do not say that it is slower.
        rate.begin(start + SECOND * 10);
        rate.completed(6 << 20, true, start + SECOND * 11);
        assert!(rate.bytes_per_s().is_some_and(|rate| rate > 5e8));
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

    fn holder(number: u32) -> Holder {
        Holder { source: 0, id: HolderId(number) }
    }

    proptest! {
        /// Whichever holders stall, and whenever that is looked at: no read is lost or in two queues.
        #[test]
        fn a_read_is_in_one_queue_or_has_ended(
            in_flight in vec((0u32..4, 1u32..9), 0..9),
            queued in vec((0u32..4, vec(0u32..4, 0..3), 1u32..12), 1..60),
            mut looks in vec(0u32..12, 1..6),
        ) {
            let start = Instant::now();
            let mut queues = Queues::default();
            for (number, (of, deadline)) in (0..).zip(in_flight) {
                let reads = queues.of(holder(of));
                reads.begin(start);
                reads.in_flight.insert(number, start + SECOND * deadline);
            }
            let count = queued.len() as u8;
            for (number, (of, others, deadline)) in (0..).zip(queued) {
                queues.of(holder(of)).push(Read {
                    space: SpaceId(0),
                    hash: BlockHash([number; 16]),
                    claims: Vec::new(),
                    bytes: 1 + u64::from(number),
                    deadline: start + SECOND * deadline,
                    others: others.into_iter().map(|other| (holder(other), SECOND / 10)).collect(),
                });
            }
            looks.sort_unstable();
            let mut ended = Vec::new();
            for look in looks {
                let now = start + SECOND * look;
                let left = queues.leave_stalled(now);
                prop_assert!(left.moved_to.iter().all(|to| !queues.of(*to).has_stalled(now)));
                ended.extend(left.ended.into_iter().map(|(_, read)| read.hash));
                let mut known = ended.clone();
                for reads in queues.all.values() {
                    prop_assert_eq!(reads.bytes, reads.queued.iter().map(|read| read.bytes).sum::<u64>());
                    prop_assert!(reads.queued.is_empty() || !reads.has_stalled(now) || !reads.is_late(now));
                    known.extend(reads.queued.iter().map(|read| read.hash));
                }
                known.sort_unstable();
                prop_assert_eq!(known, (0..count).map(|number| BlockHash([number; 16])).collect::<Vec<_>>());
            }
        }
    }
}
