//! A worker's side of the wire, without I/O: registers, requests saves and loads, and gives up on a silent daemon.
//!
//! ```text
//!   Down --> Connecting --> Greeting --Welcome--> Sharing --Done of each--> Registering --WorkerRegistered--> AskingForPool
//!    ^                                                                                                    | PoolDescriptor
//!    +---------------------- lost, refused (backoff) <----- Open <----- Done ----- Confirming <-- Mapping <-+
//! ```
//! Jobs outlive connections. worker/saves.rs and worker/loads.rs describe how a save and a load end.

pub mod event;
pub mod failures;
mod handshake;
mod link;
mod load;
mod loads;
mod messages;
mod saves;
#[cfg(test)]
mod tests;
mod up;

use std::{collections::BTreeMap, time::Instant};

use kvlane_proto::{v1, v1::refused::Reason, v1::reply::Body as Answer, v1::request::Body as Ask};

pub use self::link::WorkerLink;
use self::{
    event::{Actions, Peer, WorkerAction, WorkerEvent},
    link::{end, end_save, log},
    load::Loading,
    up::{PendingRequest, UnexpectedReply, WorkerStage, WorkerUp},
};
use super::{
    connection::ConnectionState,
    ids::{ConnectionId, NotConnected, ProcessId},
    promises::ROUND,
    standing::{Notice, Urgency},
};
use crate::{
    boot::BootId,
    jobs::{Job, Work},
};

impl WorkerLink {
    /// Handles an event, and appends the driver's actions.
    pub fn handle(&mut self, event: WorkerEvent, now: Instant, actions: &mut Actions) {
        match event {
            WorkerEvent::Start(job) => self.start(job, now, actions),
            WorkerEvent::Connected { connection, peer } => self.connected(connection, peer, actions),
            WorkerEvent::NotConnected { connection, why } => {
                self.not_connected(connection, &why, now, actions);
            }
            WorkerEvent::Reply { connection, reply } => self.take_reply(connection, reply, now, actions),
            WorkerEvent::Lost { connection, why } => {
                if self.connection.is_leaving(connection) {
                    self.hang_up(None, now, actions);
                } else if self.up_as(connection).is_some() {
                    self.lose(&why, now, actions);
                }
            }
            WorkerEvent::NotShared { connection, why } => {
                if self.up_as(connection).is_some_and(|up| matches!(up.stage, WorkerStage::Sharing { .. })) {
                    self.turn_away(&why, now, actions);
                }
            }
            WorkerEvent::Mapped { connection, boot, mapped } => {
                self.mapped(connection, boot, mapped, now, actions);
            }
            WorkerEvent::Copied { copy, copied } => match self.writes.remove(&copy) {
                Some(write) => self.written(write, copied, now, actions),
                None => self.copied_in(copy, copied, now, actions),
            },
            WorkerEvent::ProcessEnded(process) => self.process_ended(process, now, actions),
            WorkerEvent::Step(seen) => {
                if let Some(promises) = &seen.promises {
                    // The driver has fed the jobs of all steps before, so `in_use` has the boots of their loads.
                    let in_use = self.boots_in_use();
                    let unmapped = self.pools.step_begins(promises, &in_use);
                    actions.extend(unmapped.into_iter().map(WorkerAction::Unmap));
                }
                self.step = seen;
            }
            WorkerEvent::Tick => self.tick(now, actions),
            WorkerEvent::Close => self.close(now, actions),
        }
        self.begin_next_copy(actions);
        if self.is_closing {
            self.say_goodbye(now, actions);
        }
    }

    /// When the driver has to feed the next `Tick`, at the latest.
    pub fn wake_at(&self) -> Option<Instant> {
        let connection = match &self.connection {
            ConnectionState::Down => self.may_connect().then(|| self.backoff.due()),
            ConnectionState::Connecting(_) => None,
            ConnectionState::Up(up) => up.pending.values().filter_map(PendingRequest::deadline).min(),
            ConnectionState::Leaving { until, .. } => Some(*until),
        };
        let loads = self.loads.values().filter_map(|load| load.wake_at(self.is_closing));
        let round = self.pools.has_former().then_some(self.round_at);
        loads.chain(connection).chain(round).min()
    }

    /// Whether the driver has to report the end of this process.
    pub fn needs(&self, process: ProcessId) -> bool {
        let peer = self.connection.up().is_some_and(|up| up.peer.life.needs(process));
        peer || self.pools.needs(process) || self.loads.values().any(|load| load.needs(process))
    }

    /// Whether the link is closed and every job has ended.
    pub fn is_over(&self) -> bool {
        self.is_closing && self.connection.is_down() && self.loads.is_empty() && self.writes.is_empty()
    }

    /// Whether nothing is pending, loading, writing or leaving, and no former pool is mapped. For tests of leaks.
    pub fn at_rest(&self) -> bool {
        let nothing_pending = match &self.connection {
            ConnectionState::Up(up) => up.pending.is_empty(),
            ConnectionState::Leaving { .. } => false,
            _ => true,
        };
        let no_jobs = self.loads.is_empty() && self.writes.is_empty();
        nothing_pending && no_jobs && !self.pools.has_former()
    }

    fn start(&mut self, job: Job, now: Instant, actions: &mut Actions) {
        if self.is_closing {
            return end(&job, "the worker is closed", now, actions);
        }
        match &job.work {
            Work::Save(_) => self.start_save(job, now, actions),
            Work::Load { .. } => self.start_load(job, now, actions),
        }
    }

    fn connected(&mut self, connection: ConnectionId, peer: Peer, actions: &mut Actions) {
        if !self.connection.is_connecting(connection) {
            return actions.push_back(WorkerAction::Close(connection));
        }
        self.connection = ConnectionState::Up(WorkerUp {
            id: connection,
            peer,
            boot: [0; 16],
            daemon: String::new(),
            wire: 0,
            stage: WorkerStage::Greeting { hello: self.last_request + 1 },
            method: self.options.save_method,
            reason: String::new(),
            pending: BTreeMap::new(),
            silent: false,
        });
        self.send(messages::hello(&self.options), actions);
    }

    fn not_connected(
        &mut self,
        connection: ConnectionId,
        why: &NotConnected,
        now: Instant,
        actions: &mut Actions,
    ) {
        if !self.connection.is_connecting(connection) {
            return;
        }
        match why {
            NotConnected::Absent(sentence) => {
                log(self.standing.absent(sentence), actions);
                self.note_refusal(sentence, actions);
            }
            NotConnected::Refused(sentence) => self.refuse(sentence, now, actions),
        }
        self.backoff.failed(now);
        self.connection = ConnectionState::Down;
    }

    fn take_reply(
        &mut self,
        connection: ConnectionId,
        reply: v1::Reply,
        now: Instant,
        actions: &mut Actions,
    ) {
        if self.connection.is_goodbye(connection, reply.id) {
            return self.hang_up(reply.boot_id.as_ref().try_into().ok(), now, actions);
        }
        let Some(up) = self.up_as(connection) else { return };
        up.silent = false;
        let v1::Reply { id, boot_id, body, .. } = reply;
        let is_open = matches!(up.stage, WorkerStage::Open);
        let is_of_another_run = up.is_of_another_run(&boot_id);
        if let Some(Answer::Refused(refused)) = &body {
            if !is_open {
                return self.turn_away(&refused.sentence, now, actions);
            }
            if refused.reason() != Reason::Cancelled && self.note_refusal(&refused.sentence, actions) {
                let (address, sentence) = (&self.options.address, &refused.sentence);
                let sentence = format!("kvlane: the daemon at {address} refused a request: {sentence}");
                log(Some(Notice { urgency: Urgency::Warning, sentence }), actions);
            }
        }
        let fits = match self.up().and_then(|up| up.pending.remove(&id)) {
            Some(pending) if !is_of_another_run && pending.fits(body.as_ref()) => {
                self.answered(pending, body, now, actions);
                Ok(())
            }
            Some(pending) => {
                // The request stays pending, so that its job ends with the connection.
                if let Some(up) = self.up() {
                    up.pending.insert(id, pending);
                }
                Err(UnexpectedReply)
            }
            None if is_of_another_run && self.up().is_some_and(|up| up.stage.awaits() == Some(id)) => {
                Err(UnexpectedReply)
            }
            None if !is_open => {
                let boot = boot_id.as_ref().try_into().unwrap_or_default();
                self.handshake_reply(id, boot, body, now, actions)
            }
            // A second answer to a request.
            None => Ok(()),
        };
        if let Err(UnexpectedReply) = fits {
            self.lose("the daemon answered what nobody asked", now, actions);
        }
    }

    /// Handles the answer to a save, claim, commit or load. Its kind fits the request.
    fn answered(
        &mut self,
        pending: PendingRequest,
        answer: Option<Answer>,
        now: Instant,
        actions: &mut Actions,
    ) {
        match pending {
            PendingRequest::Load { key, .. } => self.load_answered(key, answer, now, actions),
            pending => self.save_answered(pending, answer, now, actions),
        }
    }

    fn process_ended(&mut self, process: ProcessId, now: Instant, actions: &mut Actions) {
        self.pools.process_ended(process);
        if let Some(up) = self.up() {
            up.peer.life.ended(process);
        }
        self.retire_daemons(now, actions, |_, life, _| life.needs(process));
    }

    fn tick(&mut self, now: Instant, actions: &mut Actions) {
        self.give_up_overdue(now, actions);
        self.tick_loads(now, actions);
        if self.pools.has_former() && now >= self.round_at {
            self.round_at = now + ROUND;
            let in_use = self.boots_in_use();
            let unmapped = self.pools.round(self.step.in_step, &in_use);
            actions.extend(unmapped.into_iter().map(WorkerAction::Unmap));
        }
        match &self.connection {
            ConnectionState::Down if self.may_connect() && self.backoff.is_due(now) => {
                self.last_connection += 1;
                let connection = ConnectionId(self.last_connection);
                self.connection = ConnectionState::Connecting(connection);
                actions.push_back(WorkerAction::Connect(connection));
            }
            ConnectionState::Leaving { until, .. } if now >= *until => self.hang_up(None, now, actions),
            _ => {}
        }
    }

    /// Whether to connect. A greeting tells the daemon that our own copies into its pool have ended, so not before they have.
    fn may_connect(&self) -> bool {
        !self.is_closing && self.writes.is_empty()
    }

    /// Handles the end of the connection, by the daemon or by us.
    fn lose(&mut self, why: &str, now: Instant, actions: &mut Actions) {
        let Some(up) = self.connection.take_up() else { return };
        if self.is_closing {
            actions.push_back(WorkerAction::Close(up.id));
            self.leave_daemon(up.boot, up.peer.life, now);
            return self.end_loads(None, now, actions);
        }
        let was_open = matches!(up.stage, WorkerStage::Open);
        // The daemon may live on and still copy. The raised fence discards those copies.
        self.raise_fence(actions);
        actions.push_back(WorkerAction::Unregistered { was_open });
        // Loads first, because the engine waits for them. Their blocks are free once neither side can write them any more.
        self.leave_loads(up.boot, up.peer.life, now, actions);
        up.pending.into_values().for_each(|pending| end_save(pending, "the daemon went away", now, actions));
        actions.push_back(WorkerAction::Close(up.id));
        self.backoff.failed(now);
        log(
            if was_open { self.standing.lost(why, now) } else { self.standing.handshake_failed(why) },
            actions,
        );
        let unmapped = self.pools.lost();
        actions.extend(unmapped.into_iter().map(WorkerAction::Unmap));
        self.round_at = now + ROUND;
    }

    fn close(&mut self, now: Instant, actions: &mut Actions) {
        if std::mem::replace(&mut self.is_closing, true) {
            return;
        }
        self.raise_fence(actions);
        if let Some(up) = self.up() {
            for pending in std::mem::take(&mut up.pending).into_values() {
                end_save(pending, "the worker is closed", now, actions);
            }
        } else {
            self.connection = ConnectionState::Down;
            self.end_loads(None, now, actions);
        }
    }

    /// Says goodbye once this process makes no copy any more, because the daemon then frees the session's blocks.
    fn say_goodbye(&mut self, now: Instant, actions: &mut Actions) {
        let is_copying = !self.writes.is_empty() || self.loads.values().any(Loading::is_copying);
        if is_copying {
            return;
        }
        let Some((id, boot, life)) = self.up().map(|up| (up.id, up.boot, up.peer.life)) else { return };
        // If no answer comes, the daemon may still write.
        self.leave_daemon(boot, life, now);
        let bye = self.send(Ask::Bye(v1::Bye {}), actions);
        self.connection = ConnectionState::leaving(id, bye, now);
    }

    /// Ends the connection after the goodbye. `answered` is the run that answered it, and so has ended its copies for us; None if
    /// no answer came in time.
    fn hang_up(&mut self, answered: Option<BootId>, now: Instant, actions: &mut Actions) {
        if let ConnectionState::Leaving { id, .. } =
            std::mem::replace(&mut self.connection, ConnectionState::Down)
        {
            actions.push_back(WorkerAction::Close(id));
        }
        self.end_loads(answered, now, actions);
    }

    /// Ends the handshake, because this worker or the daemon refuses the other.
    fn turn_away(&mut self, sentence: &str, now: Instant, actions: &mut Actions) {
        self.refuse(sentence, now, actions);
        self.lose("the daemon closed the connection", now, actions);
    }

    /// Logs and reports that this worker cannot use the daemon.
    fn refuse(&mut self, sentence: &str, now: Instant, actions: &mut Actions) {
        log(self.standing.refused(sentence, now), actions);
        self.note_refusal(sentence, actions);
    }

    /// Tells callers that wait for the registration why it does not come. True if the sentence is new.
    fn note_refusal(&mut self, sentence: &str, actions: &mut Actions) -> bool {
        let is_new = self.refusal != sentence;
        if is_new {
            self.refusal = sentence.into();
            actions.push_back(WorkerAction::Refused(sentence.into()));
        }
        is_new
    }
}
