//! Changes to entries, a list of keys at a time. Each list is hashed and touched in batches before it is searched.

use std::collections::HashSet;

use kvlane_block::{BlockHash, Space};

use crate::fingerprint::Fingerprints;
use crate::keys::{digest, space_seed};
use crate::slots::{Slot, Slots};
use crate::tables::Tables;

/// Keys that are touched together: their cache lines fit in the L1 cache.
pub(crate) const BATCH: usize = 64;

/// All entries, and the slots that they name.
#[derive(Debug)]
pub(crate) struct Entries {
    pub(crate) fingerprints: Fingerprints,
    pub(crate) tables: Tables,
    pub(crate) slots: Slots,
}

impl Entries {
    pub(crate) fn new(seed: [u64; 2]) -> Self {
        Self { fingerprints: Fingerprints::new(seed), tables: Tables::new(), slots: Slots::new() }
    }

    /// Puts the keys, but for those in `except`, into the last of an owner's slots; a key that an earlier slot has moves.
    /// Returns how many keys were refused, because there were `most` entries or the owner had `most_an_owner`.
    pub(crate) fn announce(
        &mut self,
        mine: &[Slot],
        space: &Space,
        hashes: &[BlockHash],
        except: &HashSet<u64>,
        (most, most_an_owner): (usize, u64),
    ) -> u64 {
        let Some((&newest, earlier)) = mine.split_last() else { return 0 };
        let seed = space_seed(space);
        let mut owned = self.count(mine);
        let mut refused = 0;
        self.each(space, hashes, |entries, hash, fingerprint| {
            let mut from = None;
            for slot in entries.tables.slots(fingerprint) {
                if slot == newest {
                    return;
                }
                if earlier.contains(&slot) {
                    from = Some(slot);
                }
            }
            if !except.is_empty() && except.contains(&fingerprint) {
                return;
            }
            let digest = digest(seed, hash);
            if let Some(from) = from {
                entries.tables.replace(fingerprint, from, newest);
                entries.slots.keys_mut(from).remove_digest(digest);
            } else if entries.tables.len() < most && owned < most_an_owner {
                entries.tables.insert(fingerprint, newest);
                owned += 1;
            } else {
                refused += 1;
                return;
            }
            entries.slots.keys_mut(newest).add_digest(digest);
        });
        refused
    }

    /// Removes the keys from an owner's slots. Calls `each` with the fingerprint of every key, present or not.
    pub(crate) fn withdraw(
        &mut self,
        mine: &[Slot],
        space: &Space,
        hashes: &[BlockHash],
        mut each: impl FnMut(u64),
    ) {
        let seed = space_seed(space);
        self.each(space, hashes, |entries, hash, fingerprint| {
            each(fingerprint);
            if let Some(slot) = mine.iter().find(|slot| entries.tables.remove(fingerprint, **slot)) {
                entries.slots.keys_mut(*slot).remove_digest(digest(seed, hash));
            }
        });
    }

    /// Entries in these slots.
    pub(crate) fn count(&self, slots: &[Slot]) -> u64 {
        slots.iter().map(|slot| self.slots.keys(*slot).count).sum()
    }

    /// Removes entries of closed slots, table by table, until it has looked at `budget` entries. Returns how many are left.
    pub(crate) fn sweep(&mut self, budget: usize) -> usize {
        let Self { tables, slots, .. } = self;
        let mut removed = Vec::new();
        let mut looked_at = 0;
        while slots.closed_entries() > 0 && looked_at < budget {
            // A visit to an empty table costs something, too.
            looked_at += 1 + tables.sweep_table(|slot| slots.owner(slot).is_none(), &mut removed);
            removed.drain(..).for_each(|slot| slots.note_swept(slot));
        }
        slots.closed_entries()
    }

    fn each(
        &mut self,
        space: &Space,
        hashes: &[BlockHash],
        mut change: impl FnMut(&mut Self, &BlockHash, u64),
    ) {
        let of_space = self.fingerprints.of_space(space);
        let mut fingerprints = [0; BATCH];
        for batch in hashes.chunks(BATCH) {
            let fingerprints = &mut fingerprints[..batch.len()];
            of_space.fill(batch, fingerprints);
            self.tables.touch(fingerprints);
            for (hash, fingerprint) in batch.iter().zip(fingerprints) {
                change(self, hash, *fingerprint);
            }
        }
    }
}
