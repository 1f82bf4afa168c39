//! Fences: tracks connections that broke while they carried writes, until their peers place nothing more of them.
//!
//! ```text
//!  broken --> ask over the control connection, --> confirmed ---------> over
//!             or over an address of the peer                             ^
//!                ^                |                                      |
//!                '---- pause <----' not reached, or not confirmed        |
//!  the lease has expired (if the fence has one), or the peer is gone ----'
//! ```
//! Pure: the hub sends the questions that [`Fences::take_due`] returns, and reports the answers.
//!
//! An address that refuses, or at which another process listens, proves nothing: a device between the hosts may have moved the
//! address while the process behind it lives and still reads.

use std::net::SocketAddr;
use std::time::Duration;

use crate::identity::Identity;
use crate::transfers::{PeerId, Token};
use crate::trust::Key;

/// After this long since a connection was closed, its peer places nothing more of it: [`crate::lease::PLACES`], and 0.4 s for
/// clocks and threads that are late.
pub(crate) const LEASE: Duration = Duration::from_millis(2900);
/// The first pause before a peer is asked again. It doubles.
const PAUSE: Duration = Duration::from_millis(20);
/// The longest of these pauses.
const PAUSE_MAX: Duration = Duration::from_millis(500);
/// A control connection that is up may still be dead. After this long without an answer, the fence asks over a connection of
/// its own.
const INSIST: Duration = Duration::from_millis(100);

/// How to reach a peer, and what to prove to it.
#[derive(Debug, Clone)]
pub(crate) struct Whom {
    /// None: not known yet; the process that listens at the address.
    pub(crate) identity: Option<Identity>,
    pub(crate) session: u128,
    /// The key that both sides prove.
    pub(crate) key: Key,
    /// At least one. They are tried in turns.
    pub(crate) addresses: Vec<SocketAddr>,
}

#[derive(Debug)]
struct Fence {
    broken: Broken,
    peer: PeerId,
    whom: Whom,
    /// The posts that the connection carried.
    tokens: Vec<Token>,
    /// Questions until now: selects the address.
    tried: usize,
    /// A question is out.
    is_asked: bool,
    /// If there is no answer by then, it asks again over a connection of its own.
    insist_at: Duration,
    /// When the next question is due, if none is out.
    ask_at: Duration,
    pause: Duration,
    /// When the lease expires. MAX: never.
    until: Duration,
}

/// A broken connection that carried bytes: its carrier's code and its number.
pub(crate) type Broken = (u8, u64);

/// A question to a peer: is anything of this connection still placed?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Question {
    pub(crate) broken: Broken,
    pub(crate) peer: PeerId,
    /// The address to ask at, if the control connection is not used.
    pub(crate) address: SocketAddr,
    /// The peer did not answer over the control connection: ask over a connection of its own.
    pub(crate) is_insisted: bool,
}

/// All fences of one engine.
#[derive(Debug, Default)]
pub(crate) struct Fences(Vec<Fence>);

impl Fences {
    /// Adds a connection that broke while it carried these posts. After `lease` they are over without an answer. None: only
    /// when the peer has confirmed, or is gone.
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

    /// The peer of a broken connection. None: the fence is over.
    pub(crate) fn whom(&self, broken: Broken) -> Option<&Whom> {
        self.0.iter().find(|fence| fence.broken == broken).map(|fence| &fence.whom)
    }

    /// The questions that are due now. Each counts as sent.
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

    /// Records that the last question was not confirmed; it is asked again after a pause. An address where nothing listens, or
    /// another process does, does not prove that the peer is gone: something in between may have moved.
    pub(crate) fn failed(&mut self, now: Duration, broken: Broken) {
        for fence in self.0.iter_mut().filter(|fence| fence.broken == broken) {
            fence.is_asked = false;
            fence.ask_at = now + fence.pause;
            fence.pause = (fence.pause * 2).min(PAUSE_MAX);
        }
    }

    /// Asks a peer's open questions again now, because the control connection that carried them is gone.
    pub(crate) fn ask_again(&mut self, now: Duration, peer: PeerId) {
        for fence in self.0.iter_mut().filter(|fence| fence.peer == peer && fence.is_asked) {
            (fence.is_asked, fence.ask_at) = (false, now);
        }
    }

    /// Ends the fences of a connection, because its peer has confirmed or is gone. Returns the posts that it carried.
    pub(crate) fn confirmed(&mut self, broken: Broken) -> Vec<Token> {
        self.take(|fence| fence.broken == broken).into_iter().flat_map(|(_, tokens)| tokens).collect()
    }

    /// Ends the fences whose lease has expired. Returns the posts that their connections carried.
    pub(crate) fn take_over(&mut self, now: Duration) -> Vec<(Broken, Vec<Token>)> {
        self.take(|fence| fence.until <= now)
    }

    /// Ends all fences. Returns the posts that their connections carried.
    pub(crate) fn take_all(&mut self) -> Vec<(Broken, Vec<Token>)> {
        self.take(|_| true)
    }

    /// Whether there is a fence without a lease.
    pub(crate) fn has_unlimited(&self) -> bool {
        self.0.iter().any(|fence| fence.until == Duration::MAX)
    }

    /// When a question is due or a lease expires.
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

    /// The answer to a question over a connection that is gone never comes.
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
