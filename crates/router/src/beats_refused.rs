//! Counts the nodes' beats that the router refused, by reason.

use std::sync::atomic::{AtomicU64, Ordering};

/// Why the router refused a beat, or a connection for beats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BeatRefused {
    /// The connection comes from an address outside `--ping-allow`.
    Stranger,
    /// The beat names a node whose address is outside `--ping-allow`, or is a host name.
    Address,
    /// The beat cannot be parsed.
    Malformed,
    /// The peer broke ZeroMQ's protocol, or sent more than a beat may have.
    Protocol,
    /// The limit of connections was reached.
    Connections,
    /// The limit of nodes was reached.
    Nodes,
    /// An operator has removed the node.
    Removed,
    /// Another source than beats gave the node another role or group.
    Differs,
    /// The node's ZeroMQ address or role changed again sooner than an engine restarts.
    TooOften,
}

impl BeatRefused {
    /// All reasons, in the order of their counters.
    pub const ALL: [Self; 9] = [
        Self::Stranger,
        Self::Address,
        Self::Malformed,
        Self::Protocol,
        Self::Connections,
        Self::Nodes,
        Self::Removed,
        Self::Differs,
        Self::TooOften,
    ];

    /// Label `reason` of the metric.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stranger => "stranger",
            Self::Address => "address",
            Self::Malformed => "malformed",
            Self::Protocol => "protocol",
            Self::Connections => "connections",
            Self::Nodes => "nodes",
            Self::Removed => "removed",
            Self::Differs => "differs",
            Self::TooOften => "too_often",
        }
    }
}

/// Refused beats, by reason.
#[derive(Debug, Default)]
pub struct BeatsRefused([AtomicU64; BeatRefused::ALL.len()]);

impl BeatsRefused {
    /// Counts further beats. Returns whether they are the first of this reason.
    pub(crate) fn add(&self, reason: BeatRefused, more: u64) -> bool {
        self.0[reason as usize].fetch_add(more, Ordering::Relaxed) == 0
    }

    /// Beats that were refused for this reason.
    pub fn of(&self, reason: BeatRefused) -> u64 {
        self.0[reason as usize].load(Ordering::Relaxed)
    }
}
