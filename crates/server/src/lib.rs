//! The daemon: listens, serves the sessions of engines and tools over one store, and answers HTTP.
//!
//! ```text
//!   listen (accepts) --> session (one thread a connection: reads requests, sends answers)
//!                           |  calls/table, calls/admit: may this session make this call now?
//!                           v
//!                        calls/* --> store (lookups, claims, leases), engine-memory (copies)
//!   sessions: who is connected, or may still touch the pool     engines: the sessions of one engine, and its spaces
//!   reaper: frees what exited processes held                    http, metrics, status: for people and tools
//! ```
//! [`Daemon::start`] builds all of it around one `Shared`, and [`Daemon::stop`] takes it down.
#![forbid(unsafe_code)]

mod awaited_saves;
mod calls;
mod daemon;
mod descriptions;
mod dial;
mod door;
mod engines;
mod greeted;
mod health;
mod http;
mod index_server;
mod keeper;
mod listen;
mod live;
#[cfg(test)]
mod many_saves;
mod metrics;
mod observer;
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
mod traces;
mod unreachable;
mod wire_gpu;

pub use daemon::{Daemon, ServeOptions, StartError};
pub use dial::dial;
pub use index_server::{IndexOptions, IndexServer, index_metrics};
pub use kvlane_cluster::{ClusterOptions, Directory, ReplicaOptions};
pub use kvlane_fabric::{Tls, Transport};
pub use kvlane_ssd::SsdPath;
pub use metrics::page::metrics;
pub use ssd::SsdOptions;
