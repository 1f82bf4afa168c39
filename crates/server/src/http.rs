//! The live page, health and metrics over HTTP. Any peer that reaches the port may read them, and can change nothing.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
};

use axum::{
    Json, Router,
    extract::{Query, State, rejection::QueryRejection},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::get,
};
use kvlane_door::{After, CONTENT_TYPE, Names, Pages};
use serde_json::{Value, json};

use crate::{
    door::ListenError,
    health::{hex, state},
    live::{Live, PAGE},
    metrics::page::page,
    shared::Shared,
};

/// The reason at /health for a socket that engines cannot reach.
const UNREACHABLE: &str = "socket unreachable: see the daemon's log";

/// Binds the port, without serving it yet.
pub(crate) fn bind(at: SocketAddr) -> Result<TcpListener, ListenError> {
    TcpListener::bind(at).map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => ListenError::PortInUse { flag: "--http", at },
        _ => ListenError::Refused { address: format!("{at} (--http)"), error },
    })
}

/// Serves until stopped, under the host's addresses, `localhost` and `names`.
pub(crate) fn serve(listener: TcpListener, names: Vec<String>, shared: Arc<Shared>) -> io::Result<Pages> {
    let (slots, live) = (Arc::clone(&shared.http_slots), Live::new());
    let mut sampler = live.sampler(Arc::clone(&shared));
    let pages = Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .with_state(Arc::clone(&shared))
        .route("/live", get(figures))
        .with_state((shared, live))
        .merge(PAGE.at_root());
    let names = Names { program: "daemon", flag: "--http-host", given: names };
    Pages::serve(listener, pages, names, slots, move || sampler.sample())
}

async fn figures(
    State((shared, live)): State<(Arc<Shared>, Arc<Live>)>,
    after: Result<Query<After>, QueryRejection>,
) -> Response {
    match after {
        Ok(Query(After { after })) => Json(live.figures(&shared, after)).into_response(),
        Err(_) => After::refused().into_response(),
    }
}

async fn health(State(shared): State<Arc<Shared>>) -> (StatusCode, Json<Value>) {
    // The peer may be a stranger, so the sentences with paths and users stand only in the log.
    let reasons: &[&str] = if shared.unreachable.is_empty() { &[] } else { &[UNREACHABLE] };
    let (code, status) = state(&shared);
    let body = json!({
        "status": status,
        "reasons": reasons,
        "version": env!("CARGO_PKG_VERSION"),
        "boot_id": hex(&shared.boot),
    });
    (code, Json(body))
}

async fn metrics(State(shared): State<Arc<Shared>>) -> impl IntoResponse {
    ([("content-type", CONTENT_TYPE)], page(&shared))
}
