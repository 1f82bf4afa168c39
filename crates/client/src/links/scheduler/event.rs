//! What a scheduler's link is told, and what it wants done.

use std::time::{Duration, Instant};

use kvlane_proto::v1;

use crate::{
    boot::BootId,
    hand_off::HandOff,
    hit::Hit,
    links::{
        ids::{ConnectionId, Life, NotConnected, ProcessId},
        standing::Notice,
    },
};

/// What happened, or what the engine wants.
#[derive(Debug)]
pub enum SchedulerEvent {
    /// Time has passed. Also the end of every turn.
    Tick,
    /// The connection is there.
    Connected {
        /// Which one was asked for.
        connection: ConnectionId,
        /// What is known of the end of the process that listens.
        life: Life,
    },
    /// The connection was not made.
    NotConnected {
        /// Which one was asked for.
        connection: ConnectionId,
        /// Whether somebody else listens, or nobody.
        why: NotConnected,
    },
    /// The daemon answered.
    Reply {
        /// The one that the reply came over: one of a former connection is left alone.
        connection: ConnectionId,
        /// Its id says which question it is the answer to.
        reply: v1::Reply,
    },
    /// A connection ended.
    Lost {
        /// The one that ended: that of a former one changes nothing.
        connection: ConnectionId,
        /// A sentence for the log.
        why: String,
    },
    /// The process of a daemon ended.
    ProcessEnded(ProcessId),
    /// The engine asks for a prefix.
    LookUp {
        /// The engine's name of it. One that is asked already is forgotten first.
        request: String,
        /// Block hashes as they go over the wire.
        groups: Vec<v1::LookupGroup>,
        /// Upper bound of the answer in tokens.
        max_tokens: u64,
        /// The engine that saves the prompt meanwhile, if another one does.
        hand_off: Option<HandOff>,
        /// Without an answer by then it is a miss, but for the time that the daemon says it needs.
        timeout: Duration,
    },
    /// The engine wants no answer any more.
    Forget {
        /// The engine's name of it.
        request: String,
    },
    /// The engine gives a lease back.
    Release {
        /// The run that gave it.
        boot: BootId,
        /// As the daemon named it in the hit.
        lease: u64,
    },
    /// No save below this job may become a block any more; [`cancelled`](super::SchedulerLink::cancelled) answers.
    CancelSaves {
        /// The first job that is not meant.
        below: u64,
        /// Without an answer by then it is "no".
        until: Instant,
    },
    /// The engine ends: a goodbye is said, and there is no connection after it.
    Close,
}

/// What the driver is to do, in this order.
#[derive(Debug, Clone, PartialEq)]
pub enum SchedulerAction {
    /// Answered by `Connected` or `NotConnected`.
    Connect(ConnectionId),
    /// A failure is told by `Lost`.
    Send {
        /// The link's present one.
        connection: ConnectionId,
        /// The request, with its id.
        request: v1::Request,
    },
    /// The connection is not needed any more; nothing is told of it afterwards.
    Close(ConnectionId),
    /// A sentence for the log.
    Log(Notice),
}

/// What becomes of a lookup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LookupState {
    /// Without an answer by then it is a miss.
    Pending {
        /// Moves on when the daemon says that it needs longer.
        until: Instant,
    },
    /// The answer, which the caller owns with its lease; a miss if there was none.
    Over(Hit),
}
