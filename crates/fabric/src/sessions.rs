//! Sessions of peers: the scope in which immediates and messages are numbered.
//!
//! A peer draws a session number each time that one of its callers connects this process ([`crate::Engine::connect`]). A session
//! has any number of connections, one after the other or at once.
//!
//! A session without connections is remembered for a while, because its peer may send the same again over the next one. If one
//! peer names too many, its longest disconnected session is forgotten first: a peer that has disconnected sends nothing again.

use std::collections::HashMap;
use std::time::Duration;

use crate::identity::Identity;

/// How long a session without connections is remembered: much longer than a peer would send the same again.
const KEPT: Duration = Duration::from_secs(120);
/// Most sessions of one peer. It has one for each time that it connected this process and has not disconnected.
const OF_ONE_MAX: usize = 64;
/// Most sessions of all peers together.
const ALL_MAX: usize = 16_384;

#[derive(Debug)]
struct Session {
    whose: Identity,
    /// Its connections.
    links: usize,
    /// When a connection was last made or ended.
    since: Duration,
}

/// All sessions, by the number that the peer drew.
#[derive(Debug, Default)]
pub(crate) struct Sessions(HashMap<u128, Session>);

/// The peer has [`OF_ONE_MAX`] sessions, all of them connected, or all peers together have [`ALL_MAX`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TooMany;

impl Sessions {
    /// Adds a connection of a session. Returns the session that was forgotten to make room, if any.
    pub(crate) fn join(
        &mut self,
        now: Duration,
        session: u128,
        whose: Identity,
    ) -> Result<Option<u128>, TooMany> {
        let mut forgotten = None;
        if !self.0.contains_key(&session) {
            let of_one = || self.0.iter().filter(|(_, known)| known.whose == whose);
            if of_one().count() >= OF_ONE_MAX {
                let idle = of_one().filter(|(_, known)| known.links == 0);
                let oldest = idle.min_by_key(|(session, known)| (known.since, **session));
                forgotten = Some(*oldest.ok_or(TooMany)?.0);
            } else if self.0.len() >= ALL_MAX {
                return Err(TooMany);
            }
        }
        forgotten.map(|oldest| self.0.remove(&oldest));
        let known = self.0.entry(session).or_insert(Session { whose, links: 0, since: now });
        (known.links, known.since) = (known.links + 1, now);
        Ok(forgotten)
    }

    /// Removes a connection of a session.
    pub(crate) fn leave(&mut self, now: Duration, session: u128) {
        if let Some(known) = self.0.get_mut(&session) {
            (known.links, known.since) = (known.links.saturating_sub(1), now);
        }
    }

    /// Forgets the sessions that have had no connection for too long, and calls `forget` for each.
    pub(crate) fn forget_old(&mut self, now: Duration, mut forget: impl FnMut(u128)) {
        self.0.retain(|session, known| {
            let is_kept = known.links > 0 || now.saturating_sub(known.since) < KEPT;
            if !is_kept {
                forget(*session);
            }
            is_kept
        });
    }

    /// The sessions that have a connection.
    pub(crate) fn connected(&self) -> usize {
        self.0.values().filter(|known| known.links > 0).count()
    }

    /// Whether no session is remembered.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Identity = Identity { engine: 1, boot: 1 };
    const OTHER: Identity = Identity { engine: 2, boot: 1 };

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn who_names_many_sessions_has_the_oldest_unconnected_ones_forgotten_and_nobody_elses() {
        let mut sessions = Sessions::default();
        let of_one = OF_ONE_MAX as u128;
        assert_eq!(sessions.join(at(0), 1000, OTHER), Ok(None));
        sessions.leave(at(0), 1000);
        for session in 0..of_one {
            assert_eq!(sessions.join(at(1), session, ONE), Ok(None));
        }
        assert_eq!(sessions.join(at(2), of_one, ONE), Err(TooMany), "all are connected");
        assert_eq!(sessions.join(at(2), 3, ONE), Ok(None), "another connection of one that is known");
        sessions.leave(at(3), 7);
        sessions.leave(at(4), 5);
        assert_eq!(sessions.connected(), OF_ONE_MAX - 2);
        assert_eq!(sessions.join(at(5), of_one, ONE), Ok(Some(7)));
        assert_eq!(sessions.join(at(5), 5, ONE), Ok(None), "it came back in time");
        assert_eq!(sessions.join(at(5), of_one + 1, ONE), Err(TooMany));
        assert_eq!(sessions.join(at(5), 1001, OTHER), Ok(None));
    }

    #[test]
    fn all_sessions_together_are_bounded_and_those_without_connections_are_forgotten_in_time() {
        let mut sessions = Sessions::default();
        for session in 0..ALL_MAX as u128 {
            let whose = Identity { engine: session, boot: 0 };
            assert_eq!(sessions.join(at(0), session, whose), Ok(None));
        }
        let another = u128::MAX;
        assert_eq!(sessions.join(at(1), another, ONE), Err(TooMany));
        sessions.leave(at(10), 17);
        assert_eq!(sessions.join(at(11), another, ONE), Err(TooMany), "what it sent may come again");
        let mut forgotten = Vec::new();
        sessions.forget_old(at(10) + KEPT - at(1), |session| forgotten.push(session));
        assert_eq!(forgotten, []);
        sessions.forget_old(at(10) + KEPT, |session| forgotten.push(session));
        assert_eq!(forgotten, [17]);
        assert_eq!(sessions.join(at(200), another, ONE), Ok(None));
        assert!(!sessions.is_empty());
    }
}
