//! The client connections of one thread: finds those that keep the router waiting too long, and passes on that the proxy stops.
//!
//! One sweep a second checks all of them. A timer for each request, and a channel to each connection, would take more time than
//! the request itself. The sweep marks a late connection and wakes its task, which closes it.
//!
//! ```text
//!   Idle: at most 75 s --> Head: at most 10 s --> Body: each piece within `patience`, at BODY_RATE_MIN on average
//!     --> Answer: no limit while the client waits; it reads each piece within `patience` --> Idle ...
//! ```
//! A connection joins once its [first head](super::first_head) has arrived.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    net::IpAddr,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use hyper::body::{Body, Frame, SizeHint};
use tokio::time::sleep;

/// Longest time between two requests of a connection.
const IDLE_TIMEOUT: Duration = Duration::from_secs(75);
/// Longest time for a request's head.
pub(super) const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of a body that have to come per second on average, once the body has taken longer than one piece may.
pub(super) const BODY_RATE_MIN: u32 = 4096;
/// Period of the sweep over all connections.
const SWEEP_PERIOD: Duration = Duration::from_secs(1);

/// Step of a connection within a request, each with its own time limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// No request has begun.
    Idle,
    /// The rest of a request's head is to come.
    Head,
    /// More of a request's body is to come.
    Body,
    /// The client waits for its answer, or reads it.
    Answer,
}

/// All connections of a thread.
#[derive(Debug, Default)]
pub(super) struct Clients {
    all: RefCell<HashMap<u64, Rc<Client>>>,
    next: Cell<u64>,
    is_stopping: Cell<bool>,
}

/// One connection, shared by its task and the sweep.
#[derive(Debug)]
pub(super) struct Client {
    number: u64,
    ip: Option<IpAddr>,
    phase: Cell<Phase>,
    /// Sweeps since the phase began, or since its last progress.
    sweeps: Cell<u32>,
    /// Sweeps since the body began, and bytes that came since.
    body_sweeps: Cell<u32>,
    body_bytes: Cell<usize>,
    /// The phase has taken too long.
    is_late: Cell<bool>,
    /// The kernel takes no more of the answer until the client reads.
    is_full: Cell<bool>,
    is_stopping: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl Clients {
    /// Adds a connection in phase Head: its first head is in the kernel's buffer.
    pub(super) fn join(&self, ip: Option<IpAddr>) -> Rc<Client> {
        let number = self.next.get();
        self.next.set(number + 1);
        let client = Rc::new(Client {
            number,
            ip,
            phase: Cell::new(Phase::Head),
            sweeps: Cell::new(0),
            body_sweeps: Cell::new(0),
            body_bytes: Cell::new(0),
            is_late: Cell::new(false),
            is_full: Cell::new(false),
            is_stopping: self.is_stopping.clone(),
            waker: RefCell::default(),
        });
        self.all.borrow_mut().insert(number, Rc::clone(&client));
        client
    }

    /// Removes a connection that has ended.
    pub(super) fn leave(&self, client: &Client) {
        self.all.borrow_mut().remove(&client.number);
    }

    /// Makes all connections, also those that join later, take no further request.
    pub(super) fn stop(&self) {
        self.is_stopping.set(true);
        for client in self.all.borrow().values() {
            client.is_stopping.set(true);
            client.wake();
        }
    }

    /// Number of connections whose request is not completely answered.
    pub(super) fn busy(&self) -> usize {
        self.all
            .borrow()
            .values()
            .filter(|client| matches!(client.phase.get(), Phase::Body | Phase::Answer))
            .count()
    }

    /// Marks and wakes connections that are late. `patience` is how long a client may take to send a piece of a body, or to read
    /// one of an answer. Runs forever.
    pub(super) async fn sweep(&self, patience: Duration) {
        loop {
            sleep(SWEEP_PERIOD).await;
            for client in self.all.borrow().values() {
                let most = match client.phase.get() {
                    Phase::Idle => IDLE_TIMEOUT,
                    Phase::Head => HEAD_TIMEOUT,
                    Phase::Body => patience,
                    Phase::Answer if client.is_full.get() => patience,
                    Phase::Answer => continue,
                };
                client.sweeps.set(client.sweeps.get() + 1);
                if SWEEP_PERIOD * client.sweeps.get() > most || client.sweep_body(patience) {
                    client.is_late.set(true);
                    client.wake();
                }
            }
        }
    }
}

impl Clients {
    /// Closes the connection that has been without a request for longest, because another one needs its slot. Connections that
    /// have begun a head go before idle ones. Returns whether there was one.
    pub(super) fn close_idle(&self) -> bool {
        let all = self.all.borrow();
        let waiting = all.values().filter(|client| !client.is_late.get()).filter_map(|client| {
            let rank = match client.phase.get() {
                Phase::Head => 1,
                // Its last answer has been read to its end.
                Phase::Idle if !client.is_full() => 0,
                Phase::Idle | Phase::Body | Phase::Answer => return None,
            };
            Some((rank, client.sweeps.get(), client))
        });
        let Some((.., client)) = waiting.max_by_key(|(rank, sweeps, _)| (*rank, *sweeps)) else {
            return false;
        };
        client.is_late.set(true);
        client.wake();
        true
    }
}

impl Client {
    /// Sets the task to wake.
    pub(super) fn set_waker(&self, context: &Context<'_>) {
        let mut waker = self.waker.borrow_mut();
        if !waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            *waker = Some(context.waker().clone());
        }
    }

    fn wake(&self) {
        if let Some(waker) = &*self.waker.borrow() {
            waker.wake_by_ref();
        }
    }

    /// Address of the client, if known.
    pub(super) fn ip(&self) -> Option<IpAddr> {
        self.ip
    }

    /// Begins a request, whose head has arrived. When the guard is dropped, the connection is idle again.
    pub(super) fn begin_request(self: &Rc<Self>) -> Busy {
        self.enter(Phase::Answer);
        Busy(Rc::clone(self))
    }

    /// Starts the time limit of a head, whose first bytes have arrived.
    pub(super) fn begin_head(&self) {
        if self.phase.get() == Phase::Idle {
            self.enter(Phase::Head);
        }
    }

    /// Starts the time limits of the body.
    pub(super) fn begin_body(&self) {
        self.body_sweeps.set(0);
        self.body_bytes.set(0);
        self.enter(Phase::Body);
    }

    /// Counts bytes of the body.
    pub(super) fn count_body(&self, bytes: usize) {
        self.body_bytes.set(self.body_bytes.get() + bytes);
        self.sweeps.set(0);
    }

    /// Counts a sweep of the body. Returns whether the body comes too slowly on average.
    fn sweep_body(&self, patience: Duration) -> bool {
        if self.phase.get() != Phase::Body {
            return false;
        }
        self.body_sweeps.set(self.body_sweeps.get() + 1);
        let since = (SWEEP_PERIOD * self.body_sweeps.get()).saturating_sub(patience);
        self.body_bytes.get() as u64 <= u64::from(BODY_RATE_MIN) * since.as_secs() && !since.is_zero()
    }

    /// Ends the time limits of the body, which has arrived.
    pub(super) fn end_body(&self) {
        self.enter(Phase::Answer);
    }

    fn enter(&self, phase: Phase) {
        self.phase.set(phase);
        self.sweeps.set(0);
        self.is_late.set(false);
    }

    /// Notes that the kernel took a piece of an answer, or, if it `is_full`, takes no more.
    pub(super) fn note_write(&self, is_full: bool) {
        if self.is_full.replace(is_full) != is_full {
            self.sweeps.set(0);
            self.is_late.set(false);
        }
    }

    /// Whether the client waits for its answer, or for the rest of it.
    pub(super) fn is_waiting(&self) -> bool {
        self.phase.get() == Phase::Answer
    }

    /// Whether the client does not read its answer: the kernel takes no more of it.
    pub(super) fn is_full(&self) -> bool {
        self.is_full.get()
    }

    /// Whether the next request is overdue, or the client has not read its answer for too long.
    pub(super) fn is_silent_too_long(&self) -> bool {
        let is_full = self.is_full.get();
        self.is_late.get()
            && matches!((self.phase.get(), is_full), (Phase::Idle | Phase::Head, _) | (Phase::Answer, true))
    }

    /// Whether the rest of the body is overdue, or comes too slowly.
    pub(super) fn sends_too_slowly(&self) -> bool {
        self.is_late.get() && self.phase.get() == Phase::Body
    }

    /// Whether the connection takes no further request, because the proxy stops.
    pub(super) fn is_stopping(&self) -> bool {
        self.is_stopping.get()
    }
}

/// A request that is not completely answered. Drop it when the answer ends.
#[derive(Debug)]
pub(super) struct Busy(Rc<Client>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.enter(Phase::Idle);
    }
}

/// An answer on its way to a client. When it is dropped, the connection is idle.
#[derive(Debug)]
pub(super) struct Awaited<B> {
    body: B,
    _busy: Busy,
}

impl<B> Awaited<B> {
    pub(super) fn new(body: B, busy: Busy) -> Self {
        Self { body, _busy: busy }
    }
}

impl<B: Body + Unpin> Body for Awaited<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
