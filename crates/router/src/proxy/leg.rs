//! [`LegGuard`] owns a leg's reservation of load at its node, and ends it when the leg ends, however it ends.
//!
//! The reservation's prompt tokens count until the first byte ([`LegGuard::prefilled`]), its request until the end.

use std::{sync::Arc, time::Instant};

use hyper::StatusCode;

use crate::{
    body::Mark,
    counters::Counters,
    schedule::{Leg, LegEnd, NodeId, Reservation},
    shared::Shared,
    traces::OpenSpan,
};

/// Gives its reservation back when it is dropped: as [`LegEnd::Left`], unless the leg has ended before.
#[derive(Debug)]
pub(super) struct LegGuard {
    shared: Arc<Shared>,
    reservation: Option<Reservation>,
    /// The engine computes nothing for this leg, so an answer does not prove that it works.
    proves_nothing: bool,
    /// None if the request is not traced.
    span: Option<Box<OpenSpan>>,
}

impl LegGuard {
    pub(super) fn new(shared: &Arc<Shared>, reservation: Reservation) -> Self {
        Self { shared: Arc::clone(shared), reservation: Some(reservation), proves_nothing: false, span: None }
    }

    /// A leg that an engine's server answers without its engine, such as a browser's preflight.
    pub(super) fn computes_nothing(mut self) -> Self {
        self.proves_nothing = true;
        self
    }

    /// The leg's span, which ends with it.
    pub(super) fn trace(&mut self, span: Option<OpenSpan>) {
        self.span = span.map(Box::new);
    }

    pub(super) fn node(&self) -> Option<NodeId> {
        self.reservation.as_ref().map(|reservation| reservation.node)
    }

    pub(super) fn leg(&self) -> Option<Leg> {
        self.reservation.as_ref().map(|reservation| reservation.leg)
    }

    /// Notes the answer's status. A refusal takes no time, so the scheduler learns nothing from its times.
    pub(super) fn note_status(&mut self, status: StatusCode) {
        if let Some(reservation) = self.reservation.as_mut().filter(|_| !status.is_success()) {
            reservation.learn_nothing();
        }
    }

    /// Makes the scheduler learn nothing from this leg about the time of first tokens and hand-offs.
    pub(super) fn learn_nothing(&mut self) {
        if let Some(reservation) = &mut self.reservation {
            reservation.learn_nothing();
        }
    }

    /// The first byte has arrived. The node has prefilled the prompt, and holds these marks.
    pub(super) fn prefilled(&mut self, marks: &[Mark]) {
        if let Some(reservation) = &mut self.reservation {
            self.shared.state.lock().scheduler.prefilled(reservation, marks, Instant::now());
        }
    }

    /// Counts tokens that have arrived.
    pub(super) fn generated(&mut self, tokens: u64) {
        if let Some(reservation) = &mut self.reservation {
            reservation.generated(tokens);
        }
    }

    /// Ends the leg and gives its reservation back. Later calls change nothing.
    pub(super) fn end(&mut self, end: LegEnd) {
        if let Some(mut span) = self.span.take()
            && end == LegEnd::Failed
        {
            span.fail("the engine failed");
        }
        if let Some(reservation) = self.reservation.take() {
            let node = reservation.node;
            let end = if self.proves_nothing && end == LegEnd::Served { LegEnd::Left } else { end };
            let turn = self.shared.state.lock().scheduler.end(reservation, end, Instant::now());
            self.shared.log_turn(node, turn);
        }
    }

    /// Ends the leg as a failure of the node, with this reason.
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
