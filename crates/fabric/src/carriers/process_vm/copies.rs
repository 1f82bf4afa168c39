//! Copies memory of neighbours into this process, on several threads.
//!
//! One system call copies on one core, which uses only a part of the host's memory bandwidth. So each copy is cut into calls
//! of [`CALL_BYTES`]. Helper threads make them, and so do threads that wait for the engine. Neighbours take turns, so a long
//! list of one does not hold up the others.
//!
//! ```text
//!  begin: cut --> waiting calls, one lane per neighbour --> any free thread --> last call done: ended, taken by take_ended
//! ```

#![allow(unsafe_code, reason = "the kernel writes registered memory")]

use std::any::Any;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::neighbour::{Neighbour, PullError, PulledRange, RANGES_MAX};
use crate::carrier::Job;
use crate::ranges::Spots;

/// Bytes of a call. Each call costs a few microseconds beside its bytes.
const CALL_BYTES: usize = 128 << 10;
/// Smaller copies wake no helper: the thread that began one is done before a helper runs.
const SHARED_BYTES_MIN: usize = 2 * CALL_BYTES;
/// Calls that a waiting thread makes before it looks at the engine again: the transfer it waits for may be done by then.
const CALLS_A_TURN: usize = 2;
/// How long a helper spins before it sleeps. With large transfers the next copy mostly follows sooner.
const SPIN: Duration = Duration::from_micros(50);

/// A neighbour's regions, as (number, generation).
pub(crate) type Generations = Arc<[(u32, u32)]>;

/// Names a copy. Never reused within a process.
pub(crate) type CopyId = u64;

/// The queue's owner. It starts the helper threads when they are first needed; they sleep while there is nothing to copy.
#[derive(Debug)]
pub(crate) struct Copies {
    helpers: usize,
    threads: Vec<JoinHandle<()>>,
    queue: Arc<CopyQueue>,
    next: CopyId,
    /// A thread sleeps until the eventfd is readable.
    has_sleeper: bool,
}

/// Bytes to copy from a neighbour. The destination belongs to the copy until it has ended.
#[derive(Debug)]
pub(crate) struct NewCopy {
    pub(crate) neighbour: Arc<Neighbour>,
    pub(crate) ranges: Vec<PulledRange>,
    /// The neighbour's regions, which must still be registered once the bytes were read. None: the neighbour itself
    /// named these addresses, for this copy.
    pub(crate) regions: Option<Generations>,
}

#[derive(Debug)]
struct CopyQueue {
    state: Mutex<QueueState>,
    /// Counts copies that are worth waking a helper for. Read without the lock.
    turns: AtomicU64,
    /// Calls that no thread has begun, and threads that make one right now. Read without the lock.
    waiting: AtomicUsize,
    at_work: AtomicUsize,
    /// `QueueState::ended` is not empty. Read without the lock.
    has_ended: AtomicBool,
    /// The thread that takes ended copies sleeps, so the next end writes to `wake`.
    is_awaited: AtomicBool,
    wake: OwnedFd,
    begun: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    /// One lane per neighbour, each with copies that have calls left.
    waiting: VecDeque<VecDeque<Arc<Copy>>>,
    ended: Vec<(CopyId, Result<(), PullError>)>,
    sleeping: usize,
    is_stopped: bool,
}

#[derive(Debug)]
struct Copy {
    id: CopyId,
    neighbour: Arc<Neighbour>,
    regions: Option<Generations>,
    calls: Vec<Vec<PulledRange>>,
    progress: Mutex<CopyProgress>,
}

#[derive(Debug, Default)]
struct CopyProgress {
    /// Calls that were begun, and of them those that have returned.
    begun: usize,
    over: usize,
    /// The first error.
    failed: Option<PullError>,
    /// No further call is made.
    is_given_up: bool,
}

/// Names a copy that was begun, to cancel it or to see what it writes.
#[derive(Debug, Clone)]
pub(crate) struct CopyHandle(Arc<Copy>);

impl CopyHandle {
    pub(crate) fn id(&self) -> CopyId {
        self.0.id
    }

    /// Makes no further call. The copy ends when [`Copies::take_ended`] returns it.
    pub(crate) fn give_up(&self) {
        self.0.progress.lock().is_given_up = true;
    }

    /// Whether the copy writes any of this memory.
    pub(crate) fn touches(&self, memory: Spots<'_>) -> bool {
        self.0.calls.iter().flatten().any(|range| memory.overlap_host(range.to))
    }
}

/// A job: up to [`CALLS_A_TURN`] calls of any copy.
#[derive(Debug)]
pub(crate) struct CopyTurn(Arc<CopyQueue>);

impl Job for CopyTurn {
    fn run(&mut self) {
        let mut state = self.0.state.lock();
        for _ in 0..CALLS_A_TURN {
            // The thread that puts the job back takes ended copies itself, so nothing need be woken.
            if !self.0.make_call(&mut state) || self.0.has_ended.load(Ordering::Acquire) {
                return;
            }
        }
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

impl Copies {
    /// `threads`: how many copy at most, including one that waits in a call. `wake`: an eventfd.
    pub(crate) fn new(threads: usize, wake: OwnedFd) -> Copies {
        let queue = CopyQueue {
            state: Mutex::default(),
            turns: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            at_work: AtomicUsize::new(0),
            has_ended: AtomicBool::new(false),
            is_awaited: AtomicBool::new(false),
            wake,
            begun: Condvar::new(),
        };
        Copies {
            helpers: threads.saturating_sub(1),
            threads: Vec::new(),
            queue: Arc::new(queue),
            next: 0,
            has_sleeper: false,
        }
    }

    /// The eventfd that becomes readable when a copy ends while a thread sleeps.
    pub(crate) fn wake(&self) -> &OwnedFd {
        &self.queue.wake
    }

    /// Begins a copy. After an error some of its bytes may have been written.
    ///
    /// # Safety
    /// The destinations are valid for writes, and belong to the copy until [`Copies::take_ended`] has returned it, or until
    /// `self` was dropped.
    pub(crate) unsafe fn begin(&mut self, copy: NewCopy) -> CopyHandle {
        let NewCopy { neighbour, ranges, regions } = copy;
        let bytes: usize = ranges.iter().map(|range| range.to.len).sum();
        let (id, calls) = (self.next, cut(ranges));
        self.next += 1;
        let copy = Arc::new(Copy { id, neighbour, regions, calls, progress: Mutex::default() });
        let is_shared = bytes >= SHARED_BYTES_MIN && self.ensure_helpers();
        let mut state = self.queue.state.lock();
        if copy.calls.is_empty() {
            state.ended.push((id, Ok(())));
            self.queue.has_ended.store(true, Ordering::Release);
            return CopyHandle(copy);
        }
        self.queue.waiting.fetch_add(copy.calls.len(), Ordering::AcqRel);
        let of_neighbour = |lane: &&mut VecDeque<Arc<Copy>>| {
            lane.front().is_some_and(|first| Arc::ptr_eq(&first.neighbour, &copy.neighbour))
        };
        match state.waiting.iter_mut().find(of_neighbour) {
            Some(lane) => lane.push_back(Arc::clone(&copy)),
            None => state.waiting.push_back([Arc::clone(&copy)].into()),
        }
        if is_shared {
            self.queue.turns.fetch_add(1, Ordering::Release);
            if state.sleeping > 0 {
                self.queue.begun.notify_all();
            }
        }
        CopyHandle(copy)
    }

    /// Whether a waiting thread may make calls: some are left, and fewer threads are copying than allowed.
    pub(crate) fn has_turn(&self) -> bool {
        let CopyQueue { waiting, at_work, .. } = &*self.queue;
        waiting.load(Ordering::Acquire) > 0 && at_work.load(Ordering::Acquire) <= self.helpers
    }

    /// Calls for a thread that has nothing else to do.
    pub(crate) fn take_turn(&self) -> Option<CopyTurn> {
        self.has_turn().then(|| CopyTurn(Arc::clone(&self.queue)))
    }

    /// Copies that have ended since the last call. Nothing touches their memory any more.
    pub(crate) fn take_ended(&self) -> Vec<(CopyId, Result<(), PullError>)> {
        if !self.queue.has_ended.swap(false, Ordering::AcqRel) {
            return Vec::new();
        }
        std::mem::take(&mut self.queue.state.lock().ended)
    }

    /// From now on the end of a copy makes the eventfd readable. False: a copy has ended already, so the caller must
    /// not sleep.
    pub(crate) fn prepare_to_sleep(&mut self) -> bool {
        self.has_sleeper = true;
        self.queue.is_awaited.store(true, Ordering::SeqCst);
        !self.queue.has_ended.load(Ordering::SeqCst)
    }

    pub(crate) fn woken(&mut self) {
        self.has_sleeper = false;
        self.queue.is_awaited.store(false, Ordering::SeqCst);
    }

    /// A thread has read the eventfd. If another thread sleeps on it, the next end has to write to it again.
    pub(crate) fn rearm_wake(&self) {
        if self.has_sleeper {
            self.queue.is_awaited.store(true, Ordering::SeqCst);
        }
    }

    /// Starts the helper threads that are missing. Whether there are any.
    fn ensure_helpers(&mut self) -> bool {
        while self.threads.len() < self.helpers {
            let queue = Arc::clone(&self.queue);
            let thread = std::thread::Builder::new().name("kvlane-fabric-copy".into());
            match thread.spawn(move || queue.run_helper()) {
                Ok(thread) => self.threads.push(thread),
                Err(error) => {
                    // Log: copies between engines of this host go on with fewer threads, and are slower. Do:
                    // raise the limit of threads (ulimit -u, pids of the container).
                    tracing::warn!(%error, threads = self.threads.len(), "cannot start another copy thread");
                    self.helpers = self.threads.len();
                }
            }
        }
        !self.threads.is_empty()
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        let mut state = self.queue.state.lock();
        state.is_stopped = true;
        state.waiting.clear();
        drop(state);
        self.queue.begun.notify_all();
        crate::audit::takes_time("the end of threads");
        for thread in self.threads.drain(..) {
            // A helper does not panic. If one did, there is nothing left to end.
            let _ = thread.join();
        }
    }
}

impl CopyQueue {
    /// Makes the next call. False if none is left.
    fn make_call(&self, state: &mut MutexGuard<'_, QueueState>) -> bool {
        let Some(mut lane) = state.waiting.pop_front() else { return false };
        let Some(copy) = lane.front().cloned() else { return true };
        let (index, is_wanted) = {
            let mut progress = copy.progress.lock();
            progress.begun += 1;
            self.waiting.fetch_sub(1, Ordering::AcqRel);
            (progress.begun - 1, !progress.is_given_up && progress.failed.is_none())
        };
        if index + 1 == copy.calls.len() {
            lane.pop_front();
        }
        if !lane.is_empty() {
            // The other neighbours come first.
            state.waiting.push_back(lane);
        }
        let mut made = Err(PullError::GivenUp);
        if is_wanted {
            self.at_work.fetch_add(1, Ordering::AcqRel);
            // SAFETY: the caller of `begin` keeps the memory for the copy until it has ended. Two calls write the
            // same bytes only where the runs of a transfer overlap. The kernel does the copying, nothing here refers
            // to the bytes, and transfers promise no order.
            made = MutexGuard::unlocked(state, || unsafe { copy.call(index) });
            self.at_work.fetch_sub(1, Ordering::AcqRel);
        }
        let mut progress = copy.progress.lock();
        progress.over += 1;
        if let Err(why) = made {
            progress.failed.get_or_insert(why);
        }
        if progress.over == copy.calls.len() {
            let outcome = progress.failed.map_or(Ok(()), Err);
            drop(progress);
            state.ended.push((copy.id, outcome));
            self.has_ended.store(true, Ordering::SeqCst);
        }
        true
    }

    /// Wakes the thread that sleeps until copies end, if one has ended.
    fn wake_waiter(&self) {
        if self.has_ended.load(Ordering::SeqCst) && self.is_awaited.swap(false, Ordering::SeqCst) {
            // A full eventfd counter is readable too, so a failed write loses nothing.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    /// The loop of a helper thread.
    fn run_helper(&self) {
        let mut state = self.state.lock();
        while !state.is_stopped {
            let seen = self.turns.load(Ordering::Acquire);
            while !state.is_stopped && self.make_call(&mut state) {
                self.wake_waiter();
            }
            let until = Instant::now() + SPIN;
            let is_new = || self.turns.load(Ordering::Acquire) != seen;
            MutexGuard::unlocked(&mut state, || {
                while !is_new() && Instant::now() < until {
                    // With fewer cores than threads, another thread needs this one.
                    std::thread::yield_now();
                }
            });
            if !state.is_stopped && state.waiting.is_empty() && !is_new() {
                state.sleeping += 1;
                self.begun.wait(&mut state);
                state.sleeping -= 1;
            }
        }
    }
}

impl Copy {
    /// # Safety
    /// The destinations are valid for writes, and belong to this copy.
    unsafe fn call(&self, index: usize) -> Result<(), PullError> {
        // SAFETY: the caller's promise is passed on.
        unsafe {
            match &self.regions {
                Some(regions) => self.neighbour.read(&self.calls[index], regions),
                None => self.neighbour.pull(&self.calls[index]),
            }
        }
    }
}

/// Cuts ranges into calls of at most [`CALL_BYTES`] and [`RANGES_MAX`] ranges. Their order stays.
fn cut(ranges: Vec<PulledRange>) -> Vec<Vec<PulledRange>> {
    let mut lists = Vec::new();
    let (mut list, mut room) = (Vec::new(), CALL_BYTES);
    for mut range in ranges {
        while range.to.len > 0 {
            let (first, rest) = range.split_at(range.to.len.min(room));
            room -= first.to.len;
            list.push(first);
            range = rest;
            if room == 0 || list.len() == RANGES_MAX {
                lists.push(std::mem::take(&mut list));
                room = CALL_BYTES;
            }
        }
    }
    if !list.is_empty() {
        lists.push(list);
    }
    lists
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::carriers::process_vm::Card;
    use crate::identity::Identity;
    use crate::ranges::Piece;

    const ME: Identity = Identity { engine: 7, boot: 9 };

    fn copies(threads: usize) -> Copies {
        Copies::new(threads, rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap())
    }

    fn neighbour(card: &Card) -> Arc<Neighbour> {
        Arc::new(Neighbour::probe(std::process::id(), card.address(), ME).unwrap())
    }

    /// Makes calls until a copy has ended, and returns its outcome.
    fn outcome_of(copies: &Copies, begun: &CopyHandle) -> Result<(), PullError> {
        loop {
            if let Some(mut turn) = copies.take_turn() {
                turn.run();
            }
            if let Some((id, outcome)) = copies.take_ended().pop() {
                assert_eq!(id, begun.id());
                return outcome;
            }
            std::thread::yield_now();
        }
    }

    /// Ranges of these lengths, from the end of `from` backwards, to the same offsets of `to`.
    fn ranges(lens: &[usize], from: &mut [u8], to: &mut [u8]) -> Vec<PulledRange> {
        let (from_base, to_base) =
            (from.as_mut_ptr().expose_provenance(), to.as_mut_ptr().expose_provenance());
        let mut at = from.len();
        let range = |len: &usize| {
            at -= len;
            PulledRange { to: Piece { address: to_base + at, len: *len }, from: (from_base + at) as u64 }
        };
        lens.iter().map(range).collect()
    }

    proptest! {
        #[test]
        fn nothing_is_lost_where_ranges_are_cut(lens in vec(0usize..300_000, 0..20), short in vec(1usize..3, 0..1200)) {
            let mut at = 0;
            let range = |len: &usize| {
                at += len;
                PulledRange { to: Piece { address: at, len: *len }, from: 2 * at as u64 }
            };
            let ranges: Vec<PulledRange> = lens.iter().chain(&short).map(range).collect();
            // Ranges that continue each other are the same bytes as one range.
            let joined = |ranges: &[PulledRange]| {
                let mut joined: Vec<PulledRange> = Vec::new();
                for range in ranges.iter().filter(|range| range.to.len > 0) {
                    match joined.last_mut() {
                        Some(last) if last.to.address + last.to.len == range.to.address
                            && last.from + last.to.len as u64 == range.from => last.to.len += range.to.len,
                        _ => joined.push(*range),
                    }
                }
                joined
            };
            let lists = cut(ranges.clone());
            prop_assert_eq!(joined(&lists.concat()), joined(&ranges));
            for list in &lists {
                let bytes: usize = list.iter().map(|range| range.to.len).sum();
                prop_assert!((1..=CALL_BYTES).contains(&bytes) && list.len() <= RANGES_MAX);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn as_many_threads_as_you_like_read_the_same(
            threads in 1usize..5,
            lens in vec(prop_oneof![Just(0), 1usize..9000, 100_000usize..700_000], 1..8),
            by_regions: bool,
        ) {
            let card = Card::new(ME);
            card.add(3, 1);
            let mut theirs: Vec<u8> = (0..lens.iter().sum::<usize>()).map(|at| (at / 251) as u8 ^ (at % 251) as u8).collect();
            let mut mine = vec![0xee; theirs.len()];
            let ranges = ranges(&lens, &mut theirs, &mut mine);
            let regions = by_regions.then(|| [(3, 1)].into());
            let mut copies = copies(threads);
            // SAFETY: the ranges lie in `mine`, each elsewhere, until the copy is over.
            let begun = unsafe { copies.begin(NewCopy { neighbour: neighbour(&card), ranges, regions }) };
            prop_assert_eq!(outcome_of(&copies, &begun), Ok(()));
            prop_assert!(mine == theirs);
        }
    }

    /// A copy that was given up once counted as one that had read all its bytes.
    #[test]
    fn a_copy_that_is_given_up_is_not_done() {
        let card = Card::new(ME);
        let lens = [4 * CALL_BYTES];
        let (mut theirs, mut mine) = (vec![3; lens[0]], vec![0; lens[0]]);
        let ranges = ranges(&lens, &mut theirs, &mut mine);
        let mut copies = copies(1);
        // SAFETY: as above.
        let begun = unsafe { copies.begin(NewCopy { neighbour: neighbour(&card), ranges, regions: None }) };
        begun.give_up();
        assert_eq!(outcome_of(&copies, &begun), Err(PullError::GivenUp));
        assert!(mine.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn what_is_refused_refuses_the_whole_and_reads_no_more() {
        let card = Card::new(ME);
        let lens = [8 * CALL_BYTES];
        let (mut theirs, mut mine) = (vec![3; lens[0]], vec![0; lens[0]]);
        let ranges = ranges(&lens, &mut theirs, &mut mine);
        let mut copies = copies(2);
        let regions = Some([(5, 0)].into());
        // SAFETY: as above.
        let begun = unsafe { copies.begin(NewCopy { neighbour: neighbour(&card), ranges, regions }) };
        assert_eq!(outcome_of(&copies, &begun), Err(PullError::Refused), "nobody registered it");
    }
}
