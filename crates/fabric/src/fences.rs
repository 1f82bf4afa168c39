//! Connections that broke while they carried writes, until their peers read nothing more of them.
//!
//! ```text
//!  broken --> asked over one address of the peer --> confirmed --> over
//!                ^                |                                 ^
//!                '---- pause <----' not reached                     |
//!  [`LEASE`] after it broke, if it has one, or the peer's end -------'
//! ```
//! Pure: whoever owns the sockets asks.

use std::net::SocketAddr;
use std::time::Duration;

use crate::tcp::{Identity, Key};
use crate::transfers::Token;

/// So long after a connection was closed nothing of it is placed any more: what [`crate::lease`] allows, and what clocks and
/// threads may be late.
pub(crate) const LEASE: Duration = Duration::from_millis(2900);
/// The first pause before a peer is asked again, and the longest.
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// Whom to ask.
#[derive(Debug, Clone)]
pub(crate) struct Whom {
    pub(crate) identity: Identity,
    pub(crate) session: u128,
    /// What it proves to us, and we to it.
    pub(crate) key: Key,
    /// They are tried in turns; there is one.
    pub(crate) addresses: Vec<SocketAddr>,
}

#[derive(Debug)]
struct Fence {
    /// The broken connection.
    connection: u64,
    whom: Whom,
    tokens: Vec<Token>,
    tried: usize,
    is_asked: bool,
    ask_at: Duration,
    pause: Duration,
    until: Duration,
}

/// All of a process.
#[derive(Debug, Default)]
pub(crate) struct Fences(Vec<Fence>);

impl Fences {
    /// A connection broke that carried these. `lease`: after how long they are over anyway; None: not before the peer has
    /// confirmed, or is gone.
    pub(crate) fn add(
        &mut self,
        now: Duration,
        connection: u64,
        whom: Whom,
        tokens: Vec<Token>,
        lease: Option<Duration>,
    ) {
        debug_assert!(!whom.addresses.is_empty());
        let (tried, is_asked, ask_at, pause, until) =
            (0, false, now, PAUSE, lease.map_or(Duration::MAX, |lease| now + lease));
        self.0.push(Fence { connection, whom, tokens, tried, is_asked, ask_at, pause, until });
    }

    /// Whom to ask for a connection.
    pub(crate) fn whom(&self, connection: u64) -> Option<&Whom> {
        self.0.iter().find(|fence| fence.connection == connection).map(|fence| &fence.whom)
    }

    /// Broken connections to be asked for now, each with the address to try.
    pub(crate) fn take_due(&mut self, now: Duration) -> Vec<(u64, SocketAddr)> {
        let due = |fence: &&mut Fence| !fence.is_asked && fence.ask_at <= now;
        let ask = |fence: &mut Fence| {
            let address = fence.whom.addresses[fence.tried % fence.whom.addresses.len()];
            (fence.tried, fence.is_asked) = (fence.tried + 1, true);
            (fence.connection, address)
        };
        self.0.iter_mut().filter(due).map(ask).collect()
    }

    /// The last try came to nothing. That nobody listens there, or somebody else, does not say that the process is gone:
    /// something in between may have moved.
    pub(crate) fn failed(&mut self, now: Duration, connection: u64) {
        if let Some(fence) = self.0.iter_mut().find(|fence| fence.connection == connection) {
            fence.is_asked = false;
            fence.ask_at = now + fence.pause;
            fence.pause = (fence.pause * 2).min(PAUSE_MAX);
        }
    }

    /// The peer has confirmed, or is gone: what the connection carried.
    pub(crate) fn confirmed(&mut self, connection: u64) -> Vec<Token> {
        self.take(|fence| fence.connection == connection)
    }

    /// What connections carried whose lease is over.
    pub(crate) fn take_over(&mut self, now: Duration) -> Vec<Token> {
        self.take(|fence| fence.until <= now)
    }

    /// Nobody is asked any more: what all of them carried.
    pub(crate) fn take_all(&mut self) -> Vec<Token> {
        self.take(|_| true)
    }

    /// When there is something to do if nothing happens.
    pub(crate) fn next_tick(&self) -> Option<Duration> {
        let tick = |fence: &Fence| if fence.is_asked { fence.until } else { fence.ask_at.min(fence.until) };
        self.0.iter().map(tick).min()
    }

    fn take(&mut self, is_one: impl Fn(&Fence) -> bool) -> Vec<Token> {
        if !self.0.iter().any(&is_one) {
            return Vec::new();
        }
        let (taken, left) = std::mem::take(&mut self.0).into_iter().partition(is_one);
        self.0 = left;
        taken.into_iter().flat_map(|fence| fence.tokens).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    const fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn whom(ports: &[u16]) -> Whom {
        let addresses = ports.iter().map(|port| SocketAddr::from(([127, 0, 0, 1], *port))).collect();
        Whom { identity: Identity { engine: 1, boot: 2 }, session: 3, key: Key::new(b"secret"), addresses }
    }

    #[test]
    fn every_address_is_tried_after_growing_pauses_until_the_peer_confirms() {
        let tokens = [Token::from_number(7), Token::from_number(8)];
        let mut fences = Fences::default();
        fences.add(at(0), 5, whom(&[1, 2]), tokens.to_vec(), Some(LEASE));
        fences.add(at(0), 6, whom(&[3]), Vec::new(), Some(LEASE));
        let mut now = at(0);
        let mut tried = Vec::new();
        let mut pauses = Vec::new();
        for _ in 0..5 {
            let due = fences.take_due(now);
            tried.extend(due.iter().filter(|(connection, _)| *connection == 5).map(|(_, at)| at.port()));
            assert!(fences.take_due(now).is_empty(), "it is asked already");
            due.iter().for_each(|(connection, _)| fences.failed(now, *connection));
            let next = fences.next_tick().unwrap();
            pauses.push((next - now).as_millis());
            now = next;
        }
        assert_eq!(tried, [1, 2, 1, 2, 1]);
        assert_eq!(pauses, [20, 40, 80, 160, 320]);
        assert_eq!(fences.whom(5).unwrap().session, 3);
        assert_eq!(fences.confirmed(5), tokens);
        assert!(fences.confirmed(5).is_empty() && fences.whom(5).is_none());
        assert!(fences.whom(6).is_some(), "another connection is not confirmed with it");
    }

    #[test]
    fn a_lease_ends_what_nobody_confirms() {
        let mut fences = Fences::default();
        fences.add(at(100), 5, whom(&[1]), vec![Token::from_number(7)], Some(LEASE));
        assert_eq!(fences.take_due(at(100)).len(), 1);
        let end = at(100) + LEASE;
        assert_eq!(fences.next_tick(), Some(end), "while it is asked there is nothing else to do");
        assert!(fences.take_over(end - at(1)).is_empty());
        assert_eq!(fences.take_over(end), [Token::from_number(7)]);
        assert_eq!(fences.next_tick(), None);
    }

    #[test]
    fn without_a_lease_nothing_is_over_before_the_peer_has_confirmed_or_is_gone() {
        let mut fences = Fences::default();
        fences.add(at(100), 5, whom(&[1]), vec![Token::from_number(7)], None);
        assert_eq!(fences.take_due(at(100)).len(), 1);
        assert!(fences.take_over(at(1_000_000)).is_empty());
        assert_eq!(fences.confirmed(5), [Token::from_number(7)]);
    }
}
