//! The proxy's threads. Each accepts clients' connections and serves them on a runtime of its own.

use std::{
    cell::Cell,
    future::{Future, poll_fn},
    io,
    net::{SocketAddr, TcpListener},
    pin::pin,
    rc::Rc,
    sync::{Arc, atomic::Ordering},
    task::Poll,
    time::Duration,
};

use hyper::{Request, Version, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use kvlane_door::{HeldSlot, RuntimeThread};
use thiserror::Error;
use tokio::{
    net::TcpStream,
    sync::{OwnedSemaphorePermit, SemaphorePermit, watch},
    task::{JoinSet, spawn_local},
    time::{sleep, timeout},
};

use super::{
    answer::Problem,
    clients::{Awaited, Clients, HEAD_TIMEOUT},
    departure::Departure,
    first_head::{HeadSender, first_head},
    head_watch::{HeadWatch, WatchedConnection},
    idle::Upstreams,
    joined::Joined,
    service::answer,
};
use crate::shared::Shared;

/// Longest head of a request.
const HEADER_BYTES_MAX: usize = 64 << 10;
/// Connections that the kernel completes before the router accepts them. The kernel's default of 128 fills within milliseconds if
/// many clients connect at once, and then a client retries only after a second.
const BACKLOG: i32 = 4096;
/// Pause after a failed accept.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// The proxy could not start.
#[derive(Debug, Error)]
pub enum StartError {
    /// The listener cannot be used.
    #[error("cannot listen for clients: {0}")]
    Listener(io::Error),
    /// The kernel gives no thread, or no descriptors for its runtime.
    #[error("cannot start a thread of the proxy: {0}")]
    Thread(io::Error),
}

/// A running proxy.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    stop: Stop,
    threads: Vec<RuntimeThread>,
}

/// Stops a proxy from another thread. A further call may shorten the time to drain.
#[derive(Debug, Clone)]
pub struct Stop(watch::Sender<Option<Duration>>);

impl Stop {
    /// Stops accepting connections, and gives requests under way at most this time from now on. A longer time than before changes
    /// nothing.
    pub fn within(&self, drain: Duration) {
        self.0.send_if_modified(|given| {
            let is_sooner = given.is_none_or(|given| drain < given);
            if is_sooner {
                *given = Some(drain);
            }
            is_sooner
        });
    }
}

impl Proxy {
    /// Serves clients of this listener until it is stopped.
    ///
    /// # Errors
    /// The kernel gives no thread or no descriptor.
    pub fn start(listener: TcpListener, shared: &Arc<Shared>) -> Result<Self, StartError> {
        listener.set_nonblocking(true).map_err(StartError::Listener)?;
        rustix::net::listen(&listener, BACKLOG).map_err(|error| StartError::Listener(error.into()))?;
        let address = listener.local_addr().map_err(StartError::Listener)?;
        let (stop, stopped) = watch::channel(None);
        let mut threads = Vec::new();
        for number in 0..shared.settings.threads.max(1) {
            let listener = listener.try_clone().map_err(StartError::Listener)?;
            let (shared, stopped) = (Arc::clone(shared), stopped.clone());
            // `stopped` also says how long to drain, so the thread's own signal is not used.
            let serve = move |_| async move {
                if let Err(error) = serve(listener, shared, stopped).await {
                    // Log: a thread that serves clients ended, and clients of its connections are cut; others go
                    // on. Do: restart the router, and report its log.
                    tracing::error!(%error, "proxy thread ended");
                }
            };
            let thread = RuntimeThread::start_graceful(&format!("kvlane-proxy-{number}"), serve);
            threads.push(thread.map_err(StartError::Thread)?);
        }
        Ok(Self { address, stop: Stop(stop), threads })
    }

    /// A handle that stops the proxy, also while another thread waits in [`stop`](Self::stop).
    pub fn stopper(&self) -> Stop {
        self.stop.clone()
    }

    /// Address of the listener, with the port that the kernel chose.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts no more connections, waits at most this time for requests in progress, cuts the others, and joins the threads.
    pub fn stop(self, drain: Duration) {
        self.stop.within(drain);
        self.threads.into_iter().for_each(RuntimeThread::stop);
    }
}

async fn serve(
    listener: TcpListener,
    shared: Arc<Shared>,
    mut stopped: watch::Receiver<Option<Duration>>,
) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let (upstreams, clients) = (Upstreams::default(), Rc::new(Clients::default()));
    spawn_local(upstreams.clone().sweep());
    spawn_local({
        let (clients, patience) = (Rc::clone(&clients), shared.settings.client_timeout);
        async move { clients.sweep(patience).await }
    });
    spawn_local({
        let (shared, clients) = (Arc::clone(&shared), Rc::clone(&clients));
        async move { shared.connections.close_idle(|| clients.close_idle()).await }
    });
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
            _ = stopped.changed() => break,
        };
        match accepted {
            Ok((stream, _)) => {
                let slot = tokio::select! {
                    slot = shared.connections.take() => slot,
                    _ = stopped.changed() => break,
                };
                let Some(slot) = slot else { break };
                let headless = Headless::new(&shared, slot);
                let (number, slot) = (headless.number, Arc::clone(&headless.slot));
                let connection =
                    connection(stream, headless, stopped.clone(), upstreams.clone(), Rc::clone(&clients));
                let task = connections.spawn_local(connection);
                // All tasks run in this thread, so this one has not begun yet.
                shared.connections.headless.add(number, slot, task);
            }
            Err(error) => {
                // Log: the kernel refused a client's connection, mostly for lack of file descriptors; the router
                // tries again. Do: raise the limit of open files (ulimit -n, LimitNOFILE= of systemd).
                tracing::warn!(%error, "cannot accept a client connection");
                sleep(ACCEPT_RETRY).await;
            }
        }
    }
    drop(listener);
    clients.stop();
    tokio::select! {
        () = async { while connections.join_next().await.is_some() {} } => {}
        () = drain_time(&mut stopped) => drop(shared.cut.fetch_add(clients.busy(), Ordering::Relaxed)),
    }
    Ok(())
}

/// Waits until the time to drain is over. A later call may shorten it.
async fn drain_time(stopped: &mut watch::Receiver<Option<Duration>>) {
    loop {
        let drain = stopped.borrow_and_update().unwrap_or_default();
        tokio::select! {
            () = sleep(drain) => return,
            changed = stopped.changed() => if changed.is_err() { return },
        }
    }
}

/// Waits for the first head and, if a stranger sent it, for a permit to answer it. None if the connection is to be closed.
async fn admit<'s>(
    stream: &TcpStream,
    shared: &'s Shared,
    upstreams: &Upstreams,
    stopped: &mut watch::Receiver<Option<Duration>>,
) -> Option<Option<SemaphorePermit<'s>>> {
    match first_head(stream, upstreams, &shared.settings.keys, stopped).await? {
        HeadSender::Client => Some(None),
        HeadSender::Stranger => {
            let permit = timeout(HEAD_TIMEOUT, shared.connections.strangers.acquire()).await.ok()?;
            Some(permit.ok())
        }
    }
}

async fn connection(
    stream: TcpStream,
    headless: Headless,
    mut stopped: watch::Receiver<Option<Duration>>,
    upstreams: Upstreams,
    clients: Rc<Clients>,
) {
    let shared = Arc::clone(&headless.shared);
    let _open = OpenConnection::new(&shared);
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "client left before its first request");
        return;
    }
    let peer = stream.peer_addr().ok().map(|peer| peer.ip());
    let Some(_permit) = admit(&stream, &shared, &upstreams, &mut stopped).await else { return };
    let _slot = headless.keep_slot();
    let stream = Rc::new(stream);
    let mut departure = Departure::new(&stream);
    let client = clients.join(peer);
    let requests = Cell::new(0u64);
    // Whether an interim answer may be sent: an HTTP/1.1 request is in progress, and its answer has not begun.
    let may_probe = Cell::new(false);
    let watch = HeadWatch::new();
    let service = service_fn(|request: Request<Incoming>| {
        requests.set(requests.get() + 1);
        let busy = client.begin_request();
        let fault = watch.begin_request();
        may_probe.set(request.version() == Version::HTTP_11);
        let answering = answer(&shared, &upstreams, &client, request);
        let may_probe = &may_probe;
        async move {
            let answer = match fault {
                Some(fault) => Problem::bad_framing(fault).answer(),
                None => answering.await,
            };
            may_probe.set(false);
            Ok::<_, std::convert::Infallible>(answer.map(|body| Awaited::new(body, busy)))
        }
    });
    let serving = http1::Builder::new()
        // The sweep over `Clients` finds those that are late.
        .header_read_timeout(None)
        // `Departure` detects clients that have left.
        .half_close(true)
        .max_buf_size(HEADER_BYTES_MAX)
        .serve_connection(TokioIo::new(WatchedConnection::new(Joined(stream), &watch, &client)), service);
    let mut serving = pin!(serving);
    let mut is_shutting_down = false;
    let served = poll_fn(|context| {
        client.set_waker(context);
        // Polled first, because a request that has just arrived must be served, not closed as silent.
        let mut served = serving.as_mut().poll(context);
        if served.is_pending() && client.is_stopping() && !is_shutting_down {
            is_shutting_down = true;
            serving.as_mut().graceful_shutdown();
            served = serving.as_mut().poll(context);
        }
        if served.is_pending() && client.is_silent_too_long() {
            return Poll::Ready(Ok(()));
        }
        let mut has_left = || departure.poll(context, may_probe.get() && !client.is_full()).is_ready();
        if served.is_pending() && client.is_waiting() && has_left() {
            tracing::debug!("client left before its answer ended");
            return Poll::Ready(Ok(()));
        }
        served
    })
    .await;
    clients.leave(&client);
    if let Err(error) = served {
        tracing::debug!(%error, requests = requests.get(), "client connection ended");
    }
}

/// A connection that has not sent a head. Until this is dropped, another connection may take its slot.
struct Headless {
    shared: Arc<Shared>,
    number: u64,
    slot: Arc<HeldSlot<OwnedSemaphorePermit>>,
}

impl Headless {
    fn new(shared: &Arc<Shared>, slot: OwnedSemaphorePermit) -> Self {
        let number = shared.connections.headless.number();
        Self { shared: Arc::clone(shared), number, slot: HeldSlot::new(slot) }
    }

    /// The head has arrived: no other connection may take the slot until the result is dropped.
    fn keep_slot(self) -> Arc<HeldSlot<OwnedSemaphorePermit>> {
        Arc::clone(&self.slot)
    }
}

impl Drop for Headless {
    fn drop(&mut self) {
        self.shared.connections.headless.remove(self.number);
    }
}

/// Counts an open connection until it is dropped.
struct OpenConnection(Arc<Shared>);

impl OpenConnection {
    fn new(shared: &Arc<Shared>) -> Self {
        shared.counters.connections.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(shared))
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.counters.connections.fetch_sub(1, Ordering::Relaxed);
    }
}
