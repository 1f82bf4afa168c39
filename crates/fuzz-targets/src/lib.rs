//! Properties that hold for any bytes, for each parser of bytes from outside: peers, engines, clients, files.
//!
//! Two programs run these functions. `tests/seeded.rs` takes the inputs in `corpus/` and 10,000 mutated ones of each, in
//! `make test`. `fuzz/` searches for new ones, guided by coverage, in `make soak`.

#![allow(clippy::expect_used, clippy::panic, reason = "a panic is what these functions are for")]

mod fabric_link;
mod frame;
mod halves;
mod handoff_message;
mod kv_events;
mod otlp;
mod request;
mod route_answer;
mod route_body;
mod route_control;
mod shard_layout;
mod trace_file;
mod zmtp;

/// A parser under test.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// The folder in `corpus/`, and the argument of `make fuzz`.
    pub name: &'static str,
    /// Panics if a property fails for these bytes.
    pub run: fn(&[u8]),
}

/// All parsers that `make test` and `make fuzz` run.
pub const TARGETS: [Target; 20] = [
    Target { name: "cluster_message", run: kvlane_cluster::fuzzing::message },
    Target { name: "fabric_descriptor", run: kvlane_fabric::fuzzing::descriptor },
    Target { name: "fabric_frame", run: kvlane_fabric::fuzzing::frame },
    Target { name: "fabric_greeting", run: kvlane_fabric::fuzzing::greeting },
    Target { name: "fabric_link", run: fabric_link::run },
    Target { name: "fabric_words", run: kvlane_fabric::fuzzing::words },
    Target { name: "frame", run: frame::run },
    Target { name: "handoff_message", run: handoff_message::run },
    Target { name: "kv_events", run: kv_events::run },
    Target { name: "otlp_answer", run: otlp::answer },
    Target { name: "request", run: request::run },
    Target { name: "route_answer", run: route_answer::run },
    Target { name: "route_body", run: route_body::run },
    Target { name: "route_control", run: route_control::run },
    Target { name: "shard_layout", run: shard_layout::run },
    Target { name: "ssd_file", run: kvlane_ssd::fuzzing::file },
    Target { name: "ssd_structure", run: kvlane_ssd::fuzzing::structure },
    Target { name: "trace_file", run: trace_file::run },
    Target { name: "traceparent", run: otlp::traceparent },
    Target { name: "zmtp", run: zmtp::run },
];

/// The target of this name.
pub fn target(name: &str) -> Option<Target> {
    TARGETS.into_iter().find(|each| each.name == name)
}
