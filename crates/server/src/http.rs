//! Health and metrics over HTTP, in one thread. Anybody who reaches the port may read them, and nothing can be changed there.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
    thread::JoinHandle,
};

use axum::{
    Json, Router,
    extract::{Request, State},
    http::StatusCode,
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::get,
};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::{Shared, host, listen::ListenError};

/// The serving thread.
#[derive(Debug)]
pub(crate) struct Http {
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

/// Binds the port.
pub(crate) fn bind(at: SocketAddr) -> Result<TcpListener, ListenError> {
    let refused = |error| ListenError::Refused { address: format!("{at} (--http)"), error };
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
            tokio::select! {
                served = axum::serve(listener, router(shared, names)).into_future() => served,
                _ = stopped => Ok(()),
            }
        });
        if let Err(error) = served {
            tracing::error!(%error, "HTTP ended");
        }
    })?;
    Ok(Http { stop, thread })
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
    let reasons = shared.unreachable.reasons();
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
    ([("content-type", "text/plain; version=0.0.4")], shared.metrics.render(&shared))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
