//! The table of the router's metrics, except those of requests (`request_rows`), and the page that Prometheus reads.

use std::sync::atomic::Ordering;

use kvlane_door::{
    Labels, Metric,
    MetricKind::{Counter, Gauge},
    PROCESS_METRICS, Process, Row, each, total, write_metrics,
};
use kvlane_otlp::OTLP_METRICS;

use crate::{
    balance::{Balancer, Group},
    beats_refused::BeatRefused,
    knowledge::{Reason, Status},
    request_rows,
    role_records::Records,
    schedule::{Node, NodeId, NodeState, Role},
    shared::Shared,
};

/// Labels of a node.
const NODE: &str = "node, role";

/// All metrics of the router, those of its process last.
pub fn metrics() -> impl Iterator<Item = &'static Metric> {
    let own = METRICS.iter().chain(request_rows::METRICS).map(|row| &row.metric);
    own.chain(OTLP_METRICS.iter().map(|row| &row.metric)).chain(PROCESS_METRICS.iter().map(|row| &row.metric))
}

/// The page that Prometheus reads. Removes the request metrics of nodes that are gone.
pub(crate) fn page(shared: &Shared) -> String {
    let mut page = String::new();
    shared.requests.prune(|node| shared.has_node(node));
    write_metrics(&mut page, METRICS, shared);
    write_metrics(&mut page, request_rows::METRICS, shared);
    if let Some(traces) = shared.traces.get() {
        write_metrics(&mut page, OTLP_METRICS, traces.counters());
    }
    write_metrics(&mut page, PROCESS_METRICS, &Process::read());
    page
}

/// All metrics but those of [requests](request_rows).
pub(crate) const METRICS: &[Row<Shared>] = &[
    total("kvlane_route_refused_total", Counter, "Requests that no node could serve.", |shared| {
        shared.counters.refused.load(Ordering::Relaxed)
    }),
    total(
        "kvlane_route_shed_total",
        Counter,
        "Requests that were refused with 429, because all engines were overloaded.",
        |shared| shared.counters.shed.load(Ordering::Relaxed),
    ),
    total(
        "kvlane_route_not_handed_over_total",
        Counter,
        "Requests whose prefill node handed nothing over, so that the decode node computed the prompt again.",
        |shared| shared.counters.not_handed_over.load(Ordering::Relaxed),
    ),
    total(
        "kvlane_route_left_total",
        Counter,
        "Legs that were cut short: their client left, or the other leg of a direct pair failed or ended first.",
        |shared| shared.counters.left.load(Ordering::Relaxed),
    ),
    total(
        "kvlane_route_other_role_total",
        Counter,
        "Requests that went to a node of another role, because no node of the right role was left.",
        |shared| shared.counters.other_role.load(Ordering::Relaxed),
    ),
    total("kvlane_route_beats_total", Counter, "Beats and pings of nodes.", |shared| {
        shared.counters.beats.load(Ordering::Relaxed)
    }),
    each(
        "kvlane_route_beats_refused_total",
        Counter,
        "reason",
        "Beats and pings, and connections for them, that were refused.",
        |shared| {
            let row = |reason: BeatRefused| {
                (vec![reason.name().to_owned()], shared.counters.beats_refused.of(reason) as f64)
            };
            BeatRefused::ALL.map(row).into()
        },
    ),
    total(
        "kvlane_route_names_failed_total",
        Counter,
        "DNS lookups that failed; their nodes stay as they were.",
        |shared| shared.counters.names_failed.load(Ordering::Relaxed),
    ),
    total(
        "kvlane_route_control",
        Gauge,
        "Whether `kvlane route list` and the like reach this router over its socket: 1, or 0.",
        |shared| shared.counters.control.load(Ordering::Relaxed),
    ),
    total(
        "kvlane_route_body_bytes",
        Gauge,
        "Bytes of requests in memory: bodies, ranges and hashes of their contents, and answers of prefill engines.",
        |shared| shared.counters.body_bytes.load(Ordering::Relaxed),
    ),
    total("kvlane_route_connections", Gauge, "Open client connections.", |shared| {
        shared.counters.connections.load(Ordering::Relaxed)
    }),
    total(
        "kvlane_route_connections_displaced_total",
        Counter,
        "Connections without a request that were closed because a new one needed their slot.",
        Shared::displaced,
    ),
    total("kvlane_route_index_bytes", Gauge, "Memory of the index of prefixes.", |shared| {
        shared.with_scheduler(|scheduler| scheduler.index_bytes() as u64)
    }),
    each("kvlane_route_node_ready", Gauge, NODE, "Whether the node gets requests: 1, or 0.", |shared| {
        of_nodes(shared, |node| u64::from(node.state == NodeState::Ready))
    }),
    each(
        "kvlane_route_node_open",
        Gauge,
        NODE,
        "Whether the node gets no requests because it failed: 1, or 0.",
        |shared| of_nodes(shared, |node| u64::from(node.breaker.is_open())),
    ),
    each(
        "kvlane_route_node_hand_offs_stopped",
        Gauge,
        NODE,
        "Whether prompts go to decode nodes alone, because this prefill node handed nothing over: 1, or 0.",
        |shared| of_nodes(shared, |node| u64::from(node.pairing.is_stopped())),
    ),
    each("kvlane_route_node_requests", Gauge, NODE, "Requests of this router that the node has.", |shared| {
        of_nodes(shared, |node| node.load.own_requests)
    }),
    each(
        "kvlane_route_node_prefill_tokens",
        Gauge,
        NODE,
        "Tokens of these requests that are still to be prefilled, estimated.",
        |shared| of_nodes(shared, |node| node.load.own_tokens),
    ),
    each(
        "kvlane_route_node_other_requests",
        Gauge,
        NODE,
        "Requests of others than this router that the node has, by its own metrics.",
        |shared| of_nodes(shared, |node| node.load.other_requests),
    ),
    each(
        "kvlane_route_node_load_known",
        Gauge,
        NODE,
        "Whether the node's own metrics can be read: 1, or 0.",
        |shared| of_nodes(shared, |node| u64::from(node.load.cache_percent.is_some())),
    ),
    each(
        "kvlane_route_node_cache_used_percent",
        Gauge,
        NODE,
        "Part of the node's KV cache that running requests use, by its own metrics.",
        |shared| of_nodes(shared, |node| node.load.cache_percent.unwrap_or(0)),
    ),
    each(
        "kvlane_route_node_knowledge",
        Gauge,
        "node, role, knowledge, reason",
        "1: how the node's prefixes are known (exact, checked, approximate), and why not exactly.",
        |shared| {
            let row = |(mut labels, status): (Labels, Status)| {
                labels.push(status.grade.name().to_owned());
                labels.push(status.reason.map_or("", Reason::name).to_owned());
                (labels, 1.0)
            };
            statuses(shared).into_iter().map(row).collect()
        },
    ),
    each(
        "kvlane_route_node_blocks_stored_total",
        Counter,
        NODE,
        "Blocks that the node's engine reported as stored.",
        |shared| of_statuses(shared, |status| status.blocks.stored),
    ),
    each(
        "kvlane_route_node_blocks_removed_total",
        Counter,
        NODE,
        "Blocks that the node's engine reported as removed.",
        |shared| of_statuses(shared, |status| status.blocks.removed),
    ),
    each(
        "kvlane_route_node_blocks_unattached_total",
        Counter,
        NODE,
        "Stored blocks that the router ignored, because it does not know the block before them.",
        |shared| of_statuses(shared, |status| status.blocks.unattached),
    ),
    each(
        "kvlane_route_node_restarts_total",
        Counter,
        NODE,
        "Restarts of the node's engine, as its events show.",
        |shared| of_statuses(shared, |status| status.restarts),
    ),
    each(
        "kvlane_route_node_events_lost_total",
        Counter,
        NODE,
        "Times that events of the node were lost, and the router forgot all its blocks.",
        |shared| of_statuses(shared, |status| status.gaps),
    ),
    each(
        "kvlane_route_knowledge_fallbacks_total",
        Counter,
        "reason",
        "Nodes and requests whose prefixes are known by text only, by reason: once for each change of a node.",
        |shared| {
            let row =
                |reason: Reason| (vec![reason.name().to_owned()], shared.knowledge.fallbacks(reason) as f64);
            Reason::ALL.into_iter().map(row).collect()
        },
    ),
    each(
        "kvlane_route_balance_state",
        Gauge,
        "group, connector, model, state",
        "1 for the state that the nodes of a group are in.",
        |shared| {
            let row =
                |(group, balancer): (&Group, &Balancer)| (group_labels(group, balancer.state().name()), 1.0);
            shared.with_balance(|balancers, _| balancers.groups().map(row).collect()).unwrap_or_default()
        },
    ),
    each(
        "kvlane_route_balance_score",
        Gauge,
        "group, connector, model, role",
        "How loaded the nodes of a role are, on average.",
        |shared| {
            let rows = |(group, balancer): (&Group, &Balancer)| {
                let (prefill, decode) = balancer.scores();
                let row = |role: Role, score: Option<f64>| Some((group_labels(group, role.name()), score?));
                [row(Role::Prefill, prefill), row(Role::Decode, decode)]
            };
            let all = shared
                .with_balance(|balancers, _| balancers.groups().flat_map(rows).flatten().collect::<Vec<_>>());
            all.unwrap_or_default()
        },
    ),
    each(
        "kvlane_route_node_score",
        Gauge,
        NODE,
        "How loaded a node is, for the role that it has.",
        |shared| {
            let scores = shared.scores();
            shared.with_scheduler(|scheduler| {
                let row = |(id, node): (NodeId, &Node)| Some((labels(node), scores.get(&id)?.0?));
                scheduler.nodes().filter_map(row).collect()
            })
        },
    ),
    total("kvlane_route_role_changes_total", Counter, "Changes of a node's role.", |shared| {
        shared.with_balance(|_, records| records.turns).unwrap_or_default()
    }),
    each(
        "kvlane_route_scale_wanted_total",
        Counter,
        "direction",
        "Times that one node more (up) was wanted, or one less (down) would have done.",
        |shared| {
            let rows = |records: &Records| {
                vec![
                    (vec!["up".to_owned()], records.scale_ups as f64),
                    (vec!["down".to_owned()], records.scale_downs as f64),
                ]
            };
            shared.with_balance(|_, records| rows(records)).unwrap_or_default()
        },
    ),
    total("kvlane_route_blocks_bytes", Gauge, "Memory of the blocks that engines reported.", |shared| {
        shared.knowledge.blocks_bytes() as u64
    }),
];

fn labels(node: &Node) -> Labels {
    vec![node.name.to_string(), node.role.name().to_owned()]
}

/// The labels of a group, and one more.
fn group_labels(group: &Group, last: &str) -> Labels {
    let Group { name, connector, model } = group;
    vec![name.to_string(), (*connector).to_owned(), model.to_string(), last.to_owned()]
}

/// A row for each node, with this number of it.
fn of_nodes(shared: &Shared, number: fn(&Node) -> u64) -> Vec<(Labels, f64)> {
    shared.with_scheduler(|scheduler| {
        scheduler.nodes().map(|(_, node)| (labels(node), number(node) as f64)).collect()
    })
}

/// Each node's labels, and how well the router knows its prefixes.
fn statuses(shared: &Shared) -> Vec<(Labels, Status)> {
    let all: Vec<_> =
        shared.with_scheduler(|scheduler| scheduler.nodes().map(|(id, node)| (id, labels(node))).collect());
    all.into_iter().map(|(id, labels)| (labels, shared.knowledge.status(id))).collect()
}

/// A row for each node, with this number of its engine's events.
fn of_statuses(shared: &Shared, number: fn(&Status) -> u64) -> Vec<(Labels, f64)> {
    statuses(shared).into_iter().map(|(labels, status)| (labels, number(&status) as f64)).collect()
}
