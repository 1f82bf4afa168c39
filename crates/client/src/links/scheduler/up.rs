//! A scheduler's connection that is up, and what waits for an answer over it.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use kvlane_proto::{v1, v1::request::Body as Ask};

use super::event::SchedulerAction;
use crate::{
    boot::BootId,
    links::{
        ids::{ConnectionId, Life},
        standing::Notice,
    },
};

/// How often leases in use are renewed. The daemon frees leases that a later heartbeat does not name, so this is
/// well below its lease time.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(10);

/// Longest time that a daemon may take for bringing blocks to RAM before it answers.
const FETCH_MAX: Duration = Duration::from_secs(60);

/// Lookups and probes without an answer that are remembered, as many as may wait. Beyond it the oldest that nobody waits
/// for is forgotten.
pub(super) const ASKED_MAX: usize = super::lookups::PENDING_MAX;

/// A connection, how far it is, and what was asked over it.
#[derive(Debug)]
pub(super) struct Up {
    pub(super) id: ConnectionId,
    pub(super) life: Life,
    pub(super) stage: Stage,
    /// The daemon's run; zeros while greeting.
    pub(super) boot: BootId,
    /// What the daemon said of itself, for the log.
    pub(super) daemon: String,
    /// All workers of the engine have mapped the pool, as the last answer said.
    pub(super) ready: bool,
    pub(super) heartbeat_at: Instant,
    /// A heartbeat was sent, and nothing was heard since.
    pub(super) awaits_sign: bool,
    pub(super) probe_at: Instant,
    /// Lookups and probes without an answer, in the order in which they were sent.
    pub(super) asked: BTreeMap<u64, Asked>,
    /// How often the daemon has spoken.
    pub(super) heard: u64,
    /// A lookup has waited for the engine to be opened in vain. Until the daemon speaks no other one does.
    pub(super) waited_in_vain: bool,
}

/// What the connection waits for, by the id of that request: no other answer moves it on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Greeting { hello: u64 },
    Opening { open: u64 },
    Open,
}

impl Stage {
    pub(super) fn request(self) -> Option<u64> {
        match self {
            Self::Greeting { hello: id } | Self::Opening { open: id } => Some(id),
            Self::Open => None,
        }
    }
}

/// A lookup without an answer.
#[derive(Debug)]
pub(super) struct Asked {
    /// None for a probe, and once it was given up.
    pub(super) request: Option<String>,
    pub(super) since: Instant,
    /// Without an answer by then the daemon counts as silent, if it has said nothing else since.
    pub(super) until: Instant,
    /// How often the daemon had spoken when this was asked, or when it said that it needs longer.
    heard: u64,
    /// The daemon does not prolong it beyond.
    pub(super) latest: Instant,
    pub(super) timeout: Duration,
    /// What may be answered.
    pub(super) max_tokens: u64,
}

impl Asked {
    /// The daemon needs that much longer. Answers until when it has time now.
    pub(super) fn prolong(&mut self, wait: Duration, heard: u64, now: Instant) -> Instant {
        self.heard = heard;
        self.until = (now + wait.min(FETCH_MAX) + self.timeout).min(self.latest);
        self.until
    }
}

impl Up {
    /// The daemon's run, once it has greeted.
    pub(super) fn run(&self) -> Option<BootId> {
        (!matches!(self.stage, Stage::Greeting { .. })).then_some(self.boot)
    }

    /// The daemon has spoken, which tells that it is alive: answers that it owes for longer may be lost.
    pub(super) fn has_spoken(&mut self) {
        self.heard += 1;
        (self.waited_in_vain, self.awaits_sign) = (false, false);
    }

    /// Notes a lookup, or a probe, which nobody waits for, with its time to answer.
    pub(super) fn note_asked(
        &mut self,
        id: u64,
        request: Option<String>,
        max_tokens: u64,
        now: Instant,
        until: Instant,
        timeout: Duration,
    ) {
        if self.asked.len() >= ASKED_MAX {
            let given_up = self.asked.iter().find(|(_, asked)| asked.request.is_none()).map(|(id, _)| *id);
            given_up.and_then(|id| self.asked.remove(&id));
        }
        let latest = now + FETCH_MAX + timeout;
        let asked = Asked { request, since: now, until, heard: self.heard, latest, timeout, max_tokens };
        self.asked.insert(id, asked);
    }

    /// What was asked since the daemon has spoken.
    fn asked_since(&self) -> impl Iterator<Item = &Asked> {
        self.asked.values().filter(|asked| asked.heard == self.heard)
    }

    /// Something has waited in vain, and nothing was heard since it was asked.
    pub(super) fn is_silent(&self, now: Instant) -> bool {
        self.waited_in_vain || self.asked_since().any(|asked| now >= asked.until)
    }

    /// A heartbeat is due: in its turn, or for a sign of life from a daemon that seems silent. No lookup is sent to that one,
    /// so nothing else would be answered.
    pub(super) fn wants_heartbeat(&self, now: Instant) -> bool {
        now >= self.heartbeat_at || (!self.awaits_sign && self.is_silent(now))
    }

    /// Any answer that is still to come tells whether the workers are ready, too.
    pub(super) fn wants_probe(&self) -> bool {
        !self.ready && self.asked_since().next().is_none()
    }
}

/// Has a request sent under the next id, which is answered.
pub(super) fn send(
    last_request: &mut u64,
    connection: ConnectionId,
    body: Ask,
    actions: &mut VecDeque<SchedulerAction>,
) -> u64 {
    *last_request += 1;
    let request = v1::Request { id: *last_request, body: Some(body) };
    actions.push_back(SchedulerAction::Send { connection, request });
    *last_request
}

pub(super) fn log(notice: Option<Notice>, actions: &mut VecDeque<SchedulerAction>) {
    actions.extend(notice.map(SchedulerAction::Log));
}
