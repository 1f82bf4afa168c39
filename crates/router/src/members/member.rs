//! One node's membership: who names it, whether it answers, and its state.
//!
//! ```text
//!                    answers, and beats are not overdue
//!   Join: suspect ---------------------------------------> ready
//!            ^       silent, or 9 s without a beat           |
//!            '-----------------------------------------------'
//!   drained: draining, whatever it answers, until it is added again; or until it is idle, if it is to leave
//!   Leave: no source names it any more; or an operator has removed it
//! ```

use std::{net::SocketAddr, time::Instant};

use super::{event::Spec, sources::Sources};
use crate::schedule::{Connector, KnownBy, NodeState};

/// A node that at least one source names, or that drains.
#[derive(Debug, Clone)]
pub(super) struct Member {
    /// Changed by beats and reloads.
    pub(super) spec: Spec,
    pub(super) epoch: u64,
    pub(super) sources: Sources,
    /// Whether the last probes got an answer.
    pub(super) answers: bool,
    /// The address that the last probe reached: what its name resolves to.
    pub(super) at: Option<SocketAddr>,
    pub(super) drain: Option<Drain>,
    /// When its beats last showed a restart.
    pub(super) restarted: Option<Instant>,
    /// As the last changes reported it.
    pub(super) reported_state: NodeState,
    pub(super) reported_known_by: KnownBy,
}

/// Why a node drains, and whether it leaves once it is idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Drain {
    /// An operator drained it: it stays.
    Stay,
    /// An operator removed it: it leaves once it is idle.
    Go,
    /// The configuration dropped it: it leaves once it is idle, unless a source names it again before.
    Unnamed,
}

impl Member {
    pub(super) fn new(spec: Spec, epoch: u64, sources: Sources) -> Self {
        Self {
            spec,
            epoch,
            sources,
            answers: false,
            at: None,
            drain: None,
            restarted: None,
            reported_state: NodeState::Suspect,
            reported_known_by: KnownBy::default(),
        }
    }

    /// Its state, and the reason for the log.
    pub(super) fn state(&self, now: Instant) -> (NodeState, &'static str) {
        if self.drain == Some(Drain::Unnamed) {
            (NodeState::Draining, "the configuration no longer names it")
        } else if self.drain.is_some() {
            (NodeState::Draining, "an operator drains it")
        } else if !self.answers {
            (NodeState::Suspect, "it does not answer")
        } else if self.sources.is_overdue(now) {
            (NodeState::Suspect, "it missed three beats")
        } else {
            (NodeState::Ready, "it answers")
        }
    }

    /// The default one until its pings name it.
    pub(super) fn connector(&self) -> Connector {
        self.spec.connector.unwrap_or_default()
    }

    /// Whether this address means this node, as a host name or as an IP address.
    pub(super) fn is_at(&self, address: &crate::address::Address) -> bool {
        let own = &self.spec.address;
        let is_there = |at: SocketAddr| {
            at.port() == address.port
                && address.host.parse().is_ok_and(|host: std::net::IpAddr| host == at.ip())
        };
        own.is_same_server(address) || own.path == address.path && self.at.is_some_and(is_there)
    }
}
