//! Health, metrics and admin over HTTP, in one thread.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
    thread::JoinHandle,
};

use axum::{
    Json, Router,
    extract::{ConnectInfo, Path, Request, State},
    http::StatusCode,
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{delete, get},
};
use kvlane_block::Namespace;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::{Shared, listen::ListenError, status};

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

/// Serves until stopped.
pub(crate) fn serve(listener: TcpListener, shared: Arc<Shared>) -> io::Result<Http> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (stop, stopped) = oneshot::channel::<()>();
    let thread = std::thread::Builder::new().name("kvlane-http".into()).spawn(move || {
        let served = runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            let app = router(shared).into_make_service_with_connect_info::<SocketAddr>();
            tokio::select! {
                served = axum::serve(listener, app).into_future() => served,
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

fn router(shared: Arc<Shared>) -> Router {
    let admin = Router::new()
        .route("/admin/status", get(admin_status))
        .route("/admin/sessions", get(admin_sessions))
        .route("/admin/namespaces", get(admin_namespaces))
        .route("/admin/namespaces/{namespace}", delete(drop_namespace))
        .layer(middleware::from_fn(loopback_only));
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .merge(admin)
        .with_state(shared)
}

async fn loopback_only(ConnectInfo(peer): ConnectInfo<SocketAddr>, request: Request, next: Next) -> Response {
    if peer.ip().to_canonical().is_loopback() {
        return next.run(request).await;
    }
    let sentence = format!("admin calls are served to this host only, not to {}", peer.ip());
    (StatusCode::FORBIDDEN, Json(json!({ "error": sentence }))).into_response()
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

async fn admin_status(State(shared): State<Arc<Shared>>) -> Json<Value> {
    let status = status::collect(&shared);
    Json(json!({
        "version": status.version,
        "uptime_seconds": status.uptime_ms as f64 / 1e3,
        "pool_bytes": status.pool_bytes,
        "used_bytes": status.used_bytes,
        "page_size": status.page_size,
        "blocks": status.blocks,
        "leased_blocks": status.leased_blocks,
        "claimed_blocks": status.claimed_blocks,
        "sessions": status.sessions.len(),
        "namespaces": status.namespaces.len(),
    }))
}

async fn admin_sessions(State(shared): State<Arc<Shared>>) -> Json<Value> {
    let sessions = status::collect(&shared).sessions.into_iter().map(|session| {
        json!({
            "session": session.session_id,
            "engine": session.engine_id,
            "role": session.role,
            "pid": session.pid,
            "client": session.client,
            "silent_seconds": session.silent_ms as f64 / 1e3,
            "save_method": session.method,
            "save_method_reason": session.reason,
        })
    });
    Json(sessions.collect())
}

async fn admin_namespaces(State(shared): State<Arc<Shared>>) -> Json<Value> {
    let namespaces = shared.store.spaces().into_iter().map(|space| {
        json!({
            "namespace": space.namespace.to_string(),
            "name": space.name,
            "shards": space.shards,
            "blocks": space.blocks,
            "bytes": space.bytes,
            "hit_blocks": space.hit_blocks,
            "missed_blocks": space.missed_blocks,
        })
    });
    Json(namespaces.collect())
}

async fn drop_namespace(State(shared): State<Arc<Shared>>, Path(name): Path<String>) -> Response {
    let error = |code, sentence: String| (code, Json(json!({ "error": sentence }))).into_response();
    let Some(namespace) = parse_hex(&name) else {
        return error(
            StatusCode::BAD_REQUEST,
            format!("'{name}' is no namespace: 32 hexadecimal digits are wanted"),
        );
    };
    // The SSD may have blocks of engines that have not come back yet.
    let is_known = shared.ssd.as_ref().is_some_and(|ssd| ssd.knows(&namespace))
        || shared.store.spaces().iter().any(|space| space.namespace == namespace);
    if !is_known {
        return error(StatusCode::NOT_FOUND, format!("namespace {namespace} does not exist"));
    }
    let dropped = shared.store.drop_namespace(namespace);
    tracing::info!(%namespace, blocks = dropped.blocks, "namespace dropped");
    if let Err(reason) = dropped.below {
        let sentence = format!("namespace {namespace} was dropped from RAM, but {reason}");
        return error(StatusCode::INTERNAL_SERVER_ERROR, sentence);
    }
    Json(json!({ "dropped_blocks": dropped.blocks })).into_response()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn parse_hex(text: &str) -> Option<Namespace> {
    let mut namespace = [0; 16];
    if text.len() != 32 || !text.is_ascii() {
        return None;
    }
    for (byte, pair) in namespace.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(Namespace(namespace))
}
