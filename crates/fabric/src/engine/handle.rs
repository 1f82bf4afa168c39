//! What was begun, and what is waited for.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::shared::{Shared, next_message};
use crate::inbox::Message;
use crate::shape::Pieces;
use crate::transfers::{Failure, Op, Priority, Ticket};
use crate::window::WindowDescriptor;

/// What to move.
#[derive(Debug, Clone)]
pub struct Transfer {
    /// Which way.
    pub op: Op,
    /// What.
    pub pieces: Pieces,
    /// A counter at the peer, and its generation there, that counts once all bytes are in place.
    pub immediate: Option<(u32, u32)>,
    /// After so long it is given up.
    pub timeout: Option<Duration>,
    /// Its turn.
    pub priority: Priority,
    /// A window of the peer's through which the bytes are read: the pieces name its number in place of a region's.
    pub window: Option<WindowDescriptor>,
}

impl Transfer {
    /// All bytes to the peer, with no time limit.
    pub fn write(pieces: Pieces) -> Transfer {
        let (immediate, timeout, priority, window) = (None, None, Priority::High, None);
        Transfer { op: Op::Write, pieces, immediate, timeout, priority, window }
    }

    /// All bytes from the peer, with no time limit.
    pub fn read(pieces: Pieces) -> Transfer {
        Transfer { op: Op::Read, ..Transfer::write(pieces) }
    }

    /// The same through a window of the peer's, whose number all pieces name as their region there.
    pub fn read_through(window: WindowDescriptor, pieces: Pieces) -> Transfer {
        Transfer { window: Some(window), ..Transfer::read(pieces) }
    }
}

/// How a message is sent.
#[derive(Debug, Clone)]
pub struct SendOptions {
    /// After so long it is given up.
    pub timeout: Duration,
    /// Its turn.
    pub priority: Priority,
}

impl Default for SendOptions {
    fn default() -> SendOptions {
        SendOptions { timeout: Duration::from_secs(10), priority: Priority::High }
    }
}

/// A transfer that was begun. Dropping it changes nothing for the transfer.
#[derive(Debug)]
pub struct Handle {
    pub(crate) shared: Arc<Shared>,
    pub(crate) ticket: Ticket,
}

impl Handle {
    /// The outcome, if it is over.
    pub fn outcome(&self) -> Option<Result<(), Failure>> {
        self.shared.hub().hub.outcomes.of(self.ticket)
    }

    /// Waits until it is over. None: not in this time.
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Result<(), Failure>> {
        let mut hub = self.shared.hub();
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        self.shared.wait(&mut hub, deadline, |hub| hub.hub.outcomes.of(self.ticket))
    }

    /// Gives it up. It is over when [`Handle::wait`] says so: its memory belongs to it until then.
    pub fn cancel(&self) {
        let mut hub = self.shared.hub();
        let now = hub.hub.now();
        hub.hub.transfers.cancel(now, self.ticket);
        self.shared.set_going(&mut hub);
    }
}

impl Future for Handle {
    type Output = Result<(), Failure>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut hub = self.shared.hub();
        if let Some(outcome) = hub.hub.outcomes.of(self.ticket) {
            return Poll::Ready(outcome);
        }
        let former = hub.hub.outcomes.wake_with(self.ticket, context.waker());
        // A task may go with it, and what it holds.
        drop(hub);
        drop(former);
        Poll::Pending
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.shared.is_here() {
            return;
        }
        let waker = self.shared.hub().hub.outcomes.forget(self.ticket);
        drop(waker);
    }
}

/// A message to come, of [`crate::Engine::receiving`]; None once the engine is closed and nothing is left. It can be asked again
/// for the next one.
#[derive(Debug)]
pub struct Receiving {
    shared: Arc<Shared>,
    receiver: u64,
}

impl Receiving {
    pub(super) fn new(shared: Arc<Shared>, receiver: u64) -> Receiving {
        Receiving { shared, receiver }
    }
}

impl Future for Receiving {
    type Output = Option<Message>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut hub = self.shared.hub();
        if let Some(next) = next_message(&mut hub) {
            return Poll::Ready(next);
        }
        let former = hub.hub.outcomes.receive_with(self.receiver, context.waker());
        // A task may go with it, and what it holds.
        drop(hub);
        drop(former);
        Poll::Pending
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        if !self.shared.is_here() {
            return;
        }
        let waker = self.shared.hub().hub.outcomes.forget_receiver(self.receiver);
        drop(waker);
    }
}
