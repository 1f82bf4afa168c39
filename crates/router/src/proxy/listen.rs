//! Threads that take clients' connections.

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
use kvlane_door::{Place, RuntimeThread};
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
    first_head::{First, first_head},
    head_watch::{HeadWatch, Watched},
    idle::Upstreams,
    joined::Joined,
    service::answer,
};
use crate::shared::Shared;

/// Longest headers of a request.
const HEADER_BYTES_MAX: usize = 64 << 10;
/// Connections that the kernel completes before the router accepts them. The kernel's default of 128 fills within milliseconds if
/// many clients connect at once, and then a client retries only after a second.
const BACKLOG: i32 = 4096;
/// After the kernel could not give a connection.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// The proxy could not start.
#[derive(Debug, Error)]
pub enum StartError {
    /// The listener cannot be used.
    #[error("cannot listen for clients: {0}")]
    Listener(io::Error),
    /// No thread, or no runtime for it.
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

/// Stops a proxy from another thread. The latest call counts.
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
            // The proxy's own stop comes with the time to drain.
            let serve = move |_| async move {
                if let Err(error) = serve(listener, shared, stopped).await {
                    tracing::error!(%error, "a thread of the proxy ended");
                }
            };
            let thread = RuntimeThread::start_graceful(&format!("kvlane-proxy-{number}"), serve);
            threads.push(thread.map_err(StartError::Thread)?);
        }
        Ok(Self { address, stop: Stop(stop), threads })
    }

    /// Stops the proxy while another thread waits for its end.
    pub fn stopper(&self) -> Stop {
        self.stop.clone()
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes no connections any more, waits until what is under way has ended, but no longer than this, and ends.
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
                let (number, place) = (headless.number, Arc::clone(&headless.place));
                let connection =
                    connection(stream, headless, stopped.clone(), upstreams.clone(), Rc::clone(&clients));
                let task = connections.spawn_local(connection);
                // All tasks run in this thread, so this one has not begun yet.
                shared.connections.headless.add(number, place, task);
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a client's connection");
                sleep(ACCEPT_RETRY).await;
            }
        }
    }
    drop(listener);
    clients.stop();
    tokio::select! {
        () = async { while connections.join_next().await.is_some() {} } => {}
        () = drained(&mut stopped) => drop(shared.cut.fetch_add(clients.busy(), Ordering::Relaxed)),
    }
    Ok(())
}

/// Waits until the time to drain is over. A later call may shorten it.
async fn drained(stopped: &mut watch::Receiver<Option<Duration>>) {
    loop {
        let drain = stopped.borrow_and_update().unwrap_or_default();
        tokio::select! {
            () = sleep(drain) => return,
            changed = stopped.changed() => if changed.is_err() { return },
        }
    }
}

/// Waits for the first head, and for a permit to answer it if a stranger sent it. None if the connection is to be closed.
async fn turn<'s>(
    stream: &TcpStream,
    shared: &'s Shared,
    upstreams: &Upstreams,
    stopped: &mut watch::Receiver<Option<Duration>>,
) -> Option<Option<SemaphorePermit<'s>>> {
    match first_head(stream, upstreams, &shared.settings.keys, stopped).await? {
        First::OfClient => Some(None),
        First::OfStranger => {
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
    let _counted = Counted::new(&shared);
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a client has left at once");
        return;
    }
    let peer = stream.peer_addr().ok().map(|peer| peer.ip());
    let Some(_turn) = turn(&stream, &shared, &upstreams, &mut stopped).await else { return };
    let _place = headless.has_head();
    let stream = Rc::new(stream);
    let mut departure = Departure::new(&stream);
    let client = clients.join(peer);
    let asked = Cell::new(0u64);
    // Whether an interim answer may be sent: an HTTP/1.1 request is under way, and its answer has not begun.
    let may_ask = Cell::new(false);
    let watch = HeadWatch::new();
    let service = service_fn(|request: Request<Incoming>| {
        asked.set(asked.get() + 1);
        let busy = client.asked();
        let fault = watch.request();
        may_ask.set(request.version() == Version::HTTP_11);
        let answering = answer(&shared, &upstreams, &client, request);
        let may_ask = &may_ask;
        async move {
            let answer = match fault {
                Some(fault) => Problem::bad_framing(fault).answer(),
                None => answering.await,
            };
            may_ask.set(false);
            Ok::<_, std::convert::Infallible>(answer.map(|body| Awaited::new(body, busy)))
        }
    });
    let serving = http1::Builder::new()
        // Our own clock says who is late.
        .header_read_timeout(None)
        // Our own watch detects clients that have left.
        .half_close(true)
        .max_buf_size(HEADER_BYTES_MAX)
        .serve_connection(TokioIo::new(Watched::new(Joined(stream), &watch, &client)), service);
    let mut serving = pin!(serving);
    let mut is_told_to_stop = false;
    let served = poll_fn(|context| {
        client.is_polled(context);
        // Poll first: a request that came in this turn must be served, not closed as silent.
        let mut served = serving.as_mut().poll(context);
        if served.is_pending() && client.is_stopping() && !is_told_to_stop {
            is_told_to_stop = true;
            serving.as_mut().graceful_shutdown();
            served = serving.as_mut().poll(context);
        }
        if served.is_pending() && client.is_silent_too_long() {
            return Poll::Ready(Ok(()));
        }
        let mut has_left = || departure.poll(context, may_ask.get() && !client.is_full()).is_ready();
        if served.is_pending() && client.waits() && has_left() {
            tracing::debug!("a client has left");
            return Poll::Ready(Ok(()));
        }
        served
    })
    .await;
    clients.leave(&client);
    if let Err(error) = served {
        tracing::debug!(%error, requests = asked.get(), "a client's connection ended");
    }
}

/// A connection that has not sent a head. Until this is dropped, another connection may take its slot.
struct Headless {
    shared: Arc<Shared>,
    number: u64,
    place: Arc<Place<OwnedSemaphorePermit>>,
}

impl Headless {
    fn new(shared: &Arc<Shared>, slot: OwnedSemaphorePermit) -> Self {
        let number = shared.connections.headless.number();
        Self { shared: Arc::clone(shared), number, place: Place::new(slot) }
    }

    /// The head has come. The connection keeps its slot until the result is dropped.
    fn has_head(self) -> Arc<Place<OwnedSemaphorePermit>> {
        Arc::clone(&self.place)
    }
}

impl Drop for Headless {
    fn drop(&mut self) {
        self.shared.connections.headless.remove(self.number);
    }
}

/// Counts an open connection.
struct Counted(Arc<Shared>);

impl Counted {
    fn new(shared: &Arc<Shared>) -> Self {
        shared.counters.connections.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(shared))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.counters.connections.fetch_sub(1, Ordering::Relaxed);
    }
}
