//! Transfers are checked against the memory of both sides, without the lock, and begun.

use std::sync::Arc;

use super::shared::{Hold, Shared};
use super::{FabricError, Handle, Transfer};
use crate::hub::socket_hub::SocketHub;
use crate::process::{BothSides, Used};
use crate::shape::Pieces;
use crate::transfers::{PeerId, Request, Stretch};

/// A transfer is checked against what both sides have registered without the lock. So often that may change meanwhile.
const CHECKS_MAX: usize = 4;

/// A transfer that fits the memory of both sides, as it was when it was checked.
#[derive(Debug)]
pub(crate) struct Checked {
    /// Its deadline is a time from now.
    request: Request,
    used: Used,
}

impl Shared {
    /// What both sides have registered now.
    pub(crate) fn both_sides(&self, peer: PeerId) -> Result<BothSides, FabricError> {
        self.try_hub()?.hub.both_sides(peer).ok_or(FabricError::NoSuchPeer)
    }

    /// Checks what a transfer moves, and begins it. The lock is not held while it is checked.
    pub(crate) fn begin(
        self: &Arc<Shared>,
        peer: PeerId,
        transfer: &Transfer,
    ) -> Result<Handle, FabricError> {
        for _ in 0..CHECKS_MAX {
            let sides = self.both_sides(peer)?;
            let checked = self.check(&sides, peer, transfer)?;
            let mut hub = self.try_hub()?;
            if let Some(handle) = self.submit(&mut hub, checked)? {
                self.set_going(&mut hub);
                return Ok(handle);
            }
        }
        Err(FabricError::Changing)
    }

    /// What a transfer moves, checked against the memory of both sides.
    pub(crate) fn check(
        &self,
        sides: &BothSides,
        peer: PeerId,
        transfer: &Transfer,
    ) -> Result<Checked, FabricError> {
        self.check_pieces(sides, peer, &transfer.pieces).map(|(stretches, used)| Checked {
            request: Request {
                peer,
                op: transfer.op,
                stretches,
                immediate: transfer.immediate,
                deadline: transfer.timeout,
                priority: transfer.priority,
            },
            used,
        })
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
        if self.slots.is_none() && stretches.iter().any(|stretch| stretch.between.has_gpus()) {
            return Err(FabricError::NoWayToGpus);
        }
        Ok((stretches, used))
    }

    /// Whether what a transfer was checked against is still so.
    pub(crate) fn is_current(&self, hub: &SocketHub, checked: &Checked) -> bool {
        hub.hub.both_sides(checked.used.peer).is_some_and(|sides| sides.still_have(&checked.used))
    }

    /// Makes a transfer that was checked. It is begun by [`Shared::set_going`]. None: what is registered has changed since.
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
