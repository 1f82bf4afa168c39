//! Everything of one engine, behind one lock: [`Transfers`] decides, and [`Outside`] carries out.
//!
//! ```text
//!  a thread of the engine --- the lock --> SocketHub: poll, pump, take_job, put_back
//!                                            Hub: Transfers <--- drive ---> Outside: control connections, carriers,
//!                                                                                    and the process's regions
//!  the same thread, no lock --> a job runs: sockets, copies, drivers
//! ```
//! No call under the lock blocks, and none copies bytes of transfers, except WRITEs of less than a page that travel inside
//! words. Jobs do both without the lock ([`SocketHub::take_job`]); [`crate::audit`] checks this in tests.

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

/// Runs that one hold of the lock may post. Then other threads get the lock.
pub(crate) const RUNS_A_HOLD: usize = 512;

#[derive(Debug)]
pub(crate) struct Hub<C> {
    pub(crate) transfers: Transfers,
    pub(crate) outside: Outside<C>,
    pub(crate) outcomes: Outcomes,
    pub(crate) is_closed: bool,
    /// The last hold ended at [`RUNS_A_HOLD`], so more can be posted.
    pub(crate) has_more: bool,
}

impl<C: Control> Hub<C> {
    pub(crate) fn new(transfers: Transfers, outside: Outside<C>) -> Hub<C> {
        Hub { transfers, outside, outcomes: Outcomes::default(), is_closed: false, has_more: false }
    }

    pub(crate) fn now(&self) -> Duration {
        self.outside.now()
    }

    /// Does what is due, and posts at most [`RUNS_A_HOLD`] runs. Whether there was anything.
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
                    let carried = outside.process.note_over(ticket);
                    outcomes.complete(ticket, outcome, carried);
                });
            any |= more;
            if !more || runs == 0 {
                self.has_more = more;
                self.forget();
                self.wake_waiters();
                return any;
            }
        }
    }

    /// Wakes threads that wait for a message, a counter or regions, if some have changed.
    fn wake_waiters(&mut self) {
        let news = self.outside.process.take_news();
        if news.message {
            self.outcomes.note_message();
        }
        if news.change {
            self.outcomes.note_change();
        }
    }

    /// Adds a peer and starts to connect to it.
    pub(crate) fn add_peer(&mut self, whom: Whom, trust: Trust) -> Option<PeerId> {
        let now = self.now();
        let peer = self.transfers.add_peer(now);
        let control = self.transfers.add_path(now, peer, PathSpec::new(Reach::WORDS, 0))?;
        self.outside.add_peer(peer, Peer::new(whom, trust, control));
        Some(peer)
    }

    /// Ends all transfers with a peer. WRITEs end when the peer has confirmed their fence, or with its lease.
    pub(crate) fn remove_peer(&mut self, peer: PeerId) {
        let now = self.now();
        self.transfers.remove_peer(now, peer);
        self.settle();
        self.outside.remove_peer(peer);
        self.settle();
    }

    /// Forgets removed peers and paths that have nothing in flight any more.
    fn forget(&mut self) {
        if !self.outside.has_removed() {
            return;
        }
        let transfers = &self.transfers;
        self.outside.leaving.retain(|peer, _| transfers.has_peer(*peer));
        self.outside.forget_paths(|path| transfers.has_path(path));
    }

    /// Begins a transfer that was checked against both sides' regions. None if these have changed since the check.
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

    /// The regions of both sides, as known now.
    pub(crate) fn both_sides(&self, peer: PeerId) -> Option<BothSides> {
        self.outside.both_sides(peer)
    }

    /// Does everything that is due, but posts nothing.
    fn settle(&mut self) {
        while self.pump_within(0) {}
    }

    /// Ends everything for good, except what others have to finish: fences that neighbours must confirm, and jobs or
    /// drivers at work ([`Outside::is_ending`]).
    pub(crate) fn close(&mut self) {
        self.is_closed = true;
        // A thread that closes the engine waits for memory in use.
        self.outside.process.releasing += 1;
        self.outcomes.note_message();
        self.outside.peers().into_iter().for_each(|peer| self.remove_peer(peer));
        self.outside.close_carriers();
        self.settle();
    }
}
