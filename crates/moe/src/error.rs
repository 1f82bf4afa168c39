//! [`MoeError`]: why an operation failed, and whether later ones can work.

use std::fmt;
use std::time::Duration;

use thiserror::Error;

/// What a rank waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The counts of a dispatch.
    Counts,
    /// The rows of a dispatch.
    Rows,
    /// What combine brings back.
    Sums,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Counts => "counts of a dispatch",
            Phase::Rows => "rows of a dispatch",
            Phase::Sums => "rows of a combine",
        })
    }
}

/// Why an operation failed. After all but [`MoeError::BadInput`] every later operation of this rank fails alike.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum MoeError {
    /// An argument is wrong. Nothing was sent.
    #[error("{0}")]
    BadInput(String),
    /// The ranks did not find each other.
    #[error("{0}")]
    NotJoined(String),
    /// A rank's process has ended.
    #[error("rank {rank} is gone: its process ended while this rank waited for {phase}")]
    PeerLost {
        /// The rank.
        rank: usize,
        /// What it had not sent.
        phase: Phase,
    },
    /// A rank has closed, or has failed itself.
    #[error("rank {rank} takes no part any more: it closed or failed while this rank waited for {phase}")]
    PeerLeft {
        /// The rank.
        rank: usize,
        /// What it had not sent.
        phase: Phase,
    },
    /// A rank is silent.
    #[error(
        "rank {rank} sent no {phase} within {} s: all ranks have to call dispatch and combine equally often, in the same \
         order",
        waited.as_secs_f64()
    )]
    TimedOut {
        /// The rank.
        rank: usize,
        /// What it did not send.
        phase: Phase,
        /// The longest wait.
        waited: Duration,
    },
    /// The caller wanted no more.
    #[error("interrupted while this rank waited for {phase} of rank {rank}")]
    Interrupted {
        /// The rank.
        rank: usize,
        /// What it had not sent.
        phase: Phase,
    },
    /// A rank has sent what no routing gives.
    #[error("rank {rank} sent a row that makes no sense: {why}")]
    Nonsense {
        /// The rank.
        rank: usize,
        /// What is wrong with it.
        why: &'static str,
    },
}
