//! The handshake, from the daemon's Welcome to a worker that it serves: share chunks, register, map the pool.

use std::time::Instant;

use kvlane_proto::{v1, v1::register_worker::Method, v1::reply::Body as Answer, v1::request::Body as Ask};

use super::{
    super::{ids::ConnectionId, standing::describe},
    event::{Actions, WorkerAction},
    failures::NotMapped,
    link::{WorkerLink, log},
    messages,
    up::{UnexpectedReply, WorkerStage},
};
use crate::{boot::BootId, jobs::SaveMethod};

impl WorkerLink {
    /// Handles an answer before the daemon serves the worker.
    pub(super) fn handshake_reply(
        &mut self,
        id: u64,
        boot: BootId,
        answer: Option<Answer>,
        now: Instant,
        actions: &mut Actions,
    ) -> Result<(), UnexpectedReply> {
        let has_card = self.options.card.is_some();
        let Some(up) = self.up() else { return Ok(()) };
        match (up.stage, answer) {
            (WorkerStage::Greeting { hello }, Some(Answer::Welcome(welcome))) if hello == id => {
                up.daemon = describe(&welcome);
                up.wire = welcome.wire;
                up.boot = boot;
                let pid = up.peer.pid;
                // A daemon greets a process only after its copies for the former connection have ended.
                self.retire_daemons(now, actions, |of, _, _| *of == boot);
                actions.push_back(WorkerAction::AllowReads { pid });
                self.share_or_register(0, actions);
            }
            (WorkerStage::Sharing { request, batch }, Some(Answer::Done(_))) if request == id => {
                self.share_or_register(batch + 1, actions);
            }
            (WorkerStage::Registering { request }, Some(Answer::WorkerRegistered(registered)))
                if request == id && (registered.method() == Method::Gpu) == has_card =>
            {
                up.method = match registered.method() {
                    Method::ProcessVm => SaveMethod::ProcessVm,
                    Method::Gpu => SaveMethod::Gpu,
                    _ => SaveMethod::Mapped,
                };
                up.reason = registered.reason;
                let writable = up.method == SaveMethod::Mapped;
                let request = self.send(Ask::MapPool(v1::MapPool { writable }), actions);
                self.set_stage(WorkerStage::AskingForPool { request });
            }
            (WorkerStage::AskingForPool { request }, Some(Answer::PoolDescriptor(pool))) if request == id => {
                up.stage = WorkerStage::Mapping;
                let (connection, boot, writable) = (up.id, up.boot, up.method == SaveMethod::Mapped);
                let bytes = pool.bytes;
                actions.push_back(WorkerAction::MapPool { connection, boot, bytes, writable });
            }
            (WorkerStage::Confirming { request }, Some(Answer::Done(_))) if request == id => {
                self.registered(now, actions);
            }
            (stage, _) if stage.awaits() == Some(id) => return Err(UnexpectedReply),
            // A second answer to a request.
            _ => {}
        }
        Ok(())
    }

    /// Handles the outcome of MapPool.
    pub(super) fn mapped(
        &mut self,
        connection: ConnectionId,
        boot: BootId,
        mapped: Result<(), NotMapped>,
        now: Instant,
        actions: &mut Actions,
    ) {
        let Some(up) = self.up_as(connection).filter(|up| up.stage == WorkerStage::Mapping) else {
            // The connection ended meanwhile. The pool is in no book, so nothing else would unmap it.
            if mapped.is_ok() && !self.pools.holds(&boot) {
                actions.push_back(WorkerAction::Unmap(boot));
            }
            return;
        };
        let life = up.peer.life;
        match mapped {
            Ok(()) => {
                let unmapped = self.pools.set(boot, life);
                actions.extend(unmapped.into_iter().map(WorkerAction::Unmap));
                let request = self.send(Ask::PoolMapped(v1::PoolMapped {}), actions);
                self.set_stage(WorkerStage::Confirming { request });
            }
            Err(why) => self.turn_away(&why.to_string(), now, actions),
        }
    }

    /// Shares the next batch of GPU memory, or registers once all are shared.
    fn share_or_register(&mut self, batch: usize, actions: &mut Actions) {
        if batch < self.options.card.as_ref().map_or(0, |card| card.batches) {
            self.last_request += 1;
            let request = self.last_request;
            self.set_stage(WorkerStage::Sharing { request, batch });
            let connection = self.up().map(|up| up.id);
            let share = |connection| WorkerAction::ShareChunks { connection, id: request, batch };
            return actions.extend(connection.map(share));
        }
        let request = self.send(messages::register(&self.options), actions);
        self.set_stage(WorkerStage::Registering { request });
    }

    fn registered(&mut self, now: Instant, actions: &mut Actions) {
        let Some(up) = self.up() else { return };
        up.stage = WorkerStage::Open;
        let (method, reason) = (up.method, up.reason.clone());
        let how = format!("{}, saves by {} ({reason})", up.daemon, method.name());
        self.backoff.opened(now);
        log(self.standing.connected(&how, now), actions);
        self.refusal.clear();
        actions.push_back(WorkerAction::Registered { method, reason });
    }

    fn set_stage(&mut self, stage: WorkerStage) {
        if let Some(up) = self.up() {
            up.stage = stage;
        }
    }
}
