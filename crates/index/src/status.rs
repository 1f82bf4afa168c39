//! The state of the index, for pages and metrics.

use std::sync::Arc;
use std::time::Duration;

use crate::counters::Counters;
use crate::index::Index;
use crate::keys::KeySet;
use crate::owner::Phase;

/// How the index keeps up with an owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It needs a snapshot and will request one.
    Lost,
    /// It has requested a snapshot.
    Asked,
    /// Parts of the snapshot arrive.
    Receiving,
    /// It applies the owner's deltas.
    Following,
    /// The owner has said goodbye.
    Gone,
}

/// The state of one owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnerStatus {
    /// The owner's name.
    pub name: Arc<str>,
    /// The epoch that the index follows.
    pub epoch: u64,
    /// Its address, as it joined.
    pub address: Arc<str>,
    /// Time since its latest sign of life, or since its goodbye.
    pub age: Duration,
    /// Questions find its keys.
    pub is_visible: bool,
    /// How the index keeps up with it.
    pub state: State,
    /// Number of its latest change that was applied.
    pub applied: u64,
    /// Number of its latest change that a heartbeat has named.
    pub heard_of: u64,
    /// Its keys in the index, without those that only earlier snapshots have named.
    pub keys: KeySet,
    /// Keys that did not fit since its latest snapshot began.
    pub refused: u64,
}

impl Index {
    /// All owners, in no order.
    pub fn owners(&self, now: Duration) -> Vec<OwnerStatus> {
        let status = self.owners.iter().map(|(_, owner)| OwnerStatus {
            name: owner.name.clone(),
            epoch: owner.epoch,
            address: owner.address.clone(),
            age: owner.age(now),
            is_visible: owner.is_visible(now, &self.timing),
            state: match owner.phase {
                _ if owner.is_gone => State::Gone,
                Phase::Lost { .. } => State::Lost,
                Phase::Asked { .. } => State::Asked,
                Phase::Receiving(_) => State::Receiving,
                Phase::Following => State::Following,
            },
            applied: owner.applied,
            heard_of: owner.heartbeat.map_or(0, |heartbeat| heartbeat.number),
            keys: owner.slots.last().map(|slot| self.entries.slots.keys(*slot)).unwrap_or_default(),
            refused: owner.refused,
        });
        status.collect()
    }

    /// Entries, one for each key of each owner, those that wait for the sweep included.
    pub fn entries(&self) -> usize {
        self.entries.tables.len()
    }

    /// Hidden entries that wait for [`Index::sweep`].
    pub fn unswept(&self) -> usize {
        self.entries.slots.closed_entries()
    }

    /// Bytes that the entries take, free places included.
    pub fn entry_bytes(&self) -> usize {
        self.entries.tables.bytes()
    }

    /// Totals since the index began.
    pub fn counters(&self) -> Counters {
        self.counters
    }
}
