//! [`MoeError`]: why an operation failed, and whether later ones can work.

use std::fmt;
use std::time::Duration;

use thiserror::Error;

/// A rank waits for one of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The counts of a dispatch.
    Counts,
    /// The rows of a dispatch.
    Rows,
    /// The rows that combine brings back.
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

/// Why an operation failed. After all but [`MoeError::BadInput`], [`MoeError::OverCapacity`] and [`MoeError::TooManyRows`] every
/// later operation of this rank fails alike.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum MoeError {
    /// An argument is wrong. Nothing was sent.
    #[error("{0}")]
    BadInput(String),
    /// An expert got more rows than a masked layout has room for. The dispatch fails on its rank, the combine on each rank that
    /// had sent a token there. Later operations work.
    #[error(
        "an expert of rank {rank} got {needed} rows, and has room for {capacity}: make the all-to-all with a capacity of at \
         least {needed}"
    )]
    OverCapacity {
        /// The rank of that expert.
        rank: usize,
        /// Rows of its expert that got most.
        needed: u32,
        /// Rows that it has room for.
        capacity: usize,
    },
    /// The ranks did not find each other.
    #[error("{0}")]
    NotJoined(String),
    /// A rank's process has ended.
    #[error("rank {rank} is gone: its process ended while this rank waited for {phase}")]
    PeerLost {
        /// The rank whose process ended.
        rank: usize,
        /// The part that had not come.
        phase: Phase,
    },
    /// A rank has closed, or has failed itself.
    #[error(
        "rank {rank} takes no part any more: it {} while this rank waited for {phase}",
        because.map_or("closed or failed".into(), |other| format!("failed because of rank {other}"))
    )]
    PeerLeft {
        /// The rank that left.
        rank: usize,
        /// The part that had not come.
        phase: Phase,
        /// The rank because of which it failed.
        because: Option<usize>,
    },
    /// A rank is silent.
    #[error(
        "rank {rank} sent no {phase} within {} s: all ranks have to dispatch and combine equally often, in the same order, \
         and all or none reduced",
        waited.as_secs_f64()
    )]
    TimedOut {
        /// The rank that is silent.
        rank: usize,
        /// The part that did not come.
        phase: Phase,
        /// The longest wait.
        waited: Duration,
    },
    /// A rank is ahead: this one has missed an operation.
    #[error("rank {rank} is in a later dispatch: all ranks have to dispatch equally often")]
    OutOfStep {
        /// The rank that is ahead.
        rank: usize,
    },
    /// A dispatch was sent, and its rows were not received.
    #[error(
        "a dispatch was given up before its rows were received, so this rank is out of step with the others"
    )]
    GivenUp,
    /// The caller wanted no more.
    #[error("interrupted while this rank waited for {phase} of rank {rank}")]
    Interrupted {
        /// The rank that was waited for.
        rank: usize,
        /// The part that had not come.
        phase: Phase,
    },
    /// A rank has sent bytes that no routing gives.
    #[error(
        "rank {rank} sent {what} that no routing gives: its memory was overwritten, or its kvlane is another one"
    )]
    Nonsense {
        /// The rank that sent it.
        rank: usize,
        /// The part that is wrong.
        what: &'static str,
    },
    /// A kernel found an id that is no expert. On a GPU ids are known only there.
    #[error(
        "token {token} wants expert {expert} as its number {k}: experts are 0 to {}, and -1 is none",
        experts - 1
    )]
    BadExpert {
        /// Position of the token.
        token: usize,
        /// Position among the token's experts.
        k: usize,
        /// Id that was asked for.
        expert: i64,
        /// Number of experts.
        experts: usize,
    },
    /// On a GPU, more rows came than the output has room for. Later operations work.
    #[error(
        "rank {rank} got {needed} rows, and has room for {capacity}: make the all-to-all with a capacity of at least {needed}"
    )]
    TooManyRows {
        /// The rank that got them.
        rank: usize,
        /// Rows for which there has to be room.
        needed: usize,
        /// Rows for which there is.
        capacity: usize,
    },
    /// The GPU, or its driver, refused.
    #[error("{0}")]
    Gpu(String),
}

impl MoeError {
    /// An error of the GPU's driver.
    #[cfg(not(loom))]
    pub(crate) fn of_gpu(error: kvlane_gpu::GpuError) -> MoeError {
        MoeError::Gpu(error.to_string())
    }

    /// The rank because of which this one fails.
    pub(crate) fn because(&self) -> Option<usize> {
        match *self {
            MoeError::PeerLeft { because: Some(rank), .. }
            | MoeError::PeerLeft { rank, .. }
            | MoeError::PeerLost { rank, .. }
            | MoeError::TimedOut { rank, .. }
            | MoeError::OutOfStep { rank }
            | MoeError::Nonsense { rank, .. } => Some(rank),
            _ => None,
        }
    }
}
