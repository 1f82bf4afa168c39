//! Beats of nodes that do not count, by their reasons.

use std::sync::atomic::{AtomicU64, Ordering};

/// Why a beat, or a connection for beats, does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BeatRefused {
    /// The connection comes from an address that is not in the list.
    Stranger,
    /// The node that it names is at an address that is not in the list, or at a name.
    Address,
    /// It cannot be read.
    Malformed,
    /// The peer broke ZeroMQ's protocol, or sent more than a beat may have.
    Protocol,
    /// There are as many connections as may be.
    Connections,
    /// There are as many nodes as may be.
    Nodes,
    /// An operator has removed the node.
    Removed,
    /// Somebody else has said that the node is for something else.
    Differs,
    /// The node says too often that it has started anew.
    TooOften,
}

impl BeatRefused {
    /// All of them.
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

    /// As in metrics.
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

/// How many there were.
#[derive(Debug, Default)]
pub struct BeatsRefused([AtomicU64; BeatRefused::ALL.len()]);

impl BeatsRefused {
    /// So many more. Answers whether they are the first ones.
    pub(crate) fn add(&self, reason: BeatRefused, more: u64) -> bool {
        self.0[reason as usize].fetch_add(more, Ordering::Relaxed) == 0
    }

    /// How many for this reason.
    pub fn of(&self, reason: BeatRefused) -> u64 {
        self.0[reason as usize].load(Ordering::Relaxed)
    }
}
