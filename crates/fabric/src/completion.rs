//! How whoever began a transfer hears that it is over.

use std::collections::HashMap;
use std::task::Waker;

use crate::transfers::{Failure, Ticket};

/// The transfers whose outcome somebody still wants to know.
#[derive(Debug, Default)]
pub(crate) struct Outcomes {
    wanted: HashMap<Ticket, Wanted>,
    /// Something changed that a sleeper may wait for.
    changed: bool,
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
    pub(crate) fn tell(&mut self, ticket: Ticket, outcome: Result<(), Failure>) {
        if let Some(wanted) = self.wanted.get_mut(&ticket) {
            wanted.outcome = Some(outcome);
            if let Some(waker) = wanted.waker.take() {
                waker.wake();
            }
        }
        self.changed = true;
    }

    /// The outcome, once it is known.
    pub(crate) fn of(&self, ticket: Ticket) -> Option<Result<(), Failure>> {
        self.wanted.get(&ticket).and_then(|wanted| wanted.outcome)
    }

    /// Nobody wants to know any more.
    pub(crate) fn forget(&mut self, ticket: Ticket) {
        self.wanted.remove(&ticket);
    }

    /// Wakes the last task that asked when the transfer is over.
    pub(crate) fn wake_with(&mut self, ticket: Ticket, waker: &Waker) {
        if let Some(wanted) = self.wanted.get_mut(&ticket) {
            wanted.waker = Some(waker.clone());
        }
    }

    /// A counter has counted.
    pub(crate) fn note_change(&mut self) {
        self.changed = true;
    }

    /// Whether there was a change since the last time that this was asked.
    pub(crate) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }
}
