//! The scheduler's side of the wire, without I/O: one engine's lookups, leases and cancelled saves, and the daemon's journal.
//!
//! ```text
//!        Connect         Connected        Welcome           EngineOpened
//!   Down ------> Connecting -----> Greeting -----> Opening -------------> Open
//!    ^               |                 |              |                    |
//!    +--- backoff ---+-----------------+--------------+------ lost --------+     Close: Leaving, until Bye is answered
//! ```
//! A lookup that is started while Greeting or Opening waits for Open, within its own deadline; while Down it is a miss. If a
//! lookup times out and no reply has come since it was sent, the daemon counts as silent: new lookups are misses at once,
//! until the next reply. [`Scheduler`](crate::Scheduler) is the driver.

mod asking;
mod cancelling;
mod connecting;
mod event;
mod former;
mod journal;
mod leases;
mod link;
mod lookups;
mod messages;
mod stats;
#[cfg(test)]
mod tests;
mod up;

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use kvlane_proto::{v1, v1::request::Body as Ask};

use self::{
    cancelling::{Cancelling, Readers},
    lookups::{Lookup, Unsent},
    up::{HEARTBEAT, SchedulerStage, SchedulerUp, send},
};
pub use self::{
    event::{LookupState, SchedulerAction, SchedulerEvent},
    journal::{BlockChange, BlockChanges},
    link::SchedulerLink,
    messages::SchedulerLinkOptions,
    stats::SchedulerStats,
};
use crate::{
    awaited_save::AwaitedSave,
    boot::BootId,
    hit::Hit,
    links::{
        connection::ConnectionState,
        ids::{ConnectionId, ProcessId},
    },
};

/// Interval of lookups of nothing, which ask the daemon whether the workers are ready, until they are. Until then nothing is
/// saved, and without a new request no other answer would say so.
const READY_PROBE: Duration = Duration::from_millis(20);

impl SchedulerLink {
    /// Handles an event, and appends the driver's actions.
    pub fn handle(&mut self, event: SchedulerEvent, now: Instant, actions: &mut VecDeque<SchedulerAction>) {
        match event {
            SchedulerEvent::Tick => self.tick(now, actions),
            SchedulerEvent::Connected { connection, life } => self.connected(connection, life, now, actions),
            SchedulerEvent::NotConnected { connection, why } => {
                self.not_connected(connection, why, now, actions);
            }
            SchedulerEvent::Reply { connection, reply } => self.take_reply(connection, reply, now, actions),
            SchedulerEvent::Lost { connection, why } => self.lost(connection, &why, now, actions),
            SchedulerEvent::ProcessEnded(process) => self.process_ended(process),
            SchedulerEvent::LookUp {
                request,
                number,
                again,
                traceparent,
                groups,
                max_tokens,
                awaited_save,
                tokens_per_s,
                timeout,
            } => {
                let hand_off = awaited_save.map(AwaitedSave::into_wire);
                let ask = v1::Lookup {
                    groups,
                    max_tokens,
                    may_wait: true,
                    hand_off,
                    tokens_per_s,
                    request: number,
                    again,
                    traceparent,
                };
                self.look_up(request, ask, timeout, now, actions);
            }
            SchedulerEvent::Forget { request } => self.forget(&request, actions),
            SchedulerEvent::Release { boot, lease } => self.release(boot, lease, actions),
            SchedulerEvent::RequestsEnded(requests) => {
                if let Some(up) = self.connection.up().filter(|up| up.is_recorded) {
                    let ended = Ask::RequestsEnded(v1::RequestsEnded { requests });
                    send(&mut self.last_request, up.id, ended, actions);
                }
            }
            SchedulerEvent::CancelSaves { below, until } => {
                self.cancelled_below = self.cancelled_below.max(below);
                let mut cancelling = Cancelling::new(below, until);
                cancelling.send_cancel(self.connection.up(), &mut self.last_request, now, actions);
                self.cancelling = Some(cancelling);
            }
            SchedulerEvent::Close => self.close(now, actions),
        }
    }

    /// The answer to a lookup, which ends with it; pending until the answer or the timeout. A lookup that was never started,
    /// timed out, or found no daemon is a miss.
    pub fn poll_lookup(&mut self, request: &str, now: Instant) -> LookupState {
        let until = match self.lookups.get(request) {
            None => return LookupState::Over(Hit::default()),
            Some(Lookup::Answered(_)) => None,
            Some(Lookup::Unsent(Unsent { until, .. }) | Lookup::Sent { until, .. }) => Some(*until),
        };
        match until {
            Some(until) if now >= until => self.stats.timeouts += 1,
            Some(_) if self.connection.is_down() => self.stats.unavailable += 1,
            Some(until) => return LookupState::Pending { until },
            None => {}
        }
        match self.lookups.remove(request) {
            Some(Lookup::Answered(hit)) => return LookupState::Over(hit),
            Some(Lookup::Sent { id, .. }) => self.give_up(id),
            Some(Lookup::Unsent(_)) => {
                if let Some(up) = self.connection.up_mut() {
                    up.open_timed_out = true;
                }
            }
            None => {}
        }
        LookupState::Over(Hit::default())
    }

    /// The answer to the last [`CancelSaves`](SchedulerEvent::CancelSaves), once; `None` while it is open. True if neither the
    /// present daemon nor a former one reads the engine's blocks for these saves, or accepts any of them.
    pub fn cancelled(&mut self, now: Instant) -> Option<bool> {
        let readers = match self.former.are_over(now) {
            false => Readers::Former,
            true if self.connection.is_down() => Readers::Nobody,
            true => Readers::Present,
        };
        let answer = self.cancelling.as_ref()?.verdict(readers, now)?;
        self.cancelling = None;
        Some(answer)
    }

    /// When the driver has to feed the next `Tick`, unless something happens before. Lookups need no timer, because
    /// [`poll_lookup`](Self::poll_lookup) checks their time.
    pub fn wake_at(&self) -> Option<Instant> {
        let connection = match &self.connection {
            ConnectionState::Down if self.may_connect() => Some(self.backoff.due()),
            ConnectionState::Up(up) if up.stage == SchedulerStage::Open => {
                let probe_at = up.wants_probe().then_some(up.probe_at);
                probe_at.into_iter().chain(self.journal.due()).chain([up.heartbeat_at]).min()
            }
            ConnectionState::Leaving { until, .. } => Some(*until),
            _ => None,
        };
        let cancelling = self.cancelling.as_ref();
        let an_end = cancelling.and_then(|_| self.former.next_end());
        [connection, an_end, cancelling.map(Cancelling::until)].into_iter().flatten().min()
    }

    /// Whether the driver has to report the end of this process.
    pub fn needs(&self, process: ProcessId) -> bool {
        let present = self.connection.up().is_some_and(|up| up.life.needs(process));
        present || self.former.needs(process)
    }

    /// The daemon has welcomed this process and opened the engine.
    pub fn is_connected(&self) -> bool {
        self.connection.up().is_some_and(|up| up.stage == SchedulerStage::Open)
    }

    /// The last answer said that all workers of the engine have mapped the pool.
    pub fn is_ready(&self) -> bool {
        self.connection.up().is_some_and(|up| up.ready)
    }

    /// Somebody records the daemon's requests.
    pub fn is_recorded(&self) -> bool {
        self.connection.up().is_some_and(|up| up.is_recorded)
    }

    /// Connecting, or connected and not open yet.
    pub fn is_opening(&self) -> bool {
        match &self.connection {
            ConnectionState::Connecting(_) => true,
            ConnectionState::Up(up) => up.stage != SchedulerStage::Open,
            ConnectionState::Down | ConnectionState::Leaving { .. } => false,
        }
    }

    /// The daemon's run, once it has welcomed this process.
    pub fn boot(&self) -> Option<BootId> {
        self.connection.up().and_then(SchedulerUp::run)
    }

    /// Size of the daemon's pool; 0 while it has not welcomed this process.
    pub fn pool_bytes(&self) -> u64 {
        self.connection.up().map_or(0, |up| up.pool_bytes)
    }

    /// Runs of the daemon that this link has left, the last eight.
    pub fn gone(&self) -> impl Iterator<Item = BootId> + '_ {
        self.former.gone()
    }

    /// Runs in [`gone`](Self::gone) that this link cannot come back to: their processes have ended, as far as the kernel reports
    /// it.
    pub fn over(&self) -> impl Iterator<Item = BootId> + '_ {
        self.former.over()
    }

    /// Whether the end of a run that was left is still to be reported.
    pub fn awaits_an_end(&self) -> bool {
        self.former.awaits_an_end()
    }

    /// Identifies this process and role to the daemon, over all its connections.
    pub fn nonce(&self) -> [u8; 16] {
        self.options.nonce
    }

    /// As in the options; the engine's workers use the same.
    pub fn engine_id(&self) -> &str {
        &self.options.engine_id
    }

    /// Why the daemon refused the last time, or belongs to another user; None again once it opens the engine.
    pub fn refusal(&self) -> Option<&str> {
        self.refusal.as_deref()
    }

    /// Blocks that became visible or went since the last call. The link reads on in the journal once these are taken.
    pub fn take_changes(&mut self) -> BlockChanges {
        self.journal.take()
    }

    /// Counters since the last call.
    pub fn take_stats(&mut self) -> SchedulerStats {
        std::mem::take(&mut self.stats)
    }

    /// Whether the link is closed and its connection ended.
    pub fn is_over(&self) -> bool {
        self.is_closed && self.connection.is_down()
    }

    /// Whether nothing is pending, leased, cancelled or watched. For tests of leaks.
    pub fn at_rest(&self) -> bool {
        let nothing_pending = self.connection.up().is_none_or(|up| up.pending.is_empty());
        nothing_pending
            && self.lookups.is_empty()
            && self.leases.is_empty()
            && self.cancelling.is_none()
            && self.former.is_empty()
    }

    fn may_connect(&self) -> bool {
        !self.is_closed && !self.options.groups.is_empty()
    }

    fn tick(&mut self, now: Instant, actions: &mut VecDeque<SchedulerAction>) {
        self.former.forget_over(now);
        let may_connect = self.may_connect() && self.backoff.is_due(now);
        match &mut self.connection {
            ConnectionState::Down if may_connect => {
                self.last_connection += 1;
                let id = ConnectionId(self.last_connection);
                self.connection = ConnectionState::Connecting(id);
                actions.push_back(SchedulerAction::Connect(id));
            }
            ConnectionState::Leaving { id, until, .. } if now >= *until => {
                actions.push_back(SchedulerAction::Close(*id));
                self.connection = ConnectionState::Down;
            }
            ConnectionState::Up(up) if up.stage == SchedulerStage::Open => {
                if up.wants_heartbeat(now) {
                    (up.heartbeat_at, up.awaits_heartbeat_reply) = (now + HEARTBEAT, true);
                    let live_leases = self.leases.live();
                    let heartbeat = Ask::Heartbeat(v1::Heartbeat { live_leases });
                    send(&mut self.last_request, up.id, heartbeat, actions);
                }
                if up.wants_probe() && now >= up.probe_at {
                    up.probe_at = now + READY_PROBE;
                    let id = send(&mut self.last_request, up.id, self.options.probe(), actions);
                    let timeout = self.options.lookup_timeout;
                    up.add_pending(id, None, 0, now, now + timeout, timeout);
                }
                self.journal.poll(up.id, &mut self.last_request, now, actions);
            }
            _ => {}
        }
    }

    fn process_ended(&mut self, process: ProcessId) {
        if let Some(up) = self.connection.up_mut() {
            up.life.ended(process);
        }
        self.former.process_ended(process);
    }
}
