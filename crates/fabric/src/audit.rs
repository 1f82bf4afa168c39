//! Checks what threads do under an engine's lock. In builds with debug assertions, as all tests have, slow work under the lock
//! panics ([`takes_time`]), and the work of each hold is counted. In other builds these functions do nothing.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

thread_local! {
    /// The counters of this thread's current hold. None: it does not hold the lock.
    static HELD: Cell<Option<Held>> = const { Cell::new(None) };
}

#[derive(Debug, Clone, Copy, Default)]
struct Held {
    posted: usize,
    served: usize,
    copied: usize,
}

/// The holds of one lock: their number, and the most work of a single one.
#[derive(Debug, Default)]
pub(crate) struct Audit {
    holds: AtomicU64,
    /// Runs posted in one hold.
    posted: AtomicUsize,
    /// Runs that peers asked for in one hold.
    served: AtomicUsize,
    /// Bytes of transfers that were copied in one hold.
    copied: AtomicUsize,
}

impl Audit {
    /// This thread has taken the lock.
    pub(crate) fn begin(&self) {
        if cfg!(debug_assertions) {
            HELD.set(Some(Held::default()));
        }
    }

    /// This thread is about to release the lock.
    pub(crate) fn end(&self) {
        if cfg!(debug_assertions)
            && let Some(Held { posted, served, copied }) = HELD.take()
        {
            self.holds.fetch_add(1, Ordering::Relaxed);
            self.posted.fetch_max(posted, Ordering::Relaxed);
            self.served.fetch_max(served, Ordering::Relaxed);
            self.copied.fetch_max(copied, Ordering::Relaxed);
        }
    }
}

/// Call it before code that blocks, sleeps, copies bytes of transfers, or waits for a thread, a process or a stream.
///
/// # Panics
/// Under an engine's lock, with debug assertions.
#[track_caller]
pub(crate) fn takes_time(what: &str) {
    debug_assert!(HELD.get().is_none(), "{what} under an engine's lock");
}

/// Counts the runs of a post.
pub(crate) fn posts(runs: usize) {
    count(|held| held.posted += runs);
}

/// Counts the runs that a peer asks for.
pub(crate) fn serves(runs: usize) {
    count(|held| held.served += runs);
}

/// Counts bytes of a transfer that travel inside words. Only these are copied under the lock, because a job would take longer
/// than the copy of less than a page.
pub(crate) fn copies_few(bytes: usize) {
    count(|held| held.copied += bytes);
}

fn count(count: impl FnOnce(&mut Held)) {
    if cfg!(debug_assertions)
        && let Some(mut held) = HELD.get()
    {
        count(&mut held);
        HELD.set(Some(held));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, unsafe_code, reason = "tests")]

    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::time::Duration;

    use super::*;
    use crate::carriers::process_vm::{Card, Neighbour};
    use crate::hub::RUNS_A_HOLD;
    use crate::identity::Identity;
    use crate::tcp::ENTRIES_MAX;
    use crate::{
        Access, Engine, EngineOptions, Handle, Op, Pages, PeerId, Pieces, Place, Run, SendOptions, Transfer,
        Transport,
    };

    const PATIENCE: Duration = Duration::from_secs(60);
    const BYTES: usize = 2 << 20;
    const PAGES: u32 = 10_000;

    struct Side {
        engine: Engine,
        region: u32,
        memory: Vec<u8>,
    }

    impl Side {
        fn new(transport: Option<Transport>) -> Side {
            let engine = Engine::new(EngineOptions { transport, ..EngineOptions::default() }).unwrap();
            let mut memory = vec![0u8; BYTES];
            // SAFETY: the engine is dropped before its memory, as the first field.
            let region =
                unsafe { engine.register(memory.as_mut_ptr(), BYTES as u64, Access::ReadWrite).unwrap() };
            Side { engine, region, memory }
        }

        fn begin(&self, peer: PeerId, op: Op, pieces: Pieces) -> Handle {
            self.engine.begin(peer, Transfer { op, ..Transfer::write(pieces) }).unwrap()
        }

        /// The number of its holds, and the most of a single one in runs posted, runs served and bytes copied.
        fn seen(&self) -> (u64, [usize; 3]) {
            let Audit { holds, posted, served, copied } = self.engine.audit();
            let most = [posted, served, copied].map(|most| most.load(Ordering::Relaxed));
            (holds.load(Ordering::Relaxed), most)
        }
    }

    /// Every second page of 100 bytes here, to another order there: no two are adjacent.
    fn pages(here: &Side, there: &Side) -> Pieces {
        let pages = |region, indices| Pages { region, offset: 0, stride: 200, indices };
        Pieces::Paged {
            page_bytes: 100,
            local: pages(here.region, (0..PAGES).collect()),
            remote: pages(there.region, (0..PAGES).rev().collect()),
        }
    }

    fn run(here: &Side, there: &Side, at: u64, len: u64) -> Run {
        let place = |region| Place { region, offset: at };
        Run { local: place(here.region), remote: place(there.region), len }
    }

    fn wait(handle: &Handle) {
        assert_eq!(handle.wait(Some(PATIENCE)), Some(Ok(())));
    }

    /// Slow work would have panicked, in this thread or in the engines' threads; dropping an engine checks how its thread
    /// ended.
    #[test]
    fn no_hold_of_the_lock_does_much_or_takes_its_time() {
        for transport in [Some(Transport::TCP), None] {
            let (mut here, there) = (Side::new(transport), Side::new(transport));
            here.memory.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 200) as u8);
            let peer = here.engine.connect(&there.engine.describe().unwrap()).unwrap();
            let other = here.engine.connect(&there.engine.describe().unwrap()).unwrap();
            let generation = there.engine.open_counter(1);
            wait(&here.begin(peer, Op::Write, Pieces::Contiguous(run(&here, &there, 0, BYTES as u64))));
            let mut under_way: Vec<Handle> = Vec::new();
            for peer in [peer, other] {
                under_way.extend((0..4).map(|_| here.begin(peer, Op::Write, pages(&here, &there))));
                under_way.extend((0..4).map(|_| here.begin(peer, Op::Read, pages(&here, &there))));
                for at in 0..200u64 {
                    let small = Pieces::Contiguous(run(&here, &there, at * 4096, 100));
                    let write = Transfer { immediate: Some((1, generation)), ..Transfer::write(small) };
                    under_way.push(here.engine.begin(peer, write).unwrap());
                    under_way.push(here.engine.send(peer, vec![7; 1000], SendOptions::default()).unwrap());
                    there.engine.receive(Some(PATIENCE)).unwrap();
                }
            }
            // All transfers to one of the two are given up while the others go on.
            here.engine.disconnect(other);
            assert!(under_way.iter().all(|handle| handle.wait(Some(PATIENCE)).is_some()));
            wait(&here.begin(peer, Op::Write, pages(&here, &there)));
            assert!(there.engine.wait_count(1, generation, 200, Some(PATIENCE)));
            let page = |side: &Side, number: u32| side.memory[number as usize * 200..][..100].to_vec();
            assert!((0..PAGES).all(|number| page(&here, number) == page(&there, PAGES - 1 - number)));
            here.engine.unregister(here.region).unwrap();
            there.engine.close();
            for (side, is_posting) in [(&here, true), (&there, false)] {
                let (holds, [posted, served, copied]) = side.seen();
                assert!(holds > 100);
                assert!(posted <= RUNS_A_HOLD, "{posted} runs were posted in one hold");
                assert!(served < RUNS_A_HOLD + ENTRIES_MAX, "{served} runs were served in one hold");
                assert!(copied < RUNS_A_HOLD * 4096, "{copied} bytes were copied in one hold");
                assert_eq!((posted > 1, copied > 0), (is_posting, transport.is_none()));
            }
        }
    }

    #[test]
    fn what_takes_its_time_is_caught_under_the_lock_and_nowhere_else() {
        let side = Side::new(Some(Transport::TCP));
        let me = Identity { engine: 7, boot: 9 };
        let card = Card::new(me);
        let probe = || drop(Neighbour::probe(std::process::id(), card.address(), me).unwrap());
        let watch = side.engine.hold().watch();
        let sleep = || watch.wait(&mut Vec::with_capacity(1), Duration::from_millis(1));
        let nothing = || watch.wait(&mut Vec::with_capacity(1), Duration::ZERO);
        let is_caught = |does: &dyn Fn()| {
            does();
            let hold = side.engine.hold();
            let caught = catch_unwind(AssertUnwindSafe(does)).is_err();
            drop(hold);
            does();
            caught
        };
        assert!(is_caught(&probe));
        assert!(is_caught(&sleep));
        assert!(!is_caught(&nothing));
        let mut hold = side.engine.hold();
        hold.unlocked(probe);
        let caught = catch_unwind(AssertUnwindSafe(probe)).is_err();
        assert!(caught, "it is locked again");
        posts(RUNS_A_HOLD + 1);
        drop(hold);
        assert_eq!(side.seen().1[0], RUNS_A_HOLD + 1, "more than may be");
    }
}
