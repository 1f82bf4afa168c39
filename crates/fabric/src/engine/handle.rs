//! The arguments of a transfer and a message ([`Transfer`], [`SendOptions`]), and the futures that callers wait on ([`Handle`],
//! [`Receiving`]).

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

/// A transfer to begin with [`crate::Engine::begin`].
#[derive(Debug, Clone)]
pub struct Transfer {
    /// The direction of all pieces.
    pub op: Op,
    /// The bytes, on both sides.
    pub pieces: Pieces,
    /// A counter at the peer and its generation there, which counts once all bytes are in place.
    pub immediate: Option<(u32, u32)>,
    /// The transfer is given up after this time. None: never.
    pub timeout: Option<Duration>,
    /// The queue that it waits in.
    pub priority: Priority,
    /// The peer's window to read through. All pieces name its number in place of a region's.
    pub window: Option<WindowDescriptor>,
}

impl Transfer {
    /// Writes all bytes to the peer, with no timeout.
    pub fn write(pieces: Pieces) -> Transfer {
        let (immediate, timeout, priority, window) = (None, None, Priority::High, None);
        Transfer { op: Op::Write, pieces, immediate, timeout, priority, window }
    }

    /// Reads all bytes from the peer, with no timeout.
    pub fn read(pieces: Pieces) -> Transfer {
        Transfer { op: Op::Read, ..Transfer::write(pieces) }
    }

    /// Reads all bytes through a window of the peer, whose number all pieces name as their region there.
    pub fn read_through(window: WindowDescriptor, pieces: Pieces) -> Transfer {
        Transfer { window: Some(window), ..Transfer::read(pieces) }
    }
}

/// Options of [`crate::Engine::send`].
#[derive(Debug, Clone)]
pub struct SendOptions {
    /// The message is given up after this time.
    pub timeout: Duration,
    /// The queue that it waits in.
    pub priority: Priority,
}

impl Default for SendOptions {
    fn default() -> SendOptions {
        SendOptions { timeout: Duration::from_secs(10), priority: Priority::High }
    }
}

/// A transfer or message that has begun. Dropping the handle does not cancel it.
#[derive(Debug)]
pub struct Handle {
    pub(crate) shared: Arc<Shared>,
    pub(crate) ticket: Ticket,
}

impl Handle {
    /// The outcome. None: it is not over.
    pub fn outcome(&self) -> Option<Result<(), Failure>> {
        self.shared.hub().hub.outcomes.of(self.ticket)
    }

    /// Waits until it is over. None: `timeout` passed first.
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Result<(), Failure>> {
        let mut hub = self.shared.hub();
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        self.shared.wait(&mut hub, deadline, |hub| hub.hub.outcomes.of(self.ticket))
    }

    /// The bytes that each carrier moved, by the carrier's name, as in [`crate::PathStatus`]. A part that was sent again over
    /// another path counts for the one over which it arrived. Empty before the transfer is over.
    pub fn carried(&self) -> Vec<(&'static str, u64)> {
        let hub = self.shared.hub();
        let carried = hub.hub.outcomes.carried(self.ticket);
        let named = |(carrier, bytes)| (hub.hub.outside.name_of(carrier), bytes);
        carried.into_iter().flat_map(|carried| carried.all()).map(named).collect()
    }

    /// Gives it up. Its memory belongs to it until [`Handle::wait`] says that it is over.
    pub fn cancel(&self) {
        let mut hub = self.shared.hub();
        let now = hub.hub.now();
        hub.hub.transfers.cancel(now, self.ticket);
        self.shared.run_pending(&mut hub);
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
        // Dropping the former waker may drop a task and all that it holds, so that happens without the lock.
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

/// The next message, made by [`crate::Engine::receiving`]. Resolves to None once the engine is closed and no message is left. It
/// may be polled again for the message after that.
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
        // Dropping the former waker may drop a task and all that it holds, so that happens without the lock.
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
