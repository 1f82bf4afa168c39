//! The serving thread.

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
    waiting::{Place, Waiting},
};

/// Connections at the same time. Prometheus and probes need one each, for milliseconds.
pub const CONNECTIONS_MAX: usize = 64;
/// A request's headers have to come within this time.
const HEADER_TIMEOUT: Duration = Duration::from_secs(2);
/// And the answer has to be taken within this time, counted from the connection's start.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest headers.
const HEADER_BYTES_MAX: usize = 16 << 10;
/// After the kernel could not give a connection.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Serves pages until it is stopped.
#[derive(Debug)]
pub struct Pages(RuntimeThread);

impl Pages {
    /// Serves these pages, under the host's addresses, `localhost` and `names`, to as many at a time as there are `slots`.
    ///
    /// # Errors
    /// The kernel gives no thread or no descriptor.
    pub fn serve(listener: TcpListener, pages: Router, names: Names, slots: Arc<Slots>) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let pages = pages.layer(middleware::from_fn_with_state(Arc::new(names), only_for_us));
        let serve = move || async move {
            match tokio::net::TcpListener::from_std(listener) {
                Ok(listener) => accept(&listener, &slots, &pages).await,
                Err(error) => tracing::error!(%error, "HTTP ended"),
            }
        };
        Ok(Self(RuntimeThread::start("kvlane-http", serve)?))
    }

    /// Ends it.
    pub fn stop(self) {
        self.0.stop();
    }
}

async fn accept(listener: &tokio::net::TcpListener, slots: &Arc<Slots>, pages: &Router) {
    let waiting = Arc::new(Waiting::default());
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                // Without room it is closed, unless another one has not said yet what it wants.
                let Some(slot) = slots.take().or_else(|| waiting.close_oldest()) else {
                    continue;
                };
                let (place, number) = (Place::new(slot), waiting.number());
                let answer = answer_one(stream, pages.clone(), Arc::clone(&waiting), number);
                let (held, all) = (Arc::clone(&place), Arc::clone(&waiting));
                let task = tokio::spawn(async move {
                    // Whoever does not take the answer in time is cut off as well.
                    let _ = tokio::time::timeout(CONNECTION_TIMEOUT, answer).await;
                    all.remove(number);
                    drop(held);
                });
                // Tasks run in this thread: it has not begun yet.
                waiting.add(number, place, task.abort_handle());
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept an HTTP connection");
                tokio::time::sleep(ACCEPT_RETRY).await;
            }
        }
    }
}

/// One request a connection: nobody is idle on one.
async fn answer_one(stream: tokio::net::TcpStream, pages: Router, waiting: Arc<Waiting>, number: u64) {
    let pages = TowerToHyperService::new(pages);
    let service = service_fn(move |request| {
        // It is called once all headers are there.
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
        tracing::debug!(%error, "an HTTP connection ended");
    }
}

async fn only_for_us(State(names): State<Arc<Names>>, request: Request, next: Next) -> Response {
    match names.check(request.version(), request.uri(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err((status, sentence)) => (status, Json(json!({ "error": sentence }))).into_response(),
    }
}
