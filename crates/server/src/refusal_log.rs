//! The daemon's log of refusals: each new kind of them once a peer, since a peer that is refused asks again and again.

use std::collections::{HashSet, VecDeque};

use kvlane_proto::v1::{Refused, refused::Reason};
use parking_lot::Mutex;

use crate::peer::Peer;

/// Kinds that are remembered; the oldest is forgotten first, and told again.
const REMEMBERED: usize = 4096;

/// Whom the daemon refused what.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    told: Mutex<Told>,
}

#[derive(Debug, Default)]
struct Told {
    known: HashSet<(String, Reason)>,
    order: VecDeque<(String, Reason)>,
}

impl Refusals {
    /// The daemon answers `peer` with a refusal.
    pub(crate) fn note(&self, peer: &str, refused: &Refused) {
        // Nothing went wrong.
        if refused.reason() == Reason::Cancelled {
            return;
        }
        if self.is_new(peer, refused.reason()) {
            let (reason, sentence) = (refused.reason().as_str_name(), &refused.sentence);
            tracing::warn!(peer, reason, "refused, and not told again for this peer and reason: {sentence}");
        }
    }

    fn is_new(&self, peer: &str, reason: Reason) -> bool {
        let mut told = self.told.lock();
        let kind = (peer.to_owned(), reason);
        if !told.known.insert(kind.clone()) {
            return false;
        }
        told.order.push_back(kind);
        if told.order.len() > REMEMBERED
            && let Some(oldest) = told.order.pop_front()
        {
            told.known.remove(&oldest);
        }
        true
    }
}

/// A peer's name in the log: the same over all its connections.
pub(crate) fn name_of(peer: &Peer) -> String {
    match peer {
        Peer::Local { credentials, .. } => format!("process {} of user {}", credentials.pid, credentials.uid),
        Peer::Remote => "over TCP".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_is_told_once_a_peer_and_few_are_remembered() {
        let refusals = Refusals::default();
        assert!(refusals.is_new("process 7", Reason::Conflict));
        assert!(!refusals.is_new("process 7", Reason::Conflict));
        assert!(refusals.is_new("process 7", Reason::Limit));
        assert!(refusals.is_new("process 8", Reason::Conflict));
        for pid in 0..REMEMBERED {
            refusals.is_new(&format!("process {}", pid + 9), Reason::Limit);
        }
        assert_eq!(refusals.told.lock().known.len(), REMEMBERED);
        assert!(refusals.is_new("process 7", Reason::Conflict), "the oldest is forgotten");
    }
}
