//! A scheduler's connection that is up, its pending lookups, and whether its daemon is silent.

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

/// Interval of heartbeats, which renew leases. The daemon frees a lease that no later heartbeat names, so the interval is well
/// below its lease time.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(10);

/// Longest time that a daemon may extend a lookup, for fetching blocks to RAM.
const FETCH_MAX: Duration = Duration::from_secs(60);

/// Most pending lookups and probes, as many as may wait for an answer. Beyond that, the oldest one that was given up is
/// forgotten.
pub(super) const PENDING_LOOKUPS_MAX: usize = super::lookups::PENDING_MAX;

/// A connection that is up, and the lookups that were sent over it.
#[derive(Debug)]
pub(super) struct SchedulerUp {
    pub(super) id: ConnectionId,
    pub(super) life: Life,
    pub(super) stage: SchedulerStage,
    /// The daemon's run; zeros while greeting.
    pub(super) boot: BootId,
    /// The daemon's version and pool size, for the log.
    pub(super) daemon: String,
    pub(super) pool_bytes: u64,
    /// All workers of the engine have mapped the pool, by the daemon's last answer.
    pub(super) ready: bool,
    /// Somebody records the daemon's requests, by its last answer that says so.
    pub(super) is_recorded: bool,
    pub(super) heartbeat_at: Instant,
    /// No reply has come since the last heartbeat.
    pub(super) awaits_heartbeat_reply: bool,
    pub(super) probe_at: Instant,
    /// Lookups and probes without an answer, by request id: in the order in which they were sent.
    pub(super) pending: BTreeMap<u64, PendingLookup>,
    /// Number of replies over this connection.
    pub(super) replies: u64,
    /// A lookup has timed out while it waited for the engine to be opened. Until the next reply, other lookups are misses.
    pub(super) open_timed_out: bool,
}

/// The stage of the handshake, with the id of the request whose answer ends it. No other answer does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SchedulerStage {
    Greeting { hello: u64 },
    Opening { open: u64 },
    Open,
}

impl SchedulerStage {
    pub(super) fn request(self) -> Option<u64> {
        match self {
            Self::Greeting { hello: id } | Self::Opening { open: id } => Some(id),
            Self::Open => None,
        }
    }
}

/// A lookup or a probe without an answer.
#[derive(Debug)]
pub(super) struct PendingLookup {
    /// The engine's name of it. None for a probe, and once it was given up.
    pub(super) request: Option<String>,
    pub(super) since: Instant,
    /// The daemon counts as silent after this, unless any reply has come since this lookup was sent.
    pub(super) until: Instant,
    /// [`SchedulerUp::replies`] when this was sent, or last extended.
    replies: u64,
    /// The daemon cannot extend `until` beyond this.
    pub(super) latest: Instant,
    pub(super) timeout: Duration,
    /// The most tokens that the answer may have.
    pub(super) max_tokens: u64,
}

impl PendingLookup {
    /// Moves the deadline, because the daemon needs `wait` longer. Returns the new one.
    pub(super) fn extend(&mut self, wait: Duration, replies: u64, now: Instant) -> Instant {
        self.replies = replies;
        self.until = (now + wait.min(FETCH_MAX) + self.timeout).min(self.latest);
        self.until
    }
}

impl SchedulerUp {
    /// The daemon's run, once it has welcomed this process.
    pub(super) fn run(&self) -> Option<BootId> {
        (!matches!(self.stage, SchedulerStage::Greeting { .. })).then_some(self.boot)
    }

    /// Records a reply. It proves that the daemon is alive, so older lookups without an answer do not make it silent.
    pub(super) fn note_reply(&mut self) {
        self.replies += 1;
        (self.open_timed_out, self.awaits_heartbeat_reply) = (false, false);
    }

    /// Adds a lookup that was sent, or a probe (`request` is None).
    pub(super) fn add_pending(
        &mut self,
        id: u64,
        request: Option<String>,
        max_tokens: u64,
        now: Instant,
        until: Instant,
        timeout: Duration,
    ) {
        if self.pending.len() >= PENDING_LOOKUPS_MAX {
            let given_up =
                self.pending.iter().find(|(_, pending)| pending.request.is_none()).map(|(id, _)| *id);
            given_up.and_then(|id| self.pending.remove(&id));
        }
        let latest = now + FETCH_MAX + timeout;
        let pending =
            PendingLookup { request, since: now, until, replies: self.replies, latest, timeout, max_tokens };
        self.pending.insert(id, pending);
    }

    /// Pending lookups that were sent after the last reply.
    fn pending_since_reply(&self) -> impl Iterator<Item = &PendingLookup> {
        self.pending.values().filter(|pending| pending.replies == self.replies)
    }

    /// Whether a lookup has timed out, and no reply has come since it was sent.
    pub(super) fn is_silent(&self, now: Instant) -> bool {
        self.open_timed_out || self.pending_since_reply().any(|pending| now >= pending.until)
    }

    /// Whether a heartbeat is due: at its interval, or once to a silent daemon. No lookup is sent to a silent daemon, so only
    /// the answer to a heartbeat can show that it is back.
    pub(super) fn wants_heartbeat(&self, now: Instant) -> bool {
        now >= self.heartbeat_at || (!self.awaits_heartbeat_reply && self.is_silent(now))
    }

    /// Whether to probe. A lookup that is pending makes a probe needless, because any answer says whether the workers are ready.
    pub(super) fn wants_probe(&self) -> bool {
        !self.ready && self.pending_since_reply().next().is_none()
    }
}

/// Sends a request under the next id, and returns that id.
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
