//! A neighbour whose WRITEs this process carries out: how much it has queued, and outcomes to be sent.

use std::sync::Arc;

use super::neighbour::Neighbour;
use crate::carrier::Owner;
use crate::wire::Outcome;

/// State of one session, from its accepted offer until the session or the connection ends.
#[derive(Debug)]
pub(super) struct ServedNeighbour {
    pub(super) owner: Owner,
    /// Drawn by the neighbour; unique among its connections.
    pub(super) connection: u64,
    pub(super) neighbour: Arc<Neighbour>,
    /// Weight of its requests in flight, in ranges; bounded by `RANGES_QUEUED_MAX`.
    pub(super) queued: usize,
    pub(super) outcomes: Vec<Outcome>,
}

impl ServedNeighbour {
    pub(super) fn new(owner: Owner, connection: u64, neighbour: Arc<Neighbour>) -> ServedNeighbour {
        ServedNeighbour { owner, connection, neighbour, queued: 0, outcomes: Vec::new() }
    }
}
