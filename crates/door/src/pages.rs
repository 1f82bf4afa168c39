//! Serves pages over HTTP/1 in one thread: one request a connection, few connections, each with deadlines.

use std::{io, net::TcpListener, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{Request, State},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use hyper::{
    server::conn::http1,
    service::{Service, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use serde_json::json;

use crate::{
    host::Names,
    runtime_thread::RuntimeThread,
    slots::Slots,
    waiting::{HeadlessConnections, HeldSlot},
};

/// Connections at the same time. Prometheus and probes need one each, for milliseconds.
pub const CONNECTIONS_MAX: usize = 64;
/// Time for the headers of a request to come.
const HEADER_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for the client to take the answer, counted from the connection's start.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);
/// Most bytes of a request's headers.
const HEADER_BYTES_MAX: usize = 16 << 10;
/// Pause after the kernel could not give a connection.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// The serving thread.
#[derive(Debug)]
pub struct Pages(RuntimeThread);

impl Pages {
    /// Serves these pages under the host's addresses, `localhost` and `names`. Each connection takes one of `slots`. The same
    /// thread calls `every_second`, which must not block.
    ///
    /// # Errors
    /// The kernel gives no thread or no descriptor.
    pub fn serve(
        listener: TcpListener,
        pages: Router,
        names: Names,
        slots: Arc<Slots>,
        every_second: impl FnMut() + Send + 'static,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let pages = pages.layer(middleware::from_fn_with_state(Arc::new(names), only_for_us));
        let serve = move || async move {
            match tokio::net::TcpListener::from_std(listener) {
                Ok(listener) => {
                    tokio::spawn(repeat(every_second));
                    accept(&listener, &slots, &pages).await;
                }
                // Log: health, metrics and pages are not served until a restart; all else works. Do: restart the
                // program, and report its log if it repeats.
                Err(error) => tracing::error!(%error, "HTTP server ended: its socket cannot be used"),
            }
        };
        Ok(Self(RuntimeThread::start("kvlane-http", serve)?))
    }

    /// Ends the thread, and all connections with it.
    pub fn stop(self) {
        self.0.stop();
    }
}

/// Calls `work` once a second. A call that comes late delays the later ones.
async fn repeat(mut work: impl FnMut()) {
    let mut second = tokio::time::interval(Duration::from_secs(1));
    second.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        second.tick().await;
        work();
    }
}

async fn accept(listener: &tokio::net::TcpListener, slots: &Arc<Slots>, pages: &Router) {
    let waiting = Arc::new(HeadlessConnections::default());
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                // Without a slot it is closed, unless another connection has not sent its request yet.
                let Some(slot) = slots.take().or_else(|| waiting.close_oldest()) else {
                    continue;
                };
                let (held_slot, number) = (HeldSlot::new(slot), waiting.number());
                let answer = answer_one(stream, pages.clone(), Arc::clone(&waiting), number);
                let (held, all) = (Arc::clone(&held_slot), Arc::clone(&waiting));
                let task = tokio::spawn(async move {
                    // A client that does not take the answer in time is cut off, too.
                    let _ = tokio::time::timeout(CONNECTION_TIMEOUT, answer).await;
                    all.remove(number);
                    drop(held);
                });
                // The task has not begun yet, because it runs in this thread.
                waiting.add(number, held_slot, task.abort_handle());
            }
            Err(error) => {
                // Log: the kernel refused a connection for health and metrics, mostly for lack of file
                // descriptors; the program tries again. Do: raise the limit of open files.
                tracing::warn!(%error, "cannot accept an HTTP connection");
                tokio::time::sleep(ACCEPT_RETRY).await;
            }
        }
    }
}

/// Answers the one request of a connection, which closes it. So no connection is idle.
async fn answer_one(
    stream: tokio::net::TcpStream,
    pages: Router,
    waiting: Arc<HeadlessConnections>,
    number: u64,
) {
    let pages = TowerToHyperService::new(pages);
    let service = service_fn(move |request| {
        // Called once all headers are there.
        waiting.remove(number);
        pages.call(request)
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(HEADER_BYTES_MAX)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = served.await {
        tracing::debug!(%error, "HTTP connection ended");
    }
}

async fn only_for_us(State(names): State<Arc<Names>>, request: Request, next: Next) -> Response {
    match names.check(request.version(), request.uri(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err((status, sentence)) => (status, Json(json!({ "error": sentence }))).into_response(),
    }
}
