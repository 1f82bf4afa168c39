//! The scheduler's side of the wire, without I/O: lookups, leases, cancelled saves of one engine, and the journal.
//!
//! ```text
//!        Connect         Connected        Welcome           EngineOpened
//!   Down ------> Connecting -----> Greeting -----> Opening -------------> Open
//!    ^               |                 |              |                    |
//!    +--- backoff ---+-----------------+--------------+------ lost --------+     Close: Leaving, until Bye is answered
//! ```
//! Lookups asked while greeting or opening wait for it, within their own deadline; while down they are misses. Once one has
//! waited in vain, and nothing was heard since it was asked, others are misses at once until the daemon speaks.
//! [`Scheduler`](crate::Scheduler) is its driver.

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
    up::{HEARTBEAT, Stage, Up, send},
};
pub use self::{
    event::{LookupState, SchedulerAction, SchedulerEvent},
    journal::{BlockChange, BlockChanges},
    link::SchedulerLink,
    messages::SchedulerLinkOptions,
    stats::SchedulerStats,
};
use crate::{
    boot::BootId,
    hand_off::HandOff,
    hit::Hit,
    links::{
        connection::Connection,
        ids::{ConnectionId, ProcessId},
    },
};

/// How often the daemon is asked whether the workers are ready, until they are. Until then nothing is saved, and while no
/// new request comes no other answer tells.
const READY_PROBE: Duration = Duration::from_millis(20);

impl SchedulerLink {
    /// Takes an event in; what is to be done for it is added to `actions`.
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
            SchedulerEvent::LookUp { request, groups, max_tokens, hand_off, timeout } => {
                let hand_off = hand_off.map(HandOff::into_wire);
                let ask = v1::Lookup { groups, max_tokens, may_wait: true, hand_off };
                self.look_up(request, ask, timeout, now, actions);
            }
            SchedulerEvent::Forget { request } => self.forget(&request, actions),
            SchedulerEvent::Release { boot, lease } => self.release(boot, lease, actions),
            SchedulerEvent::CancelSaves { below, until } => {
                self.cancelled_below = self.cancelled_below.max(below);
                let mut cancelling = Cancelling::new(below, until);
                cancelling.ask(self.connection.up(), &mut self.last_request, now, actions);
                self.cancelling = Some(cancelling);
            }
            SchedulerEvent::Close => self.close(now, actions),
        }
    }

    /// The answer to a lookup, which ends with it; pending while none came within its time. A lookup that was never asked,
    /// timed out, or met no daemon is a miss.
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
                    up.waited_in_vain = true;
                }
            }
            None => {}
        }
        LookupState::Over(Hit::default())
    }

    /// The answer to the last [`CancelSaves`](SchedulerEvent::CancelSaves), once; `None` while it is open. True when no former
    /// daemon and not the present one reads the engine's blocks for these saves, nor takes any of them.
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

    /// When there is something to do, if nothing happens before. Lookups have no timer: who polls them is told.
    pub fn wake_at(&self) -> Option<Instant> {
        let connection = match &self.connection {
            Connection::Down if self.may_connect() => Some(self.backoff.due()),
            Connection::Up(up) if up.stage == Stage::Open => {
                let probe_at = up.wants_probe().then_some(up.probe_at);
                probe_at.into_iter().chain(self.journal.due()).chain([up.heartbeat_at]).min()
            }
            Connection::Leaving { until, .. } => Some(*until),
            _ => None,
        };
        let cancelling = self.cancelling.as_ref();
        let an_end = cancelling.and_then(|_| self.former.next_end());
        [connection, an_end, cancelling.map(Cancelling::until)].into_iter().flatten().min()
    }

    /// The end of this process is to be told.
    pub fn needs(&self, process: ProcessId) -> bool {
        let present = self.connection.up().is_some_and(|up| up.life.needs(process));
        present || self.former.needs(process)
    }

    /// The daemon greeted us and opened the engine.
    pub fn is_connected(&self) -> bool {
        self.connection.up().is_some_and(|up| up.stage == Stage::Open)
    }

    /// The last answer said that all workers of the engine have mapped the pool.
    pub fn is_ready(&self) -> bool {
        self.connection.up().is_some_and(|up| up.ready)
    }

    /// On the way to an open engine.
    pub fn is_opening(&self) -> bool {
        match &self.connection {
            Connection::Connecting(_) => true,
            Connection::Up(up) => up.stage != Stage::Open,
            Connection::Down | Connection::Leaving { .. } => false,
        }
    }

    /// The daemon's run, once it has greeted.
    pub fn boot(&self) -> Option<BootId> {
        self.connection.up().and_then(Up::run)
    }

    /// Runs that this was connected to and is no more, the last eight.
    pub fn gone(&self) -> impl Iterator<Item = BootId> + '_ {
        self.former.gone()
    }

    /// Those of [`gone`](Self::gone) whose processes have ended, where the kernel tells: this never comes back to them.
    pub fn over(&self) -> impl Iterator<Item = BootId> + '_ {
        self.former.over()
    }

    /// The end of a run that was left is still to be seen.
    pub fn awaits_an_end(&self) -> bool {
        self.former.awaits_an_end()
    }

    /// Names the process and role of this link to the daemon, over all its connections.
    pub fn nonce(&self) -> [u8; 16] {
        self.options.nonce
    }

    /// The name of the engine.
    pub fn engine_id(&self) -> &str {
        &self.options.engine_id
    }

    /// Why the daemon refused the last time, or is a stranger's, until it opens the engine.
    pub fn refusal(&self) -> Option<&str> {
        self.refusal.as_deref()
    }

    /// Blocks that came and went since the last call. The daemon is asked for more once these are taken.
    pub fn take_changes(&mut self) -> BlockChanges {
        self.journal.take()
    }

    /// Counters since the last call.
    pub fn take_stats(&mut self) -> SchedulerStats {
        std::mem::take(&mut self.stats)
    }

    /// Closed, and nothing more will come.
    pub fn is_over(&self) -> bool {
        self.is_closed && self.connection.is_down()
    }

    /// Nothing is asked, held, cancelled or watched any more. For tests of leaks.
    pub fn at_rest(&self) -> bool {
        let nothing_asked = self.connection.up().is_none_or(|up| up.asked.is_empty());
        nothing_asked
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
            Connection::Down if may_connect => {
                self.last_connection += 1;
                let id = ConnectionId(self.last_connection);
                self.connection = Connection::Connecting(id);
                actions.push_back(SchedulerAction::Connect(id));
            }
            Connection::Leaving { id, until, .. } if now >= *until => {
                actions.push_back(SchedulerAction::Close(*id));
                self.connection = Connection::Down;
            }
            Connection::Up(up) if up.stage == Stage::Open => {
                if up.wants_heartbeat(now) {
                    (up.heartbeat_at, up.awaits_sign) = (now + HEARTBEAT, true);
                    let live_leases = self.leases.live();
                    let heartbeat = Ask::Heartbeat(v1::Heartbeat { live_leases });
                    send(&mut self.last_request, up.id, heartbeat, actions);
                }
                if up.wants_probe() && now >= up.probe_at {
                    up.probe_at = now + READY_PROBE;
                    let id = send(&mut self.last_request, up.id, self.options.probe(), actions);
                    let timeout = self.options.lookup_timeout;
                    up.note_asked(id, None, 0, now, now + timeout, timeout);
                }
                self.journal.ask(up.id, &mut self.last_request, now, actions);
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
