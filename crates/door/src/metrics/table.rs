//! The table of a program's metrics. A row names a metric and says how its values are read.

use super::histogram::Distribution;

/// What a metric is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// Only grows.
    Counter,
    /// A present value.
    Gauge,
    /// A distribution.
    Histogram,
}

impl MetricKind {
    /// As Prometheus calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// What the reference page says of a metric.
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// Name as scraped.
    pub name: &'static str,
    /// Kind of the metric.
    pub kind: MetricKind,
    /// Label names, separated by a comma and a space; empty without labels.
    pub labels: &'static str,
    /// Help text, one sentence.
    pub help: &'static str,
}

/// Values of a metric's labels, in the order of [`Metric::labels`].
pub type Labels = Vec<String>;

/// A metric, and how its values are read from `S`, the program's state.
#[derive(Debug)]
pub struct Row<S: 'static> {
    /// The metric.
    pub metric: Metric,
    /// Where its values come from.
    pub source: Source<S>,
}

/// Reads the values of a metric.
#[derive(Debug)]
pub enum Source<S: 'static> {
    /// One value, of a metric without labels.
    Total(fn(&S) -> u64),
    /// A value for each combination of labels.
    Each(fn(&S) -> Vec<(Labels, f64)>),
    /// A distribution for each combination of labels.
    Distributions(fn(&S) -> Vec<(Labels, Distribution)>),
}

/// A metric with one value and no labels.
pub const fn total<S>(
    name: &'static str,
    kind: MetricKind,
    help: &'static str,
    value: fn(&S) -> u64,
) -> Row<S> {
    Row { metric: Metric { name, kind, labels: "", help }, source: Source::Total(value) }
}

/// A metric with a value for each combination of its labels.
pub const fn each<S>(
    name: &'static str,
    kind: MetricKind,
    labels: &'static str,
    help: &'static str,
    values: fn(&S) -> Vec<(Labels, f64)>,
) -> Row<S> {
    Row { metric: Metric { name, kind, labels, help }, source: Source::Each(values) }
}

/// A histogram for each combination of its labels.
pub const fn distributions<S>(
    name: &'static str,
    labels: &'static str,
    help: &'static str,
    values: fn(&S) -> Vec<(Labels, Distribution)>,
) -> Row<S> {
    Row {
        metric: Metric { name, kind: MetricKind::Histogram, labels, help },
        source: Source::Distributions(values),
    }
}
