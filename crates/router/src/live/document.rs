//! The document that the page shows.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
    time::{Instant, SystemTime},
};

use kvlane_door::Problems;
use serde_json::{Value, json};

use crate::{
    health::state,
    knowledge::Reason,
    request_metrics::FIRST_TOKEN_BOUNDS_US,
    schedule::{Condition, Node, NodeId, NodeState},
    shared::Shared,
};

/// Choices of nodes that the page shows.
const DECISIONS_SHOWN: usize = 25;

/// `run` tells this run of the router, which began at `started`, from others.
pub(super) fn document(
    shared: &Shared,
    (run, started): (u64, Instant),
    problems: Problems,
    history: Value,
) -> Value {
    let (_, state) = state(shared);
    let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let counters = &shared.counters;
    let mut by_status: BTreeMap<String, u64> = BTreeMap::new();
    for (.., series) in shared.requests.all() {
        for (status, count) in series.statuses() {
            *by_status.entry(status).or_default() += count;
        }
    }
    json!({
        "run": format!("{:016x}", run),
        "version": concat!("kvlane ", env!("CARGO_PKG_VERSION")),
        "state": state,
        // The decisions' clock, because the browser's may be another one.
        "now": SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
        "uptime_seconds": started.elapsed().as_secs_f64(),
        "problems": problems.into_json(),
        "nodes": nodes(shared),
        "requests_by_status": by_status,
        "refused": load(&counters.refused),
        "shed": load(&counters.shed),
        "not_handed_over": load(&counters.not_handed_over),
        "connections": load(&counters.connections),
        "body_bytes": load(&counters.body_bytes),
        "decisions": shared.decisions_without_ids(DECISIONS_SHOWN),
        "first_token_bounds_seconds": FIRST_TOKEN_BOUNDS_US.iter().map(|us| *us as f64 / 1e6).collect::<Vec<_>>(),
        "history": history,
    })
}

/// A row for each node.
fn nodes(shared: &Shared) -> Vec<Value> {
    let now = Instant::now();
    let row = |(id, node): (NodeId, &Node)| {
        let status = shared.knowledge.status(id);
        json!({
            "node": &*node.name,
            "role": node.role.name(),
            "state": if node.state == NodeState::Ready && node.breaker.is_open() { "left alone" } else { node.state.name() },
            "condition": Condition::of(node, now).sentence(),
            "models": node.models.iter().map(|model| &**model).collect::<Vec<_>>().join(", "),
            "requests": node.load.own_requests,
            "prefill_tokens": node.load.own_tokens,
            "other_requests": node.load.other_requests,
            "cache_used": node.load.cache_percent.map(|percent| percent as f64 / 100.0),
            "prefixes": status.grade.name(),
            "prefixes_why": status.reason.map(Reason::sentence),
        })
    };
    shared.with_scheduler(|scheduler| scheduler.nodes().map(row).collect())
}
