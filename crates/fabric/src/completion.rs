//! How whoever began a transfer hears that it is over.

use std::collections::HashMap;
use std::task::Waker;

use crate::numbered::Numbered;
use crate::transfers::{Failure, Ticket};

/// The transfers whose outcome somebody still wants to know.
#[derive(Debug, Default)]
pub(crate) struct Outcomes {
    wanted: Numbered<Ticket, Wanted>,
    /// Something changed that a sleeper may wait for.
    changed: bool,
    to_wake: Vec<Waker>,
    /// Tasks that wait for a message.
    receivers: HashMap<u64, Waker>,
    next_receiver: u64,
}

#[derive(Debug, Default)]
struct Wanted {
    outcome: Option<Result<(), Failure>>,
    waker: Option<Waker>,
}

impl Outcomes {
    pub(crate) fn want(&mut self, ticket: Ticket) {
        self.wanted.insert(ticket, Wanted::default());
    }

    /// A transfer is over.
    pub(crate) fn complete(&mut self, ticket: Ticket, outcome: Result<(), Failure>) {
        if let Some(wanted) = self.wanted.get_mut(&ticket) {
            wanted.outcome = Some(outcome);
            self.to_wake.extend(wanted.waker.take());
        }
        self.changed = true;
    }

    /// Tasks to be woken, by whoever does not hold what they may ask for.
    pub(crate) fn take_wakers(&mut self) -> Vec<Waker> {
        std::mem::take(&mut self.to_wake)
    }

    /// The outcome, once it is known.
    pub(crate) fn of(&self, ticket: Ticket) -> Option<Result<(), Failure>> {
        self.wanted.get(&ticket).and_then(|wanted| wanted.outcome)
    }

    /// Nobody wants to know any more. What is answered is to be dropped where a task may run.
    #[must_use]
    pub(crate) fn forget(&mut self, ticket: Ticket) -> Option<Waker> {
        self.wanted.remove(&ticket)?.waker
    }

    /// Wakes this task when the transfer is over, instead of the one that is answered.
    #[must_use]
    pub(crate) fn wake_with(&mut self, ticket: Ticket, waker: &Waker) -> Option<Waker> {
        self.wanted.get_mut(&ticket)?.waker.replace(waker.clone())
    }

    /// A number for a task that is going to wait for messages.
    pub(crate) fn add_receiver(&mut self) -> u64 {
        self.next_receiver += 1;
        self.next_receiver
    }

    /// Wakes this task when there is a message, instead of the one that is answered.
    #[must_use]
    pub(crate) fn receive_with(&mut self, receiver: u64, waker: &Waker) -> Option<Waker> {
        self.receivers.insert(receiver, waker.clone())
    }

    /// It does not wait any more. What is answered is to be dropped where a task may run.
    #[must_use]
    pub(crate) fn forget_receiver(&mut self, receiver: u64) -> Option<Waker> {
        self.receivers.remove(&receiver)
    }

    /// There is a message, or there will be none any more.
    pub(crate) fn note_message(&mut self) {
        self.changed = true;
        self.to_wake.extend(self.receivers.drain().map(|(_, waker)| waker));
    }

    /// Something else that a sleeper may wait for.
    pub(crate) fn note_change(&mut self) {
        self.changed = true;
    }

    /// Whether there was a change since the last time that this was asked.
    pub(crate) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }
}
