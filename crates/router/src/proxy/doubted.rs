//! Tracks the nodes that answered one request with 500, by the request's fault or by their own.
//!
//! A 500 puts the node in doubt. A node that serves the same leg later convicts those in doubt: they were at fault, and count as
//! failed. If [`ERRORS_MAX`] nodes answer 500 instead, the request is at fault, and the client gets that answer.

use std::{cell::RefCell, net::IpAddr, time::Instant};

use bytes::Bytes;
use hyper::{HeaderMap, header::AUTHORIZATION};
use xxhash_rust::xxh3::xxh3_64;

use super::{clients::Client, leg::LegGuard};
use crate::schedule::{Doubt, Leg, LegEnd, NodeId};
use crate::shared::Shared;

/// Number of engines that may answer one request with 500. Then the client gets that answer.
const ERRORS_MAX: usize = 2;

/// The nodes that answered one request with 500.
pub(super) struct Doubted<'a> {
    shared: &'a Shared,
    client: &'a Client,
    headers: &'a HeaderMap,
    body: &'a Bytes,
    all: RefCell<Vec<Answered>>,
}

/// A node that answered a leg of the request with 500.
#[derive(Debug, Clone, Copy)]
struct Answered {
    node: NodeId,
    leg: Leg,
    /// Another node has served the leg, so this node was at fault. It counts once.
    is_convicted: bool,
}

impl<'a> Doubted<'a> {
    /// No node has answered this client's request with 500 yet.
    pub(super) fn new(
        shared: &'a Shared,
        client: &'a Client,
        headers: &'a HeaderMap,
        body: &'a Bytes,
    ) -> Self {
        Self { shared, client, headers, body, all: RefCell::default() }
    }

    /// Ends a leg that its node answered with 500.
    pub(super) fn doubt(&self, guard: &mut LegGuard, leg: Leg) {
        let node = guard.node();
        guard.end(LegEnd::InDoubt);
        let Some(node) = node else { return };
        self.all.borrow_mut().push(Answered { node, leg, is_convicted: false });
        let fingerprint = self.fingerprint();
        let turn = {
            let mut state = self.shared.state.lock();
            let turn = state.scheduler.doubt(node, fingerprint, Instant::now());
            if turn.is_some() {
                state.scheduler.note_failure(
                    node,
                    "it answered 500 to requests of several clients, and served none between",
                );
            }
            turn
        };
        self.shared.log_turn(node, turn);
    }

    /// Whether so many nodes have answered 500 that another one probably would, too.
    pub(super) fn are_enough(&self) -> bool {
        self.all.borrow().len() >= ERRORS_MAX
    }

    /// A node has served this leg, so the nodes that answered it with 500 were at fault. Other legs do not count, because engines
    /// get another request there.
    pub(super) fn convict(&self, leg: Option<Leg>) {
        for each in self.all.borrow_mut().iter_mut() {
            if each.is_convicted || Some(each.leg) != leg {
                continue;
            }
            each.is_convicted = true;
            let fingerprint = self.fingerprint();
            let turn = {
                let mut state = self.shared.state.lock();
                state
                    .scheduler
                    .note_failure(each.node, "it answered 500 to a request that another node served");
                state.scheduler.convict(each.node, fingerprint, Instant::now())
            };
            self.shared.log_turn(each.node, turn);
        }
    }

    /// Fingerprints of the client and of its request. If clients show keys, a client is its key. Else it is its IPv4 address, or
    /// the /64 network of its IPv6 address. Other headers do not count, because a client can write anything there.
    fn fingerprint(&self) -> Doubt {
        let client = if self.shared.settings.keys.is_empty() {
            match self.client.ip().map(|ip| ip.to_canonical()) {
                Some(IpAddr::V4(ip)) => xxh3_64(&ip.octets()),
                Some(IpAddr::V6(ip)) => xxh3_64(&ip.octets()[..8]),
                None => 0,
            }
        } else {
            xxh3_64(self.headers.get(AUTHORIZATION).map_or(&[], |key| key.as_bytes()))
        };
        Doubt { client, request: xxh3_64(self.body) }
    }
}
