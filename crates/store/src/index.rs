//! The index under the store's lock: an entry for each block, the spaces that blocks belong to, and what happens when
//! a block dies. Pure: no threads, no clock (time is an argument), no bytes.
//!
//! Other files add the operations as `impl Index`: lookup.rs and leasing.rs (hits), claiming.rs (saves), evict.rs and
//! replacement.rs (room), copies.rs (blocks of other hosts), seal.rs (checksums), spill.rs (the tier below), watching.rs
//! (awaited saves), changes.rs (readers of all spaces).
//!
//! # Which blocks may be evicted while a save of their continuation is in flight
//!
//! None: neither the block before it nor any ancestor. A block may be evicted if it is sealed, no lease names it, and no other
//! entry, block or gap, is its child. A claim makes the block that it saves a child of the block before it:
//!
//! ```text
//!   A sealed <--- B sealed <--- C claimed <--- D claimed          B sealed <--- E sealed
//!   has a child   has children  not sealed     not sealed                       may be evicted
//! ```
//! - The claim comes first and room is made afterwards. So a save never evicts its own ancestors.
//! - When C is sealed it is still the child of B. If its claim dies, its entry is removed, or becomes a gap (an entry without a
//!   block) if D is below it. B may be evicted once no entry is left below it.
//! - Before the claim only leases protect B. If B has been evicted by then, the claim of C is answered `NoRoom`: the store does
//!   not keep C, because no lookup would reach it.
//! - Copies and own blocks protect each other: a copy with an own child stays, and an own block with a copy as its child.
//! - The blocks of a group with a window (`Chain::Unchained`) have no parents. A save of one protects no other.
//! - A reader of a sealed block (scrub, spill) does not protect it. If it is evicted meanwhile, its memory is in limbo, not free,
//!   until the reader is done. Where a whole slab is cleared because its memory is needed at once, none of its blocks has a
//!   reader.
//! - Eviction is not the only death: a dropped namespace or a failed scrub takes blocks with children and leases too. Such a
//!   block leaves a gap, and its memory stays in limbo until its leases, readers and writers are done.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};

use kvlane_block::{BlockHash, BlockKey, CutDigest, Namespace};
use kvlane_memory::ExtentAllocator;
use kvlane_policy::{Memo, ReplacementPolicy};

use crate::api::{ShardNumber, SpaceId, StoreOptions, StoredBlock};
use crate::claim::Claim;
use crate::copies::Copies;
use crate::described::ForgottenSpaces;
use crate::entries::{CopyState, Entries, State};
use crate::journal::{Change, Journal, JournalEntry, JournalRead};
use crate::lease::Leases;
use crate::limbo::{Extent, Limbo};
use crate::not_saved::NotSaved;
use crate::refusals::Refusals;
use crate::residence::{Clock, Residence};
use crate::rows::{Row, Rows};
use crate::space::{Space, Spaces};
use crate::stats::{Counters, SpaceStats, StoreStats};
use crate::watch::Watches;

/// Most sizes of extents in the statistics.
const SIZES_SHOWN: usize = 32;

/// The cache without threads, clock and bytes; [`Store`](crate::Store) puts it under a lock and over a pool.
pub struct Index {
    pub(crate) options: StoreOptions,
    pub(crate) pool_bytes: u64,
    pub(crate) extents: ExtentAllocator,
    pub(crate) entries: Entries,
    pub(crate) spaces: Spaces,
    /// Usually one id a key; a cut whose shards come in other sizes adds one.
    space_ids: HashMap<(Namespace, CutDigest), Vec<SpaceId>>,
    /// Picks the victims and judges newcomers. Contains every block, leased and claimed ones too, but no copies and no gaps.
    pub(crate) policy: Box<dyn ReplacementPolicy>,
    /// Blocks of other hosts, which the policy does not contain.
    pub(crate) copies: Copies,
    /// Estimate: how many blocks a full pool holds.
    pub(crate) capacity: usize,
    /// Runs that were not admitted from one worker. The engine's other workers get the same answer.
    pub(crate) refusals: Refusals,
    /// Scratch of `claim_part`: its new blocks that follow each other. A field because its memory is reused.
    pub(crate) run: Vec<u32>,
    pub(crate) leases: Leases,
    /// By slot. Holds exactly the blocks that are `Claimed`.
    pub(crate) claims: HashMap<u32, Claim>,
    pub(crate) limbo: Limbo,
    /// Committed blocks, in order of commit. May name blocks that died since.
    pub(crate) seal_queue: VecDeque<StoredBlock>,
    /// How many blocks have ever entered `seal_queue`.
    pub(crate) seals_queued: u64,
    /// Numbers of the seals in progress; several threads seal at once.
    pub(crate) sealing: BTreeSet<u64>,
    /// Visible blocks that wait for the tier below, in the order in which they became visible. May name blocks that
    /// died since.
    pub(crate) spill_queue: VecDeque<StoredBlock>,
    /// Longest that `spill_queue` may get; 0 without a tier.
    pub(crate) spill_limit: usize,
    /// How many blocks have ever left `spill_queue`.
    pub(crate) spills_taken: u64,
    /// Numbers of the spills whose memory the tier below may be reading.
    pub(crate) spilling: BTreeSet<u64>,
    /// Bytes of those spills.
    pub(crate) spilling_bytes: u64,
    /// Evicted blocks and the policy's memo of each, until the tier below gets them.
    pub(crate) lost: Vec<(BlockKey, Memo)>,
    /// Hit density of the blocks that the tier below gives up; None without a tier.
    pub(crate) tier_density: Option<f32>,
    /// Spills in a row that the tier below did not keep.
    pub(crate) refused_spills: u32,
    /// Block references so far: the policy's clock.
    pub(crate) references: u64,
    pub(crate) journal: Journal,
    /// Spaces that only the journal names.
    pub(crate) forgotten: ForgottenSpaces,
    pub(crate) counters: Counters,
    pub(crate) residence: Residence,
    pub(crate) clock: Clock,
    /// Lookups that await saves. They are notified of every step in a block's life.
    pub(crate) watches: Watches,
    /// Saves that failed of late, for watches that begin afterwards.
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
            copies: Copies::new(pool_bytes, options.copies_share),
            options,
            capacity: 0,
            refusals: Refusals::default(),
            run: Vec::new(),
            leases: Leases::default(),
            claims: HashMap::new(),
            limbo: Limbo::default(),
            seal_queue: VecDeque::new(),
            seals_queued: 0,
            sealing: BTreeSet::new(),
            spill_queue: VecDeque::new(),
            spill_limit: 0,
            spills_taken: 0,
            spilling: BTreeSet::new(),
            spilling_bytes: 0,
            lost: Vec::new(),
            tier_density: None,
            refused_spills: 0,
            references: 0,
            journal: Journal::default(),
            forgotten: ForgottenSpaces::default(),
            counters: Counters::default(),
            residence: Residence::default(),
            clock: Clock::default(),
            watches: Watches::default(),
            not_saved: NotSaved::default(),
        }
    }

    /// Finds or makes the space of this namespace, cut and `shard_bytes` (each above 0). The same three give the same
    /// space. `name` is for people; the first one stays.
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
            crosses_hosts: false,
            last_change: 0,
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

    /// The spaces that `in_use` does not name, oldest first.
    pub fn unused_spaces(&self, in_use: &HashSet<SpaceId>) -> Vec<SpaceId> {
        let all = self.spaces.with_ids().map(|(id, _)| id);
        all.filter(|space| !in_use.contains(space)).collect()
    }

    /// Forgets a space that is not in use. False, and nothing happens, if it has blocks, claimed ones included. The id
    /// is invalid afterwards, and the same namespace and cut get a new one.
    pub fn forget_space(&mut self, space: SpaceId) -> bool {
        if !self.spaces[space].rows.is_empty() {
            return false;
        }
        let Some(removed) = self.spaces.remove(space) else { return true };
        self.forgotten.keep(space, removed.last_change, self.journal.oldest(), removed.description());
        if let Entry::Occupied(mut ids) = self.space_ids.entry((removed.namespace, removed.cut)) {
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

    /// Whether these blocks can be dropped and their memory freed at once: all are sealed, unleased and unchecked.
    pub fn can_lose(&self, blocks: &[StoredBlock]) -> bool {
        blocks.iter().all(|block| {
            let entry = self.entries.at(block.slot);
            entry.state == State::Sealed && entry.leases == 0 && entry.checks == 0
        })
    }

    /// Namespace and cut of a space: its identity in other processes and in tiers.
    pub(crate) fn space_name(&self, space: SpaceId) -> kvlane_block::Space {
        let Space { namespace, cut, .. } = self.spaces[space];
        kvlane_block::Space { namespace, cut }
    }

    /// How many shards a block of a space has.
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

    /// Drops blocks: invisible at once, freed when their leases and writers are done. Returns how many were still
    /// there.
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

    /// Appends the changes in `spaces` since `cursor` to `out`, each with the position of its space in `spaces`. See
    /// [`Journal::read`].
    pub fn read_journal(
        &mut self,
        cursor: u64,
        spaces: &[SpaceId],
        most: usize,
        out: &mut Vec<(usize, JournalEntry)>,
    ) -> JournalRead {
        let read = self.journal.read(cursor, most, out, |entry, out| {
            let positions = spaces.iter().enumerate().filter(|(_, space)| **space == entry.space);
            out.extend(positions.map(|(position, _)| (position, *entry)));
        });
        // A cursor of 0 is a new reader's, which has missed nothing.
        self.counters.journal_restarts += u64::from(read.start_again && cursor != 0);
        read
    }

    /// Appends a change to the journal. No other code writes to it.
    pub(crate) fn note_change(&mut self, change: Change, space: SpaceId, hash: BlockHash) {
        let entry = JournalEntry { change, space, hash };
        if self.journal.note(entry) {
            self.spaces[space].last_change = self.journal.newest();
            self.counters.journal_entries += 1;
        }
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
            copied_blocks: self.copies.len() as u64,
            copied_bytes: self.copies.bytes(),
            policy: self.policy.kind(),
            counters: self.counters,
            residence: self.residence,
            unused_bytes: self.extents.unused_bytes(),
            free_extents: self.extents.free_extents().into_iter().take(SIZES_SHOWN).collect(),
        }
    }

    /// Blocks of prompts that lookups covered, and that they did not, of all spaces.
    pub fn hit_and_missed_blocks(&self) -> (u64, u64) {
        let sum =
            |(hit, missed): (u64, u64), space: &Space| (hit + space.hit_blocks, missed + space.missed_blocks);
        self.spaces.iter().fold((0, 0), sum)
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

    /// Ends the life of a claimed, committed or sealed block: lookups no longer find it. Its extents are freed, or stay
    /// in limbo until leases, checks and writers are done with them. A block with children leaves a gap.
    pub(crate) fn drop_block(&mut self, slot: u32) {
        let entry = self.entries.at_mut(slot);
        let before = *entry;
        assert!(before.row != Row::NONE, "slot {slot} holds no block");
        entry.generation = before.generation.wrapping_add(1);
        entry.state = State::Gap;
        entry.row = Row::NONE;
        entry.leases = 0;
        entry.checks = 0;

        if before.copy == CopyState::Own {
            self.policy.remove(slot);
        } else {
            self.remove_copy(slot);
        }
        if before.leases > 0 {
            self.leases.block_died();
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
