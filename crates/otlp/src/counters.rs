//! Counts what the exporter did, for the program's own metrics.

use std::sync::atomic::{AtomicU64, Ordering};

use kvlane_door::{
    MetricKind::{Counter, Gauge},
    Row, each, total,
};

/// Counts of an exporter.
#[derive(Debug, Default)]
pub struct Counters {
    /// Spans that the collector took.
    pub(crate) exported_spans: AtomicU64,
    /// Spans that were not exported: the queue was full, or the collector did not take them.
    pub(crate) dropped_spans: AtomicU64,
    /// Requests to the collector that failed.
    pub(crate) failed_requests: AtomicU64,
    /// Exports of metrics that the collector took.
    pub(crate) exported_metrics: AtomicU64,
    /// Spans that wait in the queue.
    pub(crate) waiting_spans: AtomicU64,
}

impl Counters {
    pub(crate) fn add(counter: &AtomicU64, count: u64) {
        counter.fetch_add(count, Ordering::Relaxed);
    }
}

/// The rows that a program with an exporter appends to its metrics.
pub const OTLP_METRICS: &[Row<Counters>] = &[
    total("kvlane_otlp_exported_spans_total", Counter, "Spans that the collector took.", |counters| {
        counters.exported_spans.load(Ordering::Relaxed)
    }),
    total(
        "kvlane_otlp_dropped_spans_total",
        Counter,
        "Spans that were not exported: too many waited, or the collector did not take them.",
        |counters| counters.dropped_spans.load(Ordering::Relaxed),
    ),
    total(
        "kvlane_otlp_exported_metrics_total",
        Counter,
        "Times that the collector took the metrics.",
        |counters| counters.exported_metrics.load(Ordering::Relaxed),
    ),
    total(
        "kvlane_otlp_failed_requests_total",
        Counter,
        "Requests to the collector that failed.",
        |counters| counters.failed_requests.load(Ordering::Relaxed),
    ),
    each("kvlane_otlp_waiting_spans", Gauge, "", "Spans that wait for their export.", |counters| {
        vec![(Vec::new(), counters.waiting_spans.load(Ordering::Relaxed) as f64)]
    }),
];
