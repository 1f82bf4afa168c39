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

use crate::identity::Identity;
use crate::transfers::{PeerId, Token};
use crate::trust::Key;

/// So long after a connection was closed nothing of it is placed any more: what [`crate::lease`] allows, and what clocks and
/// threads may be late.
pub(crate) const LEASE: Duration = Duration::from_millis(2900);
/// The first pause before a peer is asked again, and the longest.
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(500);
/// A control connection that is up may be dead all the same: after so long without an answer another way is tried.
const INSIST: Duration = Duration::from_millis(100);

/// Whom to ask.
#[derive(Debug, Clone)]
pub(crate) struct Whom {
    /// None: whoever listens at its address, since nothing else is known of it yet.
    pub(crate) identity: Option<Identity>,
    pub(crate) session: u128,
    /// What it proves to us, and we to it.
    pub(crate) key: Key,
    /// They are tried in turns; there is one.
    pub(crate) addresses: Vec<SocketAddr>,
}

#[derive(Debug)]
struct Fence {
    /// The broken connection, and its carrier.
    broken: Broken,
    peer: PeerId,
    whom: Whom,
    tokens: Vec<Token>,
    tried: usize,
    is_asked: bool,
    /// When it is asked once more, over a connection of its own, if there is no answer.
    insist_at: Duration,
    ask_at: Duration,
    pause: Duration,
    until: Duration,
}

/// A connection that carried bytes: its carrier's code and its number.
pub(crate) type Broken = (u8, u64);

/// Whom to ask about what, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Question {
    pub(crate) broken: Broken,
    pub(crate) peer: PeerId,
    /// Where, if not over the control connection.
    pub(crate) address: SocketAddr,
    /// It was asked before, and nobody has answered: a connection of its own is needed.
    pub(crate) is_insisted: bool,
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
        broken: Broken,
        peer: PeerId,
        whom: Whom,
        tokens: Vec<Token>,
        lease: Option<Duration>,
    ) {
        debug_assert!(!whom.addresses.is_empty());
        let (tried, is_asked, insist_at, ask_at, pause, until) =
            (0, false, Duration::MAX, now, PAUSE, lease.map_or(Duration::MAX, |lease| now + lease));
        self.0.push(Fence { broken, peer, whom, tokens, tried, is_asked, insist_at, ask_at, pause, until });
    }

    /// Whom to ask for a connection.
    pub(crate) fn whom(&self, broken: Broken) -> Option<&Whom> {
        self.0.iter().find(|fence| fence.broken == broken).map(|fence| &fence.whom)
    }

    /// Broken connections to be asked for now.
    pub(crate) fn take_due(&mut self, now: Duration) -> Vec<Question> {
        let due = |fence: &&mut Fence| match fence.is_asked {
            true => fence.insist_at <= now,
            false => fence.ask_at <= now,
        };
        let ask = |fence: &mut Fence| {
            let address = fence.whom.addresses[fence.tried % fence.whom.addresses.len()];
            let is_insisted = fence.is_asked;
            fence.insist_at = if is_insisted { Duration::MAX } else { now + INSIST };
            (fence.tried, fence.is_asked) = (fence.tried + 1, true);
            Question { broken: fence.broken, peer: fence.peer, address, is_insisted }
        };
        self.0.iter_mut().filter(due).map(ask).collect()
    }

    /// The last try came to nothing. That nobody listens there, or somebody else, does not say that the process is gone:
    /// something in between may have moved.
    pub(crate) fn failed(&mut self, now: Duration, broken: Broken) {
        for fence in self.0.iter_mut().filter(|fence| fence.broken == broken) {
            fence.is_asked = false;
            fence.ask_at = now + fence.pause;
            fence.pause = (fence.pause * 2).min(PAUSE_MAX);
        }
    }

    /// Questions that went over a peer's control connection, which is gone, are to be asked again.
    pub(crate) fn ask_again(&mut self, now: Duration, peer: PeerId) {
        for fence in self.0.iter_mut().filter(|fence| fence.peer == peer && fence.is_asked) {
            (fence.is_asked, fence.ask_at) = (false, now);
        }
    }

    /// The peer has confirmed, or is gone: what the connection carried.
    pub(crate) fn confirmed(&mut self, broken: Broken) -> Vec<Token> {
        self.take(|fence| fence.broken == broken).into_iter().flat_map(|(_, tokens)| tokens).collect()
    }

    /// What connections carried whose lease is over.
    pub(crate) fn take_over(&mut self, now: Duration) -> Vec<(Broken, Vec<Token>)> {
        self.take(|fence| fence.until <= now)
    }

    /// Nobody is asked any more: what all of them carried.
    pub(crate) fn take_all(&mut self) -> Vec<(Broken, Vec<Token>)> {
        self.take(|_| true)
    }

    /// Whether any waits that no lease ends.
    pub(crate) fn has_unlimited(&self) -> bool {
        self.0.iter().any(|fence| fence.until == Duration::MAX)
    }

    /// When there is something to do if nothing happens.
    pub(crate) fn next_tick(&self) -> Option<Duration> {
        let next = |fence: &Fence| if fence.is_asked { fence.insist_at } else { fence.ask_at };
        let tick = |fence: &Fence| next(fence).min(fence.until);
        self.0.iter().map(tick).min()
    }

    fn take(&mut self, is_one: impl Fn(&Fence) -> bool) -> Vec<(Broken, Vec<Token>)> {
        if !self.0.iter().any(&is_one) {
            return Vec::new();
        }
        let (taken, left): (Vec<Fence>, _) = std::mem::take(&mut self.0).into_iter().partition(is_one);
        self.0 = left;
        taken.into_iter().map(|fence| (fence.broken, fence.tokens)).collect()
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
        Whom {
            identity: Some(Identity { engine: 1, boot: 2 }),
            session: 3,
            key: Key::new(b"secret"),
            addresses,
        }
    }

    const ONE: Broken = (1, 5);
    const OTHER: Broken = (2, 5);

    fn add(
        fences: &mut Fences,
        now: Duration,
        broken: Broken,
        ports: &[u16],
        token: u64,
        lease: Option<Duration>,
    ) {
        let tokens = vec![Token::from_number(token)];
        fences.add(now, broken, PeerId::from_number(7), whom(ports), tokens, lease);
    }

    #[test]
    fn every_address_is_tried_after_growing_pauses_until_the_peer_confirms() {
        let mut fences = Fences::default();
        add(&mut fences, at(0), ONE, &[1, 2], 7, Some(LEASE));
        add(&mut fences, at(0), OTHER, &[3], 8, Some(LEASE));
        let mut now = at(0);
        let mut tried = Vec::new();
        let mut pauses = Vec::new();
        for _ in 0..5 {
            let due = fences.take_due(now);
            tried.extend(due.iter().filter(|due| due.broken == ONE).map(|due| due.address.port()));
            assert!(fences.take_due(now).is_empty(), "it is asked already");
            due.iter().for_each(|due| fences.failed(now, due.broken));
            let next = fences.next_tick().unwrap();
            pauses.push((next - now).as_millis());
            now = next;
        }
        assert_eq!(tried, [1, 2, 1, 2, 1]);
        assert_eq!(pauses, [20, 40, 80, 160, 320]);
        assert_eq!(fences.whom(ONE).unwrap().session, 3);
        assert_eq!(fences.confirmed(ONE), [Token::from_number(7)]);
        assert!(fences.confirmed(ONE).is_empty() && fences.whom(ONE).is_none());
        assert!(fences.whom(OTHER).is_some(), "another carrier's connection is not confirmed with it");
    }

    #[test]
    fn a_lease_ends_what_nobody_confirms() {
        let mut fences = Fences::default();
        add(&mut fences, at(100), ONE, &[1], 7, Some(LEASE));
        assert!(!fences.has_unlimited());
        assert_eq!(fences.take_due(at(100)).len(), 1);
        let end = at(100) + LEASE;
        assert_eq!(fences.next_tick(), Some(at(100) + INSIST));
        assert!(fences.take_due(at(100) + INSIST)[0].is_insisted, "over a connection of its own");
        assert_eq!(fences.next_tick(), Some(end), "while it is asked there is nothing else to do");
        assert!(fences.take_over(end - at(1)).is_empty());
        assert_eq!(fences.take_over(end), [(ONE, vec![Token::from_number(7)])]);
        assert_eq!(fences.next_tick(), None);
    }

    #[test]
    fn without_a_lease_nothing_is_over_before_the_peer_has_confirmed_or_is_gone() {
        let mut fences = Fences::default();
        add(&mut fences, at(100), ONE, &[1], 7, None);
        add(&mut fences, at(100), ONE, &[1], 8, Some(LEASE));
        assert!(fences.has_unlimited());
        assert_eq!(fences.take_due(at(100)).len(), 2);
        assert_eq!(fences.take_over(at(1_000_000)), [(ONE, vec![Token::from_number(8)])]);
        assert_eq!(fences.confirmed(ONE), [Token::from_number(7)]);
    }

    /// What was asked over a connection that is gone is never answered.
    #[test]
    fn what_was_asked_over_a_connection_that_is_gone_is_asked_again() {
        let mut fences = Fences::default();
        add(&mut fences, at(0), ONE, &[1], 7, None);
        assert_eq!(fences.take_due(at(0)).len(), 1);
        fences.ask_again(at(10), PeerId::from_number(8));
        assert_eq!(fences.take_due(at(10)).len(), 0, "of another peer");
        fences.ask_again(at(20), PeerId::from_number(7));
        assert_eq!(fences.take_due(at(20)).len(), 1);
    }
}
