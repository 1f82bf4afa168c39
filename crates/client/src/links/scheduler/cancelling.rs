//! Cancels saves: no save below a job may become a block any more, and no daemon may read the engine's blocks for it.

use std::{collections::VecDeque, time::Instant};

use kvlane_proto::{v1, v1::request::Body as Ask};

use super::{
    event::SchedulerAction,
    up::{SchedulerStage, SchedulerUp, send},
};

/// The daemons that may read the engine's blocks for saves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Readers {
    /// No daemon: the connection is down, and every former daemon has stopped.
    Nobody,
    /// At most the daemon of the present connection.
    Present,
    /// Perhaps a former daemon, too.
    Former,
}

/// The engine's last CancelSaves.
#[derive(Debug)]
pub(super) struct Cancelling {
    below: u64,
    until: Instant,
    /// Its id on the present connection, once it is sent.
    request: Option<u64>,
    answer: Option<bool>,
}

impl Cancelling {
    pub(super) fn new(below: u64, until: Instant) -> Self {
        Self { below, until, request: None, answer: None }
    }

    /// Sends it once the engine is open. Before that, the daemon may still accept saves of a former connection.
    pub(super) fn send_cancel(
        &mut self,
        up: Option<&SchedulerUp>,
        last_request: &mut u64,
        now: Instant,
        actions: &mut VecDeque<SchedulerAction>,
    ) {
        let left = self.until.saturating_duration_since(now);
        if let Some(up) = up
            && up.stage == SchedulerStage::Open
            && !left.is_zero()
        {
            let cancel = v1::CancelSaves { below_job: self.below, timeout_ms: left.as_millis() as u32 };
            self.request = Some(send(last_request, up.id, Ask::CancelSaves(cancel), actions));
        }
    }

    /// The connection ended, so the answer is open again: its daemon is a former one now, and may still read for the saves.
    pub(super) fn forget_request(&mut self) {
        (self.request, self.answer) = (None, None);
    }

    /// Whether it was sent under this id, on the present connection.
    pub(super) fn is_request(&self, id: u64) -> bool {
        self.request == Some(id)
    }

    /// Records the daemon's answer, if this is its request.
    pub(super) fn answered(&mut self, id: u64, done: bool) {
        if self.is_request(id) {
            self.answer = Some(done);
        }
    }

    /// When the answer becomes "no", if none has come.
    pub(super) fn until(&self) -> Instant {
        self.until
    }

    /// Whether no daemon reads for the saves any more; None while that is open.
    pub(super) fn verdict(&self, readers: Readers, now: Instant) -> Option<bool> {
        match self.answer {
            _ if readers == Readers::Nobody => Some(true),
            Some(done) => Some(done && readers == Readers::Present),
            None if now >= self.until => Some(false),
            None => None,
        }
    }
}
