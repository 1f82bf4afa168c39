//! A node's answers of 500 that may be the requests' fault, and the rules by which they count against the node.
//!
//! vLLM answers 500 both if its engine is broken and if a request makes it fail. Only the first says something about the node.
//! A 500 therefore counts in two cases:
//!
//! - Another node then served the same leg of the same request. The caller reports this ([`Doubts::confirm`]).
//! - Different requests of different clients failed here, and the node served none in between ([`Doubts::raise`]).

use std::time::{Duration, Instant};

/// A doubt expires if no second one follows within this time.
const LASTS: Duration = Duration::from_secs(60);
/// Doubts that one client can raise. A single client can neither eject a node nor fill the list.
const OF_A_CLIENT: usize = 2;
/// Most doubts that are remembered.
const MOST: usize = 8;

/// Fingerprints of a request that a node answered with 500, and of its client. Equal fingerprints are one doubt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Doubt {
    /// Differs between clients.
    pub client: u64,
    /// Equal for equal bodies.
    pub request: u64,
}

/// The doubts about one node since it served a request.
#[derive(Debug, Clone, Default)]
pub(super) struct Doubts {
    /// The oldest first.
    all: Vec<Raised>,
}

#[derive(Debug, Clone, Copy)]
struct Raised {
    doubt: Doubt,
    at: Instant,
    /// The doubt has counted as a failure of the node.
    counted: bool,
}

impl Doubts {
    /// The node answered 500. Returns the number of failures that follow from it.
    pub(super) fn raise(&mut self, doubt: Doubt, now: Instant) -> u32 {
        self.all.retain(|raised| now.saturating_duration_since(raised.at) < LASTS);
        let same_client = self.all.iter().filter(|raised| raised.doubt.client == doubt.client).count();
        let is_known = self.all.iter().any(|raised| raised.doubt == doubt);
        if is_known || same_client == OF_A_CLIENT {
            return 0;
        }
        if self.all.len() == MOST {
            self.all.remove(0);
        }
        self.all.push(Raised { doubt, at: now, counted: false });
        let doubts: Vec<Doubt> = self.all.iter().map(|raised| raised.doubt).collect();
        let is_shared = |one: Doubt| {
            doubts.iter().any(|other| one.client != other.client && one.request != other.request)
        };
        let mut failures = 0;
        for raised in self.all.iter_mut().filter(|raised| !raised.counted && is_shared(raised.doubt)) {
            raised.counted = true;
            failures += 1;
        }
        failures
    }

    /// Another node served the request that this one answered with 500. Returns whether that is a failure that has not counted
    /// yet.
    pub(super) fn confirm(&mut self, doubt: Doubt) -> bool {
        let at = self.all.iter().position(|raised| raised.doubt == doubt);
        at.is_none_or(|at| !self.all.remove(at).counted)
    }

    /// The node served a request: forgets its doubts.
    pub(super) fn clear(&mut self) {
        self.all.clear();
    }

    /// Number of doubts that have not expired.
    pub(super) fn count(&self, now: Instant) -> usize {
        self.all.iter().filter(|raised| now.saturating_duration_since(raised.at) < LASTS).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn doubt(client: u64, request: u64) -> Doubt {
        Doubt { client, request }
    }

    #[test]
    fn one_client_cannot_eject_a_node_whatever_it_asks() {
        let (mut doubts, now) = (Doubts::default(), Instant::now());
        let failures: u32 = (0..1000).map(|request| doubts.raise(doubt(1, request), now)).sum();
        assert_eq!((failures, doubts.count(now)), (0, OF_A_CLIENT));
    }

    #[test]
    fn one_request_counts_nothing_however_many_clients_send_it() {
        let (mut doubts, now) = (Doubts::default(), Instant::now());
        assert_eq!((0..1000).map(|client| doubts.raise(doubt(client, 7), now)).sum::<u32>(), 0);
        assert_eq!(doubts.count(now), MOST);
    }

    #[test]
    fn different_requests_of_different_clients_count_once_each() {
        let (mut doubts, now) = (Doubts::default(), Instant::now());
        assert_eq!(doubts.raise(doubt(1, 1), now), 0);
        assert_eq!(doubts.raise(doubt(2, 2), now), 2, "the first one counts now as well");
        assert_eq!(doubts.raise(doubt(2, 2), now), 0);
        assert_eq!(doubts.raise(doubt(3, 3), now), 1);
        assert!(!doubts.confirm(doubt(3, 3)), "it has counted");
    }

    #[test]
    fn a_request_that_another_node_serves_counts_whoever_sent_it() {
        let (mut doubts, now) = (Doubts::default(), Instant::now());
        for request in 0..5 {
            assert_eq!(doubts.raise(doubt(1, request), now), 0);
            assert!(doubts.confirm(doubt(1, request)));
        }
        assert_eq!(doubts.count(now), 0);
    }

    #[test]
    fn what_was_served_between_or_long_ago_says_nothing() {
        let (mut doubts, now) = (Doubts::default(), Instant::now());
        doubts.raise(doubt(1, 1), now);
        doubts.clear();
        assert_eq!(doubts.raise(doubt(2, 2), now), 0);
        assert_eq!(doubts.raise(doubt(1, 1), now + LASTS), 0);
        assert_eq!(doubts.count(now + LASTS), 1);
    }
}
