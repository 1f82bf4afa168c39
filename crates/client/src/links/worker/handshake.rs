//! From the greeting to a worker that is served: share chunks, register, map the pool.

use std::time::Instant;

use kvlane_proto::{v1, v1::register_worker::Method, v1::reply::Body as Answer, v1::request::Body as Ask};

use super::{
    super::{ids::ConnectionId, standing::describe},
    event::{Actions, WorkerAction},
    failures::NotMapped,
    link::{WorkerLink, log},
    messages,
    up::{Misfit, Stage},
};
use crate::{boot::BootId, jobs::SaveMethod};

impl WorkerLink {
    /// An answer before the worker is served.
    pub(super) fn greeting_answered(
        &mut self,
        id: u64,
        boot: BootId,
        answer: Option<Answer>,
        now: Instant,
        actions: &mut Actions,
    ) -> Result<(), Misfit> {
        let has_card = self.options.card.is_some();
        let Some(up) = self.up() else { return Ok(()) };
        match (up.stage, answer) {
            (Stage::Greeting { hello }, Some(Answer::Welcome(welcome))) if hello == id => {
                up.daemon = describe(&welcome);
                up.boot = boot;
                let pid = up.peer.pid;
                // This run says that the copies that it did for us have ended.
                self.daemons_are_out(now, actions, |of, _, _| *of == boot);
                actions.push_back(WorkerAction::AllowReads { pid });
                self.share_or_register(0, actions);
            }
            (Stage::Sharing { request, batch }, Some(Answer::Done(_))) if request == id => {
                self.share_or_register(batch + 1, actions);
            }
            (Stage::Registering { request }, Some(Answer::WorkerRegistered(registered)))
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
                self.set_stage(Stage::AskingForPool { request });
            }
            (Stage::AskingForPool { request }, Some(Answer::PoolDescriptor(pool))) if request == id => {
                up.stage = Stage::Mapping;
                let (connection, boot, writable) = (up.id, up.boot, up.method == SaveMethod::Mapped);
                let bytes = pool.bytes;
                actions.push_back(WorkerAction::MapPool { connection, boot, bytes, writable });
            }
            (Stage::Confirming { request }, Some(Answer::Done(_))) if request == id => {
                self.registered(now, actions);
            }
            (stage, _) if stage.awaits() == Some(id) => return Err(Misfit),
            // A second answer.
            _ => {}
        }
        Ok(())
    }

    /// The pool is mapped, or cannot be.
    pub(super) fn mapped(
        &mut self,
        connection: ConnectionId,
        boot: BootId,
        mapped: Result<(), NotMapped>,
        now: Instant,
        actions: &mut Actions,
    ) {
        let Some(up) = self.up_as(connection).filter(|up| up.stage == Stage::Mapping) else {
            // Its connection is over. Nobody else would let it go.
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
                self.set_stage(Stage::Confirming { request });
            }
            Err(why) => self.turn_away(&why.to_string(), now, actions),
        }
    }

    /// Shares the next chunks of GPU memory, or registers when all are shared.
    fn share_or_register(&mut self, batch: usize, actions: &mut Actions) {
        if batch < self.options.card.as_ref().map_or(0, |card| card.batches) {
            self.last_request += 1;
            let request = self.last_request;
            self.set_stage(Stage::Sharing { request, batch });
            let connection = self.up().map(|up| up.id);
            let share = |connection| WorkerAction::ShareChunks { connection, id: request, batch };
            return actions.extend(connection.map(share));
        }
        let request = self.send(messages::register(&self.options), actions);
        self.set_stage(Stage::Registering { request });
    }

    fn registered(&mut self, now: Instant, actions: &mut Actions) {
        let Some(up) = self.up() else { return };
        up.stage = Stage::Open;
        let (method, reason) = (up.method, up.reason.clone());
        let how = format!("{}, saves by {} ({reason})", up.daemon, method.name());
        self.backoff.opened(now);
        log(self.standing.connected(&how, now), actions);
        self.refusal.clear();
        actions.push_back(WorkerAction::Registered { method, reason });
    }

    fn set_stage(&mut self, stage: Stage) {
        if let Some(up) = self.up() {
            up.stage = stage;
        }
    }
}
