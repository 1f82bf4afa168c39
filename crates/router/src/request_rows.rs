//! The rows of [request metrics](crate::request_metrics) in the table of the router's metrics.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering},
};

use kvlane_door::{Distribution, Labels, MetricKind::Counter, Row, distributions, each};

use crate::{
    request_metrics::{Answerer, OTHER, Series},
    schedule::NodeId,
    shared::Shared,
};

const LABELS: &str = "route, model, node";

/// All request metrics. `node` is empty if no engine was chosen.
pub(crate) const METRICS: &[Row<Shared>] = &[
    each(
        "kvlane_route_requests_total",
        Counter,
        "route, model, node, status",
        "Requests of clients, by the status of their answer; 499: the client left before it began.",
        |shared| {
            let rows = |(labels, series): (Labels, Arc<Series>)| {
                let row = |(status, count)| ([&labels[..], &[status]].concat(), count as f64);
                series.statuses().map(row).collect::<Vec<_>>()
            };
            of_each(shared).into_iter().flat_map(rows).collect()
        },
    ),
    each(
        "kvlane_route_retries_total",
        Counter,
        LABELS,
        "Attempts beyond a request's first one, by the node of the last one.",
        |shared| totals(shared, |series| series.retries.load(Ordering::Relaxed)),
    ),
    distributions(
        "kvlane_route_time_to_first_token_seconds",
        LABELS,
        "Time from a streamed request's head to its first token.",
        |shared| read(shared, |series| series.first_token.read()),
    ),
    distributions(
        "kvlane_route_inter_token_latency_seconds",
        LABELS,
        "Time between two tokens of a streamed answer.",
        |shared| read(shared, |series| series.between_tokens.read()),
    ),
    distributions(
        "kvlane_route_request_duration_seconds",
        LABELS,
        "Time from a request's head to the last byte of its answer, or until its client leaves.",
        |shared| read(shared, |series| series.duration.read()),
    ),
    each(
        "kvlane_route_prompt_tokens_total",
        Counter,
        LABELS,
        "Tokens of prompts, estimated where no tokenizer is known.",
        |shared| totals(shared, |series| series.prompt_tokens.load(Ordering::Relaxed)),
    ),
    each(
        "kvlane_route_cached_tokens_total",
        Counter,
        LABELS,
        "Tokens of prompts that the chosen node probably has in its cache.",
        |shared| totals(shared, |series| series.cached_tokens.load(Ordering::Relaxed)),
    ),
    each(
        "kvlane_route_generated_tokens_total",
        Counter,
        LABELS,
        "Tokens of answers: events of streams, and the usage member of other answers.",
        |shared| totals(shared, |series| series.generated_tokens.load(Ordering::Relaxed)),
    ),
];

/// Distributions of the series that observed something.
fn read(shared: &Shared, of: fn(&Series) -> Distribution) -> Vec<(Labels, Distribution)> {
    let all = of_each(shared).into_iter().map(|(labels, series)| (labels, of(&series)));
    all.filter(|(_, distribution)| !distribution.is_empty()).collect()
}

fn totals(shared: &Shared, value: fn(&Series) -> u64) -> Vec<(Labels, f64)> {
    of_each(shared).into_iter().map(|(labels, series)| (labels, value(&series) as f64)).collect()
}

/// Each series, with its labels.
fn of_each(shared: &Shared) -> Vec<(Labels, Arc<Series>)> {
    let names: HashMap<NodeId, Arc<str>> = shared.names().into_iter().collect();
    let labelled = |(answerer, model, route, series): (Answerer, Arc<str>, &str, Arc<Series>)| {
        let node = match answerer {
            Answerer::Router => "",
            Answerer::Others => OTHER,
            Answerer::Node(node) => names.get(&node)?,
        };
        Some((vec![route.to_owned(), model.to_string(), node.to_owned()], series))
    };
    shared.requests.all().into_iter().filter_map(labelled).collect()
}
