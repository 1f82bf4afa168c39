//! Who does an engine's work: whoever waits for something, and else the thread behind.

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

/// How long whoever waits looks again and again before it sleeps. A sleeper is woken within a few times as much.
const SPIN: Duration = Duration::from_micros(50);
/// The same while a carrier expects something of which nothing is heard before its end: a neighbour that reads what this
/// process has written reports after whole parts, 0.2 ms for each half a mebibyte, and a GPU's copy reports nothing.
const SPIN_FOR_CARRIERS: Duration = Duration::from_micros(500);
/// Of that, how long it keeps its processor to itself. Where there are fewer of them than there is work, the peer may need
/// it to answer; while bytes are streaming, the next ones come sooner than this.
const KEEP: Duration = Duration::from_micros(10);
/// How long the thread behind leaves the work to those who wait, before it looks whether they still do.
const PARK: Duration = Duration::from_micros(200);
/// Jobs that whoever begins something does before it goes on: what it has begun is then mostly written, or read.
const JOBS_AT_ONCE: usize = 8;
const EVENTS: usize = 64;

#[derive(Debug)]
pub(crate) struct Shared {
    /// Where all of this may be used.
    pub(super) own: OwnProcess,
    hub: Mutex<SocketHub>,
    pub(crate) audit: Audit,
    /// What carriers do when memory is registered: outside of the lock.
    pub(super) registrars: Registrars,
    /// Routes that the carriers serve together.
    pub(super) reach: Reach,
    /// Pinned memory that bytes of GPUs go through, and its counters.
    pub(super) slots: Arc<SlotPool>,
    /// Something that a sleeper may wait for has happened.
    changed: Condvar,
    /// How many wait and do the work; the thread behind rests until there are none.
    pollers: AtomicUsize,
    sleepers: AtomicUsize,
    /// How often somebody who waits has done some work. Not in the hub: whoever asks for that would stand in line for it, and
    /// be let in between two turns of the work.
    polls: AtomicU64,
    pub(super) stop: AtomicBool,
}

/// Each with the code of its carrier.
pub(super) struct Registrars(pub(super) Vec<(u8, Arc<dyn Registrar>)>);

impl std::fmt::Debug for Registrars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(code, _)| code)).finish()
    }
}

impl Shared {
    pub(super) fn new(hub: SocketHub, registrars: Registrars, reach: Reach, slots: Arc<SlotPool>) -> Shared {
        Shared {
            own: OwnProcess::this(),
            hub: Mutex::new(hub),
            audit: Audit::default(),
            registrars,
            reach,
            slots,
            changed: Condvar::new(),
            pollers: AtomicUsize::new(0),
            sleepers: AtomicUsize::new(0),
            polls: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        }
    }

    /// All that the engine has. Only in its own process: in a forked one the lock may be held by a thread that is not there.
    pub(crate) fn try_hub(&self) -> Result<Hold<'_>, FabricError> {
        self.own.check()?;
        Ok(self.lock())
    }

    /// The same for calls that return no such error.
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

    /// Does what was asked for since, and tells those who wait for it.
    pub(crate) fn set_going(&self, hub: &mut Hold<'_>) {
        hub.pump();
        while hub.hub.has_more {
            // Others have their turn. Not without need: whoever stands in line for the lock would do what was begun here, and
            // this thread would sleep until then, five times as long as a small read takes.
            hub.bump();
            hub.pump();
        }
        self.work(hub, |_| false);
        self.wake_waiters(hub);
        self.wake_if_needed(hub);
    }

    /// Does a few jobs, without the lock, but none more once this is enough. Whether there were any.
    fn work(&self, hub: &mut Hold<'_>, mut is_enough: impl FnMut(&mut SocketHub) -> bool) -> bool {
        for done in 0..JOBS_AT_ONCE {
            let Some(mut work) = hub.take_job() else { return done > 0 };
            hub.unlocked(|| work.run());
            hub.put_back(work);
            hub.pump();
            if is_enough(hub) {
                break;
            }
        }
        true
    }

    /// Waits until `found` finds something, and does the engine's work meanwhile. None: not by the deadline.
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
            // The jobs may be others': whoever has what it waits for goes on.
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
                // Others may begin transfers meanwhile.
                if now + SPIN < spin_until + KEEP {
                    hub.bump();
                } else {
                    hub.unlocked(std::thread::yield_now);
                }
                continue;
            }
            // The thread behind goes on.
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

    /// Wakes those who sleep, and tasks, if anything happened that they may wait for.
    pub(crate) fn wake_waiters(&self, hub: &mut Hold<'_>) {
        let outcomes = &mut hub.hub.outcomes;
        if outcomes.take_changed() && self.sleepers.load(Ordering::Acquire) > 0 {
            self.changed.notify_all();
        }
        let wakers = outcomes.take_wakers();
        if !wakers.is_empty() {
            // They may ask for what this guards.
            hub.unlocked(|| wakers.into_iter().for_each(std::task::Waker::wake));
        }
    }

    /// Wakes the thread behind if something is due before it looks by itself.
    pub(crate) fn wake_if_needed(&self, hub: &SocketHub) {
        if hub.asleep_until.is_some_and(|until| hub.next_tick() < until) {
            hub.wake();
        }
    }

    /// What the thread behind does.
    pub(super) fn serve(&self) {
        let watch = self.lock().watch();
        let mut events = Vec::<Event>::with_capacity(EVENTS);
        let (mut busy_until, mut is_busy, mut looked) = (Duration::ZERO, false, Instant::now());
        while !self.stop.load(Ordering::Acquire) {
            if self.pollers.load(Ordering::Acquire) > 0 {
                // They do the work, unless they have no CPU to do it on.
                let before = self.polls.load(Ordering::Relaxed);
                audit::takes_time("a sleep");
                std::thread::sleep(PARK);
                if self.polls.load(Ordering::Relaxed) != before {
                    continue;
                }
            }
            // Whoever has it does the work. To stand in line would make them share it, in turns of which each begins with cold
            // caches: one turn may take longer than this thread rests.
            let hub = match self.pollers.load(Ordering::Acquire) {
                0 if !is_busy => Some(self.lock()),
                _ => self.hub.try_lock().map(|hub| Hold::new(hub, &self.audit)),
            };
            let Some(mut hub) = hub else {
                // While it is busy this thread asks all the time, and whoever has the lock does not want to sleep for it.
                std::thread::yield_now();
                is_busy &= looked.elapsed() < SPIN;
                continue;
            };
            let any = hub.poll(&mut events);
            if self.work(&mut hub, |_| false) || any {
                busy_until = hub.hub.now() + SPIN;
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
            if !hub.prepare_to_sleep() {
                hub.woken();
                continue;
            }
            hub.asleep_until = Some(until);
            drop(hub);
            watch.wait(&mut events, timeout);
            // What has come is asked for again, under the lock.
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

/// A message that has arrived; Some(None): there will be none any more.
pub(super) fn next_message(hub: &mut SocketHub) -> Option<Option<Message>> {
    let message = hub.hub.outside.process.inbox.take();
    (message.is_some() || hub.hub.is_closed).then_some(message)
}
