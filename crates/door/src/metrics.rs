//! Metrics as Prometheus reads them (its text format, version 0.0.4).

use std::fmt::Write;

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

/// Appends a counter or gauge with these values, each with its labels (`name="value",name="value"`, or nothing); nothing where
/// it has no value.
pub fn write_metric(
    page: &mut String,
    name: &str,
    kind: MetricKind,
    help: &str,
    values: impl IntoIterator<Item = (String, f64)>,
) {
    let mut values = values.into_iter().peekable();
    if values.peek().is_none() {
        return;
    }
    // A String takes everything.
    let _ = writeln!(page, "# HELP {name} {help}\n# TYPE {name} {}", kind.name());
    for (labels, value) in values {
        let labels = if labels.is_empty() { labels } else { format!("{{{labels}}}") };
        let _ = writeln!(page, "{name}{labels} {value}");
    }
    page.push('\n');
}

/// What somebody else has chosen, so that it stays inside a label's quotes.
pub fn escape_label(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
