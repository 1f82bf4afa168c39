//! Pages over HTTP for whoever reaches the port: health, metrics and the like of a program. They are read only, and strangers get
//! little of the program's time and descriptors.
//!
//! - [`Pages`]: serves them, in one thread.
//! - [`Names`]: under which names they may be asked for.
//! - [`Row`]: a metric in a program's table; [`write_metrics`] writes the table as Prometheus reads it.
//! - [`Histogram`]: durations by their length, counted without a lock.
//! - [`Process`]: what the program tells of its own process.
//! - [`RuntimeThread`]: a thread with a runtime of its own, which another thread can stop.
//! - [`Slots`]: how many connections are open.
//! - [`Waiting`]: chooses the connection that gives up its slot when there is none left.
#![forbid(unsafe_code)]

mod host;
mod metrics;
mod pages;
mod runtime_thread;
mod slots;
mod waiting;

pub use self::{
    host::{Misdirected, Names},
    metrics::{
        CONTENT_TYPE, Distribution, Histogram, Labels, Metric, MetricKind, PROCESS_METRICS, Pending, Process,
        Row, Source, distributions, each, total, write_metrics,
    },
    pages::{CONNECTIONS_MAX, Pages},
    runtime_thread::{RuntimeThread, Stopped},
    slots::{Slot, Slots},
    waiting::{Place, Waiting},
};
