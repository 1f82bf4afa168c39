//! Descriptions of spaces for other processes, for as long as something names the space.

use std::collections::HashMap;
use std::sync::Arc;

use kvlane_block::Space;

use crate::api::SpaceId;

/// A space as other processes name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpaceDescription {
    /// Namespace and cut.
    pub space: Space,
    /// Bytes of each shard of a block.
    pub shard_bytes: Arc<[u64]>,
    /// Other hosts may have its blocks.
    pub crosses_hosts: bool,
}

/// Descriptions of forgotten spaces that the journal still names, each with the number of its last entry.
#[derive(Default)]
pub(crate) struct ForgottenSpaces(HashMap<SpaceId, (u64, SpaceDescription)>);

impl ForgottenSpaces {
    /// Keeps the description until entry `last` is overwritten. `oldest` is the oldest entry that the journal has.
    pub(crate) fn keep(&mut self, id: SpaceId, last: u64, oldest: u64, description: SpaceDescription) {
        self.0.retain(|_, (last, _)| *last >= oldest);
        if last >= oldest {
            self.0.insert(id, (last, description));
        }
    }

    /// The description of a space that the journal may still name.
    pub(crate) fn get(&self, id: SpaceId) -> Option<&SpaceDescription> {
        self.0.get(&id).map(|(_, description)| description)
    }
}
