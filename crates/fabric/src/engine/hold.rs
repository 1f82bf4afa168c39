//! The engine's lock while a thread has it.

use std::ops::{Deref, DerefMut};
use std::time::Instant;

use parking_lot::{Condvar, MutexGuard};

use crate::audit::Audit;
use crate::hub::socket_hub::SocketHub;

/// The lock, in hand.
pub(crate) struct Hold<'a> {
    guard: MutexGuard<'a, SocketHub>,
    audit: &'a Audit,
}

impl<'a> Hold<'a> {
    pub(super) fn new(guard: MutexGuard<'a, SocketHub>, audit: &'a Audit) -> Hold<'a> {
        let mut hold = Hold { guard, audit };
        hold.begin();
        hold
    }

    fn begin(&mut self) {
        self.audit.begin();
        self.guard.read_clock();
    }

    /// Others have their turn.
    pub(super) fn bump(&mut self) {
        self.audit.end();
        MutexGuard::bump(&mut self.guard);
        self.begin();
    }

    /// Does something that takes its time.
    pub(crate) fn unlocked(&mut self, does: impl FnOnce()) {
        self.audit.end();
        MutexGuard::unlocked(&mut self.guard, does);
        self.begin();
    }

    /// Sleeps until it is told, or until then.
    pub(super) fn sleep(&mut self, changed: &Condvar, deadline: Option<Instant>) {
        self.audit.end();
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
        self.audit.end();
    }
}
