//! Request metrics by route, model and the node that answered.
//!
//! A request looks up its series once, when its answer begins, and then counts tokens without a lock. Clients choose paths and
//! models, so the router bounds the number of series:
//! - paths come from a list;
//! - a model has its own series only if a node serves it;
//! - series beyond [`SERIES_MAX`] share one.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use kvlane_door::{Histogram, Pending};
use parking_lot::RwLock;

use crate::schedule::NodeId;

/// Paths with series of their own. Other paths share [`OTHER`].
pub(crate) const ROUTES: [&str; 8] = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    OTHER,
];
/// Label of paths, models, statuses and nodes without series of their own.
pub(crate) const OTHER: &str = "other";
/// Statuses with series of their own. 499: the client left before an answer began.
pub(crate) const STATUSES: [u16; 16] =
    [200, 400, 401, 404, 405, 408, 413, 415, 422, 429, 499, 500, 501, 502, 503, 504];
/// Most series of all nodes, models and routes together.
pub(crate) const SERIES_MAX: usize = 2048;

/// Upper bounds of buckets, in microseconds. Some are vLLM's own, so that both histograms can be compared.
pub(crate) const FIRST_TOKEN_BOUNDS_US: &[u64] = &[
    10_000,
    40_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    40_000_000,
    160_000_000,
];
pub(crate) const BETWEEN_TOKENS_BOUNDS_US: &[u64] =
    &[10_000, 25_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 5_000_000];
const DURATION_BOUNDS_US: &[u64] =
    &[300_000, 1_000_000, 2_500_000, 5_000_000, 10_000_000, 30_000_000, 60_000_000, 240_000_000, 960_000_000];

/// Times between tokens that one request has counted and not yet added.
pub(crate) type PendingTokens = Pending<9>;

/// Counters of one route and model at one node, or at none.
#[derive(Debug)]
pub(crate) struct Series {
    by_status: [AtomicU64; STATUSES.len() + 1],
    pub(crate) first_token: Histogram<12>,
    pub(crate) between_tokens: Histogram<9>,
    pub(crate) duration: Histogram<10>,
    pub(crate) prompt_tokens: AtomicU64,
    pub(crate) cached_tokens: AtomicU64,
    pub(crate) generated_tokens: AtomicU64,
    pub(crate) retries: AtomicU64,
}

/// Label `node` of a series.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Answerer {
    /// The router itself answered.
    Router,
    /// An engine answered.
    Node(NodeId),
    /// Any node, because there are too many series for one each.
    Others,
}

type ByRoute = [Option<Arc<Series>>; ROUTES.len()];

/// All series, by answerer, model and route.
#[derive(Debug, Default)]
pub(crate) struct RequestMetrics(RwLock<HashMap<Answerer, HashMap<Arc<str>, ByRoute>>>);

/// Index of the path in [`ROUTES`].
pub(crate) fn route_of(path: &str) -> usize {
    ROUTES.iter().position(|route| *route == path).unwrap_or(ROUTES.len() - 1)
}

impl Series {
    fn new() -> Self {
        Self {
            by_status: std::array::from_fn(|_| AtomicU64::new(0)),
            first_token: Histogram::new(FIRST_TOKEN_BOUNDS_US),
            between_tokens: Histogram::new(BETWEEN_TOKENS_BOUNDS_US),
            duration: Histogram::new(DURATION_BOUNDS_US),
            prompt_tokens: AtomicU64::new(0),
            cached_tokens: AtomicU64::new(0),
            generated_tokens: AtomicU64::new(0),
            retries: AtomicU64::new(0),
        }
    }

    /// Counts an answer with this status.
    pub(crate) fn answered(&self, status: u16) {
        let index = STATUSES.iter().position(|known| *known == status).unwrap_or(STATUSES.len());
        self.by_status[index].fetch_add(1, Ordering::Relaxed);
    }

    /// Statuses that occurred, with their counts.
    pub(crate) fn statuses(&self) -> impl Iterator<Item = (String, u64)> {
        let counted = |(index, count): (usize, &AtomicU64)| {
            let name = STATUSES.get(index).map_or_else(|| OTHER.to_owned(), ToString::to_string);
            Some((name, count.load(Ordering::Relaxed))).filter(|(_, count)| *count > 0)
        };
        self.by_status.iter().enumerate().filter_map(counted)
    }
}

impl RequestMetrics {
    /// The series of a request. `serves` tells whether a node serves the model, `is_there` whether a node still exists. Both are
    /// called only if the series does not exist yet.
    pub(crate) fn series(
        &self,
        answerer: Answerer,
        model: Option<&str>,
        route: usize,
        serves: impl Fn(&str) -> bool,
        is_there: impl Fn(NodeId) -> bool,
    ) -> Arc<Series> {
        let found = |answerer, model: &str| {
            let series = self.0.read();
            series.get(&answerer)?.get(model)?[route].clone()
        };
        let model = model.unwrap_or("");
        if let Some(series) = found(answerer, model) {
            return series;
        }
        let model = if model.is_empty() || serves(model) { model } else { OTHER };
        if let Some(series) = found(answerer, model) {
            return series;
        }
        let mut all = self.0.write();
        if count(&all) >= SERIES_MAX {
            prune(&mut all, &is_there, &serves);
        }
        let (answerer, model) =
            if count(&all) >= SERIES_MAX { (Answerer::Others, OTHER) } else { (answerer, model) };
        let by_route = all.entry(answerer).or_default().entry(model.into()).or_default();
        Arc::clone(by_route[route].get_or_insert_with(|| Arc::new(Series::new())))
    }

    /// Drops the series of nodes that are gone.
    pub(crate) fn prune(&self, is_there: impl Fn(NodeId) -> bool) {
        prune(&mut self.0.write(), &is_there, &|_| true);
    }

    /// All series: answerer, model and route of each, in order.
    pub(crate) fn all(&self) -> Vec<(Answerer, Arc<str>, &'static str, Arc<Series>)> {
        let all = self.0.read();
        let mut listed = Vec::new();
        for (answerer, models) in all.iter() {
            for (model, routes) in models {
                let there = ROUTES.iter().zip(routes).filter_map(|(route, series)| {
                    Some((*answerer, Arc::clone(model), *route, Arc::clone(series.as_ref()?)))
                });
                listed.extend(there);
            }
        }
        listed.sort_by(|one, other| (one.0, &one.1, one.2).cmp(&(other.0, &other.1, other.2)));
        listed
    }
}

fn count(all: &HashMap<Answerer, HashMap<Arc<str>, ByRoute>>) -> usize {
    all.values().flat_map(HashMap::values).flatten().flatten().count()
}

fn prune(
    all: &mut HashMap<Answerer, HashMap<Arc<str>, ByRoute>>,
    is_there: &impl Fn(NodeId) -> bool,
    serves: &impl Fn(&str) -> bool,
) {
    all.retain(|answerer, models| {
        models.retain(|model, _| model.is_empty() || &**model == OTHER || serves(model));
        !models.is_empty() && !matches!(answerer, Answerer::Node(node) if !is_there(*node))
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{Node, Role, Scheduler, SchedulerSettings};

    #[test]
    fn clients_cannot_make_series_beyond_the_bound() {
        let metrics = RequestMetrics::default();
        for number in 0..SERIES_MAX * 2 {
            let model = format!("model-{number}");
            metrics.series(Answerer::Router, Some(&model), 0, |_| false, |_| true).answered(404);
        }
        let all = metrics.all();
        assert_eq!(all.len(), 1, "no node serves these models: they are one");
        assert_eq!(
            (&*all[0].1, all[0].3.statuses().next()),
            (OTHER, Some(("404".into(), SERIES_MAX as u64 * 2)))
        );
        for number in 0..SERIES_MAX * 2 {
            let model = format!("model-{number}");
            metrics.series(Answerer::Router, Some(&model), 0, |_| true, |_| true).answered(200);
        }
        assert_eq!(metrics.all().len(), SERIES_MAX + 1, "the last one is of all further ones");
    }

    #[test]
    fn a_node_that_goes_takes_its_series_along() {
        let mut scheduler = Scheduler::new(SchedulerSettings::default());
        let [goes, stays] = ["a", "b"].map(|name| scheduler.add(Node::new(name, Role::Worker, "")));
        let metrics = RequestMetrics::default();
        for node in [goes, stays] {
            metrics.series(Answerer::Node(node), Some("m"), route_of("/v1/messages"), |_| true, |_| true);
        }
        metrics.prune(|node| node == stays);
        let left: Vec<_> =
            metrics.all().into_iter().map(|(node, model, route, _)| (node, model, route)).collect();
        assert_eq!(left, [(Answerer::Node(stays), "m".into(), "/v1/messages")]);
    }
}
