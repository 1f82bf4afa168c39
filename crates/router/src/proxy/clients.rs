//! Clients' connections of one thread: how long each has kept us waiting, and word that the proxy stops.
//!
//! One sweep a second looks at all of them. A timer for each request, and a channel that each connection listens to, would take
//! more time than the request itself.
//!
//! ```text
//!   Idle (for at most 75 s) --> sends a Head (within 10 s) --> sends its Body (each piece in time, and not too slowly)
//!     --> Waits for us, and reads in time --> Idle ...
//! ```
//! A connection is here once its [first head](super::first_head) has come.

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
/// Bytes of a body that have to come per second on average, after the time that one piece may take.
pub(super) const BODY_RATE_MIN: u32 = 4096;
/// How often all are looked at.
const SWEEP_PERIOD: Duration = Duration::from_secs(1);

/// What a connection waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Waits for a request.
    Idle,
    /// Waits for the rest of a request's head.
    Head,
    /// For more of a request's body.
    Body,
    /// For its answer, or for the client to read it.
    Waits,
}

/// All connections of a thread.
#[derive(Debug, Default)]
pub(super) struct Clients {
    all: RefCell<HashMap<u64, Rc<Client>>>,
    next: Cell<u64>,
    is_stopping: Cell<bool>,
}

/// One connection.
#[derive(Debug)]
pub(super) struct Client {
    number: u64,
    ip: Option<IpAddr>,
    phase: Cell<Phase>,
    /// Sweeps since something came of it.
    sweeps: Cell<u32>,
    /// Sweeps since the body began, and bytes that came since.
    body_sweeps: Cell<u32>,
    body_bytes: Cell<usize>,
    is_late: Cell<bool>,
    /// The kernel takes no more of its answer until it reads.
    is_full: Cell<bool>,
    is_stopping: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl Clients {
    /// A connection comes.
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

    /// A connection goes.
    pub(super) fn leave(&self, client: &Client) {
        self.all.borrow_mut().remove(&client.number);
    }

    /// Tells all that they take no further request.
    pub(super) fn stop(&self) {
        self.is_stopping.set(true);
        for client in self.all.borrow().values() {
            client.is_stopping.set(true);
            client.wake();
        }
    }

    /// Number of connections with a request that is not yet answered completely.
    pub(super) fn busy(&self) -> usize {
        self.all
            .borrow()
            .values()
            .filter(|client| matches!(client.phase.get(), Phase::Body | Phase::Waits))
            .count()
    }

    /// Tells those that are late. `patience` is how long a client may take to send a piece of a body, or to read one of an
    /// answer. For ever.
    pub(super) async fn sweep(&self, patience: Duration) {
        loop {
            sleep(SWEEP_PERIOD).await;
            for client in self.all.borrow().values() {
                let most = match client.phase.get() {
                    Phase::Idle => IDLE_TIMEOUT,
                    Phase::Head => HEAD_TIMEOUT,
                    Phase::Body => patience,
                    Phase::Waits if client.is_full.get() => patience,
                    Phase::Waits => continue,
                };
                client.sweeps.set(client.sweeps.get() + 1);
                if SWEEP_PERIOD * client.sweeps.get() > most || client.is_body_too_slow(patience) {
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
                Phase::Idle | Phase::Body | Phase::Waits => return None,
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
    /// Remembers whom to wake.
    pub(super) fn is_polled(&self, context: &Context<'_>) {
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

    /// The head of a request has come. Until the guard is dropped, the client waits for us.
    pub(super) fn asked(self: &Rc<Self>) -> Busy {
        self.enter(Phase::Waits);
        Busy(Rc::clone(self))
    }

    /// Bytes of a head have come; starts the time limit for the rest.
    pub(super) fn sends_head(&self) {
        if self.phase.get() == Phase::Idle {
            self.enter(Phase::Head);
        }
    }

    /// Starts the time limits of the body.
    pub(super) fn sends(&self) {
        self.body_sweeps.set(0);
        self.body_bytes.set(0);
        self.enter(Phase::Body);
    }

    /// Counts bytes of the body.
    pub(super) fn sent(&self, bytes: usize) {
        self.body_bytes.set(self.body_bytes.get() + bytes);
        self.sweeps.set(0);
    }

    /// Counts a sweep. Returns whether the body is slower than it has to be.
    fn is_body_too_slow(&self, patience: Duration) -> bool {
        if self.phase.get() != Phase::Body {
            return false;
        }
        self.body_sweeps.set(self.body_sweeps.get() + 1);
        let since = (SWEEP_PERIOD * self.body_sweeps.get()).saturating_sub(patience);
        self.body_bytes.get() as u64 <= u64::from(BODY_RATE_MIN) * since.as_secs() && !since.is_zero()
    }

    /// All of the body has come.
    pub(super) fn has_sent(&self) {
        self.enter(Phase::Waits);
    }

    fn enter(&self, phase: Phase) {
        self.phase.set(phase);
        self.sweeps.set(0);
        self.is_late.set(false);
    }

    /// The kernel has taken a piece of an answer, or takes no more.
    pub(super) fn wrote(&self, is_full: bool) {
        if self.is_full.replace(is_full) != is_full {
            self.sweeps.set(0);
            self.is_late.set(false);
        }
    }

    /// Whether the client waits for its answer, or for the rest of it.
    pub(super) fn waits(&self) -> bool {
        self.phase.get() == Phase::Waits
    }

    /// Whether the client does not read its answer: the kernel takes no more of it.
    pub(super) fn is_full(&self) -> bool {
        self.is_full.get()
    }

    /// Whether the next request does not come, or the client does not read its answer.
    pub(super) fn is_silent_too_long(&self) -> bool {
        let is_full = self.is_full.get();
        self.is_late.get()
            && matches!((self.phase.get(), is_full), (Phase::Idle | Phase::Head, _) | (Phase::Waits, true))
    }

    /// Whether the rest of a body does not come.
    pub(super) fn sends_too_slowly(&self) -> bool {
        self.is_late.get() && self.phase.get() == Phase::Body
    }

    /// Whether it shall take no further request.
    pub(super) fn is_stopping(&self) -> bool {
        self.is_stopping.get()
    }
}

/// A request that is not answered to its end.
#[derive(Debug)]
pub(super) struct Busy(Rc<Client>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.enter(Phase::Idle);
    }
}

/// An answer on its way to a client, which waits for us meanwhile.
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
