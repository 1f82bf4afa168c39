//! Spaces: a namespace with one cut, and the rows of its blocks.

use std::collections::BTreeMap;
use std::ops::{Index, IndexMut};
use std::sync::Arc;

use kvlane_block::{CutDigest, Namespace};
use kvlane_memory::PAGE_BYTES;

use crate::api::SpaceId;
use crate::described::SpaceDescription;
use crate::rows::Rows;

/// A namespace with one cut.
pub(crate) struct Space {
    pub(crate) namespace: Namespace,
    pub(crate) name: String,
    pub(crate) cut: CutDigest,
    pub(crate) shard_bytes: Box<[u64]>,
    pub(crate) rows: Rows,
    /// How many of its blocks are visible.
    pub(crate) sealed: u64,
    pub(crate) hit_blocks: u64,
    pub(crate) missed_blocks: u64,
    /// Other hosts may have its blocks, and this one theirs.
    pub(crate) crosses_hosts: bool,
    /// Number of the last entry of the journal that names it; 0 if there is none.
    pub(crate) last_change: u64,
}

impl Space {
    pub(crate) fn description(&self) -> SpaceDescription {
        let space = kvlane_block::Space { namespace: self.namespace, cut: self.cut };
        SpaceDescription {
            space,
            shard_bytes: Arc::from(&*self.shard_bytes),
            crosses_hosts: self.crosses_hosts,
        }
    }

    pub(crate) fn block_bytes(&self) -> u64 {
        self.shard_bytes.iter().sum()
    }

    /// Pool bytes of a block: each shard has whole pages.
    pub(crate) fn room_bytes(&self) -> u64 {
        self.shard_bytes.iter().map(|bytes| bytes.next_multiple_of(PAGE_BYTES)).sum()
    }

    pub(crate) fn shards(&self) -> usize {
        self.shard_bytes.len()
    }
}

/// All spaces that are alive. The id of one that was forgotten is never given to another one.
#[derive(Default)]
pub(crate) struct Spaces {
    living: BTreeMap<SpaceId, Space>,
    next: u32,
}

impl Spaces {
    pub(crate) fn add(&mut self, space: Space) -> SpaceId {
        let id = SpaceId(self.next);
        self.next = self.next.checked_add(1).unwrap_or_else(|| unreachable!("four billion spaces"));
        self.living.insert(id, space);
        id
    }

    pub(crate) fn remove(&mut self, id: SpaceId) -> Option<Space> {
        self.living.remove(&id)
    }

    pub(crate) fn len(&self) -> usize {
        self.living.len()
    }

    /// In order of creation.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Space> {
        self.living.values()
    }

    /// None if it was forgotten.
    pub(crate) fn get(&self, id: SpaceId) -> Option<&Space> {
        self.living.get(&id)
    }

    /// The same with their ids.
    pub(crate) fn with_ids(&self) -> impl Iterator<Item = (SpaceId, &Space)> {
        self.living.iter().map(|(id, space)| (*id, space))
    }
}

/// Panics if the space was forgotten. A caller that keeps an id must keep its space alive:
/// [`forget_spaces`](crate::Store::forget_spaces) spares those that are in use.
impl Index<SpaceId> for Spaces {
    type Output = Space;

    fn index(&self, id: SpaceId) -> &Space {
        &self.living[&id]
    }
}

impl IndexMut<SpaceId> for Spaces {
    fn index_mut(&mut self, id: SpaceId) -> &mut Space {
        match self.living.get_mut(&id) {
            Some(space) => space,
            None => unreachable!("{id:?} was forgotten and is still in use"),
        }
    }
}
