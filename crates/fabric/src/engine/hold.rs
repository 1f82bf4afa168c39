//! [`Hold`]: the guard of the engine's lock. Each hold reads the clock once, and is audited and measured.

use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, MutexGuard};
use rustix::time::{ClockId, clock_gettime};

use crate::audit::Audit;
use crate::hold_time::HoldTime;
use crate::hub::socket_hub::SocketHub;

/// Most holds that are measured between two calls of `Engine::take_holds`.
const MEASURED_MAX: usize = 1 << 20;

/// A guard of the engine's lock.
pub(crate) struct Hold<'a> {
    guard: MutexGuard<'a, SocketHub>,
    audit: &'a Audit,
    /// The thread's processor time and the instant at which the lock was taken. None: holds are not measured.
    begun: Option<(Duration, Instant)>,
}

impl<'a> Hold<'a> {
    pub(super) fn new(guard: MutexGuard<'a, SocketHub>, audit: &'a Audit) -> Hold<'a> {
        let mut hold = Hold { guard, audit, begun: None };
        hold.begin();
        hold
    }

    fn begin(&mut self) {
        self.audit.begin();
        self.guard.read_clock();
        self.begun = self.guard.holds.is_some().then(|| (cpu_time(), Instant::now()));
    }

    fn end(&mut self) {
        self.audit.end();
        if let (Some((cpu, wall)), Some(holds)) = (self.begun.take(), &mut self.guard.holds)
            && holds.len() < MEASURED_MAX
        {
            holds.push(HoldTime { cpu: cpu_time().saturating_sub(cpu), wall: wall.elapsed() });
        }
    }

    /// Lets another thread that waits for the lock have it, and takes it again.
    pub(super) fn bump(&mut self) {
        self.end();
        MutexGuard::bump(&mut self.guard);
        self.begin();
    }

    /// Runs slow work without the lock, and takes it again.
    pub(crate) fn unlocked(&mut self, does: impl FnOnce()) {
        self.end();
        MutexGuard::unlocked(&mut self.guard, does);
        self.begin();
    }

    /// Releases the lock and sleeps until `changed` is notified or the deadline passes, then takes the lock again.
    pub(super) fn sleep(&mut self, changed: &Condvar, deadline: Option<Instant>) {
        self.end();
        match deadline {
            Some(deadline) => drop(changed.wait_until(&mut self.guard, deadline)),
            None => changed.wait(&mut self.guard),
        }
        self.begin();
    }
}

impl Deref for Hold<'_> {
    type Target = SocketHub;

    fn deref(&self) -> &SocketHub {
        &self.guard
    }
}

impl DerefMut for Hold<'_> {
    fn deref_mut(&mut self) -> &mut SocketHub {
        &mut self.guard
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.end();
    }
}

/// Processor time of this thread.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    // Neither part is ever negative.
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
