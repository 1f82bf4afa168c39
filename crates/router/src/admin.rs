//! What the admin port shows: health, metrics, nodes, the last decisions. Nothing can be changed there.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use axum::{
    Json, Router,
    extract::{Query, State},
    http::StatusCode,
    response::IntoResponse,
    routing::get,
};
use kvlane_door::{MetricKind, escape_label, write_metric};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    balance::{Balancer, Balancers, Group, Indicators},
    beats_refused::BeatRefused,
    histogram::write_histogram,
    knowledge::{Reason, Status},
    metric::{Metric, Source, each, of_node, total},
    request_rows,
    role_records::{Records, score_page},
    schedule::{Condition, Node, NodeId, NodeState, Role},
    shared::Shared,
};

/// Decisions that are shown where nobody says how many.
const DECISIONS_SHOWN: usize = 100;

/// All metrics: those below, and those of requests (request_rows.rs).
pub fn metrics() -> impl Iterator<Item = &'static Metric> {
    METRICS.iter().chain(request_rows::METRICS)
}

/// All metrics but those of [requests](request_rows).
const METRICS: &[Metric] = &[
    total(
        "kvlane_route_refused_total",
        MetricKind::Counter,
        "Requests that no node was there for.",
        |shared| shared.counters.refused.load(Ordering::Relaxed),
    ),
    total(
        "kvlane_route_shed_total",
        MetricKind::Counter,
        "Requests that were refused with 429, since all engines were overloaded.",
        |shared| shared.counters.shed.load(Ordering::Relaxed),
    ),
    total(
        "kvlane_route_not_handed_over_total",
        MetricKind::Counter,
        "Requests whose prefill node named nothing for the decode node, which then computes the prompt again.",
        |shared| shared.counters.not_handed_over.load(Ordering::Relaxed),
    ),
    total(
        "kvlane_route_left_total",
        MetricKind::Counter,
        "Legs that were cut short: their client left, or the other leg of a direct pair failed.",
        |shared| shared.counters.left.load(Ordering::Relaxed),
    ),
    total(
        "kvlane_route_other_role_total",
        MetricKind::Counter,
        "Requests that went to a node of another role, since none of the right one was left.",
        |shared| shared.counters.other_role.load(Ordering::Relaxed),
    ),
    total("kvlane_route_beats_total", MetricKind::Counter, "Beats and pings of nodes.", |shared| {
        shared.counters.beats.load(Ordering::Relaxed)
    }),
    Metric {
        name: "kvlane_route_beats_refused_total",
        kind: MetricKind::Counter,
        labels: "reason",
        help: "Beats and pings, and connections for them, that do not count.",
        source: Source::OfReason(|shared, reason| shared.counters.beats_refused.of(reason)),
    },
    total(
        "kvlane_route_names_failed_total",
        MetricKind::Counter,
        "Look-ups of names that failed; their nodes stay as they were.",
        |shared| shared.counters.names_failed.load(Ordering::Relaxed),
    ),
    total(
        "kvlane_route_control",
        MetricKind::Gauge,
        "Whether `kvlane route list` and the like reach this router over its socket: 1, or 0.",
        |shared| shared.counters.control.load(Ordering::Relaxed),
    ),
    total(
        "kvlane_route_body_bytes",
        MetricKind::Gauge,
        "Bytes of requests that are held: bodies, what the router knows of them, and answers of prefill engines.",
        |shared| shared.counters.body_bytes.load(Ordering::Relaxed),
    ),
    total("kvlane_route_connections", MetricKind::Gauge, "Clients' connections that are open.", |shared| {
        shared.counters.connections.load(Ordering::Relaxed)
    }),
    total(
        "kvlane_route_connections_displaced_total",
        MetricKind::Counter,
        "Connections without a request that were closed because a new one needed their slot.",
        Shared::displaced,
    ),
    total("kvlane_route_index_bytes", MetricKind::Gauge, "Memory of the index of prefixes.", |shared| {
        shared.with_scheduler(|scheduler| scheduler.index_bytes() as u64)
    }),
    of_node("kvlane_route_node_ready", "Whether the node gets requests: 1, or 0.", |node| {
        u64::from(node.state == NodeState::Ready)
    }),
    of_node("kvlane_route_node_open", "Whether the node is left alone since it failed: 1, or 0.", |node| {
        u64::from(node.breaker.is_open())
    }),
    of_node(
        "kvlane_route_node_hand_offs_stopped",
        "Whether prompts go to decode nodes alone, since this prefill node handed nothing over: 1, or 0.",
        |node| u64::from(node.hand_offs.is_stopped()),
    ),
    of_node("kvlane_route_node_requests", "Requests of this router that the node has.", |node| {
        node.load.own_requests
    }),
    of_node(
        "kvlane_route_node_prefill_tokens",
        "Tokens of them that are still to be prefilled, estimated.",
        |node| node.load.own_tokens,
    ),
    of_node(
        "kvlane_route_node_other_requests",
        "Requests of others than this router that the node has, by its own metrics.",
        |node| node.load.other_requests,
    ),
    of_node("kvlane_route_node_load_known", "Whether the node's own metrics can be read: 1, or 0.", |node| {
        u64::from(node.load.cache_percent.is_some())
    }),
    of_node(
        "kvlane_route_node_cache_used_percent",
        "Part of the node's KV cache that running requests use, by its own metrics.",
        |node| node.load.cache_percent.unwrap_or(0),
    ),
    each(
        "kvlane_route_node_knowledge",
        MetricKind::Gauge,
        "node, role, knowledge, reason",
        "1: how the node's prefixes are known (exact, checked, approximate), and why not exactly.",
        |shared| {
            let row = |(labels, status): (String, Status)| {
                let (grade, reason) = (status.grade.name(), status.reason.map_or("", Reason::name));
                (format!("{labels},knowledge=\"{grade}\",reason=\"{reason}\""), 1.0)
            };
            statuses(shared).into_iter().map(row).collect()
        },
    ),
    each(
        "kvlane_route_node_blocks_stored_total",
        MetricKind::Counter,
        "node, role",
        "Blocks that the node's engine said it has stored.",
        |shared| told(shared, |status| status.told.stored),
    ),
    each(
        "kvlane_route_node_blocks_removed_total",
        MetricKind::Counter,
        "node, role",
        "Blocks that the node's engine said are gone.",
        |shared| told(shared, |status| status.told.removed),
    ),
    each(
        "kvlane_route_node_blocks_unattached_total",
        MetricKind::Counter,
        "node, role",
        "Stored blocks that were not taken in, since what comes before them is not known.",
        |shared| told(shared, |status| status.told.unattached),
    ),
    each(
        "kvlane_route_node_restarts_total",
        MetricKind::Counter,
        "node, role",
        "Times that the node's engine began anew, as its events show.",
        |shared| told(shared, |status| status.restarts),
    ),
    each(
        "kvlane_route_node_events_lost_total",
        MetricKind::Counter,
        "node, role",
        "Times that events of the node were lost, and all that was known of it was forgotten.",
        |shared| told(shared, |status| status.gaps),
    ),
    each(
        "kvlane_route_knowledge_fallbacks_total",
        MetricKind::Counter,
        "reason",
        "Nodes and requests whose prefixes are known by text only, by reason: once for each change of a node.",
        |shared| {
            let row = |reason: Reason| {
                (format!("reason=\"{}\"", reason.name()), shared.knowledge.fallbacks(reason) as f64)
            };
            Reason::ALL.into_iter().map(row).collect()
        },
    ),
    each(
        "kvlane_route_balance_state",
        MetricKind::Gauge,
        "group, connector, model, state",
        "1 for the state that the nodes of a group are in.",
        |shared| {
            let row = |(group, balancer): (&Group, &Balancer)| {
                let labels = format!("{},state=\"{}\"", group_labels(group), balancer.state().name());
                (labels, 1.0)
            };
            shared.with_balance(|balancers, _| balancers.groups().map(row).collect()).unwrap_or_default()
        },
    ),
    each(
        "kvlane_route_balance_score",
        MetricKind::Gauge,
        "group, connector, model, role",
        "How loaded the nodes of a role are, on average.",
        |shared| {
            let rows = |(group, balancer): (&Group, &Balancer)| {
                let (prefill, decode) = balancer.scores();
                let row = |role: Role, score: Option<f64>| {
                    Some((format!("{},role=\"{role}\"", group_labels(group)), score?))
                };
                [row(Role::Prefill, prefill), row(Role::Decode, decode)]
            };
            let all = shared
                .with_balance(|balancers, _| balancers.groups().flat_map(rows).flatten().collect::<Vec<_>>());
            all.unwrap_or_default()
        },
    ),
    each(
        "kvlane_route_node_score",
        MetricKind::Gauge,
        "node, role",
        "How loaded a node is, for the role that it has.",
        |shared| {
            let scores = scores(shared);
            shared.with_scheduler(|scheduler| {
                let row = |(id, node): (NodeId, &Node)| Some((labels(node), scores.get(&id)?.0?));
                scheduler.nodes().filter_map(row).collect()
            })
        },
    ),
    total("kvlane_route_role_changes_total", MetricKind::Counter, "Changes of a node's role.", |shared| {
        shared.with_balance(|_, records| records.turns).unwrap_or_default()
    }),
    each(
        "kvlane_route_scale_wanted_total",
        MetricKind::Counter,
        "direction",
        "Times that one node more (up) was wanted, or one less (down) would have done.",
        |shared| {
            let rows = |records: &Records| {
                vec![
                    ("direction=\"up\"".to_owned(), records.scale_ups as f64),
                    ("direction=\"down\"".to_owned(), records.scale_downs as f64),
                ]
            };
            shared.with_balance(|_, records| rows(records)).unwrap_or_default()
        },
    ),
    total(
        "kvlane_route_blocks_bytes",
        MetricKind::Gauge,
        "Memory of what engines told of their blocks.",
        |shared| shared.knowledge.blocks_bytes() as u64,
    ),
];

fn labels(node: &Node) -> String {
    format!("node=\"{}\",role=\"{}\"", escape_label(&node.name), node.role)
}

fn group_labels(group: &Group) -> String {
    let Group { name, connector, model } = group;
    format!("group=\"{}\",connector=\"{connector}\",model=\"{}\"", escape_label(name), escape_label(model))
}

/// What is known of each node's prefixes, with its labels.
fn statuses(shared: &Shared) -> Vec<(String, Status)> {
    let all: Vec<_> =
        shared.with_scheduler(|scheduler| scheduler.nodes().map(|(id, node)| (id, labels(node))).collect());
    all.into_iter().map(|(id, labels)| (labels, shared.knowledge.status(id))).collect()
}

/// A number for each node.
fn told(shared: &Shared, number: fn(&Status) -> u64) -> Vec<(String, f64)> {
    statuses(shared).into_iter().map(|(labels, status)| (labels, number(&status) as f64)).collect()
}

/// The pages.
pub fn pages(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics_answer))
        .route("/nodes", get(nodes))
        .route("/decisions", get(decisions))
        .with_state(shared)
}

async fn health(State(shared): State<Arc<Shared>>) -> (StatusCode, Json<Value>) {
    let ready = shared.with_scheduler(|scheduler| {
        scheduler.nodes().filter(|(_, node)| node.state == NodeState::Ready).count()
    });
    let (code, status) = if shared.is_stopping() {
        (StatusCode::SERVICE_UNAVAILABLE, "the router stops")
    } else if ready > 0 {
        (StatusCode::OK, "ok")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "no node is ready")
    };
    (code, Json(json!({ "status": status, "nodes_ready": ready, "version": env!("CARGO_PKG_VERSION") })))
}

async fn metrics_answer(State(shared): State<Arc<Shared>>) -> impl IntoResponse {
    ([("content-type", "text/plain; version=0.0.4")], metrics_page(&shared))
}

fn metrics_page(shared: &Shared) -> String {
    let mut page = String::new();
    shared.requests.prune(|node| shared.is_there(node));
    for Metric { name, kind, help, source, .. } in metrics() {
        let values: Vec<(String, f64)> = match source {
            Source::Total(value) => vec![(String::new(), value(shared) as f64)],
            Source::OfReason(value) => {
                let labels = |reason: BeatRefused| format!("reason=\"{}\"", reason.name());
                BeatRefused::ALL.map(|reason| (labels(reason), value(shared, reason) as f64)).into()
            }
            Source::Each(values) => values(shared),
            Source::Distributions(values) => {
                write_histogram(&mut page, name, help, values(shared));
                continue;
            }
            Source::OfNode(value) => shared.with_scheduler(|scheduler| {
                scheduler.nodes().map(|(_, node)| (labels(node), value(node) as f64)).collect()
            }),
        };
        // What the router does not do has no numbers.
        if !values.is_empty() {
            write_metric(&mut page, name, *kind, help, values);
        }
    }
    page
}

/// Of each node: its score, and what it comes from. None where nodes keep their roles.
fn scores(shared: &Shared) -> HashMap<NodeId, (Option<f64>, Indicators)> {
    let ids: Vec<NodeId> = shared.with_scheduler(|scheduler| scheduler.nodes().map(|(id, _)| id).collect());
    let of = |balancers: &Balancers| ids.iter().filter_map(|id| Some((*id, balancers.of(*id)?))).collect();
    shared.with_balance(|balancers, _| of(balancers)).unwrap_or_default()
}

async fn nodes(State(shared): State<Arc<Shared>>) -> Json<Value> {
    let knowledge = &shared.knowledge;
    let (scores, now) = (scores(&shared), Instant::now());
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
                    "block_size": status.told.block_size,
                    "blocks_stored": status.told.stored,
                    "blocks_removed": status.told.removed,
                    "blocks_unattached": status.told.unattached,
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

async fn decisions(State(shared): State<Arc<Shared>>, Query(shown): Query<Shown>) -> Json<Value> {
    Json(shared.decisions_page(shown.limit.unwrap_or(DECISIONS_SHOWN)))
}
