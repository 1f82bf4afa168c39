//! Runs an engine's work: polls the hub and runs its jobs. The threads that wait for something do that, or the engine's own
//! thread if none waits.
//!
//! ```text
//!  Engine::begin, send, ...   run_pending: pump, a few jobs, then return
//!  Handle::wait, ...          wait: poll and run jobs (spin), then sleep on the condition variable
//!  the engine's thread        serve: rests while threads wait and poll, else polls, and sleeps on the watch when idle
//!  helpers (socket_threads)   help: sleep until a job is due that no other thread has taken, then poll and run jobs
//! ```
//! A waiting thread polls for a while because a switch of threads takes longer than a small transfer. While it sleeps, the
//! engine's thread does the work and wakes it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvlane_memory::{Forked, OwnProcess};
use parking_lot::{Condvar, Mutex};
use rustix::event::epoll::Event;

use super::error::FabricError;
use super::hold::Hold;
use crate::audit::{self, Audit};
use crate::carriers::slots::SlotPool;
use crate::hub::socket_hub::SocketHub;
use crate::inbox::Message;
use crate::registrar::Registrar;
use crate::transfers::Reach;

/// How long a waiting thread polls without finding anything before it sleeps. Waking a sleeper takes a few times as long.
const SPIN: Duration = Duration::from_micros(50);
/// How much longer it polls while a carrier expects something that reports nothing before its end. A neighbour that reads this
/// process's memory reports after whole parts, 0.2 ms for each 512 KiB; a GPU's copy reports nothing.
const SPIN_FOR_CARRIERS: Duration = Duration::from_micros(500);
/// For so much of [`SPIN`] it keeps its processor; after that it yields between polls. If there is more work than processors,
/// the peer may need this one to answer. While bytes stream, the next ones arrive sooner than this.
const KEEP: Duration = Duration::from_micros(10);
/// How long the engine's thread rests while other threads poll or run what it waits for, before it checks that they still do.
const PARK: Duration = Duration::from_micros(200);
/// Jobs that a thread runs in [`Shared::run_pending`]: mostly enough to write, or read, what it has begun.
const JOBS_AT_ONCE: usize = 8;
/// Events that one call of epoll_wait returns at most.
const EVENTS: usize = 64;

/// An engine, as its handles, groups and thread share it.
#[derive(Debug)]
pub(crate) struct Shared {
    /// The process that made the engine, the only one that may use it.
    pub(super) own: OwnProcess,
    hub: Mutex<SocketHub>,
    pub(crate) audit: Audit,
    /// The carriers' registrars, which are called without the lock.
    pub(super) registrars: Registrars,
    /// The routes that any of the carriers serves.
    pub(super) reach: Reach,
    /// Pinned memory that bytes of GPUs go through, and its counters.
    pub(super) slots: Arc<SlotPool>,
    /// Notified when something has happened that a sleeper may wait for.
    changed: Condvar,
    /// Threads that wait or help, and poll. While there are any, the engine's thread rests.
    pollers: AtomicUsize,
    /// See [`EngineOptions::socket_threads`](super::EngineOptions::socket_threads).
    socket_threads: usize,
    /// Helpers that sleep, and the engine's thread while it rests as one. Changes under the lock.
    helpers_asleep: AtomicUsize,
    /// Notified when a job is due and fewer than `socket_threads` threads poll, and at the end.
    more_jobs: Condvar,
    sleepers: AtomicUsize,
    /// Polls by waiting threads, ever. Not in the hub: to read it there, the engine's thread would queue for the lock, and
    /// get it between two polls of the thread that does the work.
    polls: AtomicU64,
    stop: AtomicBool,
}

/// The registrars of an engine, each with its carrier's code.
pub(super) struct Registrars(pub(super) Vec<(u8, Arc<dyn Registrar>)>);

impl std::fmt::Debug for Registrars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(code, _)| code)).finish()
    }
}

impl Shared {
    pub(super) fn new(
        hub: SocketHub,
        registrars: Registrars,
        reach: Reach,
        slots: Arc<SlotPool>,
        socket_threads: usize,
    ) -> Shared {
        Shared {
            own: OwnProcess::this(),
            hub: Mutex::new(hub),
            audit: Audit::default(),
            registrars,
            reach,
            slots,
            changed: Condvar::new(),
            pollers: AtomicUsize::new(0),
            socket_threads,
            helpers_asleep: AtomicUsize::new(0),
            more_jobs: Condvar::new(),
            sleepers: AtomicUsize::new(0),
            polls: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        }
    }

    /// Locks the engine. Fails in a forked process, where the lock may be held by a thread that does not exist there.
    pub(crate) fn try_hub(&self) -> Result<Hold<'_>, FabricError> {
        self.own.check()?;
        Ok(self.lock())
    }

    /// As [`Shared::try_hub`], for calls that cannot return the error.
    ///
    /// # Panics
    /// In another process than the engine's.
    pub(crate) fn hub(&self) -> Hold<'_> {
        assert!(self.is_here(), "{Forked}");
        self.lock()
    }

    fn lock(&self) -> Hold<'_> {
        Hold::new(self.hub.lock(), &self.audit)
    }

    /// Whether this is the engine's own process.
    pub(crate) fn is_here(&self) -> bool {
        self.own.is_this()
    }

    /// Posts what is due, runs a few jobs, and wakes the threads that wait for their outcome.
    pub(crate) fn run_pending(&self, hub: &mut Hold<'_>) {
        hub.pump();
        while hub.hub.has_more {
            // Let other threads have the lock, but only if there is more than one hold may do. A thread that waits for the lock
            // would do the work begun here, while this one sleeps, five times as long as a small read takes.
            hub.bump();
            hub.pump();
        }
        self.work(hub, |_| false);
        self.wake_waiters(hub);
        self.wake_if_needed(hub);
    }

    /// Runs up to [`JOBS_AT_ONCE`] jobs without the lock, and stops early once `is_enough`. True if there were any.
    fn work(&self, hub: &mut Hold<'_>, mut is_enough: impl FnMut(&mut SocketHub) -> bool) -> bool {
        for done in 0..JOBS_AT_ONCE {
            let Some(mut work) = hub.take_job() else { return done > 0 };
            self.call_helper(hub);
            hub.unlocked(|| work.run());
            hub.put_back(work);
            hub.pump();
            if is_enough(hub) {
                break;
            }
        }
        true
    }

    /// Waits until `found` returns something, and does the engine's work meanwhile. None: the deadline passed first.
    pub(crate) fn wait<T>(
        &self,
        hub: &mut Hold<'_>,
        deadline: Option<Instant>,
        mut found: impl FnMut(&mut SocketHub) -> Option<T>,
    ) -> Option<T> {
        if let Some(found) = found(hub) {
            return Some(found);
        }
        let mut events = Vec::<Event>::with_capacity(EVENTS);
        self.pollers.fetch_add(1, Ordering::AcqRel);
        let deadline_of_hub = deadline.map(|deadline| hub.time_of(deadline));
        let mut spin_until = hub.hub.now() + SPIN;
        let answer = loop {
            self.polls.fetch_add(1, Ordering::Relaxed);
            let any = hub.poll(&mut events);
            // The jobs may serve other transfers, so this thread runs no more of them once it has what it waits for.
            let mut has = found(hub);
            let worked = has.is_none()
                && self.work(hub, |hub| {
                    has = found(hub);
                    has.is_some()
                });
            if worked || any {
                spin_until = hub.hub.now() + SPIN;
            }
            self.wake_waiters(hub);
            if let Some(found) = has.or_else(|| found(hub)) {
                break Some(found);
            }
            let now = hub.hub.now();
            if deadline_of_hub.is_some_and(|deadline| now >= deadline) {
                break None;
            }
            let is_expecting =
                now >= spin_until && now < spin_until + SPIN_FOR_CARRIERS && hub.is_expecting();
            if now < spin_until || is_expecting {
                // Other threads may take the lock and begin transfers meanwhile.
                if now + SPIN < spin_until + KEEP {
                    hub.bump();
                } else {
                    hub.unlocked(std::thread::yield_now);
                }
                continue;
            }
            // From here on the engine's thread does the work.
            self.pollers.fetch_sub(1, Ordering::AcqRel);
            self.sleepers.fetch_add(1, Ordering::AcqRel);
            self.wake_if_needed(hub);
            hub.sleep(&self.changed, deadline);
            self.sleepers.fetch_sub(1, Ordering::AcqRel);
            if let Some(found) = found(hub) {
                return Some(found);
            }
            self.pollers.fetch_add(1, Ordering::AcqRel);
            spin_until = hub.hub.now() + SPIN;
        };
        self.pollers.fetch_sub(1, Ordering::AcqRel);
        self.wake_if_needed(hub);
        answer
    }

    /// Wakes sleeping threads and tasks if anything has happened that they may wait for.
    pub(crate) fn wake_waiters(&self, hub: &mut Hold<'_>) {
        let outcomes = &mut hub.hub.outcomes;
        if outcomes.take_changed() && self.sleepers.load(Ordering::Acquire) > 0 {
            self.changed.notify_all();
        }
        let wakers = outcomes.take_wakers();
        if !wakers.is_empty() {
            // A woken task may take the lock at once.
            hub.unlocked(|| wakers.into_iter().for_each(std::task::Waker::wake));
        }
    }

    /// Wakes a helper if a job is due that the threads at work have not taken.
    fn call_helper(&self, hub: &SocketHub) {
        let may_help = self.helpers_asleep.load(Ordering::Relaxed) > 0
            && self.pollers.load(Ordering::Relaxed) < self.socket_threads;
        if may_help && hub.next_tick().is_zero() {
            self.more_jobs.notify_one();
        }
    }

    /// Wakes the engine's thread if something is due before the end of its sleep, and a helper if that is a job.
    pub(crate) fn wake_if_needed(&self, hub: &SocketHub) {
        self.call_helper(hub);
        if hub.asleep_until.is_some_and(|until| hub.next_tick() < until) {
            hub.wake();
        }
    }

    /// The loop of a helper, until the engine is closed.
    pub(super) fn help(&self) {
        let mut events = Vec::<Event>::with_capacity(EVENTS);
        let mut hub = self.lock();
        while !self.stop.load(Ordering::Acquire) {
            if !hub.next_tick().is_zero() {
                self.rest_as_helper(&mut hub, None);
            }
            self.pollers.fetch_add(1, Ordering::AcqRel);
            let mut spin_until = hub.hub.now() + SPIN;
            while hub.hub.now() < spin_until && !self.stop.load(Ordering::Acquire) {
                self.polls.fetch_add(1, Ordering::Relaxed);
                let any = hub.poll(&mut events);
                if self.work(&mut hub, |_| false) || any {
                    spin_until = hub.hub.now() + SPIN;
                }
                self.wake_waiters(&mut hub);
                hub.unlocked(std::thread::yield_now);
            }
            self.pollers.fetch_sub(1, Ordering::AcqRel);
            self.wake_if_needed(&hub);
        }
    }

    /// Sleeps until a job is due that no thread has taken, or the deadline passes.
    fn rest_as_helper(&self, hub: &mut Hold<'_>, deadline: Option<Instant>) {
        self.helpers_asleep.fetch_add(1, Ordering::Relaxed);
        hub.sleep(&self.more_jobs, deadline);
        self.helpers_asleep.fetch_sub(1, Ordering::Relaxed);
    }

    /// Ends [`Shared::serve`] and [`Shared::help`].
    pub(super) fn stop(&self, hub: &mut Hold<'_>) {
        self.stop.store(true, Ordering::Release);
        self.wake_waiters(hub);
        self.more_jobs.notify_all();
        hub.wake();
    }

    /// The loop of the engine's thread, until the engine is closed.
    pub(super) fn serve(&self) {
        let watch = self.lock().watch();
        let mut events = Vec::<Event>::with_capacity(EVENTS);
        let (mut busy_until, mut is_busy, mut looked) = (Duration::ZERO, false, Instant::now());
        let mut blocked_since: Option<Duration> = None;
        while !self.stop.load(Ordering::Acquire) {
            if self.pollers.load(Ordering::Acquire) > 0 {
                // Other threads do the work, unless they get no processor.
                let before = self.polls.load(Ordering::Relaxed);
                if self.socket_threads == 1 {
                    audit::takes_time("a sleep");
                    std::thread::sleep(PARK);
                } else {
                    let mut hub = self.lock();
                    self.rest_as_helper(&mut hub, Some(Instant::now() + PARK));
                    if self.work(&mut hub, |_| false) {
                        self.wake_waiters(&mut hub);
                    }
                }
                if self.polls.load(Ordering::Relaxed) != before {
                    continue;
                }
            }
            // A thread that has the lock does the work. Queueing for the lock would make both do it in turns, each with cold
            // caches, and one turn may take longer than this thread's rest.
            let hub = match self.pollers.load(Ordering::Acquire) {
                0 if !is_busy => Some(self.lock()),
                _ => self.hub.try_lock().map(|hub| Hold::new(hub, &self.audit)),
            };
            let Some(mut hub) = hub else {
                // A busy thread only tries the lock, so that its holder need not hand the lock over and sleep.
                std::thread::yield_now();
                is_busy &= looked.elapsed() < SPIN;
                continue;
            };
            let any = hub.poll(&mut events);
            if self.work(&mut hub, |_| false) || any {
                busy_until = hub.hub.now() + SPIN;
                blocked_since = None;
            }
            self.wake_waiters(&mut hub);
            let now = hub.hub.now();
            is_busy = now < busy_until;
            if is_busy {
                drop(hub);
                looked = Instant::now();
                if now + SPIN >= busy_until + KEEP {
                    std::thread::yield_now();
                }
                continue;
            }
            let until = hub.next_tick();
            let timeout = until.saturating_sub(hub.hub.now());
            if hub.waits_for_job || !hub.prepare_to_sleep() {
                hub.woken();
                hub.poll_sockets_next();
                // A ring has something, or a job has to end whose socket or ring is ready. If that takes long, its thread may
                // have no processor, and polling would keep one from it.
                let is_long = now >= *blocked_since.get_or_insert(now) + SPIN;
                drop(hub);
                if is_long {
                    audit::takes_time("a sleep");
                    std::thread::sleep(PARK);
                } else {
                    std::thread::yield_now();
                }
                continue;
            }
            blocked_since = None;
            hub.asleep_until = Some(until);
            drop(hub);
            watch.wait(&mut events, timeout);
            // The events are read again under the lock, by the next poll.
            let has_come = !events.is_empty();
            events.clear();
            let mut hub = self.lock();
            if has_come {
                hub.poll_sockets_next();
            }
            hub.asleep_until = None;
            hub.woken();
        }
    }
}

/// The next message that has arrived. Some(None): the engine is closed, and none will come any more.
pub(super) fn next_message(hub: &mut SocketHub) -> Option<Option<Message>> {
    let message = hub.hub.outside.process.inbox.take();
    (message.is_some() || hub.hub.is_closed).then_some(message)
}
