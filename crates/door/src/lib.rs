//! Pages over HTTP for whoever reaches the port: health, metrics and the like of a program. They are read only, and strangers get
//! little of the program's time and descriptors.
//!
//! - [`Pages`]: serves them, in one thread.
//! - [`Names`]: under which names they may be asked for.
//! - [`write_metric`]: metrics as Prometheus reads them.
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
    metrics::{MetricKind, escape_label, write_metric},
    pages::{CONNECTIONS_MAX, Pages},
    runtime_thread::{RuntimeThread, Stopped},
    slots::{Slot, Slots},
    waiting::{Place, Waiting},
};
