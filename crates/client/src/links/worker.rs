//! A worker's side of the wire, without I/O: connects and registers, asks for saves and loads, gives up on a silent daemon.
//!
//! ```text
//!   Down --> Connecting --> Greeting --Welcome--> Sharing --Done of each--> Registering --WorkerRegistered--> AskingForPool
//!    ^                                                                                                    | PoolDescriptor
//!    +---------------------- lost, refused (backoff) <----- Open <----- Done ----- Confirming <-- Mapping <-+
//! ```
//! Jobs outlive connections: worker/saves.rs and worker/loads.rs say how each ends.

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
    up::{Asked, Misfit, Stage, Up},
};
use super::{
    connection::Connection,
    ids::{ConnectionId, NotConnected, ProcessId},
    promises::ROUND,
    standing::{Notice, Urgency},
};
use crate::{
    boot::BootId,
    jobs::{Job, Work},
};

impl WorkerLink {
    /// Takes an event, and appends what is to be done.
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
                if self.up_as(connection).is_some_and(|up| matches!(up.stage, Stage::Sharing { .. })) {
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
                    // After the jobs that were queued before that step.
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

    /// When the next `Tick` has something to do, at the latest.
    pub fn wake_at(&self) -> Option<Instant> {
        let connection = match &self.connection {
            Connection::Down => self.may_connect().then(|| self.backoff.due()),
            Connection::Connecting(_) => None,
            Connection::Up(up) => up.asked.values().filter_map(Asked::deadline).min(),
            Connection::Leaving { until, .. } => Some(*until),
        };
        let loads = self.loads.values().filter_map(|load| load.wake_at(self.is_closing));
        let round = self.pools.has_former().then_some(self.round_at);
        loads.chain(connection).chain(round).min()
    }

    /// Whether the end of this process matters.
    pub fn needs(&self, process: ProcessId) -> bool {
        let peer = self.connection.up().is_some_and(|up| up.peer.life.needs(process));
        peer || self.pools.needs(process) || self.loads.values().any(|load| load.needs(process))
    }

    /// Closed, and every job has ended.
    pub fn is_over(&self) -> bool {
        self.is_closing && self.connection.is_down() && self.loads.is_empty() && self.writes.is_empty()
    }

    /// For tests of leaks: nothing is asked, loading, writing, former or leaving.
    pub fn at_rest(&self) -> bool {
        let nothing_asked = match &self.connection {
            Connection::Up(up) => up.asked.is_empty(),
            Connection::Leaving { .. } => false,
            _ => true,
        };
        let no_jobs = self.loads.is_empty() && self.writes.is_empty();
        nothing_asked && no_jobs && !self.pools.has_former()
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
        self.connection = Connection::Up(Up {
            id: connection,
            peer,
            boot: [0; 16],
            daemon: String::new(),
            stage: Stage::Greeting { hello: self.last_request + 1 },
            method: self.options.save_method,
            reason: String::new(),
            asked: BTreeMap::new(),
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
        self.connection = Connection::Down;
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
        let is_open = matches!(up.stage, Stage::Open);
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
        let fits = match self.up().and_then(|up| up.asked.remove(&id)) {
            Some(asked) if !is_of_another_run && asked.fits(body.as_ref()) => {
                self.answered(asked, body, now, actions);
                Ok(())
            }
            Some(asked) => {
                // It ends with the connection.
                if let Some(up) = self.up() {
                    up.asked.insert(id, asked);
                }
                Err(Misfit)
            }
            None if is_of_another_run && self.up().is_some_and(|up| up.stage.awaits() == Some(id)) => {
                Err(Misfit)
            }
            None if !is_open => {
                let boot = boot_id.as_ref().try_into().unwrap_or_default();
                self.greeting_answered(id, boot, body, now, actions)
            }
            // A second answer.
            None => Ok(()),
        };
        if let Err(Misfit) = fits {
            self.lose("the daemon answered what nobody asked", now, actions);
        }
    }

    /// The answer to a save, claim, commit or load, of a kind that fits.
    fn answered(&mut self, asked: Asked, answer: Option<Answer>, now: Instant, actions: &mut Actions) {
        match asked {
            Asked::Load { key, .. } => self.load_answered(key, answer, now, actions),
            asked => self.save_answered(asked, answer, now, actions),
        }
    }

    fn process_ended(&mut self, process: ProcessId, now: Instant, actions: &mut Actions) {
        self.pools.process_ended(process);
        if let Some(up) = self.up() {
            up.peer.life.ended(process);
        }
        self.daemons_are_out(now, actions, |_, life, _| life.needs(process));
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
            Connection::Down if self.may_connect() && self.backoff.is_due(now) => {
                self.last_connection += 1;
                let connection = ConnectionId(self.last_connection);
                self.connection = Connection::Connecting(connection);
                actions.push_back(WorkerAction::Connect(connection));
            }
            Connection::Leaving { until, .. } if now >= *until => self.hang_up(None, now, actions),
            _ => {}
        }
    }

    /// A greeting says that our own copies have ended, so none is made while one is under way.
    fn may_connect(&self) -> bool {
        !self.is_closing && self.writes.is_empty()
    }

    /// The connection is over, whoever ended it.
    fn lose(&mut self, why: &str, now: Instant, actions: &mut Actions) {
        let Some(up) = self.connection.take_up() else { return };
        if self.is_closing {
            actions.push_back(WorkerAction::Close(up.id));
            self.stop_asking(up.boot, up.peer.life, now);
            return self.end_loads(None, now, actions);
        }
        let was_open = matches!(up.stage, Stage::Open);
        // It may have ended without the daemon: what that still copies must not count.
        self.raise_fence(actions);
        actions.push_back(WorkerAction::Unregistered { was_open });
        // The engine goes on first. The blocks of loads are free once nothing can write them any more.
        self.leave_loads(up.boot, up.peer.life, now, actions);
        up.asked.into_values().for_each(|asked| end_save(asked, "the daemon went away", now, actions));
        actions.push_back(WorkerAction::Close(up.id));
        self.backoff.failed(now);
        log(if was_open { self.standing.lost(why, now) } else { self.standing.broken_off(why) }, actions);
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
            for asked in std::mem::take(&mut up.asked).into_values() {
                end_save(asked, "the worker is closed", now, actions);
            }
        } else {
            self.connection = Connection::Down;
            self.end_loads(None, now, actions);
        }
    }

    /// Says goodbye as soon as this process copies nothing: the daemon may free what it held for us.
    fn say_goodbye(&mut self, now: Instant, actions: &mut Actions) {
        let is_copying = !self.writes.is_empty() || self.loads.values().any(Loading::is_copying);
        if is_copying {
            return;
        }
        let Some((id, boot, life)) = self.up().map(|up| (up.id, up.boot, up.peer.life)) else { return };
        // Should no answer come, it may go on writing.
        self.stop_asking(boot, life, now);
        let bye = self.send(Ask::Bye(v1::Bye {}), actions);
        self.connection = Connection::leaving(id, bye, now);
    }

    /// The daemon has answered our goodbye, as the run that is named: it has freed what it held for us. Or none has answered,
    /// and it will find out.
    fn hang_up(&mut self, answered: Option<BootId>, now: Instant, actions: &mut Actions) {
        if let Connection::Leaving { id, .. } = std::mem::replace(&mut self.connection, Connection::Down) {
            actions.push_back(WorkerAction::Close(id));
        }
        self.end_loads(answered, now, actions);
    }

    /// Refuses the daemon, or is refused by it, before it serves this worker.
    fn turn_away(&mut self, sentence: &str, now: Instant, actions: &mut Actions) {
        self.refuse(sentence, now, actions);
        self.lose("the daemon closed the connection", now, actions);
    }

    /// This daemon cannot be used.
    fn refuse(&mut self, sentence: &str, now: Instant, actions: &mut Actions) {
        log(self.standing.refused(sentence, now), actions);
        self.note_refusal(sentence, actions);
    }

    /// Whoever waits for the registration learns why it does not come. True for a sentence that is new.
    fn note_refusal(&mut self, sentence: &str, actions: &mut Actions) -> bool {
        let is_new = self.refusal != sentence;
        if is_new {
            self.refusal = sentence.into();
            actions.push_back(WorkerAction::Refused(sentence.into()));
        }
        is_new
    }
}
