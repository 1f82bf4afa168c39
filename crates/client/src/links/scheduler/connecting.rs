//! From no connection to an open engine, and back.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt::Display,
    time::{Duration, Instant},
};

use kvlane_proto::{v1, v1::reply::Body as Answer, v1::request::Body as Ask};

use super::{
    event::SchedulerAction,
    link::SchedulerLink,
    lookups::Unsent,
    up::{HEARTBEAT, Stage, Up, log, send},
};
use crate::{
    boot::BootId,
    hit::Hit,
    links::{
        connection::Connection,
        ids::{ConnectionId, Life, NotConnected},
        standing::{Notice, Urgency, describe},
    },
};

impl SchedulerLink {
    pub(super) fn connected(
        &mut self,
        id: ConnectionId,
        life: Life,
        now: Instant,
        actions: &mut VecDeque<SchedulerAction>,
    ) {
        if !self.connection.is_connecting(id) {
            // Nobody wants it any more.
            return actions.push_back(SchedulerAction::Close(id));
        }
        let hello = self.options.hello(self.leases.live());
        let hello = send(&mut self.last_request, id, hello, actions);
        self.connection = Connection::Up(Up {
            id,
            life,
            stage: Stage::Greeting { hello },
            boot: [0; 16],
            daemon: String::new(),
            ready: false,
            heartbeat_at: now + HEARTBEAT,
            awaits_sign: false,
            probe_at: now,
            asked: BTreeMap::new(),
            heard: 0,
            waited_in_vain: false,
        });
    }

    pub(super) fn not_connected(
        &mut self,
        id: ConnectionId,
        why: NotConnected,
        now: Instant,
        actions: &mut VecDeque<SchedulerAction>,
    ) {
        if !self.connection.is_connecting(id) {
            return;
        }
        self.connection = Connection::Down;
        self.backoff.failed(now);
        match why {
            NotConnected::Absent(sentence) => log(self.standing.absent(&sentence), actions),
            NotConnected::Refused(sentence) => {
                log(self.standing.refused(&sentence, now), actions);
                self.refusal = Some(sentence);
            }
        }
    }

    pub(super) fn take_reply(
        &mut self,
        connection: ConnectionId,
        reply: v1::Reply,
        now: Instant,
        actions: &mut VecDeque<SchedulerAction>,
    ) {
        if self.connection.is_goodbye(connection, reply.id) {
            self.connection = Connection::Down;
            return actions.push_back(SchedulerAction::Close(connection));
        }
        let Some(up) = self.connection.up_mut().filter(|up| up.id == connection) else { return };
        up.has_spoken();
        let id = reply.id;
        let boot = BootId::try_from(reply.boot_id.as_ref()).ok();
        if up.run().is_some() && up.run() != boot {
            return self.misfit(connection, &"it names another run of the daemon", now, actions);
        }
        match (up.stage, reply.body) {
            (_, Some(Answer::Refused(refused))) => self.refused(connection, id, refused, now, actions),
            (Stage::Greeting { hello }, Some(Answer::Welcome(welcome))) if id == hello => {
                let Some(boot) = boot else {
                    return self.misfit(connection, &"a run's name has 16 bytes", now, actions);
                };
                up.daemon = describe(&welcome);
                up.boot = boot;
                self.former.welcome(&boot);
                self.leases.keep_only(&boot);
                log(self.journal.greeted(boot, welcome.wire, &up.daemon, now), actions);
                let open = self.options.open_engine(self.cancelled_below);
                let open = send(&mut self.last_request, up.id, open, actions);
                up.stage = Stage::Opening { open };
            }
            (Stage::Opening { open }, Some(Answer::EngineOpened(opened))) if id == open => {
                up.stage = Stage::Open;
                up.ready = opened.ready;
                self.opened(now, actions);
            }
            (_, Some(Answer::LookupResult(result))) if up.asked.contains_key(&id) => {
                up.ready = result.ready;
                let asked = up.asked.remove(&id);
                let hit = Hit::from_reply(up.boot, result);
                let max_tokens = asked.as_ref().map_or(0, |asked| asked.max_tokens);
                match hit.check(&self.options.groups, self.options.workers, max_tokens) {
                    Ok(()) => self.answered(asked, hit, now, actions),
                    Err(misfit) => self.misfit(connection, &misfit, now, actions),
                }
            }
            (_, Some(Answer::LookupPending(pending))) if up.asked.contains_key(&id) => {
                let Some(asked) = up.asked.get_mut(&id) else { return };
                let wait = Duration::from_millis(pending.wait_ms.into());
                let until = asked.prolong(wait, up.heard, now);
                if let Some(request) = &asked.request {
                    self.lookups.prolong(request, id, until);
                }
            }
            (_, Some(Answer::Done(_))) if self.cancelling.as_ref().is_some_and(|c| c.is_asked(id)) => {
                if let Some(cancelling) = &mut self.cancelling {
                    cancelling.answered(id, true);
                }
            }
            (_, Some(Answer::JournalEntries(told))) if self.journal.is_asked(id) => {
                if let Err(misfit) = self.journal.answered(told, self.options.groups.len(), now) {
                    self.misfit(connection, &misfit, now, actions);
                }
            }
            _ => {
                let is_known = up.stage.request() == Some(id)
                    || self.journal.is_asked(id)
                    || up.asked.contains_key(&id)
                    || self.cancelling.as_ref().is_some_and(|cancelling| cancelling.is_asked(id));
                // Others are second answers, and those to releases and heartbeats.
                if is_known {
                    self.misfit(connection, &"it is of another kind", now, actions);
                }
            }
        }
    }

    /// The daemon has opened the engine over this connection: the link sends the requests that waited for it.
    fn opened(&mut self, now: Instant, actions: &mut VecDeque<SchedulerAction>) {
        let Some(up) = self.connection.up() else { return };
        self.backoff.opened(now);
        self.stats.connects += 1;
        self.refusal = None;
        log(self.standing.connected(&up.daemon, now), actions);
        // Before anything can be saved over this connection.
        self.journal.ask(up.id, &mut self.last_request, now, actions);
        for (request, Unsent { ask, until, timeout }) in self.lookups.take_unsent() {
            self.ask(request, ask, until, timeout, now, actions);
        }
        if let Some(cancelling) = &mut self.cancelling {
            cancelling.ask(self.connection.up(), &mut self.last_request, now, actions);
        }
    }

    /// A daemon that answers what was not asked is left: whatever it says next may be as wrong.
    fn misfit(
        &mut self,
        connection: ConnectionId,
        what: &dyn Display,
        now: Instant,
        actions: &mut VecDeque<SchedulerAction>,
    ) {
        actions.push_back(SchedulerAction::Close(connection));
        let why = format!(
            "an answer does not fit what was asked ({what}); install the same version of kvlane for the daemon and the engine"
        );
        self.lost(connection, &why, now, actions);
    }

    pub(super) fn refused(
        &mut self,
        connection: ConnectionId,
        id: u64,
        refused: v1::Refused,
        now: Instant,
        actions: &mut VecDeque<SchedulerAction>,
    ) {
        if let Some(cancelling) = &mut self.cancelling {
            cancelling.answered(id, false);
        }
        self.journal.refused(id, now);
        let Some(up) = self.connection.up_mut() else { return };
        let sentence = refused.sentence;
        if up.stage == Stage::Open {
            let asked = up.asked.remove(&id);
            if self.refusal.as_ref() != Some(&sentence) {
                let address = &self.options.address;
                let told = format!("kvlane: the daemon at {address} refused a request: {sentence}");
                log(Some(Notice { urgency: Urgency::Warning, sentence: told }), actions);
            }
            self.answered(asked, Hit::default(), now, actions);
        } else {
            log(self.standing.refused(&sentence, now), actions);
            self.leave(now);
            actions.push_back(SchedulerAction::Close(connection));
            self.backoff.failed(now);
        }
        self.refusal = Some(sentence);
    }

    pub(super) fn lost(
        &mut self,
        connection: ConnectionId,
        why: &str,
        now: Instant,
        actions: &mut VecDeque<SchedulerAction>,
    ) {
        if self.connection.is_leaving(connection) {
            self.connection = Connection::Down;
        }
        let Some(up) = self.connection.up().filter(|up| up.id == connection) else { return };
        let told = match up.stage {
            Stage::Open => self.standing.lost(why, now),
            Stage::Greeting { .. } | Stage::Opening { .. } => self.standing.broken_off(why),
        };
        log(told, actions);
        self.leave(now);
        self.stats.losses += 1;
        self.backoff.failed(now);
        // Nobody will give these leases back: greetings and heartbeats must not name them any more.
        for hit in self.lookups.clear() {
            self.leases.forget(&hit.boot, hit.lease);
        }
    }

    /// The connection is over, and with it what was asked over it.
    pub(super) fn leave(&mut self, now: Instant) {
        if let Some(cancelling) = &mut self.cancelling {
            cancelling.ask_again();
        }
        self.journal.left();
        if let Some(up) = self.connection.take_up()
            && let Some(boot) = up.run()
        {
            self.former.leave(boot, up.life, now);
        }
    }

    pub(super) fn close(&mut self, now: Instant, actions: &mut VecDeque<SchedulerAction>) {
        self.is_closed = true;
        self.cancelling = None;
        self.journal.left();
        self.lookups.clear();
        self.leases.clear();
        match &self.connection {
            Connection::Connecting(_) => self.connection = Connection::Down,
            Connection::Up(up) => {
                let id = up.id;
                let bye = send(&mut self.last_request, id, Ask::Bye(v1::Bye {}), actions);
                self.connection = Connection::leaving(id, bye, now);
            }
            Connection::Down | Connection::Leaving { .. } => {}
        }
    }
}
