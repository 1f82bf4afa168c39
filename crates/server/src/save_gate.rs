//! A gate that decides which saves of an engine may still become blocks. The scheduler closes it to saves whose blocks vLLM
//! is about to overwrite (a reset of its cache, sleep).
//!
//! ```text
//!   save of job n:  enter(n) ----- claims, copies, commits ----- leaves       (a mapped worker copies outside, and enters
//!                                                                              again with its commit)
//!   CancelSaves(m):       closed below m, then waits for those inside with n < m
//! ```
//! When that wait has ended, each job below m is either complete or shut out. The bytes of a complete one were read before
//! vLLM overwrites them.

use std::{sync::Arc, time::Instant};

use parking_lot::{Condvar, Mutex};

/// The gate of one engine.
#[derive(Debug, Default)]
pub(crate) struct SaveGate {
    state: Mutex<State>,
    left: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Jobs below this one may not enter.
    closed_below: u64,
    /// One entry for each [`Inside`].
    inside: Vec<u64>,
}

/// Held while a thread works on a save.
#[derive(Debug)]
pub(crate) struct Inside {
    gate: Arc<SaveGate>,
    job: u64,
}

impl SaveGate {
    /// Begins work on a save. None if it was cancelled.
    pub(crate) fn enter(self: &Arc<Self>, job: u64) -> Option<Inside> {
        let mut state = self.state.lock();
        if job < state.closed_below {
            return None;
        }
        state.inside.push(job);
        Some(Inside { gate: Arc::clone(self), job })
    }

    /// Closes the gate to jobs below `below`, and waits until the deadline for those inside to leave. True if they have.
    pub(crate) fn close(&self, below: u64, deadline: Instant) -> bool {
        let mut state = self.state.lock();
        state.closed_below = state.closed_below.max(below);
        while state.inside.iter().any(|job| *job < below) {
            if self.left.wait_until(&mut state, deadline).timed_out() {
                return !state.inside.iter().any(|job| *job < below);
            }
        }
        true
    }

    /// Sets the gate to what a scheduler says when it opens its engine. That may open it, because the jobs of a new
    /// scheduler begin at 1.
    pub(crate) fn set(&self, closed_below: u64) {
        self.state.lock().closed_below = closed_below;
    }
}

impl Inside {
    /// Whether the save was cancelled since it entered. Its remaining blocks need not be copied.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.job < self.gate.state.lock().closed_below
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let mut state = self.gate.state.lock();
        if let Some(at) = state.inside.iter().position(|job| *job == self.job) {
            state.inside.swap_remove(at);
        }
        self.gate.left.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn closing_waits_for_who_is_inside_and_keeps_others_out() {
        let gate = Arc::new(SaveGate::default());
        let early = gate.enter(3).unwrap();
        let later = gate.enter(7).unwrap();
        assert!(!gate.close(6, Instant::now()), "3 is still being copied");
        assert!(early.is_cancelled() && !later.is_cancelled());
        assert!(gate.enter(5).is_none() && gate.enter(6).is_some());
        let leaving = std::thread::spawn(move || drop(early));
        assert!(gate.close(6, Instant::now() + Duration::from_secs(60)));
        leaving.join().unwrap();
        gate.set(0);
        assert!(gate.enter(1).is_some(), "the jobs of a new scheduler begin at 1");
    }
}
