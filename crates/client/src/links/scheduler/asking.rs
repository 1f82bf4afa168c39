//! One lookup after the other: asked, answered, given up; and leases given back.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use kvlane_proto::{v1, v1::request::Body as Ask};

use super::{
    event::SchedulerAction,
    link::SchedulerLink,
    lookups::{Lookup, Unsent},
    up::{Asked, Stage, send},
};
use crate::{boot::BootId, hit::Hit, links::connection::Connection};

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

    /// Sends a lookup if the engine is open, else keeps it until then.
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
            Connection::Up(up) if up.stage == Stage::Open => {
                let max_tokens = self.options.most_tokens(&ask);
                let id = send(&mut self.last_request, up.id, Ask::Lookup(ask), actions);
                up.note_asked(id, Some(request.clone()), max_tokens, now, until, timeout);
                Lookup::Sent { id, until }
            }
            _ => Lookup::Unsent(Unsent { ask, until, timeout }),
        };
        self.lookups.insert(request, lookup);
    }

    /// Whether an answer is to be expected: connected or connecting, and not silent.
    pub(super) fn may_ask(&self, now: Instant) -> bool {
        match &self.connection {
            Connection::Connecting(_) => true,
            Connection::Up(up) => !up.is_silent(now),
            Connection::Down | Connection::Leaving { .. } => false,
        }
    }

    /// A lookup or a probe has its answer.
    pub(super) fn answered(
        &mut self,
        asked: Option<Asked>,
        hit: Hit,
        now: Instant,
        actions: &mut VecDeque<SchedulerAction>,
    ) {
        let Some(asked) = asked else { return };
        if hit.tokens > 0 {
            self.leases.note(hit.boot, hit.lease);
        }
        let Some(request) = asked.request else {
            // Given up meanwhile.
            if hit.tokens > 0 {
                self.release(hit.boot, hit.lease, actions);
            }
            return;
        };
        self.stats.lookup_seconds += now.saturating_duration_since(asked.since).as_secs_f64();
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

    /// Nobody waits for this answer any more. It still counts as silence if neither it nor another one comes, and its lease
    /// is given back if it does.
    pub(super) fn give_up(&mut self, id: u64) {
        if let Some(up) = self.connection.up_mut()
            && let Some(asked) = up.asked.get_mut(&id)
        {
            asked.request = None;
        }
    }

    /// One of another run is gone already.
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
