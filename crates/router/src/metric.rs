//! One metric of the router: its name, what it means, and where its values come from.

use kvlane_door::MetricKind;

use crate::{
    beats_refused::BeatRefused,
    histogram::Distribution,
    schedule::Node,
    shared::Shared,
};

/// One metric of the router.
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// Name as scraped.
    pub name: &'static str,
    /// Kind of the metric.
    pub kind: MetricKind,
    /// Label names, comma-separated.
    pub labels: &'static str,
    /// Help text, one sentence.
    pub help: &'static str,
    pub(crate) source: Source,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Source {
    Total(fn(&Shared) -> u64),
    OfNode(fn(&Node) -> u64),
    OfReason(fn(&Shared, BeatRefused) -> u64),
    /// Pairs of labels and a value.
    Each(fn(&Shared) -> Vec<(String, f64)>),
    /// Pairs of labels and a distribution.
    Distributions(fn(&Shared) -> Vec<(String, Distribution)>),
}

pub(crate) const fn total(
    name: &'static str,
    kind: MetricKind,
    help: &'static str,
    value: fn(&Shared) -> u64,
) -> Metric {
    Metric { name, kind, labels: "", help, source: Source::Total(value) }
}

pub(crate) const fn of_node(name: &'static str, help: &'static str, value: fn(&Node) -> u64) -> Metric {
    Metric { name, kind: MetricKind::Gauge, labels: "node, role", help, source: Source::OfNode(value) }
}

pub(crate) const fn each(
    name: &'static str,
    kind: MetricKind,
    labels: &'static str,
    help: &'static str,
    values: fn(&Shared) -> Vec<(String, f64)>,
) -> Metric {
    Metric { name, kind, labels, help, source: Source::Each(values) }
}
