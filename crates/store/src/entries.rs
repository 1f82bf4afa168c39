//! Entries: 48 bytes a block in chunks that never move, found by key through many small hash tables.

use hashbrown::HashTable;
use kvlane_block::BlockHash;

use crate::api::{SpaceId, StoredBlock};
use crate::rows::Row;

/// Marks the absence of a slot.
pub(crate) const NONE: u32 = u32::MAX;

/// Entries a chunk holds.
const CHUNK: usize = 1024;
/// A table that grows rehashes all of its entries. With this many tables, a million blocks rehash in steps of a few
/// thousand.
const TABLES: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Not an entry; the slot waits for reuse.
    Free,
    /// Kept because it has children; holds no memory.
    Gap,
    /// Being written; its claim says by whom.
    Claimed,
    /// Written, in the seal queue.
    Committed,
    /// Visible to lookups.
    Sealed,
}

/// Whether a block is a copy of another host's, and how often it was hit since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyState {
    /// Not a copy: the policy contains it. Also of an entry without a block.
    Own,
    Unhit,
    HitOnce,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) hash: BlockHash,
    pub(crate) space: SpaceId,
    /// Slot of the parent, `NONE` for a root or an unchained block. In a free slot: the next free one.
    pub(crate) parent: u32,
    /// Entries whose parent this is, gaps included.
    pub(crate) children: u32,
    /// How many leases name this block.
    pub(crate) leases: u32,
    /// Raised when the slot's block dies: a reference with another generation is stale.
    pub(crate) generation: u32,
    /// The row of its space with its extents; [`Row::NONE`] in a gap.
    pub(crate) row: Row,
    /// When it was last written whole, by the index's [`Clock`](crate::residence::Clock).
    pub(crate) stored_at: u32,
    pub(crate) state: State,
    /// How many background threads read its bytes outside the lock.
    pub(crate) checks: u8,
    pub(crate) copy: CopyState,
}

impl Entry {
    const FREE: Self = Self {
        hash: BlockHash([0; 16]),
        space: SpaceId(0),
        parent: NONE,
        children: 0,
        leases: 0,
        generation: 0,
        row: Row::NONE,
        stored_at: 0,
        state: State::Free,
        checks: 0,
        copy: CopyState::Own,
    };

    pub(crate) fn is(&self, space: SpaceId, hash: &BlockHash) -> bool {
        self.hash == *hash && self.space == space && self.state != State::Free
    }
}

/// All entries. Slots are handed out last-freed first. So the blocks of a chain get consecutive slots, also where they
/// reuse those of an evicted chain, and lookups guess by that.
pub(crate) struct Entries {
    chunks: Vec<Box<[Entry]>>,
    tables: Box<[HashTable<u32>]>,
    free: u32,
}

impl Entries {
    pub(crate) fn new() -> Self {
        Self { chunks: Vec::new(), tables: (0..TABLES).map(|_| HashTable::new()).collect(), free: NONE }
    }

    /// Slots that exist, free ones included: all slots are below this.
    pub(crate) fn slots(&self) -> u32 {
        (self.chunks.len() * CHUNK) as u32
    }

    pub(crate) fn at(&self, slot: u32) -> &Entry {
        at(&self.chunks, slot)
    }

    pub(crate) fn at_mut(&mut self, slot: u32) -> &mut Entry {
        &mut self.chunks[slot as usize / CHUNK][slot as usize % CHUNK]
    }

    /// The entry if its slot still holds this block.
    pub(crate) fn current(&self, StoredBlock { slot, generation }: StoredBlock) -> Option<&Entry> {
        let chunk = self.chunks.get(slot as usize / CHUNK)?;
        let entry = &chunk[slot as usize % CHUNK];
        (entry.generation == generation && entry.state != State::Free).then_some(entry)
    }

    /// The block that the slot holds now.
    pub(crate) fn block(&self, slot: u32) -> StoredBlock {
        StoredBlock { slot, generation: self.at(slot).generation }
    }

    pub(crate) fn find(&self, space: SpaceId, hash: &BlockHash) -> Option<u32> {
        let key = fingerprint(space, hash);
        let table = &self.tables[table_of(key)];
        table.find(key, |&slot| at(&self.chunks, slot).is(space, hash)).copied()
    }

    /// Like `find`, but tries the slot `guess` first.
    pub(crate) fn find_near(&self, guess: u32, space: SpaceId, hash: &BlockHash) -> Option<u32> {
        let guessed = self.chunks.get(guess as usize / CHUNK).map(|chunk| &chunk[guess as usize % CHUNK]);
        match guessed {
            Some(entry) if entry.is(space, hash) => Some(guess),
            _ => self.find(space, hash),
        }
    }

    /// Adds a gap for a key that has no entry, as a child of `parent`.
    pub(crate) fn insert(&mut self, space: SpaceId, hash: BlockHash, parent: u32) -> u32 {
        if self.free == NONE {
            self.grow();
        }
        let slot = self.free;
        let entry = self.at_mut(slot);
        let next_free = entry.parent;
        *entry =
            Entry { hash, space, parent, state: State::Gap, generation: entry.generation, ..Entry::FREE };
        self.free = next_free;
        if parent != NONE {
            self.at_mut(parent).children += 1;
        }
        let Self { chunks, tables, .. } = self;
        let key = fingerprint(space, &hash);
        tables[table_of(key)].insert_unique(key, slot, |&slot| {
            let entry = at(chunks, slot);
            fingerprint(entry.space, &entry.hash)
        });
        slot
    }

    /// Removes this entry if it is a gap without children, then its parent likewise.
    pub(crate) fn prune(&mut self, mut slot: u32) {
        while slot != NONE {
            let Entry { space, hash, parent, children, state, .. } = *self.at(slot);
            if state != State::Gap || children > 0 {
                return;
            }
            let key = fingerprint(space, &hash);
            if let Ok(found) = self.tables[table_of(key)].find_entry(key, |&other| other == slot) {
                found.remove();
            }
            let free = self.free;
            let entry = self.at_mut(slot);
            entry.state = State::Free;
            entry.parent = free;
            self.free = slot;
            if parent != NONE {
                self.at_mut(parent).children -= 1;
            }
            slot = parent;
        }
    }

    /// Slots in use, gaps included.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Entry)> {
        let numbered = (0u32..).zip(self.chunks.iter().flat_map(|chunk| chunk.iter()));
        numbered.filter(|(_, entry)| entry.state != State::Free)
    }

    fn grow(&mut self) {
        let first = self.slots();
        assert!(first < NONE - CHUNK as u32, "the index is full at {first} blocks");
        let mut chunk = vec![Entry::FREE; CHUNK].into_boxed_slice();
        for (slot, entry) in (first..).zip(chunk.iter_mut()) {
            entry.parent = slot + 1;
        }
        chunk[CHUNK - 1].parent = NONE;
        self.chunks.push(chunk);
        self.free = first;
    }
}

fn at(chunks: &[Box<[Entry]>], slot: u32) -> &Entry {
    &chunks[slot as usize / CHUNK][slot as usize % CHUNK]
}

/// A key in 64 bits, for the tables and for the policy. Block hashes are uniform already when they come from a real
/// engine; one multiplication spreads those that are not, and keeps spaces apart.
pub(crate) fn fingerprint(space: SpaceId, hash: &BlockHash) -> u64 {
    let bits = u128::from_le_bytes(hash.0);
    let folded = (bits as u64) ^ ((bits >> 64) as u64).rotate_left(29) ^ u64::from(space.0).rotate_left(47);
    let product = u128::from(folded) * 0x9E37_79B9_7F4A_7C15;
    (product as u64) ^ ((product >> 64) as u64)
}

/// Bits that hashbrown uses neither for the bucket (low) nor for the tag (top seven).
fn table_of(key: u64) -> usize {
    (key >> 48) as usize % TABLES
}
