//! Leases that the engine holds, or that wait to be taken with their hit, by the run that gave them.

use std::collections::{BTreeMap, BTreeSet};

use crate::boot::BootId;

/// Leases by run.
#[derive(Debug, Default)]
pub(super) struct Leases {
    of: BTreeMap<BootId, BTreeSet<u64>>,
}

impl Leases {
    /// This lease came with a hit.
    pub(super) fn note(&mut self, boot: BootId, lease: u64) {
        self.of.entry(boot).or_default().insert(lease);
    }

    /// This lease is given back.
    pub(super) fn forget(&mut self, boot: &BootId, lease: u64) {
        if let Some(of_boot) = self.of.get_mut(boot) {
            of_boot.remove(&lease);
        }
    }

    /// A lease of another run died with that daemon.
    pub(super) fn keep_only(&mut self, boot: &BootId) {
        self.of.retain(|of, _| of == boot);
    }

    pub(super) fn clear(&mut self) {
        self.of.clear();
    }

    /// All of them, as greetings and heartbeats name them.
    pub(super) fn live(&self) -> Vec<u64> {
        self.of.values().flatten().copied().collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.of.values().all(BTreeSet::is_empty)
    }
}
