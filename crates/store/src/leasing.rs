//! An engine's leases: taken by a lookup, renewed by heartbeats, released, or adopted after a reconnect.

use std::time::Instant;

use kvlane_memory::PoolPage;

use crate::api::{LeaseId, OwnerId, SpaceId, StoredBlock};
use crate::entries::State;
use crate::index::Index;
use crate::lease::Lease;

impl Index {
    /// Leases sealed blocks of one space, given in the prompt's order. Returns the pool pages of their shards, and adds
    /// the blocks to `leased`, for [`Leases::insert`](crate::lease::Leases::insert).
    pub(crate) fn lease_blocks(
        &mut self,
        space: SpaceId,
        slots: &[u32],
        leased: &mut Vec<StoredBlock>,
    ) -> Vec<PoolPage> {
        let space = &self.spaces[space];
        let mut pages = Vec::with_capacity(slots.len() * space.shards());
        leased.reserve(slots.len());
        for &slot in slots {
            let entry = self.entries.at_mut(slot);
            assert!(entry.state == State::Sealed, "only visible blocks are leased");
            self.leases.blocks += u64::from(entry.leases == 0);
            entry.leases += 1;
            leased.push(StoredBlock { slot, generation: entry.generation });
            pages.extend(space.rows.shards(entry.row).map(|(page, _)| page));
        }
        pages
    }

    /// Releases a lease. Does nothing if the owner does not hold it, because it has ended already.
    pub fn release(&mut self, owner: OwnerId, lease: LeaseId) {
        let Some(lease) = self.leases.remove(owner, lease) else { return };
        self.counters.ended_leases += 1;
        for block in lease.blocks {
            if self.entries.current(block).is_none() {
                let unused = self.limbo.reader_done(block);
                self.free(unused);
                continue;
            }
            let entry = self.entries.at_mut(block.slot);
            entry.leases -= 1;
            if entry.leases == 0 {
                self.leases.blocks -= 1;
            }
        }
    }

    /// Renews the leases in `live`, which the owner still needs. Its other leases are released once they are older than
    /// `lease_ttl`; a younger one may be an answer that has not reached the owner yet.
    pub fn heartbeat(&mut self, owner: OwnerId, live: &[LeaseId], now: Instant) {
        let live = sorted(live);
        for id in self.leases.of(owner).to_vec() {
            let Some(lease) = self.leases.by_id.get_mut(&id) else { continue };
            if live.binary_search(&id).is_ok() {
                lease.renewed = now;
            } else if now.saturating_duration_since(lease.renewed) > self.options.lease_ttl {
                self.release(owner, id);
                self.counters.expired_leases += 1;
            }
        }
    }

    /// Moves the leases in `live` to `new_owner`, for a process that reconnected. Releases the old owner's others.
    pub fn adopt(&mut self, owner: OwnerId, new_owner: OwnerId, live: &[LeaseId]) {
        let live = sorted(live);
        for id in self.leases.of(owner).to_vec() {
            if live.binary_search(&id).is_err() {
                self.release(owner, id);
            } else if owner != new_owner
                && let Some(lease) = self.leases.remove(owner, id)
            {
                self.leases.by_owner.entry(new_owner).or_default().push(id);
                self.leases.by_id.insert(id, Lease { owner: new_owner, ..lease });
            }
        }
    }

    /// Releases all leases of an owner.
    pub fn release_owner(&mut self, owner: OwnerId) {
        for id in self.leases.of(owner).to_vec() {
            self.release(owner, id);
        }
    }

    /// Leases that the owner holds.
    pub fn leases_of(&self, owner: OwnerId) -> usize {
        self.leases.of(owner).len()
    }
}

fn sorted(live: &[LeaseId]) -> Vec<LeaseId> {
    let mut live = live.to_vec();
    live.sort_unstable();
    live
}
