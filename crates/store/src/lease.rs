//! Leases: blocks that stay in the pool because a lookup promised them to an engine.

use std::collections::HashMap;
use std::time::Instant;

use crate::api::{LeaseId, OwnerId, StoredBlock};

pub(crate) struct Lease {
    pub(crate) owner: OwnerId,
    /// When it was taken or last named by a heartbeat.
    pub(crate) renewed: Instant,
    /// Within a group, in the prompt's order.
    pub(crate) blocks: Vec<StoredBlock>,
}

/// All leases, by id and by owner.
#[derive(Default)]
pub(crate) struct Leases {
    pub(crate) by_id: HashMap<LeaseId, Lease>,
    pub(crate) by_owner: HashMap<OwnerId, Vec<LeaseId>>,
    last_id: u64,
    /// Distinct living blocks with a lease.
    pub(crate) blocks: u64,
}

impl Leases {
    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Lease> {
        self.by_id.values()
    }

    /// A leased block died. Its leases go on, but it no longer counts.
    pub(crate) fn block_died(&mut self) {
        self.blocks -= 1;
    }

    /// A lease on blocks that were leased by `Index::lease_blocks`.
    pub(crate) fn insert(&mut self, owner: OwnerId, now: Instant, blocks: Vec<StoredBlock>) -> LeaseId {
        self.last_id += 1;
        let id = LeaseId(self.last_id);
        self.by_owner.entry(owner).or_default().push(id);
        self.by_id.insert(id, Lease { owner, renewed: now, blocks });
        id
    }

    pub(crate) fn remove(&mut self, owner: OwnerId, id: LeaseId) -> Option<Lease> {
        if self.by_id.get(&id)?.owner != owner {
            return None;
        }
        if let Some(ids) = self.by_owner.get_mut(&owner) {
            ids.retain(|&other| other != id);
            if ids.is_empty() {
                self.by_owner.remove(&owner);
            }
        }
        self.by_id.remove(&id)
    }

    pub(crate) fn of(&self, owner: OwnerId) -> &[LeaseId] {
        self.by_owner.get(&owner).map_or(&[], Vec::as_slice)
    }
}
