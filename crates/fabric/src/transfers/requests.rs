//! What is asked for, what is to be posted for it, and what became of that.

use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use super::reach::{Between, Route, Stretch};
use crate::runs::Run;

/// A process that bytes move to or from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId(pub(super) u32);

#[cfg(test)]
impl PathId {
    pub(crate) fn from_number(number: u32) -> PathId {
        PathId(number)
    }
}

#[cfg(test)]
impl PeerId {
    pub(crate) fn from_number(number: u32) -> PeerId {
        PeerId(number)
    }
}

/// A way to a peer, of one carrier: joined by a connection while it is up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PathId(pub(super) u32);

/// A transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub(super) u64);

/// Something that was posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub(super) u64);

impl Token {
    /// As it goes over the wire.
    pub(crate) fn number(self) -> u64 {
        self.0
    }

    /// That a peer sent back; it may be nobody's.
    pub(crate) fn from_number(number: u64) -> Token {
        Token(number)
    }
}

/// Which way bytes move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// To the peer.
    Write,
    /// From the peer.
    Read,
}

/// Who comes first on a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Priority {
    /// Somebody waits for it.
    High,
    /// Everything else. It is not starved: of [`crate::Options::bulk_every`] posts to a peer one is of this kind, if
    /// there are any.
    Bulk,
}

/// A transfer to be.
#[derive(Debug, Clone)]
pub struct Request {
    /// With whom.
    pub peer: PeerId,
    /// Which way.
    pub op: Op,
    /// What; may be empty. Each memory of either side is posted by itself.
    pub stretches: Vec<Stretch>,
    /// The number of a counter at the peer and its generation: told once all bytes are in place.
    pub immediate: Option<(u32, u32)>,
    /// When it is given up, if ever.
    pub deadline: Option<Duration>,
    /// Its turn.
    pub priority: Priority,
}

/// What is done on a path at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Work {
    /// Bytes.
    Move {
        /// Which way.
        op: Op,
        /// Between which memories.
        between: Between,
        /// Which; none is empty.
        runs: Vec<Run>,
    },
    /// An immediate, the `number`-th for this peer.
    Immediate {
        /// From 0 on; the same when it is sent again.
        number: u64,
        /// The counter.
        counter: u32,
        /// Its generation.
        generation: u32,
    },
    /// A message, numbered with the immediates.
    Message {
        /// From 0 on; the same when it is sent again.
        number: u64,
        /// All of it.
        bytes: Arc<[u8]>,
    },
}

/// Something to be posted now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Post {
    /// Where.
    pub path: PathId,
    /// By which its completion is told.
    pub token: Token,
    /// Of which transfer it is a part.
    pub ticket: Ticket,
    /// What.
    pub work: Work,
}

/// What became of something posted. Everything that is posted gets one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completion {
    /// Its bytes are in place at their destination, its immediate has been counted, or its message was delivered.
    Placed,
    /// Its path broke or was closed. It may have been placed or not; nothing touches its memory any more.
    Unknown,
    /// The peer refused it: a stale descriptor, a place outside of its region, a write to what is read-only.
    Refused,
    /// The peer has no room for this message now.
    NoRoom,
    /// The driver of a GPU, here or at the peer, could not copy its bytes. Nothing touches its memory any more.
    GpuFailed,
}

/// Why a transfer failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Failure {
    /// Whoever asked for it gave it up.
    #[error("the transfer was cancelled")]
    Cancelled,
    /// It took too long.
    #[error("the transfer was not over by its deadline")]
    DeadlineExceeded,
    /// The peer refused a part: its descriptor is out of date, or does not cover the bytes.
    #[error("the peer refused the transfer: describe its memory again")]
    Refused,
    /// No path to the peer that reaches the memory has been up for too long, or the peer was removed.
    #[error("the peer cannot be reached any more")]
    PeerLost,
    /// Paths broke again and again while they carried it, and nothing of it was placed in between.
    #[error("every path broke that carried the transfer")]
    PathsBreak,
    /// The peer had no room for the message until its deadline: nobody there takes what has arrived.
    #[error("the peer had no room for the message until its deadline")]
    NoRoom,
    /// The driver of a GPU, here or at the peer, could not copy a part of the bytes; the log there says how.
    #[error("a GPU's driver, here or at the peer, could not copy the bytes: the log there says how")]
    Gpu,
}

/// So many transfers are under way that no more can begin: wait for one to be over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{0} transfers are under way, as many as can be")]
pub struct Full(pub usize);

/// Why a message cannot begin: wait for others to be over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum CannotSend {
    /// As many transfers as can be.
    #[error(transparent)]
    Full(#[from] Full),
    /// As many bytes of messages as can be.
    #[error("{0} bytes of messages are under way, as many as can be")]
    Bytes(usize),
}

/// What else is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// A transfer is over. Told once for each.
    Over(Ticket, Result<(), Failure>),
    /// End this path's connection of that number, if that has not happened yet: everything posted on it is to complete, as
    /// [`Completion::Unknown`] unless it is known better, once nothing touches its memory any more.
    Close(PathId, u32),
    /// Connect this path, as the connection of that number; answer [`crate::Transfers::path_up`] or [`crate::Transfers::path_broke`].
    Connect(PathId, u32),
    /// No path to the peer that serves this route has been up for [`crate::Options::peer_patience`]; all transfers that need
    /// one are failed.
    Lost(PeerId, Route),
}

impl Work {
    /// How many runs it has; one where it has no bytes of regions.
    pub fn runs(&self) -> usize {
        match self {
            Work::Move { runs, .. } => runs.len(),
            Work::Immediate { .. } | Work::Message { .. } => 1,
        }
    }

    /// What it needs of its path.
    pub(super) fn route(&self) -> Route {
        match self {
            Work::Move { between, .. } => between.route(),
            Work::Immediate { .. } | Work::Message { .. } => Route::Words,
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        match self {
            Work::Move { runs, .. } => runs.iter().map(|run| run.len).sum(),
            Work::Message { bytes, .. } => bytes.len() as u64,
            Work::Immediate { .. } => 0,
        }
    }
}
