//! What is known of a neighbour whose writes this process reads: its requests and their outcomes.

use std::sync::Arc;

use super::neighbour::Neighbour;
use crate::carrier::Owner;
use crate::wire::Outcome;

/// A neighbour whose writes this process reads.
#[derive(Debug)]
pub(super) struct Serving {
    pub(super) owner: Owner,
    /// As the neighbour has drawn it.
    pub(super) connection: u64,
    pub(super) neighbour: Arc<Neighbour>,
    /// What it has asked for counts so much until it is over.
    pub(super) queued: usize,
    pub(super) outcomes: Vec<Outcome>,
}

impl Serving {
    pub(super) fn new(owner: Owner, connection: u64, neighbour: Arc<Neighbour>) -> Serving {
        Serving { owner, connection, neighbour, queued: 0, outcomes: Vec::new() }
    }
}
