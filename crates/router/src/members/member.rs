//! One node as members know it.
//!
//! ```text
//!                    answers, and beats are not overdue
//!   Join: suspect ---------------------------------------> ready
//!            ^       silent, or 9 s without a beat           |
//!            '-----------------------------------------------'
//!   drained: draining, whatever it answers, until it is added again; if it is to be removed: until it is idle
//!   Leave: nobody knows of it any more; or removed
//! ```

use std::{net::SocketAddr, time::Instant};

use super::{event::Spec, whose::Whose};
use crate::schedule::{Connector, KnownBy, NodeState};

/// One node.
#[derive(Debug, Clone)]
pub(super) struct Member {
    /// As it is now.
    pub(super) spec: Spec,
    pub(super) epoch: u64,
    pub(super) whose: Whose,
    /// Whether it answers probes.
    pub(super) answers: bool,
    /// Where it was reached last: what a name stands for.
    pub(super) at: Option<SocketAddr>,
    pub(super) drain: Option<Drain>,
    /// When its beats said last that it has started anew.
    pub(super) restarted: Option<Instant>,
    /// What was told of it last.
    pub(super) told: NodeState,
    pub(super) told_known_by: KnownBy,
}

/// What an operator wants of a node that finishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Drain {
    /// It stays.
    Stay,
    /// It goes when it has nothing to do.
    Go,
    /// The node leaves once it is idle, unless a source names it again before.
    Unnamed,
}

impl Member {
    pub(super) fn new(spec: Spec, epoch: u64, whose: Whose) -> Self {
        Self {
            spec,
            epoch,
            whose,
            answers: false,
            at: None,
            drain: None,
            restarted: None,
            told: NodeState::Suspect,
            told_known_by: KnownBy::default(),
        }
    }

    /// What it should be told to be, and why.
    pub(super) fn state(&self, now: Instant) -> (NodeState, &'static str) {
        if self.drain == Some(Drain::Unnamed) {
            (NodeState::Draining, "the configuration does not name it any more")
        } else if self.drain.is_some() {
            (NodeState::Draining, "an operator has it finish what it has")
        } else if !self.answers {
            (NodeState::Suspect, "it does not answer")
        } else if self.whose.is_overdue(now) {
            (NodeState::Suspect, "three of its beats are missing")
        } else {
            (NodeState::Ready, "it answers")
        }
    }

    /// The connector that counts.
    pub(super) fn connector(&self) -> Connector {
        self.spec.connector.unwrap_or_default()
    }

    /// Whether a node of this address is this one, be it by a name or by a number.
    pub(super) fn is_at(&self, address: &crate::address::Address) -> bool {
        let own = &self.spec.address;
        let is_there = |at: SocketAddr| {
            at.port() == address.port
                && address.host.parse().is_ok_and(|host: std::net::IpAddr| host == at.ip())
        };
        own.is_same_server(address) || own.path == address.path && self.at.is_some_and(is_there)
    }
}
