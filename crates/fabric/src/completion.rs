//! Keeps the outcomes of transfers for their handles, and the wakers of tasks that wait for transfers or messages.

use std::collections::HashMap;
use std::task::Waker;

use crate::numbered::Numbered;
use crate::process::Carried;
use crate::transfers::{Failure, Ticket};

/// The outcomes of transfers that still have a handle.
#[derive(Debug, Default)]
pub(crate) struct Outcomes {
    wanted: Numbered<Ticket, Waiter>,
    /// Something has happened that a sleeping thread may wait for.
    changed: bool,
    to_wake: Vec<Waker>,
    /// By receiver: the task that waits for a message.
    receivers: HashMap<u64, Waker>,
    next_receiver: u64,
}

#[derive(Debug, Default)]
struct Waiter {
    /// None: the transfer is not over.
    outcome: Option<Result<(), Failure>>,
    carried: Carried,
    waker: Option<Waker>,
}

impl Outcomes {
    /// Keeps the outcome of a transfer until [`Outcomes::forget`]. Call it before the transfer can end.
    pub(crate) fn want(&mut self, ticket: Ticket) {
        self.wanted.insert(ticket, Waiter::default());
    }

    /// Records that a transfer is over.
    pub(crate) fn complete(&mut self, ticket: Ticket, outcome: Result<(), Failure>, carried: Carried) {
        if let Some(wanted) = self.wanted.get_mut(&ticket) {
            (wanted.outcome, wanted.carried) = (Some(outcome), carried);
            self.to_wake.extend(wanted.waker.take());
        }
        self.changed = true;
    }

    /// The wakers to call. The caller releases the engine's lock first, because a woken task may take it at once.
    pub(crate) fn take_wakers(&mut self) -> Vec<Waker> {
        std::mem::take(&mut self.to_wake)
    }

    /// The outcome of a transfer. None: it is not over, or has no handle any more.
    pub(crate) fn of(&self, ticket: Ticket) -> Option<Result<(), Failure>> {
        self.wanted.get(&ticket).and_then(|wanted| wanted.outcome)
    }

    /// The bytes that each carrier moved of a transfer that is over.
    pub(crate) fn carried(&self, ticket: Ticket) -> Option<&Carried> {
        self.wanted.get(&ticket).filter(|wanted| wanted.outcome.is_some()).map(|wanted| &wanted.carried)
    }

    /// Forgets a transfer whose handle is dropped. The caller drops the returned waker without the lock, because that may drop
    /// a task.
    #[must_use]
    pub(crate) fn forget(&mut self, ticket: Ticket) -> Option<Waker> {
        self.wanted.remove(&ticket)?.waker
    }

    /// Sets the task to wake when the transfer is over. Returns the former one, to be dropped without the lock.
    #[must_use]
    pub(crate) fn wake_with(&mut self, ticket: Ticket, waker: &Waker) -> Option<Waker> {
        self.wanted.get_mut(&ticket)?.waker.replace(waker.clone())
    }

    /// A number for a task that will wait for messages.
    pub(crate) fn add_receiver(&mut self) -> u64 {
        self.next_receiver += 1;
        self.next_receiver
    }

    /// Sets the task to wake when a message arrives. Returns the former one, to be dropped without the lock.
    #[must_use]
    pub(crate) fn receive_with(&mut self, receiver: u64, waker: &Waker) -> Option<Waker> {
        self.receivers.insert(receiver, waker.clone())
    }

    /// Forgets a receiver that is dropped. Returns its waker, to be dropped without the lock.
    #[must_use]
    pub(crate) fn forget_receiver(&mut self, receiver: u64) -> Option<Waker> {
        self.receivers.remove(&receiver)
    }

    /// Wakes all receivers: a message has arrived, or none will any more.
    pub(crate) fn note_message(&mut self) {
        self.changed = true;
        self.to_wake.extend(self.receivers.drain().map(|(_, waker)| waker));
    }

    /// Wakes sleeping threads for something other than a transfer or message.
    pub(crate) fn note_change(&mut self) {
        self.changed = true;
    }

    /// Whether anything has happened since the last call that a sleeping thread may wait for.
    pub(crate) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }
}
