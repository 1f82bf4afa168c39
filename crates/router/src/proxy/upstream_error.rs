//! Why there is no answer of a node, or no whole one.

use std::{io, time::Duration};

use thiserror::Error;

use crate::answers::AnswerError;

/// A node did not answer, or not to the end.
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
    /// Of a kept connection: the engine may have closed it before the request came, or after.
    #[error("it reset a kept connection before an answer: {0}")]
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
    /// Whether the node may have worked at the request.
    pub(super) fn was_taken(&self) -> bool {
        !matches!(self, Self::Refused(_) | Self::Slow(_) | Self::NotBegun)
    }
}
