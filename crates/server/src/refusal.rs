//! Why a request is not carried out.

use kvlane_proto::v1::{self, refused::Reason, reply::Body as Answer};
use thiserror::Error;

/// A refused request: a reason that the peer acts upon, and a sentence for people.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{sentence}")]
pub(crate) struct Refusal {
    pub(crate) reason: Reason,
    pub(crate) sentence: String,
}

impl Refusal {
    fn new(reason: Reason, sentence: impl ToString) -> Self {
        Self { reason, sentence: sentence.to_string() }
    }

    /// The request is malformed or out of range.
    pub(crate) fn invalid(sentence: impl ToString) -> Self {
        Self::new(Reason::Invalid, sentence)
    }

    /// The two ends have no wire version in common.
    pub(crate) fn incompatible(sentence: impl ToString) -> Self {
        Self::new(Reason::Incompatible, sentence)
    }

    /// Not over this socket, or not in this role.
    pub(crate) fn not_allowed(sentence: impl ToString) -> Self {
        Self::new(Reason::NotAllowed, sentence)
    }

    /// A bound of the daemon, or of the machine, is reached.
    pub(crate) fn limit(sentence: impl ToString) -> Self {
        Self::new(Reason::Limit, sentence)
    }

    /// Another live engine stands in the way.
    pub(crate) fn conflict(sentence: impl ToString) -> Self {
        Self::new(Reason::Conflict, sentence)
    }

    /// The request names what does not exist.
    pub(crate) fn unknown(sentence: impl ToString) -> Self {
        Self::new(Reason::Unknown, sentence)
    }

    /// It was done, but a restart of the daemon would undo it.
    pub(crate) fn not_durable(sentence: impl ToString) -> Self {
        Self::new(Reason::NotDurable, sentence)
    }

    /// The daemon is about to end. `what`: "work" or "sessions".
    pub(crate) fn stopping(what: &str) -> Self {
        Self::new(Reason::Stopping, format!("the daemon is stopping and takes no new {what}"))
    }

    /// The save's engine has cancelled it.
    pub(crate) fn cancelled() -> Self {
        Self::new(Reason::Cancelled, "the engine has cancelled this save")
    }

    /// The daemon had no descriptor left for the request.
    pub(crate) fn no_descriptor(error: impl std::fmt::Display) -> Self {
        Self::limit(format!("no descriptor left: {error}"))
    }
}

impl From<Refusal> for Answer {
    fn from(Refusal { reason, sentence }: Refusal) -> Self {
        Self::Refused(v1::Refused { reason: reason.into(), sentence })
    }
}
