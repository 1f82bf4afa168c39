//! Metrics of a program: one table format, counters without a lock, and the page that Prometheus reads.

mod histogram;
mod page;
mod process;
mod table;

pub use self::{
    histogram::{Distribution, Histogram, Pending},
    page::{CONTENT_TYPE, write_metrics},
    process::{PROCESS_METRICS, Process},
    table::{Labels, Metric, MetricKind, Row, Source, distributions, each, total},
};
