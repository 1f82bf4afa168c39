//! [`Context`]: everything that a call gets beside its request. [`Answered`]: its result.

use std::{io, os::fd::OwnedFd, sync::Arc, time::Instant};

use kvlane_proto::v1::{self, reply::Body as Answer};
use kvlane_store::OwnerId;

use super::table::Call;
use crate::{greeted::Greeted, peer::Peer, refusal::Refusal, replies::Replies, shared::Shared};

/// A call that was admitted.
pub(crate) struct Context<'a> {
    pub(crate) shared: &'a Arc<Shared>,
    pub(crate) greeted: &'a mut Greeted,
    pub(crate) peer: &'a Peer,
    /// For answers that another thread sends.
    pub(crate) replies: &'a Arc<Replies>,
    /// The request's number.
    pub(crate) id: u64,
    pub(crate) call: Call,
    /// When the request was read.
    pub(crate) since: Instant,
    /// They came with the request.
    pub(crate) descriptors: Vec<OwnedFd>,
}

/// The result of a call that is not refused.
pub(crate) enum Answered {
    /// The answer, and a descriptor to send with it.
    Now(Answer, Option<OwnedFd>),
    /// A thread of the session answers, and counts the call.
    Later,
    /// The connection cannot be used any further.
    Broken(io::Error),
}

impl From<Answer> for Answered {
    fn from(answer: Answer) -> Self {
        Self::Now(answer, None)
    }
}

impl Context<'_> {
    /// The engine that the session has opened. A call whose row requires one always has it.
    pub(crate) fn owner(&self) -> Result<OwnerId, Refusal> {
        self.greeted.opened.ok_or_else(|| not_admitted(self.call))
    }
}

/// The refusal for a session that may not use the call.
pub(crate) fn not_admitted(call: Call) -> Refusal {
    Refusal::not_allowed(call.row().refusal)
}

/// The answer of a call that has no result.
pub(crate) fn done() -> Answer {
    Answer::Done(v1::Done::default())
}
