//! HTTP pages of a program, such as health and metrics, for any peer that reaches the port. They are read only, and strangers
//! get little of the program's time and descriptors.
//!
//! - [`Pages`]: serves them in one thread.
//! - [`LivePage`]: shows the figures of a program in a browser; [`History`] keeps ten minutes of samples for it.
//! - [`Names`]: the host names that a request may use.
//! - [`Row`]: a metric in a program's table; [`write_metrics`] writes the table for Prometheus.
//! - [`Histogram`]: counts durations without a lock.
//! - [`Process`]: figures of the program's own process.
//! - [`RuntimeThread`]: a thread with a runtime of its own, which another thread can stop.
//! - [`Slots`]: bounds how many connections are open.
//! - [`HeadlessConnections`]: the connections whose request has not come yet; the oldest gives up its slot when none is left.
#![forbid(unsafe_code)]

mod host;
mod live;
mod metrics;
mod pages;
mod runtime_thread;
mod slots;
mod waiting;

pub use self::{
    host::{Misdirected, Names},
    live::{After, History, LivePage, Problems, Rates, SAMPLES_MAX, Severity},
    metrics::{
        CONTENT_TYPE, Distribution, Histogram, Labels, Metric, MetricKind, PROCESS_METRICS, Pending, Process,
        Row, Source, distributions, each, total, write_metrics,
    },
    pages::{CONNECTIONS_MAX, Pages},
    runtime_thread::{RuntimeThread, Stopped},
    slots::{Slot, Slots},
    waiting::{HeadlessConnections, HeldSlot},
};
