//! The engine's wish that saves do not become blocks.

use std::{collections::VecDeque, time::Instant};

use kvlane_proto::{v1, v1::request::Body as Ask};

use super::{
    event::SchedulerAction,
    up::{Stage, Up, send},
};

/// The daemons that may read the engine's blocks for saves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Readers {
    /// No daemon: the connection is down, and every former daemon has stopped.
    Nobody,
    /// The daemon of the present connection at most.
    Present,
    /// A former daemon too.
    Former,
}

/// The last wish.
#[derive(Debug)]
pub(super) struct Cancelling {
    below: u64,
    until: Instant,
    /// The request of the present connection.
    asked: Option<u64>,
    answer: Option<bool>,
}

impl Cancelling {
    pub(super) fn new(below: u64, until: Instant) -> Self {
        Self { below, until, asked: None, answer: None }
    }

    /// Tells the daemon. While the engine is being opened, saves of a former connection may still be accepted: it waits for
    /// that.
    pub(super) fn ask(
        &mut self,
        up: Option<&Up>,
        last_request: &mut u64,
        now: Instant,
        actions: &mut VecDeque<SchedulerAction>,
    ) {
        let left = self.until.saturating_duration_since(now);
        if let Some(up) = up
            && up.stage == Stage::Open
            && !left.is_zero()
        {
            let cancel = v1::CancelSaves { below_job: self.below, timeout_ms: left.as_millis() as u32 };
            self.asked = Some(send(last_request, up.id, Ask::CancelSaves(cancel), actions));
        }
    }

    /// The connection is over. The saves may be its daemon's, which is a former one now.
    pub(super) fn ask_again(&mut self) {
        (self.asked, self.answer) = (None, None);
    }

    /// Under this id, of the present connection.
    pub(super) fn is_asked(&self, id: u64) -> bool {
        self.asked == Some(id)
    }

    /// The daemon has answered the request with this id, which may be another.
    pub(super) fn answered(&mut self, id: u64, done: bool) {
        if self.is_asked(id) {
            self.answer = Some(done);
        }
    }

    /// Without an answer by then it is "no".
    pub(super) fn until(&self) -> Instant {
        self.until
    }

    /// Whether nobody reads for the saves any more, once that is known: neither this daemon nor a former one.
    pub(super) fn verdict(&self, readers: Readers, now: Instant) -> Option<bool> {
        match self.answer {
            _ if readers == Readers::Nobody => Some(true),
            Some(done) => Some(done && readers == Readers::Present),
            None if now >= self.until => Some(false),
            None => None,
        }
    }
}
