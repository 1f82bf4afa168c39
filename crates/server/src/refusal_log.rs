//! Logs refusals: each reason once a peer, because a peer that is refused asks again and again.

use std::collections::{HashSet, VecDeque};

use kvlane_proto::v1::{Refused, refused::Reason};
use parking_lot::Mutex;

use crate::peer::Peer;

/// Pairs of peer and reason that are remembered. The oldest is forgotten first, and may be logged again.
const REMEMBERED: usize = 4096;

/// The refusals that were logged.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    logged: Mutex<Logged>,
}

/// Peers and reasons, the same ones in both.
#[derive(Debug, Default)]
struct Logged {
    pairs: HashSet<(String, Reason)>,
    order: VecDeque<(String, Reason)>,
}

impl Refusals {
    /// Logs a refusal, if it is the first one for this peer and reason.
    pub(crate) fn note(&self, peer: &str, refused: &Refused) {
        // A cancelled save is no fault.
        if refused.reason() == Reason::Cancelled {
            return;
        }
        if self.remember(peer, refused.reason()) {
            let (reason, sentence) = (refused.reason().as_str_name(), &refused.sentence);
            // Log: the daemon refused a request of this peer, for the reason named; the engine computes instead.
            // Do: look for the reason in docs/troubleshoot.md.
            tracing::warn!(once = true, peer, reason, "request refused: {sentence}");
        }
    }

    /// True if the pair is new.
    fn remember(&self, peer: &str, reason: Reason) -> bool {
        let mut logged = self.logged.lock();
        let pair = (peer.to_owned(), reason);
        if !logged.pairs.insert(pair.clone()) {
            return false;
        }
        logged.order.push_back(pair);
        if logged.order.len() > REMEMBERED
            && let Some(oldest) = logged.order.pop_front()
        {
            logged.pairs.remove(&oldest);
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
        assert!(refusals.remember("process 7", Reason::Conflict));
        assert!(!refusals.remember("process 7", Reason::Conflict));
        assert!(refusals.remember("process 7", Reason::Limit));
        assert!(refusals.remember("process 8", Reason::Conflict));
        for pid in 0..REMEMBERED {
            refusals.remember(&format!("process {}", pid + 9), Reason::Limit);
        }
        assert_eq!(refusals.logged.lock().pairs.len(), REMEMBERED);
        assert!(refusals.remember("process 7", Reason::Conflict), "the oldest is forgotten");
    }
}
