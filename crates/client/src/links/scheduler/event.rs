//! Events and actions of a scheduler's link.

use std::time::{Duration, Instant};

use kvlane_proto::v1;

use crate::{
    awaited_save::AwaitedSave,
    boot::BootId,
    hit::Hit,
    links::{
        ids::{ConnectionId, Life, NotConnected, ProcessId},
        standing::Notice,
    },
};

/// An event, or a call of the engine, that the driver feeds to the link.
#[derive(Debug)]
pub enum SchedulerEvent {
    /// Time has passed. The driver ends every turn with it.
    Tick,
    /// An answer to [`SchedulerAction::Connect`]: the connection is up.
    Connected {
        /// As the action named it.
        connection: ConnectionId,
        /// Whether the end of the listening process will be reported.
        life: Life,
    },
    /// The other answer to [`SchedulerAction::Connect`].
    NotConnected {
        /// As the action named it.
        connection: ConnectionId,
        /// No daemon answers, or another user's process does.
        why: NotConnected,
    },
    /// The daemon answered a request.
    Reply {
        /// The connection that the reply came over. Replies over a former one are ignored.
        connection: ConnectionId,
        /// Carries the id of its request.
        reply: v1::Reply,
    },
    /// A connection ended.
    Lost {
        /// The end of a former connection is ignored.
        connection: ConnectionId,
        /// The reason, for the log.
        why: String,
    },
    /// A daemon's process ended.
    ProcessEnded(ProcessId),
    /// The engine looks up a prefix.
    LookUp {
        /// The engine's name of the lookup. A former lookup of this name is forgotten first.
        request: String,
        /// The engine's number of the request, by which [`RequestsEnded`](Self::RequestsEnded) names it; 0 if it has none.
        number: u64,
        /// The request had blocks already, or saved some of these itself: recordings leave this lookup out.
        again: bool,
        /// The W3C `traceparent` that the request came with; empty if none.
        traceparent: String,
        /// Block hashes as they go over the wire.
        groups: Vec<v1::LookupGroup>,
        /// Upper bound of the answer in tokens.
        max_tokens: u64,
        /// The saves of another engine that the daemon waits for before it answers.
        awaited_save: Option<AwaitedSave>,
        /// Tokens of prompts that the engine computes in a second; 0 if it does not know.
        tokens_per_s: u32,
        /// After it the lookup is a miss. The daemon may extend it, if it needs longer.
        timeout: Duration,
    },
    /// The engine gives a lookup up.
    Forget {
        /// The name given in `LookUp`.
        request: String,
    },
    /// The engine releases a lease.
    Release {
        /// The run of the daemon that granted it.
        boot: BootId,
        /// As [`Hit::lease`] names it.
        lease: u64,
    },
    /// Requests of the engine have ended. Sent only while somebody records the daemon's requests.
    RequestsEnded(Vec<v1::EndedRequest>),
    /// No save below this job may become a block any more; [`cancelled`](super::SchedulerLink::cancelled) answers.
    CancelSaves {
        /// The first job that is not cancelled.
        below: u64,
        /// When the answer becomes "no", if none has come.
        until: Instant,
    },
    /// The engine ends. The link says goodbye, and never connects again.
    Close,
}

/// An action for the driver. The driver carries actions out in their order.
#[derive(Debug, Clone, PartialEq)]
pub enum SchedulerAction {
    /// Answered by `Connected` or `NotConnected`.
    Connect(ConnectionId),
    /// Hand a request to the connection. A failure is reported as `Lost`.
    Send {
        /// The link's present connection.
        connection: ConnectionId,
        /// The request, with its id.
        request: v1::Request,
    },
    /// Close the connection; no event of it follows.
    Close(ConnectionId),
    /// Write a line to the log.
    Log(Notice),
}

/// Progress of a lookup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LookupState {
    /// The daemon has not answered.
    Pending {
        /// Then the lookup becomes a miss. Later if the daemon says that it needs longer.
        until: Instant,
    },
    /// The answer, which the caller owns with its lease; a miss if there was none.
    Over(Hit),
}
