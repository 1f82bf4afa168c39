//! Threads that read from neighbours beside whoever drives the engine.
//!
//! One system call copies with one processor, which reaches a part of what the host's memory has. So the parts of a turn are
//! cut into calls, and whoever is free makes the next one: the driver too, which therefore never waits for a thread that
//! has no processor, but for calls that were begun.
//!
//! ```text
//!  driver    | cut | call 1 | call 3 | call 5 | wait |  all bytes are there, or none of them counts
//!  helper     (woken)   | call 2 | call 4 | call 6 | looks for more, 50 us; then sleeps
//! ```

#![allow(unsafe_code, reason = "the kernel writes registered memory")]

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::process::{Neighbour, Part, PullError};

/// Bytes of a call. A call costs a few microseconds beside its bytes, and whoever is ready first waits for the others' last one.
const CALL_BYTES: usize = 128 << 10;
/// With fewer bytes nobody is woken: the driver would be done before.
const SHARED_BYTES_MIN: usize = 2 * CALL_BYTES;
/// How long a helper looks for more before it sleeps. Of large transfers the next turn mostly follows sooner: after 6 to 20 us
/// in the median on two cores.
const SPIN: Duration = Duration::from_micros(50);

/// Regions of a neighbour, by number and generation.
pub(crate) type Generations = Arc<[(u32, u32)]>;

/// Helpers are made when they are first needed, and sleep when there is nothing to read.
#[derive(Debug)]
pub(crate) struct Crew {
    helpers: usize,
    threads: Vec<JoinHandle<()>>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Changes when there is something to do. Only for those who look without the lock.
    turns: AtomicU64,
    /// Whether the last call of a turn was over. Only for a driver that looks without the lock.
    is_over: AtomicBool,
    /// There are calls, or it is time to stop.
    begun: Condvar,
    /// No call is under way any more.
    over: Condvar,
}

#[derive(Debug, Default)]
struct State {
    calls: VecDeque<Call>,
    under_way: usize,
    /// What went wrong first.
    failed: Option<PullError>,
    sleeping: usize,
    is_stopped: bool,
}

#[derive(Debug)]
struct Call {
    neighbour: Arc<Neighbour>,
    parts: Vec<Part>,
    regions: Option<Generations>,
}

impl Call {
    /// # Safety
    /// The destinations are valid for writes, and belong to this call.
    unsafe fn make(&self) -> Result<(), PullError> {
        // SAFETY: the caller's promise is passed on.
        unsafe {
            match &self.regions {
                Some(regions) => self.neighbour.read(&self.parts, regions),
                None => self.neighbour.pull(&self.parts),
            }
        }
    }
}

impl Crew {
    /// So many threads in all, the driver being one.
    pub(crate) fn new(threads: usize) -> Crew {
        Crew { helpers: threads.saturating_sub(1), threads: Vec::new(), shared: Arc::default() }
    }

    /// How many read, the driver being one.
    pub(crate) fn threads(&self) -> usize {
        self.helpers + 1
    }

    /// Reads bytes of regions of a neighbour, or without regions of memory that it offered for this; as many parts as a call
    /// can have ([`super::PARTS_MAX`]). After an error some of them may have been read. When it returns, nobody touches the
    /// destinations any more.
    ///
    /// # Safety
    /// The destinations are valid for writes, and belong to this call.
    pub(crate) unsafe fn read(
        &mut self,
        neighbour: &Arc<Neighbour>,
        parts: Vec<Part>,
        regions: Option<&Generations>,
    ) -> Result<(), PullError> {
        let bytes: usize = parts.iter().map(|part| part.to.len).sum();
        let call = |parts| Call { neighbour: Arc::clone(neighbour), parts, regions: regions.cloned() };
        if bytes < SHARED_BYTES_MIN || !self.is_there() {
            // SAFETY: the caller's promise is passed on.
            return unsafe { call(parts).make() };
        }
        let mut state = self.shared.state.lock();
        debug_assert!(state.calls.is_empty() && state.under_way == 0);
        state.calls.extend(cut(parts, CALL_BYTES).into_iter().map(call));
        self.shared.is_over.store(false, Ordering::Relaxed);
        self.shared.turns.fetch_add(1, Ordering::Release);
        if state.sleeping > 0 {
            self.shared.begun.notify_all();
        }
        self.shared.make_calls(&mut state);
        if state.under_way > 0 {
            let until = Instant::now() + SPIN;
            MutexGuard::unlocked(&mut state, || {
                while !self.shared.is_over.load(Ordering::Acquire) && Instant::now() < until {
                    std::thread::yield_now();
                }
            });
        }
        while state.under_way > 0 {
            self.shared.over.wait(&mut state);
        }
        state.failed.take().map_or(Ok(()), Err)
    }

    /// Whether there are helpers.
    fn is_there(&mut self) -> bool {
        while self.threads.len() < self.helpers {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("kvlane-fabric-copy".into());
            match thread.spawn(move || shared.help()) {
                Ok(thread) => self.threads.push(thread),
                Err(error) => {
                    tracing::warn!(%error, "no more threads can be made to copy between processes");
                    self.helpers = self.threads.len();
                }
            }
        }
        !self.threads.is_empty()
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.shared.state.lock().is_stopped = true;
        self.shared.begun.notify_all();
        for thread in self.threads.drain(..) {
            // It does not panic; if it did, there is nothing left to end.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Makes calls while there are any.
    fn make_calls(&self, state: &mut MutexGuard<'_, State>) {
        while let Some(call) = state.calls.pop_front() {
            state.under_way += 1;
            // SAFETY: whoever asked waits until no call is under way, and promised that nobody else touches the
            // destinations meanwhile. Two calls write the same bytes only where the runs of a transfer overlap; the kernel
            // copies, nothing here refers to them, and transfers promise no order.
            let made = MutexGuard::unlocked(state, || unsafe { call.make() });
            state.under_way -= 1;
            if let Err(why) = made {
                state.failed.get_or_insert(why);
                state.calls.clear();
            }
            if state.under_way == 0 && state.calls.is_empty() {
                self.is_over.store(true, Ordering::Release);
                self.over.notify_one();
            }
        }
    }

    /// What a helper does.
    fn help(&self) {
        let mut state = self.state.lock();
        while !state.is_stopped {
            let seen = self.turns.load(Ordering::Acquire);
            self.make_calls(&mut state);
            let until = Instant::now() + SPIN;
            let is_new = || self.turns.load(Ordering::Acquire) != seen;
            MutexGuard::unlocked(&mut state, || {
                while !is_new() && Instant::now() < until {
                    // Where there are fewer processors than there is work, somebody else needs this one.
                    std::thread::yield_now();
                }
            });
            if !state.is_stopped && state.calls.is_empty() && !is_new() {
                state.sleeping += 1;
                self.begun.wait(&mut state);
                state.sleeping -= 1;
            }
        }
    }
}

/// The same parts in the same order, in lists of so many bytes each; of the last one fewer.
fn cut(parts: Vec<Part>, bytes: usize) -> Vec<Vec<Part>> {
    let mut lists = Vec::new();
    let (mut list, mut room) = (Vec::new(), bytes);
    for mut part in parts {
        while part.to.len >= room {
            let (first, rest) = part.split_at(room);
            list.push(first);
            lists.push(std::mem::take(&mut list));
            (part, room) = (rest, bytes);
        }
        if part.to.len > 0 {
            room -= part.to.len;
            list.push(part);
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
    use crate::regions::Piece;
    use crate::same_host::Card;
    use crate::tcp::Identity;

    const ME: Identity = Identity { engine: 7, boot: 9 };

    fn address(bytes: &mut [u8]) -> usize {
        bytes.as_mut_ptr().expose_provenance()
    }

    /// Bytes that tell where they are from.
    fn numbered(len: usize) -> Vec<u8> {
        (0..len).map(|at| (at / 251) as u8 ^ (at % 251) as u8).collect()
    }

    fn neighbour(card: &Card) -> Arc<Neighbour> {
        Arc::new(Neighbour::probe(std::process::id(), card.address(), ME).unwrap())
    }

    proptest! {
        #[test]
        fn nothing_is_lost_where_parts_are_cut(lens in vec(0usize..300, 0..20), bytes in 1usize..200) {
            let mut at = 0;
            let parts: Vec<Part> = lens.iter().map(|len| {
                at += len;
                Part { to: Piece { address: at, len: *len }, from: 2 * at as u64 }
            }).collect();
            let in_bytes = |parts: &[Part]| -> Vec<(usize, u64)> {
                let each = |part: &Part| (0..part.to.len).map(|by| (part.to.address + by, part.from + by as u64))
                    .collect::<Vec<_>>();
                parts.iter().flat_map(each).collect()
            };
            let lists = cut(parts.clone(), bytes);
            prop_assert_eq!(in_bytes(&lists.concat()), in_bytes(&parts));
            let sizes: Vec<usize> = lists.iter().map(|list| in_bytes(list).len()).collect();
            prop_assert!(sizes.iter().rev().skip(1).all(|size| *size == bytes));
            prop_assert!(sizes.last().is_none_or(|size| (1..=bytes).contains(size)));
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
            let mut theirs = numbered(lens.iter().sum());
            let mut mine = vec![0xee; theirs.len()];
            let (from, to) = (address(&mut theirs), address(&mut mine));
            // Back to front.
            let mut at = theirs.len();
            let parts = lens.iter().map(|len| {
                at -= len;
                Part { to: Piece { address: to + at, len: *len }, from: (from + at) as u64 }
            }).collect();
            let regions: Generations = [(3, 1)].into();
            let mut crew = Crew::new(threads);
            // SAFETY: the parts lie in `mine`, each elsewhere.
            let read = unsafe { crew.read(&neighbour(&card), parts, by_regions.then_some(&regions)) };
            prop_assert_eq!(read, Ok(()));
            prop_assert!(mine == theirs);
        }
    }

    #[test]
    fn once_something_was_refused_nobody_writes_any_more() {
        const LEN: usize = 4 << 20;
        let card = Card::new(ME);
        let neighbour = neighbour(&card);
        let mut crew = Crew::new(4);
        let (mut theirs, mut mine) = (numbered(LEN), vec![0xee; LEN]);
        let (from, to) = (address(&mut theirs) as u64, address(&mut mine));
        for round in 0..50 {
            // A page in the middle is not there.
            let hole = (round * 79) % 1000 * 4096;
            let part = |at, len, from| Part { to: Piece { address: to + at, len }, from };
            let after = hole + 4096;
            let parts = vec![
                part(0, hole, from),
                part(hole, 4096, 4096),
                part(after, LEN - after, from + after as u64),
            ];
            // SAFETY: the parts lie in `mine`, each elsewhere.
            assert_eq!(unsafe { crew.read(&neighbour, parts, None) }, Err(PullError::Refused));
            mine.fill(0xcc);
            // Whoever was late would be now.
            let (mut other, len) = (vec![0; LEN], LEN);
            let whole = vec![Part { to: Piece { address: address(&mut other), len }, from }];
            // SAFETY: the part is `other`.
            assert_eq!(unsafe { crew.read(&neighbour, whole, None) }, Ok(()), "the crew goes on");
            assert!(other == theirs && mine.iter().all(|byte| *byte == 0xcc), "round {round}");
        }
    }

    #[test]
    fn a_region_that_was_given_back_is_refused_by_whoever_reads() {
        let card = Card::new(ME);
        card.add(3, 1);
        let (mut theirs, mut mine) = (numbered(2 << 20), vec![0; 2 << 20]);
        let (from, to) = (address(&mut theirs) as u64, address(&mut mine));
        let mut crew = Crew::new(3);
        let neighbour = neighbour(&card);
        let mut read = |regions: Generations| {
            let parts = vec![Part { to: Piece { address: to, len: 2 << 20 }, from }];
            // SAFETY: the part is `mine`.
            unsafe { crew.read(&neighbour, parts, Some(&regions)) }
        };
        assert_eq!(read([(3, 1)].into()), Ok(()));
        assert_eq!(read([(3, 2)].into()), Err(PullError::Refused));
        card.remove(3);
        assert_eq!(read([(3, 1)].into()), Err(PullError::Refused));
    }

    #[test]
    fn a_helper_that_sleeps_is_woken_and_makes_calls_alone() {
        let card = Card::new(ME);
        let neighbour = neighbour(&card);
        let mut crew = Crew::new(2);
        assert!(crew.is_there());
        let shared = Arc::clone(&crew.shared);
        let (mut theirs, mut mine) = (numbered(1 << 20), vec![0; 1 << 20]);
        let (from, to) = (address(&mut theirs) as u64, address(&mut mine));
        for round in 0..20u8 {
            while shared.state.lock().sleeping == 0 {
                std::thread::yield_now();
            }
            theirs[4095] = round;
            let mut state = shared.state.lock();
            let whole = vec![Part { to: Piece { address: to, len: 1 << 20 }, from }];
            let call = |parts| Call { neighbour: Arc::clone(&neighbour), parts, regions: None };
            state.calls.extend(cut(whole, CALL_BYTES).into_iter().map(call));
            shared.turns.fetch_add(1, Ordering::Release);
            shared.begun.notify_all();
            while state.under_way > 0 || !state.calls.is_empty() {
                shared.over.wait(&mut state);
            }
            drop(state);
            assert!(mine == theirs, "round {round}");
        }
    }
}
