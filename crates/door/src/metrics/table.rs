//! The format of a program's table of metrics: a row names a metric, and has a function that reads its values.

use super::histogram::Distribution;

/// Prometheus' type of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// A total that only grows.
    Counter,
    /// A present value.
    Gauge,
    /// A distribution of durations, in seconds.
    Histogram,
}

impl MetricKind {
    /// The type's word on the page.
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// The description of a metric, for the metrics page and the reference page.
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// Name on the metrics page.
    pub name: &'static str,
    /// A counter's name ends with `_total`.
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
    /// Its description.
    pub metric: Metric,
    /// Reads its values.
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
