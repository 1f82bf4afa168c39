//! The values that go into and out of [`Transfers`](super::Transfers): requests, posts, completions, failures and actions.

use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use super::reach::{Between, Route, Stretch};
use crate::runs::Run;

/// A peer of one engine. Never used twice.
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

/// A path of one carrier to a peer; it has a connection while it is up. Never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PathId(pub(super) u32);

/// Names a transfer. Never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub(super) u64);

/// Names a post. Never used twice, also where the same work is posted again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub(super) u64);

impl Token {
    /// The token on the wire.
    pub(crate) fn number(self) -> u64 {
        self.0
    }

    /// A token that a peer sent back. It may name no post.
    pub(crate) fn from_number(number: u64) -> Token {
        Token(number)
    }
}

/// The direction in which bytes move, as seen from this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// From memory here to memory of the peer.
    Write,
    /// From memory of the peer to memory here.
    Read,
}

/// The order of transfers to one peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Priority {
    /// A caller waits for the transfer.
    High,
    /// Everything else. It is not starved: one in [`crate::Options::bulk_every`] posts to a peer is bulk, if any waits.
    Bulk,
}

/// A transfer that a caller asks for.
#[derive(Debug, Clone)]
pub struct Request {
    /// The process on the other side.
    pub peer: PeerId,
    /// The direction of all stretches.
    pub op: Op,
    /// The bytes; may be empty. No post spans two stretches.
    pub stretches: Vec<Stretch>,
    /// A counter at the peer and its generation, which counts once all bytes are in place.
    pub immediate: Option<(u32, u32)>,
    /// When the transfer is given up. None: never.
    pub deadline: Option<Duration>,
    /// The queue that it waits in.
    pub priority: Priority,
}

/// The work of one post.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Work {
    /// Moves bytes of registered memory.
    Move {
        /// The direction of all runs.
        op: Op,
        /// The two memories of all runs.
        between: Between,
        /// At least one; none of them is empty.
        runs: Vec<Run>,
    },
    /// Counts an immediate at the peer.
    Immediate {
        /// Counts the immediates and messages to this peer from 0; the same when it is sent again.
        number: u64,
        /// The counter, by its number at the peer.
        counter: u32,
        /// The generation that the counter must have.
        generation: u32,
    },
    /// Delivers a message.
    Message {
        /// Counts the immediates and messages to this peer from 0; the same when it is sent again.
        number: u64,
        /// The whole message.
        bytes: Arc<[u8]>,
    },
}

/// Work to be posted on a path now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Post {
    /// A path that was up when the post was made.
    pub path: PathId,
    /// Pass it to [`crate::Transfers::complete`] or [`crate::Transfers::hand_back`].
    pub token: Token,
    /// The transfer that the post is a part of.
    pub ticket: Ticket,
    /// The work that the path carries.
    pub work: Work,
}

/// How a post ended. Every post ends with exactly one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completion {
    /// Its bytes are in place at their destination, its immediate has been counted, or its message was delivered.
    Placed,
    /// Its path broke or was closed. It may have been placed or not; nothing touches its memory any more.
    Unknown,
    /// The peer refused it: a stale descriptor, bytes outside of the region, a write to what is read-only.
    Refused,
    /// The peer has no room for this message now.
    NoRoom,
    /// The driver of a GPU, here or at the peer, could not copy its bytes. Nothing touches its memory any more.
    GpuFailed,
}

/// Why a transfer failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Failure {
    /// The caller gave it up.
    #[error("the transfer was cancelled")]
    Cancelled,
    /// Its deadline passed.
    #[error("the transfer was not over by its deadline")]
    DeadlineExceeded,
    /// The peer refused a part, because the descriptor used here is out of date or does not cover the bytes.
    #[error("the peer refused the transfer: describe its memory again")]
    Refused,
    /// No path to the peer that reaches the memory has been up for too long, or the peer was removed.
    #[error("the peer cannot be reached any more")]
    PeerLost,
    /// More than [`crate::Options::breaks_max`] connections in a row broke while they carried it, with nothing of it placed in
    /// between.
    #[error("every path broke that carried the transfer")]
    PathsBreak,
    /// The peer had no room for the message until its deadline, because its process does not receive what has arrived.
    #[error("the peer had no room for the message until its deadline")]
    NoRoom,
    /// The driver of a GPU, here or at the peer, could not copy a part of the bytes; the log there says how.
    #[error("a GPU's driver, here or at the peer, could not copy the bytes: the log there says how")]
    Gpu,
}

/// No transfer can begin, because this many are under way, the limit. Wait for one to be over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{0} transfers are under way, as many as can be")]
pub struct Full(pub usize);

/// Why a message cannot begin. Wait for others to be over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum CannotSend {
    /// [`crate::Options::live_max`] transfers are under way.
    #[error(transparent)]
    Full(#[from] Full),
    /// With this message [`crate::Options::message_bytes`] would be exceeded; these are under way already.
    #[error("{0} bytes of messages are under way, as many as can be")]
    Bytes(usize),
}

/// A task for the caller of [`crate::Transfers`], besides posting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Report that a transfer is over. Comes exactly once for each.
    Over(Ticket, Result<(), Failure>),
    /// End this path's connection with this number, unless it has ended already. Each of its posts then completes once nothing
    /// touches its memory any more: as [`Completion::Unknown`], unless the outcome is known.
    Close(PathId, u32),
    /// Connect this path, under this number. Answer with [`crate::Transfers::path_up`] or [`crate::Transfers::path_broke`].
    Connect(PathId, u32),
    /// Report a peer as lost for a route: no path that serves it has been up for [`crate::Options::peer_patience`]. The
    /// transfers that need one have failed.
    Lost(PeerId, Route),
}

impl Work {
    /// Its runs; an immediate or a message counts as one.
    pub fn runs(&self) -> usize {
        match self {
            Work::Move { runs, .. } => runs.len(),
            Work::Immediate { .. } | Work::Message { .. } => 1,
        }
    }

    /// The route that its path has to serve.
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
