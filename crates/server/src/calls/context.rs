//! What a call knows beside what it asks, and what becomes of it.

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
    /// For answers that come from another thread.
    pub(crate) replies: &'a Arc<Replies>,
    /// The request's number.
    pub(crate) id: u64,
    pub(crate) call: Call,
    /// When the request was read.
    pub(crate) since: Instant,
    /// That came with the request.
    pub(crate) descriptors: Vec<OwnedFd>,
}

/// What became of a call that is not refused.
pub(crate) enum Answered {
    /// The answer, and a descriptor that goes with it.
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
    /// The engine that the session has opened. Calls whose row asks for it were admitted with one.
    pub(crate) fn owner(&self) -> Result<OwnerId, Refusal> {
        self.greeted.opened.ok_or_else(|| not_admitted(self.call))
    }
}

/// What a session hears that is not one of those who may use the call.
pub(crate) fn not_admitted(call: Call) -> Refusal {
    Refusal::not_allowed(call.row().others_hear)
}

/// An answer that has nothing to tell.
pub(crate) fn done() -> Answer {
    Answer::Done(v1::Done {})
}
