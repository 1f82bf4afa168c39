//! The states of a link's connection, the same for both links. What is known of one that is up is each link's own.
//!
//! ```text
//!   Down --> Connecting --> Up --> Leaving, until Bye is answered
//!    ^           |           |        |
//!    +-----------+-----------+--------+
//! ```

use std::time::{Duration, Instant};

use super::ids::ConnectionId;

/// How long a goodbye waits for the daemon. One that is stopped finds out by itself that we are gone.
pub(super) const GOODBYE: Duration = Duration::from_secs(1);

/// In the order in which they follow each other.
#[derive(Debug)]
pub(super) enum Connection<U> {
    Down,
    Connecting(ConnectionId),
    Up(U),
    /// Bye is sent; until its answer or that time.
    Leaving {
        id: ConnectionId,
        bye: u64,
        until: Instant,
    },
}

impl<U> Connection<U> {
    /// Bye was sent as this request.
    pub(super) fn leaving(id: ConnectionId, bye: u64, now: Instant) -> Self {
        Self::Leaving { id, bye, until: now + GOODBYE }
    }

    pub(super) fn is_down(&self) -> bool {
        matches!(self, Self::Down)
    }

    /// Whether this one is being made. Another one is not wanted any more.
    pub(super) fn is_connecting(&self, connection: ConnectionId) -> bool {
        matches!(self, Self::Connecting(id) if *id == connection)
    }

    /// Whether Bye was sent over this one.
    pub(super) fn is_leaving(&self, connection: ConnectionId) -> bool {
        matches!(self, Self::Leaving { id, .. } if *id == connection)
    }

    /// Whether an answer over this connection is the goodbye's.
    pub(super) fn is_goodbye(&self, connection: ConnectionId, answer: u64) -> bool {
        matches!(self, Self::Leaving { id, bye, .. } if (*id, *bye) == (connection, answer))
    }

    pub(super) fn up(&self) -> Option<&U> {
        match self {
            Self::Up(up) => Some(up),
            _ => None,
        }
    }

    pub(super) fn up_mut(&mut self) -> Option<&mut U> {
        match self {
            Self::Up(up) => Some(up),
            _ => None,
        }
    }

    /// Is down from now on; what was known of the one that was up.
    pub(super) fn take_up(&mut self) -> Option<U> {
        match std::mem::replace(self, Self::Down) {
            Self::Up(up) => Some(up),
            _ => None,
        }
    }
}
