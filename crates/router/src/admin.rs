//! The pages of the admin port: the live page, health, metrics, nodes, the last decisions. They change nothing.

use std::{sync::Arc, time::Instant};

use axum::{
    Json, Router,
    extract::{Query, State, rejection::QueryRejection},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::get,
};
use kvlane_door::{After, CONTENT_TYPE};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    health::{ready_nodes, state},
    knowledge::Reason,
    live::{Live, PAGE},
    metrics,
    role_records::score_page,
    schedule::{Condition, Role},
    shared::Shared,
};

/// Decisions that the page shows if its query sets no `limit`.
const DECISIONS_SHOWN: usize = 100;

/// The admin port's pages, by path.
pub fn pages(shared: Arc<Shared>, live: Arc<Live>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics_answer))
        .route("/nodes", get(nodes))
        .route("/decisions", get(decisions))
        .with_state(Arc::clone(&shared))
        .route("/live", get(figures))
        .with_state((shared, live))
        .merge(PAGE.at_root())
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
    let (code, status) = state(&shared);
    let ready = ready_nodes(&shared);
    (code, Json(json!({ "status": status, "nodes_ready": ready, "version": env!("CARGO_PKG_VERSION") })))
}

async fn metrics_answer(State(shared): State<Arc<Shared>>) -> impl IntoResponse {
    ([("content-type", CONTENT_TYPE)], metrics::page(&shared))
}

async fn nodes(State(shared): State<Arc<Shared>>) -> Json<Value> {
    let knowledge = &shared.knowledge;
    let (scores, now) = (shared.scores(), Instant::now());
    let nodes: Vec<Value> = shared.with_scheduler(|scheduler| {
        scheduler
            .nodes()
            .map(|(id, node)| {
                let status = knowledge.status(id);
                let prediction = scheduler.prediction(&node.class).map(|prediction| {
                    json!({
                        "first_tokens": prediction.observations(),
                        "mean_error": prediction.error(),
                        "is_used": prediction.is_calibrated(),
                    })
                });
                let (load_share, is_learned) = scheduler.load_share(&node.class);
                let pool = node
                    .pool()
                    .map(|name| json!({ "name": name, "load_share": load_share, "is_learned": is_learned }));
                json!({
                    "id": id.to_string(),
                    "node": &*node.name,
                    "role": node.role.name(),
                    "next_role": node.next_role.map(Role::name),
                    "role_may_change": node.may_flip,
                    "load": score_page(scores.get(&id).copied()),
                    "group": &*node.group,
                    "class": &*node.class,
                    "host": &*node.host,
                    "prediction": prediction,
                    "pool": pool,
                    "connector": node.connector.name(),
                    "connector_address": node.connector_address.as_deref(),
                    "known_by": node.known_by.names(),
                    "state": node.state.name(),
                    "left_alone": node.breaker.is_open(),
                    "condition": Condition::of(node, now),
                    "models": node.models.iter().map(|model| &**model).collect::<Vec<_>>(),
                    "requests": node.load.own_requests,
                    "prefill_tokens": node.load.own_tokens,
                    "other_requests": node.load.other_requests,
                    "cache_used_percent": node.load.cache_percent,
                    "prefixes": status.grade.name(),
                    "prefixes_reason": status.reason.map(Reason::name),
                    "prefixes_why": status.reason.map(Reason::sentence),
                    "block_size": status.blocks.block_size,
                    "blocks_stored": status.blocks.stored,
                    "blocks_removed": status.blocks.removed,
                    "blocks_unattached": status.blocks.unattached,
                })
            })
            .collect()
    });
    Json(json!({ "nodes": nodes }))
}

#[derive(Debug, Deserialize)]
struct Shown {
    limit: Option<usize>,
}

async fn decisions(
    State(shared): State<Arc<Shared>>,
    shown: Result<Query<Shown>, QueryRejection>,
) -> (StatusCode, Json<Value>) {
    match shown {
        Ok(Query(Shown { limit })) => {
            (StatusCode::OK, Json(shared.decisions_page(limit.unwrap_or(DECISIONS_SHOWN))))
        }
        Err(_) => {
            let sentence = "limit is no number: ask for /decisions?limit=100, or without a query";
            (StatusCode::BAD_REQUEST, Json(json!({ "error": sentence })))
        }
    }
}
