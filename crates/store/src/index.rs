//! The core under the store's lock: which blocks there are, and what happens when one dies.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};

use kvlane_block::{BlockHash, BlockKey, CutDigest, Namespace};
use kvlane_memory::ExtentAllocator;
use kvlane_policy::{Memo, ReplacementPolicy};

use crate::api::{ShardNumber, SpaceId, StoreOptions, StoredBlock};
use crate::claim::Claim;
use crate::entries::{Entries, State};
use crate::journal::{Change, Journal, JournalEntry, JournalRead};
use crate::lease::Leases;
use crate::limbo::{Extent, Limbo};
use crate::not_saved::NotSaved;
use crate::refusals::Refusals;
use crate::rows::{Row, Rows};
use crate::space::{Space, Spaces};
use crate::stats::{Counters, SpaceStats, StoreStats};
use crate::watch::Watches;

/// The cache without threads, clock and bytes; [`Store`](crate::Store) puts it under a lock and over a pool.
pub struct Index {
    pub(crate) options: StoreOptions,
    pub(crate) pool_bytes: u64,
    pub(crate) extents: ExtentAllocator,
    pub(crate) entries: Entries,
    pub(crate) spaces: Spaces,
    /// Mostly one: others have shards of other sizes.
    space_ids: HashMap<(Namespace, CutDigest), Vec<SpaceId>>,
    /// What goes next, and what comes in. Has all blocks, also those that are leased or being saved; no gaps.
    pub(crate) policy: Box<dyn ReplacementPolicy>,
    /// Blocks that the pool holds when it is full, about.
    pub(crate) capacity: usize,
    /// What was not admitted of one worker, for the others.
    pub(crate) refusals: Refusals,
    /// The new blocks of the present call that follow each other. Here so that its memory is used again.
    pub(crate) run: Vec<u32>,
    pub(crate) leases: Leases,
    /// By slot; exactly the claimed blocks.
    pub(crate) claims: HashMap<u32, Claim>,
    pub(crate) limbo: Limbo,
    /// Committed blocks, in order of commit. May name blocks that died since.
    pub(crate) seal_queue: VecDeque<StoredBlock>,
    pub(crate) seals_asked: u64,
    /// Seals that were begun and are not over, by their number: several threads seal.
    pub(crate) sealing: BTreeSet<u64>,
    /// Blocks that became visible and that the tier below is to get, in that order. May name blocks
    /// that died since.
    pub(crate) spill_queue: VecDeque<StoredBlock>,
    /// Blocks that may be in it.
    pub(crate) spill_limit: usize,
    /// Blocks that have left it, and the numbers of those that the tier below reads now.
    pub(crate) spills_taken: u64,
    pub(crate) spilling: BTreeSet<u64>,
    /// Their bytes.
    pub(crate) spilling_bytes: u64,
    /// Blocks that were evicted, and what the policy knew of them, until the tier below is told.
    pub(crate) lost: Vec<(BlockKey, Memo)>,
    /// How dense is what the tier below gives up; None without one.
    pub(crate) below: Option<f32>,
    /// Blocks in a row that the tier below did not keep.
    pub(crate) refused_spills: u32,
    /// Block references so far, as the policy counts its time.
    pub(crate) references: u64,
    journal: Journal,
    pub(crate) counters: Counters,
    /// Hears of every step in a block's life.
    pub(crate) watches: Watches,
    /// For those who begin to watch after a save has failed.
    pub(crate) not_saved: NotSaved,
}

impl Index {
    /// An empty index over a pool of `pool_bytes` whose extents `extents` hands out.
    pub fn new(extents: ExtentAllocator, pool_bytes: u64, options: StoreOptions) -> Self {
        Self {
            pool_bytes,
            extents,
            entries: Entries::new(),
            spaces: Spaces::default(),
            space_ids: HashMap::new(),
            policy: options.policy.first().build(0),
            options,
            capacity: 0,
            refusals: Refusals::default(),
            run: Vec::new(),
            leases: Leases::default(),
            claims: HashMap::new(),
            limbo: Limbo::default(),
            seal_queue: VecDeque::new(),
            seals_asked: 0,
            sealing: BTreeSet::new(),
            spill_queue: VecDeque::new(),
            spill_limit: 0,
            spills_taken: 0,
            spilling: BTreeSet::new(),
            spilling_bytes: 0,
            lost: Vec::new(),
            below: None,
            refused_spills: 0,
            references: 0,
            journal: Journal::default(),
            counters: Counters::default(),
            watches: Watches::default(),
            not_saved: NotSaved::default(),
        }
    }

    /// The space of this namespace and cut; the same one each time. `shard_bytes` (each above 0) belongs to the
    /// cut: the same cut with other sizes is another space. `name` is for people; the first one stays.
    pub fn space(
        &mut self,
        namespace: Namespace,
        name: &str,
        cut: CutDigest,
        shard_bytes: &[u64],
    ) -> SpaceId {
        assert!(!shard_bytes.is_empty() && !shard_bytes.contains(&0), "shards of {shard_bytes:?} bytes");
        if let Some(space) = self.find_space(namespace, cut, shard_bytes) {
            return space;
        }
        let id = self.spaces.add(Space {
            namespace,
            name: name.to_owned(),
            cut,
            shard_bytes: Box::from(shard_bytes),
            rows: Rows::new(shard_bytes.len()),
            sealed: 0,
            hit_blocks: 0,
            missed_blocks: 0,
        });
        self.space_ids.entry((namespace, cut)).or_default().push(id);
        if self.capacity == 0 {
            self.set_first_capacity(shard_bytes);
        }
        id
    }

    /// Whether a space is alive.
    pub fn has_space(&self, namespace: Namespace, cut: CutDigest, shard_bytes: &[u64]) -> bool {
        self.find_space(namespace, cut, shard_bytes).is_some()
    }

    fn find_space(&self, namespace: Namespace, cut: CutDigest, shard_bytes: &[u64]) -> Option<SpaceId> {
        self.spaces_of(namespace, cut).find(|&space| *self.spaces[space].shard_bytes == *shard_bytes)
    }

    /// All spaces of a namespace and cut that are alive.
    pub(crate) fn spaces_of(
        &self,
        namespace: Namespace,
        cut: CutDigest,
    ) -> impl Iterator<Item = SpaceId> + '_ {
        self.space_ids.get(&(namespace, cut)).into_iter().flatten().copied()
    }

    /// How many spaces are alive.
    pub fn count_spaces(&self) -> usize {
        self.spaces.len()
    }

    /// The spaces that are in nobody's use, those that were made first before others.
    pub fn unused_spaces(&self, in_use: &HashSet<SpaceId>) -> Vec<SpaceId> {
        let all = self.spaces.with_ids().map(|(id, _)| id);
        all.filter(|space| !in_use.contains(space)).collect()
    }

    /// Forgets a space that nobody uses, if it has no block, not even one that is being saved. Its id means nothing from
    /// then on; the same namespace and cut get another one. False if there is a block.
    pub fn forget_space(&mut self, space: SpaceId) -> bool {
        if !self.spaces[space].rows.is_empty() {
            return false;
        }
        if let Some(Space { namespace, cut, .. }) = self.spaces.remove(space)
            && let Entry::Occupied(mut ids) = self.space_ids.entry((namespace, cut))
        {
            ids.get_mut().retain(|id| *id != space);
            if ids.get().is_empty() {
                ids.remove();
            }
        }
        true
    }

    /// All blocks of a space, those being saved included.
    pub fn blocks_in(&self, space: SpaceId) -> Vec<StoredBlock> {
        let rows = self.spaces[space].rows.iter();
        rows.map(|(slot, _)| self.entries.block(slot)).collect()
    }

    /// Whether nobody needs these blocks now: they are complete, and neither leased nor being checked.
    pub fn can_lose(&self, blocks: &[StoredBlock]) -> bool {
        blocks.iter().all(|block| {
            let entry = self.entries.at(block.slot);
            entry.state == State::Sealed && entry.leases == 0 && entry.checks == 0
        })
    }

    /// Namespace and cut of a space, by which other processes and tiers know it.
    pub(crate) fn space_name(&self, space: SpaceId) -> kvlane_block::Space {
        let Space { namespace, cut, .. } = self.spaces[space];
        kvlane_block::Space { namespace, cut }
    }

    /// Shards that a block of a space has.
    pub(crate) fn shards_of(&self, space: SpaceId) -> usize {
        self.spaces[space].shards()
    }

    /// Bytes of each shard of a space's blocks.
    pub(crate) fn shard_bytes(&self, space: SpaceId) -> &[u64] {
        &self.spaces[space].shard_bytes
    }

    /// True when a lookup could answer this block.
    pub fn is_visible(&self, space: SpaceId, hash: &BlockHash) -> bool {
        self.entries.find(space, hash).is_some_and(|slot| self.entries.at(slot).state == State::Sealed)
    }

    /// All blocks of a namespace, those being saved included.
    pub fn blocks_of(&self, namespace: Namespace) -> Vec<StoredBlock> {
        let spaces = self.spaces.iter().filter(|space| space.namespace == namespace);
        let slots = spaces.flat_map(|space| space.rows.iter());
        slots.map(|(slot, _)| self.entries.block(slot)).collect()
    }

    /// Drops blocks: invisible at once, freed when their leases and writers are done. Answers how many of them were
    /// still there.
    pub fn drop_blocks(&mut self, blocks: &[StoredBlock]) -> u64 {
        let mut dropped = 0;
        for &block in blocks {
            if self.entries.current(block).is_some_and(|entry| entry.row != Row::NONE) {
                self.drop_block(block.slot);
                dropped += 1;
            }
        }
        dropped
    }

    /// What became of the blocks of some spaces since `cursor`: the space's place in `spaces`, the block's hash, and what. See
    /// [`Journal::read`].
    pub fn read_journal(
        &mut self,
        cursor: u64,
        spaces: &[SpaceId],
        most: usize,
        out: &mut Vec<(usize, JournalEntry)>,
    ) -> JournalRead {
        let read = self.journal.read(cursor, most, out, |entry, out| {
            let places = spaces.iter().enumerate().filter(|(_, space)| **space == entry.space);
            out.extend(places.map(|(place, _)| (place, *entry)));
        });
        // A new reader has missed nothing.
        self.counters.journal_restarts += u64::from(read.start_again && cursor != 0);
        read
    }

    /// Tells the journal's readers what became of a block in the pool. The one place that writes it.
    pub(crate) fn note_change(&mut self, change: Change, space: SpaceId, hash: BlockHash) {
        let entry = JournalEntry { change, space, hash };
        self.counters.journal_entries += u64::from(self.journal.note(entry));
    }

    /// State and counters.
    pub fn stats(&self) -> StoreStats {
        StoreStats {
            pool_bytes: self.pool_bytes,
            used_bytes: self.extents.used_bytes(),
            limbo_bytes: self.limbo.bytes(),
            blocks: self.spaces.iter().map(|space| space.sealed).sum(),
            leased_blocks: self.leases.blocks,
            claimed_blocks: self.claims.len() as u64,
            seal_queue: (self.seal_queue.len() + self.sealing.len()) as u64,
            spill_queue: self.spill_queue.len() as u64,
            leases: self.leases.len() as u64,
            policy: self.policy.kind(),
            counters: self.counters,
        }
    }

    /// Each space, in order of creation.
    pub fn spaces(&self) -> Vec<SpaceStats> {
        let stats = |space: &Space| SpaceStats {
            namespace: space.namespace,
            name: space.name.clone(),
            cut: space.cut,
            shards: space.shards() as u32,
            blocks: space.sealed,
            bytes: space.sealed * space.block_bytes(),
            hit_blocks: space.hit_blocks,
            missed_blocks: space.missed_blocks,
        };
        self.spaces.iter().map(stats).collect()
    }

    /// Ends the life of a claimed, committed or sealed block: it is not found any more. Its extents are freed, or
    /// go to limbo for as long as leases, checks and writers use them. With children it leaves a gap.
    pub(crate) fn drop_block(&mut self, slot: u32) {
        let entry = self.entries.at_mut(slot);
        let before = *entry;
        assert!(before.row != Row::NONE, "slot {slot} holds no block");
        entry.generation = before.generation.wrapping_add(1);
        entry.state = State::Gap;
        entry.row = Row::NONE;
        entry.leases = 0;
        entry.checks = 0;

        self.policy.remove(slot);
        if before.leases > 0 {
            self.leases.block_left();
        }
        let claim = self.claims.remove(&slot);
        if claim.is_some() {
            self.counters.dead_claims += 1;
        }
        let was_visible = before.state == State::Sealed;
        self.watches.died((before.space, before.hash), was_visible, claim.as_ref().map(|claim| claim.owner));
        let space = &mut self.spaces[before.space];
        if was_visible {
            space.sealed -= 1;
        }
        let readers = before.leases + u32::from(before.checks);
        let pages = space.rows.shards(before.row).map(|(page, _)| page);
        let extents = pages.zip(&space.shard_bytes).map(|(page, &bytes)| Extent { page, bytes });
        if readers == 0 && claim.is_none() {
            for extent in extents {
                self.extents.free(extent.page, extent.bytes);
            }
        } else {
            let writer = |shard| claim.as_ref().and_then(|claim| claim.writer(shard));
            let shards = ShardNumber::all(space.shards())
                .zip(extents)
                .map(|(shard, extent)| (shard, extent, writer(shard)));
            let unused =
                self.limbo.insert(StoredBlock { slot, generation: before.generation }, readers, shards);
            self.free(unused);
        }
        self.spaces[before.space].rows.remove(before.row);
        self.note_change(Change::Gone, before.space, before.hash);
        self.entries.prune(slot);
    }

    pub(crate) fn free(&mut self, unused: Vec<Extent>) {
        for extent in unused {
            self.extents.free(extent.page, extent.bytes);
        }
    }
}
