//! A peer whose WRITEs this process serves: its queue, and outcomes to be sent.

use std::collections::VecDeque;

use super::neighbour::{Neighbour, WantedBytes};
use crate::carrier::Owner;
use crate::wire::Outcome;

/// State of one session, from its accepted offer until the session or the connection ends.
#[derive(Debug)]
pub(super) struct ServedPeer {
    pub(super) owner: Owner,
    pub(super) neighbour: Neighbour,
    /// WRITEs that wait for regions to be mapped, or for a stream.
    pub(super) waiting: VecDeque<PulledWrite>,
    /// Runs of its requests in flight, with `REQUEST_RUNS` for each request; bounded by `RUNS_QUEUED_MAX`.
    pub(super) queued: usize,
    pub(super) outcomes: Vec<Outcome>,
}

/// A WRITE that this process is to carry out.
#[derive(Debug)]
pub(super) struct PulledWrite {
    pub(super) token: u64,
    pub(super) gpu: u16,
    pub(super) bytes: Vec<WantedBytes>,
    pub(super) weight: usize,
}

impl ServedPeer {
    pub(super) fn new(owner: Owner, neighbour: Neighbour) -> ServedPeer {
        let (waiting, outcomes) = (VecDeque::new(), Vec::new());
        ServedPeer { owner, neighbour, waiting, queued: 0, outcomes }
    }
}
