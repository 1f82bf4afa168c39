//! Why a node's answer is missing or incomplete.

use std::{io, time::Duration};

use thiserror::Error;

use crate::answers::AnswerError;

/// A node did not answer a request, or not to the end.
#[derive(Debug, Error)]
pub(super) enum UpstreamError {
    #[error("it refuses connections: {0}")]
    Refused(io::Error),
    #[error("it did not take the connection within {} ms", .0.as_millis())]
    Slow(Duration),
    /// The engine cannot have begun the request.
    #[error("it ended the connection before the request had come")]
    NotBegun,
    #[error("it ended the connection before an answer")]
    Closed,
    /// The engine's kernel had acknowledged nothing of the request. The engine may have read it all the same.
    #[error("it reset the connection before an answer: {0}")]
    Reset(io::Error),
    #[error("it ended the connection before an answer: {0}")]
    Failed(io::Error),
    #[error("it ended the connection within its answer")]
    Cut,
    #[error("the connection failed within its answer: {0}")]
    Broken(io::Error),
    #[error(transparent)]
    Nonsense(#[from] AnswerError),
}

impl UpstreamError {
    /// Whether the node had accepted a connection for the request, so that the request may be what made it fail.
    pub(super) fn was_taken(&self) -> bool {
        !matches!(self, Self::Refused(_) | Self::Slow(_))
    }
}
