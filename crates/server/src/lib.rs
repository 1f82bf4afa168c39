//! The daemon: listens, serves the sessions of engines and tools over one store, and answers HTTP.
#![forbid(unsafe_code)]

mod calls;
mod ceilings;
mod daemon;
mod descriptions;
mod door;
mod engines;
mod greeted;
mod hand_offs;
mod http;
mod keeper;
mod listen;
#[cfg(test)]
mod many_saves;
mod metrics;
mod peer;
mod reaper;
mod refusal;
mod refusal_log;
mod replies;
mod save_gate;
mod session;
#[cfg(test)]
mod session_table;
mod sessions;
mod shared;
mod ssd;
mod ssd_notes;
mod status;
mod unreachable;
mod wire_gpu;

pub use daemon::{Daemon, ServeOptions, StartError};
pub use metrics::page::metrics;
pub use ssd::SsdOptions;
