//! Connects, greets and opens the engine; handles replies, refusals, losses and the close.

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
    up::{HEARTBEAT, SchedulerStage, SchedulerUp, log, send},
};
use crate::{
    boot::BootId,
    hit::Hit,
    links::{
        connection::ConnectionState,
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
            // The link was closed meanwhile.
            return actions.push_back(SchedulerAction::Close(id));
        }
        let hello = self.options.hello(self.leases.live());
        let hello = send(&mut self.last_request, id, hello, actions);
        self.connection = ConnectionState::Up(SchedulerUp {
            id,
            life,
            stage: SchedulerStage::Greeting { hello },
            boot: [0; 16],
            daemon: String::new(),
            pool_bytes: 0,
            ready: false,
            is_recorded: false,
            heartbeat_at: now + HEARTBEAT,
            awaits_heartbeat_reply: false,
            probe_at: now,
            pending: BTreeMap::new(),
            replies: 0,
            open_timed_out: false,
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
        self.connection = ConnectionState::Down;
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
            self.connection = ConnectionState::Down;
            return actions.push_back(SchedulerAction::Close(connection));
        }
        let Some(up) = self.connection.up_mut().filter(|up| up.id == connection) else { return };
        up.note_reply();
        let id = reply.id;
        let boot = BootId::try_from(reply.boot_id.as_ref()).ok();
        if up.run().is_some() && up.run() != boot {
            return self.reject(connection, &"it names another run of the daemon", now, actions);
        }
        if let Some(Answer::Done(v1::Done { is_recorded: Some(is_recorded) })) = &reply.body {
            up.is_recorded = *is_recorded;
        }
        match (up.stage, reply.body) {
            (_, Some(Answer::Refused(refused))) => self.refused(connection, id, refused, now, actions),
            (SchedulerStage::Greeting { hello }, Some(Answer::Welcome(welcome))) if id == hello => {
                let Some(boot) = boot else {
                    return self.reject(connection, &"a run's name has 16 bytes", now, actions);
                };
                up.daemon = describe(&welcome);
                up.pool_bytes = welcome.pool_bytes;
                up.boot = boot;
                self.former.welcome(&boot);
                self.leases.keep_only(&boot);
                log(self.journal.greeted(boot, welcome.wire, &up.daemon, now), actions);
                let open = self.options.open_engine(self.cancelled_below);
                let open = send(&mut self.last_request, up.id, open, actions);
                up.stage = SchedulerStage::Opening { open };
            }
            (SchedulerStage::Opening { open }, Some(Answer::EngineOpened(opened))) if id == open => {
                up.stage = SchedulerStage::Open;
                up.ready = opened.ready;
                self.opened(now, actions);
            }
            (_, Some(Answer::LookupResult(result))) if up.pending.contains_key(&id) => {
                up.ready = result.ready;
                up.is_recorded = result.is_recorded;
                let pending = up.pending.remove(&id);
                let hit = Hit::from_reply(up.boot, result);
                let max_tokens = pending.as_ref().map_or(0, |pending| pending.max_tokens);
                match hit.check(&self.options.groups, self.options.workers, max_tokens) {
                    Ok(()) => self.answered(pending, hit, now, actions),
                    Err(misfit) => self.reject(connection, &misfit, now, actions),
                }
            }
            (_, Some(Answer::LookupPending(delay))) if up.pending.contains_key(&id) => {
                let Some(pending) = up.pending.get_mut(&id) else { return };
                let wait = Duration::from_millis(delay.wait_ms.into());
                let until = pending.extend(wait, up.replies, now);
                if let Some(request) = &pending.request {
                    self.lookups.extend(request, id, until);
                }
            }
            (_, Some(Answer::Done(_))) if self.cancelling.as_ref().is_some_and(|c| c.is_request(id)) => {
                if let Some(cancelling) = &mut self.cancelling {
                    cancelling.answered(id, true);
                }
            }
            (_, Some(Answer::JournalEntries(entries))) if self.journal.is_request(id) => {
                if let Err(misfit) = self.journal.answered(entries, self.options.groups.len(), now) {
                    self.reject(connection, &misfit, now, actions);
                }
            }
            _ => {
                let is_pending = up.stage.request() == Some(id)
                    || self.journal.is_request(id)
                    || up.pending.contains_key(&id)
                    || self.cancelling.as_ref().is_some_and(|cancelling| cancelling.is_request(id));
                // Other ids are second answers, or answers to releases and heartbeats.
                if is_pending {
                    self.reject(connection, &"it is of another kind", now, actions);
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
        // The first read of the journal comes before anything is saved over this connection, so that it misses nothing.
        self.journal.poll(up.id, &mut self.last_request, now, actions);
        for (request, Unsent { ask, until, timeout }) in self.lookups.take_unsent() {
            self.ask(request, ask, until, timeout, now, actions);
        }
        if let Some(cancelling) = &mut self.cancelling {
            cancelling.send_cancel(self.connection.up(), &mut self.last_request, now, actions);
        }
    }

    /// Closes the connection because an answer does not fit its request: later answers may be as wrong.
    fn reject(
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
        if up.stage == SchedulerStage::Open {
            let pending = up.pending.remove(&id);
            if self.refusal.as_ref() != Some(&sentence) {
                let address = &self.options.address;
                let sentence = format!("kvlane: the daemon at {address} refused a request: {sentence}");
                log(Some(Notice { urgency: Urgency::Warning, sentence }), actions);
            }
            self.answered(pending, Hit::default(), now, actions);
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
            self.connection = ConnectionState::Down;
        }
        let Some(up) = self.connection.up().filter(|up| up.id == connection) else { return };
        let notice = match up.stage {
            SchedulerStage::Open => self.standing.lost(why, now),
            SchedulerStage::Greeting { .. } | SchedulerStage::Opening { .. } => {
                self.standing.handshake_failed(why)
            }
        };
        log(notice, actions);
        self.leave(now);
        self.stats.losses += 1;
        self.backoff.failed(now);
        // The engine cannot take these hits any more, so it will not release them. Greetings and heartbeats must not name them.
        for hit in self.lookups.clear() {
            self.leases.forget(&hit.boot, hit.lease);
        }
    }

    /// The connection is over, and with it every request that was sent over it.
    pub(super) fn leave(&mut self, now: Instant) {
        if let Some(cancelling) = &mut self.cancelling {
            cancelling.forget_request();
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
            ConnectionState::Connecting(_) => self.connection = ConnectionState::Down,
            ConnectionState::Up(up) => {
                let id = up.id;
                let bye = send(&mut self.last_request, id, Ask::Bye(v1::Bye {}), actions);
                self.connection = ConnectionState::leaving(id, bye, now);
            }
            ConnectionState::Down | ConnectionState::Leaving { .. } => {}
        }
    }
}
