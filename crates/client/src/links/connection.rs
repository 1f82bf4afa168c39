//! The states of a link's connection, shared by both links. Each link has its own data for a connection that is up.
//!
//! ```text
//!   Down --> Connecting --> Up --> Leaving, until Bye is answered
//!    ^           |           |        |
//!    +-----------+-----------+--------+
//! ```

use std::time::{Duration, Instant};

use super::ids::ConnectionId;

/// How long a goodbye waits for the daemon. A stopped daemon finds out later, from the socket, that this process is gone.
pub(super) const GOODBYE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) enum ConnectionState<U> {
    Down,
    Connecting(ConnectionId),
    Up(U),
    /// Bye was sent as request `bye`. Ends with its answer, or at `until`.
    Leaving {
        id: ConnectionId,
        bye: u64,
        until: Instant,
    },
}

impl<U> ConnectionState<U> {
    /// After Bye was sent as request `bye`.
    pub(super) fn leaving(id: ConnectionId, bye: u64, now: Instant) -> Self {
        Self::Leaving { id, bye, until: now + GOODBYE }
    }

    pub(super) fn is_down(&self) -> bool {
        matches!(self, Self::Down)
    }

    /// Whether the driver is making this connection. The link has given up any other.
    pub(super) fn is_connecting(&self, connection: ConnectionId) -> bool {
        matches!(self, Self::Connecting(id) if *id == connection)
    }

    /// Whether Bye was sent over this connection.
    pub(super) fn is_leaving(&self, connection: ConnectionId) -> bool {
        matches!(self, Self::Leaving { id, .. } if *id == connection)
    }

    /// Whether this is the answer to Bye.
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

    /// Goes Down, and returns the data of a connection that was up.
    pub(super) fn take_up(&mut self) -> Option<U> {
        match std::mem::replace(self, Self::Down) {
            Self::Up(up) => Some(up),
            _ => None,
        }
    }
}
