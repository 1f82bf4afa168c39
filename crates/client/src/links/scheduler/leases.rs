//! Leases that the engine holds, those of hits that it has not taken included.

use std::collections::{BTreeMap, BTreeSet};

use crate::boot::BootId;

#[derive(Debug, Default)]
pub(super) struct Leases {
    by_run: BTreeMap<BootId, BTreeSet<u64>>,
}

impl Leases {
    /// Adds the lease of a hit.
    pub(super) fn note(&mut self, boot: BootId, lease: u64) {
        self.by_run.entry(boot).or_default().insert(lease);
    }

    /// Removes a lease that was released.
    pub(super) fn forget(&mut self, boot: &BootId, lease: u64) {
        if let Some(of_run) = self.by_run.get_mut(boot) {
            of_run.remove(&lease);
        }
    }

    /// Removes the leases of other runs, which died with their daemons.
    pub(super) fn keep_only(&mut self, boot: &BootId) {
        self.by_run.retain(|run, _| run == boot);
    }

    pub(super) fn clear(&mut self) {
        self.by_run.clear();
    }

    /// All leases, for greetings and heartbeats.
    pub(super) fn live(&self) -> Vec<u64> {
        self.by_run.values().flatten().copied().collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_run.values().all(BTreeSet::is_empty)
    }
}
