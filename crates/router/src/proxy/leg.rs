//! A leg of a request: its reservation, which ends when the leg does, however it ends.

use std::{sync::Arc, time::Instant};

use hyper::StatusCode;

use crate::{
    body::Mark,
    counters::Counters,
    schedule::{Leg, LegEnd, NodeId, Reservation},
    shared::Shared,
};

/// Gives its reservation back when it is dropped: as a leg that was left, if nothing else was said.
#[derive(Debug)]
pub(super) struct LegGuard {
    shared: Arc<Shared>,
    reservation: Option<Reservation>,
    /// The node computes nothing for it, so an answer does not say that its engine works.
    proves_nothing: bool,
}

impl LegGuard {
    pub(super) fn new(shared: &Arc<Shared>, reservation: Reservation) -> Self {
        Self { shared: Arc::clone(shared), reservation: Some(reservation), proves_nothing: false }
    }

    /// A leg that an engine's server answers without its engine, such as a browser's preflight.
    pub(super) fn computes_nothing(mut self) -> Self {
        self.proves_nothing = true;
        self
    }

    pub(super) fn node(&self) -> Option<NodeId> {
        self.reservation.as_ref().map(|reservation| reservation.node)
    }

    pub(super) fn leg(&self) -> Option<Leg> {
        self.reservation.as_ref().map(|reservation| reservation.leg)
    }

    /// An answer with this status comes. Of one that is no success there is nothing to learn: it takes no time to refuse.
    pub(super) fn answers(&mut self, status: StatusCode) {
        if let Some(reservation) = self.reservation.as_mut().filter(|_| !status.is_success()) {
            reservation.learn_nothing();
        }
    }

    /// What comes says nothing of what a first token or a hand-over takes.
    pub(super) fn learn_nothing(&mut self) {
        if let Some(reservation) = &mut self.reservation {
            reservation.learn_nothing();
        }
    }

    /// The first byte has come.
    pub(super) fn prefilled(&mut self, marks: &[Mark]) {
        if let Some(reservation) = &mut self.reservation {
            self.shared.state.lock().scheduler.prefilled(reservation, marks, Instant::now());
        }
    }

    /// So many more tokens have come.
    pub(super) fn generated(&mut self, tokens: u64) {
        if let Some(reservation) = &mut self.reservation {
            reservation.generated(tokens);
        }
    }

    /// The leg has ended. What is said later does not count.
    pub(super) fn end(&mut self, end: LegEnd) {
        if let Some(reservation) = self.reservation.take() {
            let node = reservation.node;
            let end = if self.proves_nothing && end == LegEnd::Served { LegEnd::Left } else { end };
            let turn = self.shared.state.lock().scheduler.end(reservation, end, Instant::now());
            self.shared.tell_turn(node, turn);
        }
    }

    /// Counts a failure of the node, with this reason.
    pub(super) fn fail(&mut self, why: &str) {
        if let Some(node) = self.node() {
            self.shared.state.lock().scheduler.note_failure(node, why);
        }
        self.end(LegEnd::Failed);
    }
}

impl Drop for LegGuard {
    fn drop(&mut self) {
        if self.reservation.is_some() {
            Counters::count(&self.shared.counters.left);
            self.end(LegEnd::Left);
        }
    }
}
