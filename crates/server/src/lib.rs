//! The daemon: listens, serves the sessions of engines and tools over one store, and answers HTTP.

mod calls;
mod ceilings;
mod chunks;
mod daemon;
mod door;
mod engines;
mod gpu;
mod greeted;
mod host;
mod http;
mod http_waiting;
mod keeper;
mod listen;
mod meetings;
mod metrics;
mod peer;
mod reaper;
mod refusal;
mod refusal_log;
mod replies;
mod save_gate;
mod save_pace;
mod session;
#[cfg(test)]
mod session_table;
mod sessions;
mod shared;
mod slots;
mod ssd;
mod ssd_notes;
mod status;
mod unreachable;
mod worker_memory;

pub use daemon::{Daemon, ServeOptions, StartError};
pub use metrics::{METRICS, Metric, MetricKind};
pub use ssd::SsdOptions;
