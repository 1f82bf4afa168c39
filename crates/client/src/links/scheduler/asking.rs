//! Starts, answers and gives up lookups, and releases leases.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use kvlane_proto::{v1, v1::request::Body as Ask};

use super::{
    event::SchedulerAction,
    link::SchedulerLink,
    lookups::{Lookup, Unsent},
    up::{PendingLookup, SchedulerStage, send},
};
use crate::{boot::BootId, hit::Hit, links::connection::ConnectionState};

impl SchedulerLink {
    pub(super) fn look_up(
        &mut self,
        request: String,
        ask: v1::Lookup,
        timeout: Duration,
        now: Instant,
        actions: &mut VecDeque<SchedulerAction>,
    ) {
        self.forget(&request, actions);
        self.stats.lookups += 1;
        if self.lookups.is_full() || !self.may_ask(now) {
            self.stats.unavailable += 1;
            return;
        }
        self.ask(request, ask, now + timeout, timeout, now, actions);
    }

    /// Sends a lookup if the engine is open, else holds it until then.
    pub(super) fn ask(
        &mut self,
        request: String,
        ask: v1::Lookup,
        until: Instant,
        timeout: Duration,
        now: Instant,
        actions: &mut VecDeque<SchedulerAction>,
    ) {
        let lookup = match &mut self.connection {
            ConnectionState::Up(up) if up.stage == SchedulerStage::Open => {
                let max_tokens = self.options.most_tokens(&ask);
                let id = send(&mut self.last_request, up.id, Ask::Lookup(ask), actions);
                up.add_pending(id, Some(request.clone()), max_tokens, now, until, timeout);
                Lookup::Sent { id, until }
            }
            _ => Lookup::Unsent(Unsent { ask, until, timeout }),
        };
        self.lookups.insert(request, lookup);
    }

    /// Whether the daemon can be expected to answer: connected or connecting, and not silent.
    pub(super) fn may_ask(&self, now: Instant) -> bool {
        match &self.connection {
            ConnectionState::Connecting(_) => true,
            ConnectionState::Up(up) => !up.is_silent(now),
            ConnectionState::Down | ConnectionState::Leaving { .. } => false,
        }
    }

    /// Handles the answer to a lookup or a probe.
    pub(super) fn answered(
        &mut self,
        pending: Option<PendingLookup>,
        hit: Hit,
        now: Instant,
        actions: &mut VecDeque<SchedulerAction>,
    ) {
        let Some(pending) = pending else { return };
        if hit.tokens > 0 {
            self.leases.note(hit.boot, hit.lease);
        }
        let Some(request) = pending.request else {
            // The engine gave the lookup up, so the hit's lease goes back.
            if hit.tokens > 0 {
                self.release(hit.boot, hit.lease, actions);
            }
            return;
        };
        self.stats.lookup_seconds += now.saturating_duration_since(pending.since).as_secs_f64();
        if hit.tokens > 0 {
            self.stats.hits += 1;
        } else {
            self.stats.misses += 1;
        }
        self.lookups.insert(request, Lookup::Answered(hit));
    }

    pub(super) fn forget(&mut self, request: &str, actions: &mut VecDeque<SchedulerAction>) {
        match self.lookups.remove(request) {
            Some(Lookup::Answered(hit)) if hit.tokens > 0 => self.release(hit.boot, hit.lease, actions),
            Some(Lookup::Sent { id, .. }) => self.give_up(id),
            Some(Lookup::Answered(_) | Lookup::Unsent(_)) | None => {}
        }
    }

    /// Gives up a lookup that was sent. If its answer comes, its lease is released. If no answer at all comes by its deadline,
    /// the daemon counts as silent.
    pub(super) fn give_up(&mut self, id: u64) {
        if let Some(up) = self.connection.up_mut()
            && let Some(pending) = up.pending.get_mut(&id)
        {
            pending.request = None;
        }
    }

    /// Releases a lease. A lease of another run ended with that run.
    pub(super) fn release(&mut self, boot: BootId, lease: u64, actions: &mut VecDeque<SchedulerAction>) {
        self.leases.forget(&boot, lease);
        if let Some(up) = self.connection.up()
            && up.run() == Some(boot)
        {
            let release = Ask::Release(v1::Release { leases: vec![lease] });
            send(&mut self.last_request, up.id, release, actions);
        }
    }
}
