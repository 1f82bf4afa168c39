//! All that one engine has: what decides about transfers ([`Transfers`]), and what carries out what was decided
//! ([`Outside`]). One lock guards it. Nothing under it blocks or copies bytes of transfers, but those of writes of less than a
//! page that go with words: that is done by jobs ([`SocketHub::take_job`]), outside of the lock, as [`crate::audit`] checks.

mod answers;
mod ending;
#[cfg(test)]
mod leftovers;
mod outside;
mod serving;
#[cfg(test)]
mod simulation;
pub(crate) mod socket_hub;

use std::time::Duration;

pub(crate) use self::outside::Outside;
use crate::completion::Outcomes;
use crate::control::Control;
use crate::fences::Whom;
use crate::peers::Peer;
use crate::process::{BothSides, Used};
use crate::provider::drive;
use crate::transfers::{Full, PathSpec, PeerId, Reach, Request, Ticket, Transfers};
use crate::trust::Trust;

/// Runs that are posted before whoever holds the lock lets others have it.
pub(crate) const RUNS_A_HOLD: usize = 512;

#[derive(Debug)]
pub(crate) struct Hub<C> {
    pub(crate) transfers: Transfers,
    pub(crate) outside: Outside<C>,
    pub(crate) outcomes: Outcomes,
    pub(crate) is_closed: bool,
    /// There is more to be posted than one hold of the lock may.
    pub(crate) has_more: bool,
}

impl<C: Control> Hub<C> {
    pub(crate) fn new(transfers: Transfers, outside: Outside<C>) -> Hub<C> {
        Hub { transfers, outside, outcomes: Outcomes::default(), is_closed: false, has_more: false }
    }

    pub(crate) fn now(&self) -> Duration {
        self.outside.now()
    }

    /// Does what is due now, and posts at most so many runs as one hold of the lock may. Whether there was anything.
    pub(crate) fn pump(&mut self) -> bool {
        self.pump_within(RUNS_A_HOLD)
    }

    fn pump_within(&mut self, mut runs: usize) -> bool {
        let mut any = false;
        loop {
            let mut more = self.outside.settle();
            let now = self.now();
            let outcomes = &mut self.outcomes;
            more |=
                drive(&mut self.transfers, &mut self.outside, now, &mut runs, |outside, ticket, outcome| {
                    outside.process.note_over(ticket);
                    outcomes.complete(ticket, outcome);
                });
            any |= more;
            if !more || runs == 0 {
                self.has_more = more;
                self.forget();
                self.take_news();
                return any;
            }
        }
    }

    /// What came by itself is told to those who wait for it.
    fn take_news(&mut self) {
        let news = self.outside.process.take_news();
        if news.message {
            self.outcomes.note_message();
        }
        if news.change {
            self.outcomes.note_change();
        }
    }

    /// A peer, which is connected from now on.
    pub(crate) fn add_peer(&mut self, whom: Whom, trust: Trust) -> Option<PeerId> {
        let now = self.now();
        let peer = self.transfers.add_peer(now);
        let control = self.transfers.add_path(now, peer, PathSpec::new(Reach::WORDS, 0))?;
        self.outside.add_peer(peer, Peer::new(whom, trust, control));
        Some(peer)
    }

    /// Ends all transfers with a peer. Those that wrote are over when the peer has confirmed that, or with its lease.
    pub(crate) fn remove_peer(&mut self, peer: PeerId) {
        let now = self.now();
        self.transfers.remove_peer(now, peer);
        self.settle();
        self.outside.remove_peer(peer);
        self.settle();
    }

    /// Forgets removed peers and paths of which nothing is under way any more.
    fn forget(&mut self) {
        if !self.outside.forgets() {
            return;
        }
        let transfers = &self.transfers;
        self.outside.leaving.retain(|peer, _| transfers.has_peer(*peer));
        self.outside.forget_paths(|path| transfers.has_path(path));
    }

    /// Begins a transfer whose request was checked against what both sides had registered. None: that has changed.
    pub(crate) fn submit(&mut self, request: Request, used: Used) -> Result<Option<Ticket>, Full> {
        let is_right = self.outside.both_sides(used.peer).is_some_and(|sides| sides.still_have(&used));
        if !is_right {
            return Ok(None);
        }
        let now = self.now();
        let ticket = self.transfers.submit(now, request)?;
        self.outcomes.want(ticket);
        self.outside.process.note_use(ticket, used);
        Ok(Some(ticket))
    }

    /// What both sides have registered now.
    pub(crate) fn both_sides(&self, peer: PeerId) -> Option<BothSides> {
        self.outside.both_sides(peer)
    }

    /// Does all that is due, but posts nothing.
    fn settle(&mut self) {
        while self.pump_within(0) {}
    }

    /// Ends everything, for good, but what asks neighbours to read nothing more of this process, and what waits for a driver or
    /// for a job ([`Outside::is_ending`]).
    pub(crate) fn close(&mut self) {
        self.is_closed = true;
        // Whoever closes waits for what is in hand.
        self.outside.process.releasing += 1;
        self.outcomes.note_message();
        self.outside.peers().into_iter().for_each(|peer| self.remove_peer(peer));
        self.outside.close_carriers();
        self.settle();
    }
}
