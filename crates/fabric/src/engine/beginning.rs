//! Begins transfers: checks them against a snapshot of both sides' regions without the engine's lock, then submits them if the
//! snapshot still holds.

use std::sync::Arc;

use super::error::FabricError;
use super::handle::{Handle, Transfer};
use super::hold::Hold;
use super::shared::Shared;
use crate::hub::socket_hub::SocketHub;
use crate::process::{BothSides, Used};
use crate::shape::{Pieces, ShapeError, Side};
use crate::transfers::{Op, PeerId, Request, Stretch};
use crate::window::WindowDescriptor;

/// Checks of one transfer before it fails as [`FabricError::Changing`]: the regions it uses may change between check and
/// submission.
const CHECKS_MAX: usize = 4;

/// A transfer that fitted the memory of both sides when it was checked.
#[derive(Debug)]
pub(crate) struct Checked {
    /// Its `deadline` is still a timeout, which counts from [`Shared::submit`] on.
    request: Request,
    used: Used,
}

impl Shared {
    /// The regions of both sides, as they are now.
    pub(crate) fn both_sides(&self, peer: PeerId) -> Result<BothSides, FabricError> {
        self.try_hub()?.hub.both_sides(peer).ok_or(FabricError::NoSuchPeer)
    }

    /// Checks a transfer without the lock, and begins it.
    pub(crate) fn begin(
        self: &Arc<Shared>,
        peer: PeerId,
        transfer: &Transfer,
    ) -> Result<Handle, FabricError> {
        if let Some(window) = &transfer.window {
            self.note_window(peer, window)?;
        }
        for _ in 0..CHECKS_MAX {
            let sides = self.both_sides(peer)?;
            let checked = self.check(&sides, peer, transfer)?;
            let mut hub = self.try_hub()?;
            if let Some(handle) = self.submit(&mut hub, checked)? {
                self.run_pending(&mut hub);
                return Ok(handle);
            }
        }
        Err(FabricError::Changing)
    }

    /// Makes a window known by its descriptor, which may arrive before the peer's announcement.
    fn note_window(&self, peer: PeerId, window: &WindowDescriptor) -> Result<(), FabricError> {
        let mut hub = self.try_hub()?;
        let known = hub.hub.outside.peer_mut(peer).ok_or(FabricError::NoSuchPeer)?;
        known.describe_window(window).then_some(()).ok_or(FabricError::WindowClosed)
    }

    /// Checks a transfer against the memory of both sides.
    pub(crate) fn check(
        &self,
        sides: &BothSides,
        peer: PeerId,
        transfer: &Transfer,
    ) -> Result<Checked, FabricError> {
        let (stretches, used) = self.check_pieces(sides, peer, &transfer.pieces)?;
        check_window(sides, &used, transfer)?;
        let request = Request {
            peer,
            op: transfer.op,
            stretches,
            immediate: transfer.immediate,
            deadline: transfer.timeout,
            priority: transfer.priority,
        };
        Ok(Checked { request, used })
    }

    fn check_pieces(
        &self,
        sides: &BothSides,
        peer: PeerId,
        pieces: &Pieces,
    ) -> Result<(Vec<Stretch>, Used), FabricError> {
        let runs = pieces.runs(sides)?;
        let used = sides.used_by(peer, &runs);
        let stretches = sides.stretches(runs);
        let mut routes = stretches.iter().map(|stretch| stretch.between.route());
        match routes.find(|route| !self.reach.serves(*route)) {
            Some(route) => Err(FabricError::NoRoute(route)),
            None => Ok((stretches, used)),
        }
    }

    /// Whether the regions that a transfer was checked against have not changed.
    pub(crate) fn is_current(&self, hub: &SocketHub, checked: &Checked) -> bool {
        hub.hub.both_sides(checked.used.peer).is_some_and(|sides| sides.still_have(&checked.used))
    }

    /// Submits a checked transfer; [`Shared::run_pending`] posts it. None: the regions that it uses have changed since.
    pub(crate) fn submit(
        self: &Arc<Shared>,
        hub: &mut Hold<'_>,
        checked: Checked,
    ) -> Result<Option<Handle>, FabricError> {
        let Checked { mut request, used } = checked;
        let now = hub.hub.now();
        request.deadline = request.deadline.map(|timeout| now.saturating_add(timeout));
        let submitted = hub.hub.submit(request, used).map_err(|full| FabricError::Full(full.0))?;
        Ok(submitted.map(|ticket| Handle { shared: Arc::clone(self), ticket }))
    }
}

/// Checks that a transfer with a window names only that window, of its generation, and reads; and that one without names none.
/// A window's number may be used again, so the number alone does not identify it.
fn check_window(sides: &BothSides, used: &Used, transfer: &Transfer) -> Result<(), FabricError> {
    let window = transfer.window.map(|window| (window.number, window.generation));
    if transfer.window.is_some() && transfer.op == Op::Write {
        return Err(FabricError::WindowIsRead);
    }
    for (region, generation) in used.theirs() {
        let is_window = sides.theirs.get(region).is_some_and(|shape| shape.is_window);
        match window {
            Some((number, its)) if number == *region && its != *generation => {
                return Err(FabricError::WindowClosed);
            }
            Some((number, _)) if number == *region && is_window => {}
            None if !is_window => {}
            _ => return Err(ShapeError::NoSuchRegion { side: Side::Remote, region: *region }.into()),
        }
    }
    Ok(())
}
