//! Health and metrics over HTTP, in one thread. Anybody who reaches the port may read them, and nothing can be changed there.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
    thread::JoinHandle,
    time::Duration,
};

use axum::{
    Json, Router,
    extract::{Request, State},
    http::StatusCode,
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::get,
};
use hyper::{
    server::conn::http1,
    service::{Service, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::{
    door::ListenError,
    host,
    http_waiting::{Place, Waiting},
    metrics::page::page,
    shared::Shared,
};

/// Connections at the same time. Prometheus and probes need one each, for milliseconds.
pub(crate) const CONNECTIONS_MAX: usize = 64;
/// A request's headers have to come within this time.
const HEADER_TIMEOUT: Duration = Duration::from_secs(2);
/// And the answer has to be taken within this time, counted from the connection's start.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest headers.
const HEADER_BYTES_MAX: usize = 16 << 10;
/// What is said of a socket that engines cannot reach.
const UNREACHABLE: &str = "socket unreachable: see the daemon's log";
/// After the kernel could not give a connection.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// The serving thread.
#[derive(Debug)]
pub(crate) struct Http {
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

/// Binds the port.
pub(crate) fn bind(at: SocketAddr) -> Result<TcpListener, ListenError> {
    let refused = |error: io::Error| match error.kind() {
        io::ErrorKind::AddrInUse => ListenError::PortInUse { flag: "--http", at },
        _ => ListenError::Refused { address: format!("{at} (--http)"), error },
    };
    let listener = TcpListener::bind(at).map_err(refused)?;
    listener.set_nonblocking(true).map_err(refused)?;
    Ok(listener)
}

/// Serves until stopped, under the host's addresses, `localhost` and `names`.
pub(crate) fn serve(listener: TcpListener, names: Vec<String>, shared: Arc<Shared>) -> io::Result<Http> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (stop, stopped) = oneshot::channel::<()>();
    let thread = std::thread::Builder::new().name("kvlane-http".into()).spawn(move || {
        let served = runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            let router = router(Arc::clone(&shared), names);
            tokio::select! {
                () = accept(&listener, &shared, &router) => Ok(()),
                _ = stopped => Ok::<(), io::Error>(()),
            }
        });
        if let Err(error) = served {
            tracing::error!(%error, "HTTP ended");
        }
    })?;
    Ok(Http { stop, thread })
}

async fn accept(listener: &tokio::net::TcpListener, shared: &Shared, router: &Router) {
    let waiting = Arc::new(Waiting::default());
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                // Without room it is closed, unless another one has not said yet what it wants.
                let Some(slot) = shared.http_slots.take().or_else(|| waiting.close_oldest()) else {
                    continue;
                };
                let (place, number) = (Place::new(slot), waiting.number());
                let answer = answer_one(stream, router.clone(), Arc::clone(&waiting), number);
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
async fn answer_one(stream: tokio::net::TcpStream, router: Router, waiting: Arc<Waiting>, number: u64) {
    let router = TowerToHyperService::new(router);
    let service = service_fn(move |request| {
        // It is called once all headers are there.
        waiting.remove(number);
        router.call(request)
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

impl Http {
    pub(crate) fn stop(self) {
        // The receiver is gone when serving ended by itself.
        let _ = self.stop.send(());
        let _ = self.thread.join();
    }
}

fn router(shared: Arc<Shared>, names: Vec<String>) -> Router {
    let names = Arc::new(names);
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .layer(middleware::from_fn_with_state(names, only_for_us))
        .with_state(shared)
}

async fn only_for_us(State(names): State<Arc<Vec<String>>>, request: Request, next: Next) -> Response {
    match host::check(request.version(), request.uri(), request.headers(), &names) {
        Ok(()) => next.run(request).await,
        Err((status, sentence)) => (status, Json(json!({ "error": sentence }))).into_response(),
    }
}

async fn health(State(shared): State<Arc<Shared>>) -> (StatusCode, Json<Value>) {
    // Whoever asks here may be a stranger: the sentences have paths and users, and are in the log.
    let reasons: &[&str] = if shared.unreachable.is_empty() { &[] } else { &[UNREACHABLE] };
    let (code, status) = if shared.is_stopping() {
        (StatusCode::SERVICE_UNAVAILABLE, "stopping")
    } else if !reasons.is_empty() {
        (StatusCode::SERVICE_UNAVAILABLE, "engines cannot connect")
    } else {
        (StatusCode::OK, "ok")
    };
    let body = json!({
        "status": status,
        "reasons": reasons,
        "version": env!("CARGO_PKG_VERSION"),
        "boot_id": hex(&shared.boot),
    });
    (code, Json(body))
}

async fn metrics(State(shared): State<Arc<Shared>>) -> impl IntoResponse {
    ([("content-type", "text/plain; version=0.0.4")], page(&shared))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
