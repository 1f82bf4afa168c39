//! Random operations of several engines on an index, against a simple model of who holds which blocks.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::{Duration, Instant};

use kvlane_block::{BlockHash, CutDigest, Namespace};
use kvlane_memory::{ExtentAllocator, PAGE_BYTES, PoolPage};
use kvlane_policy::{Choice, PolicyKind};
use kvlane_store::{
    Caller, Chain, Change, Check, ClaimOutcome, Hit, Index, LeaseId, LookupGroup, Origin, OwnerId,
    ShardClaim, ShardNumber, SpaceId, Spill, StoreOptions, StoredBlock, WriterId,
};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

const POOL_PAGES: u32 = 100;
const PROMPTS: u8 = 3;
const PROMPT_BLOCKS: u8 = 8;
/// Blocks that all prompts begin with.
const SHARED_BLOCKS: u8 = 3;
const TTL: Duration = Duration::from_secs(60);
/// Pages of each shard, by space. The last space has windows, so its blocks do not chain.
const SPACES: [&[u64]; 3] = [&[2, 1], &[5], &[3]];
const WINDOW_SPACE: usize = 2;
const OWNERS: u64 = 3;
/// Bytes that copies may take before own blocks do.
const COPIES_MAX: u64 = POOL_PAGES as u64 * PAGE_BYTES / 4;
/// Who brings blocks back from the tier below, and from other hosts.
const FETCHER: OwnerId = OwnerId(97);
const FETCHING: WriterId = WriterId(970);

#[derive(Clone, Debug)]
enum Op {
    Claim {
        owner: u64,
        space: usize,
        shard: u32,
        prompt: u8,
        blocks: Range<u8>,
    },
    /// All shards claimed, committed and sealed at once.
    Save {
        owner: u64,
        space: usize,
        prompt: u8,
        blocks: u8,
    },
    Commit(usize),
    CommitAll,
    Abort(usize),
    WriterGone {
        owner: u64,
        shard: u32,
    },
    StartSeal,
    StartScrub,
    EndCheck {
        pick: usize,
        intact: bool,
    },
    Lookup {
        owner: u64,
        space: usize,
        prompt: u8,
        blocks: u8,
        with_window: bool,
    },
    Release(usize),
    Heartbeat {
        owner: u64,
        keep: usize,
    },
    Adopt {
        owner: u64,
        new_owner: u64,
        keep: usize,
    },
    ReleaseOwner(u64),
    /// All shards of blocks claimed to be read from the tier below, or from another host.
    StartFetch {
        space: usize,
        prompt: u8,
        blocks: Range<u8>,
        origin: Origin,
    },
    /// Blocks of another host, one after the other.
    Bring {
        space: usize,
        prompt: u8,
        blocks: u8,
    },
    /// Another source may bring the block than the one that was asked first.
    EndFetch {
        pick: usize,
        came: bool,
        by_another: bool,
    },
    StartSpill,
    EndSpill(usize),
    Expire,
    Wait(u64),
    DropNamespace(usize),
    SwitchPolicy(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let owner = || 0..OWNERS;
    let blocks =
        (0..PROMPT_BLOCKS, 1..=PROMPT_BLOCKS).prop_map(|(from, n)| from..(from + n).min(PROMPT_BLOCKS));
    let blocks_to_fetch =
        (0..PROMPT_BLOCKS, 1..=PROMPT_BLOCKS).prop_map(|(from, n)| from..(from + n).min(PROMPT_BLOCKS));
    prop_oneof![
        6 => (owner(), 0usize..3, 0u32..2, 0..PROMPTS, blocks).prop_map(|(owner, space, shard, prompt, blocks)| {
            Op::Claim { owner, space, shard: shard % SPACES[space].len() as u32, prompt, blocks }
        }),
        8 => (owner(), 0usize..3, 0..PROMPTS, 2..=PROMPT_BLOCKS).prop_map(|(owner, space, prompt, blocks)| {
            Op::Save { owner, space, prompt, blocks }
        }),
        4 => any::<usize>().prop_map(Op::Commit),
        3 => Just(Op::CommitAll),
        1 => any::<usize>().prop_map(Op::Abort),
        1 => (owner(), 0u32..2).prop_map(|(owner, shard)| Op::WriterGone { owner, shard }),
        4 => Just(Op::StartSeal),
        2 => Just(Op::StartScrub),
        5 => (any::<usize>(), prop::bool::weighted(0.7)).prop_map(|(pick, intact)| Op::EndCheck { pick, intact }),
        8 => (owner(), 0usize..3, 0..PROMPTS, 0..=PROMPT_BLOCKS, any::<bool>()).prop_map(
            |(owner, space, prompt, blocks, with_window)| Op::Lookup { owner, space, prompt, blocks, with_window }
        ),
        3 => any::<usize>().prop_map(Op::Release),
        4 => (owner(), 0usize..3).prop_map(|(owner, keep)| Op::Heartbeat { owner, keep }),
        1 => (owner(), owner(), 0usize..3).prop_map(|(owner, new_owner, keep)| Op::Adopt { owner, new_owner, keep }),
        1 => owner().prop_map(Op::ReleaseOwner),
        5 => (0usize..3, 0..PROMPTS, blocks_to_fetch, prop::bool::weighted(0.6)).prop_map(|(space, prompt, blocks, are_copies)| {
            let origin = if are_copies { Origin::OtherHost } else { Origin::ThisHost };
            Op::StartFetch { space, prompt, blocks, origin }
        }),
        8 => (0usize..3, 0..PROMPTS, 2..=PROMPT_BLOCKS).prop_map(|(space, prompt, blocks)| Op::Bring { space, prompt, blocks }),
        6 => (any::<usize>(), prop::bool::weighted(0.8), prop::bool::weighted(0.1)).prop_map(|(pick, came, by_another)| {
            Op::EndFetch { pick, came, by_another }
        }),
        3 => Just(Op::StartSpill),
        2 => any::<usize>().prop_map(Op::EndSpill),
        3 => Just(Op::Expire),
        3 => (30u64..100).prop_map(Op::Wait),
        1 => (0usize..3).prop_map(Op::DropNamespace),
        1 => (0..PolicyKind::ALL.len()).prop_map(Op::SwitchPolicy),
    ]
}

/// Hash of a prompt's block: the same for all prompts where they share their beginning.
fn hash(prompt: u8, block: u8) -> BlockHash {
    let prompt = if block < SHARED_BLOCKS { 0 } else { prompt };
    BlockHash([prompt, block, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7])
}

/// The next block of a prompt; after the shared ones, of prompt 0.
fn child_of(BlockHash(bytes): BlockHash) -> BlockHash {
    hash(bytes[0], bytes[1] + 1)
}

/// A block: its space and hash.
type Key = (usize, BlockHash);

/// A shard that a worker was told to write and has not answered for.
#[derive(Clone, Copy, Debug)]
struct Writing {
    writer: WriterId,
    key: Key,
    shard: ShardClaim,
}

/// A claim that lives: which shards were asked for and written, and where they are.
struct LiveClaim {
    owner: OwnerId,
    /// Tells it from an earlier claim of the same key.
    id: StoredBlock,
    asked: BTreeSet<u32>,
    written: BTreeMap<u32, PoolPage>,
    since: Instant,
}

struct HeldLease {
    owner: OwnerId,
    renewed: Instant,
    blocks: Vec<(Key, Vec<PoolPage>)>,
}

struct World {
    index: Index,
    spaces: Vec<SpaceId>,
    now: Instant,
    cursor: u32,
    writing: Vec<Writing>,
    claims: BTreeMap<Key, LiveClaim>,
    /// Fully written blocks, by all that is known: eviction may have taken them since. Pages of their shards.
    stored: BTreeMap<Key, Vec<PoolPage>>,
    leases: BTreeMap<LeaseId, HeldLease>,
    checks: Vec<Check>,
    /// Blocks that the tier below reads.
    spills: Vec<Spill>,
    /// Blocks that a source writes, with all their shards.
    fetching: Vec<(Key, Vec<ShardClaim>, Origin)>,
    /// Visible blocks of other hosts that are not own ones yet, with how often each was hit.
    copies: BTreeMap<Key, u32>,
    journal: u64,
    /// What a reader of the journal takes for visible, and one that hears only of what comes.
    told: BTreeSet<Key>,
    told_of_coming: BTreeSet<Key>,
    seen: Seen,
}

/// What a run came across, to know that the test reaches what it is about.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    hits: u64,
    joined_claims: u64,
    limbo: u64,
    evicted: u64,
    no_room: u64,
    not_admitted: u64,
    switches: u64,
    in_flight: u64,
    damaged: u64,
    stale_commits: u64,
    expired_leases: u64,
    expired_claims: u64,
    filled_gaps: u64,
    fetched: u64,
    spilled: u64,
    stale_fetches: u64,
    evicted_copies: u64,
    adopted_copies: u64,
    corrected_copies: u64,
    own_victims_of_copies: u64,
    stale_listeners: u64,
}

fn writer(owner: u64, shard: u32) -> WriterId {
    WriterId(owner * 10 + u64::from(shard))
}

fn namespace(space: usize) -> Namespace {
    Namespace([space as u8 + 1; 16])
}

impl World {
    fn new(policy: PolicyKind) -> Self {
        let extents = ExtentAllocator::new(POOL_PAGES, std::slice::from_ref(&(0..POOL_PAGES)));
        let options = StoreOptions {
            lease_ttl: TTL,
            claim_ttl: TTL,
            policy: Choice::Fixed(policy),
            ..StoreOptions::default()
        };
        let mut index = Index::new(extents, u64::from(POOL_PAGES) * PAGE_BYTES, options);
        index.set_spill_limit(4);
        let space = |(number, pages): (usize, &&[u64])| {
            let bytes: Vec<u64> = pages.iter().map(|pages| pages * PAGE_BYTES).collect();
            index.space(namespace(number), "model", CutDigest([9; 16]), &bytes)
        };
        let spaces = SPACES.iter().enumerate().map(space).collect();
        let journal = index.read_journal(0, &[], 0, &mut Vec::new()).cursor;
        Self {
            index,
            spaces,
            now: Instant::now(),
            cursor: 0,
            writing: Vec::new(),
            claims: BTreeMap::new(),
            stored: BTreeMap::new(),
            leases: BTreeMap::new(),
            checks: Vec::new(),
            spills: Vec::new(),
            fetching: Vec::new(),
            copies: BTreeMap::new(),
            journal,
            told: BTreeSet::new(),
            told_of_coming: BTreeSet::new(),
            seen: Seen::default(),
        }
    }

    fn visible(&self) -> BTreeSet<Key> {
        let keys = (0..SPACES.len()).flat_map(|space| {
            (0..PROMPTS)
                .flat_map(move |prompt| (0..PROMPT_BLOCKS).map(move |block| (space, hash(prompt, block))))
        });
        keys.filter(|(space, hash)| self.index.is_visible(self.spaces[*space], hash)).collect()
    }

    /// Pages that some process or thread reads.
    fn read_pages(&self) -> BTreeSet<u32> {
        let mut pages = BTreeSet::new();
        for (key, firsts) in self.leases.values().flat_map(|lease| &lease.blocks) {
            for (first, count) in firsts.iter().zip(SPACES[key.0]) {
                pages.extend(first.0..first.0 + *count as u32);
            }
        }
        for (first, bytes, _) in self.checks.iter().flat_map(|check| check.shards()) {
            pages.extend(first.0..first.0 + (bytes / PAGE_BYTES) as u32);
        }
        for shard in self.spills.iter().flat_map(Spill::shards) {
            let first = (shard.extent.offset.0 / PAGE_BYTES) as u32;
            pages.extend(first..first + (shard.extent.bytes / PAGE_BYTES) as u32);
        }
        pages
    }

    fn pages_of(writing: &Writing) -> Range<u32> {
        let first = writing.shard.page.0;
        first..first + SPACES[writing.key.0][writing.shard.shard.0 as usize] as u32
    }

    /// Nobody is told to write where another reads or writes.
    fn check_no_late_write(&self) {
        let mut busy = self.read_pages();
        let fetching = self.fetching.iter().flat_map(|(key, shards, _)| {
            shards.iter().map(|shard| Writing { writer: FETCHING, key: *key, shard: *shard })
        });
        for writing in self.writing.iter().copied().chain(fetching) {
            for page in Self::pages_of(&writing) {
                assert!(page < POOL_PAGES && busy.insert(page), "page {page} of {writing:?} is in use");
            }
        }
    }

    fn apply(&mut self, op: &Op) {
        let visible_before = self.visible();
        match op {
            Op::Claim { owner, space, shard, prompt, blocks } => {
                self.claim((Origin::Engine, OwnerId(*owner)), *space, *shard, *prompt, blocks.clone());
                self.check_evictions(&visible_before);
            }
            Op::Save { owner, space, prompt, blocks } => {
                for shard in 0..SPACES[*space].len() as u32 {
                    self.claim((Origin::Engine, OwnerId(*owner)), *space, shard, *prompt, 0..*blocks);
                    let now_visible = self.visible();
                    self.check_evictions(&visible_before);
                    assert!(visible_before.is_superset(&now_visible));
                }
                (0..self.writing.len()).for_each(|_| self.commit(0));
                for check in self.index.take_unsealed(u64::MAX, usize::MAX) {
                    self.end_check(check, true);
                }
            }
            Op::Commit(pick) => self.commit(*pick),
            Op::CommitAll => (0..self.writing.len()).for_each(|_| self.commit(0)),
            Op::Abort(pick) => {
                if !self.writing.is_empty() {
                    let writing = self.writing.swap_remove(pick % self.writing.len());
                    self.index.abort(&[writing.shard], self.now);
                    let id = writing.shard.block;
                    self.claims.retain(|&key, claim| key != writing.key || claim.id != id);
                }
            }
            Op::WriterGone { owner, shard } => {
                let gone = writer(*owner, *shard);
                self.index.writer_gone(gone, self.now);
                let (died, rest): (Vec<_>, Vec<_>) =
                    self.writing.iter().partition(|writing| writing.writer == gone);
                self.writing = rest;
                let ids: BTreeSet<_> = died.iter().map(|w| w.shard.block).collect();
                self.claims.retain(|_, claim| !ids.contains(&claim.id));
            }
            Op::StartSeal => self.checks.extend(self.index.take_unsealed(u64::MAX, 2)),
            Op::StartScrub => self.checks.extend(self.index.next_scrub(&mut self.cursor, u32::MAX)),
            Op::EndCheck { pick, intact } => {
                if !self.checks.is_empty() {
                    let check = self.checks.swap_remove(pick % self.checks.len());
                    self.end_check(check, *intact);
                }
            }
            Op::Lookup { owner, space, prompt, blocks, with_window } => {
                self.lookup(OwnerId(*owner), *space, *prompt, *blocks, *with_window);
                assert_eq!(self.visible(), visible_before);
            }
            Op::Release(pick) => {
                if let Some(lease) = self.leases.keys().nth(pick % self.leases.len().max(1)).copied() {
                    // Another owner's release does nothing.
                    self.index.release(OwnerId(99), lease);
                    if let Some(held) = self.leases.remove(&lease) {
                        self.index.release(held.owner, lease);
                    }
                }
                assert_eq!(self.visible(), visible_before);
            }
            Op::Heartbeat { owner, keep } => {
                let (owner, live, now) = (OwnerId(*owner), self.some_leases(*keep), self.now);
                self.index.heartbeat(owner, &live, now);
                for (id, lease) in self.leases.iter_mut().filter(|(_, lease)| lease.owner == owner) {
                    if live.contains(id) {
                        lease.renewed = now;
                    }
                }
                self.leases.retain(|_, lease| lease.owner != owner || now - lease.renewed <= TTL);
            }
            Op::Adopt { owner, new_owner, keep } => {
                let (owner, new_owner, live) =
                    (OwnerId(*owner), OwnerId(*new_owner), self.some_leases(*keep));
                self.index.adopt(owner, new_owner, &live);
                self.leases.retain(|id, lease| lease.owner != owner || live.contains(id));
                for lease in self.leases.values_mut().filter(|lease| lease.owner == owner) {
                    lease.owner = new_owner;
                }
            }
            Op::ReleaseOwner(owner) => {
                self.index.release_owner(OwnerId(*owner));
                self.leases.retain(|_, lease| lease.owner != OwnerId(*owner));
            }
            Op::StartFetch { space, prompt, blocks, origin } => {
                self.start_fetch(*space, *prompt, blocks.clone(), *origin);
            }
            Op::Bring { space, prompt, blocks } => {
                for block in 0..*blocks {
                    let before = self.fetching.len();
                    self.start_fetch(*space, *prompt, block..block + 1, Origin::OtherHost);
                    if self.fetching.len() > before {
                        self.end_fetch(before, true, false);
                    }
                }
            }
            Op::EndFetch { pick, came, by_another } => self.end_fetch(*pick, *came, *by_another),
            Op::StartSpill => {
                if let Some(spill) = self.index.take_spill() {
                    let space =
                        (0..SPACES.len()).find(|&space| namespace(space) == spill.key.space.namespace);
                    let key = (space.unwrap(), spill.key.hash);
                    let places = spill.shards().into_iter().map(|shard| shard.extent.offset);
                    let are_its = self.stored[&key].iter().map(|page| page.offset()).eq(places);
                    assert!(visible_before.contains(&key) && are_its, "{spill:?}");
                    assert!(!self.copies.contains_key(&key), "a copy goes to the tier: {spill:?}");
                    self.spills.push(spill);
                }
                assert_eq!(self.visible(), visible_before);
            }
            Op::EndSpill(pick) => {
                if !self.spills.is_empty() {
                    let spill = self.spills.swap_remove(pick % self.spills.len());
                    self.index.finish_spill(&spill, true);
                    self.seen.spilled += 1;
                }
                assert_eq!(self.visible(), visible_before);
            }
            Op::Expire => {
                self.index.expire(self.now);
                let (now, writing) = (self.now, &self.writing);
                let fetching = &self.fetching;
                let in_flight = |id| {
                    let shards = fetching.iter().flat_map(|(_, shards, _)| shards);
                    let mut shards = writing.iter().map(|other| &other.shard).chain(shards);
                    shards.any(|shard| shard.block == id)
                };
                self.claims.retain(|_, claim| now - claim.since <= TTL || in_flight(claim.id));
            }
            Op::Wait(seconds) => self.now += Duration::from_secs(*seconds),
            Op::SwitchPolicy(kind) => {
                let before = self.index.stats().policy;
                self.index.switch_policy(PolicyKind::ALL[*kind]);
                self.seen.switches += u64::from(self.index.stats().policy != before);
                assert_eq!(self.visible(), visible_before);
            }
            Op::DropNamespace(space) => {
                let blocks = self.index.blocks_of(namespace(*space));
                assert_eq!(self.index.drop_blocks(&blocks), blocks.len() as u64);
                self.claims.retain(|(of, _), _| of != space);
                self.stored.retain(|(of, _), _| of != space);
                assert!(self.visible().iter().all(|(of, _)| of != space));
            }
        }
        self.check(op);
    }

    /// Whoever follows the journal knows what is visible, neither less nor more; without the goings nobody would.
    fn follow_journal(&mut self, op: &Op) {
        let mut entries = Vec::new();
        let read = self.index.read_journal(self.journal, &self.spaces, usize::MAX, &mut entries);
        assert!(!read.start_again && !read.has_more);
        self.journal = read.cursor;
        for (space, entry) in entries {
            let key = (space, entry.hash);
            match entry.change {
                Change::Visible => drop((self.told.insert(key), self.told_of_coming.insert(key))),
                Change::Gone => drop(self.told.remove(&key)),
            }
        }
        let visible = self.visible();
        assert_eq!(self.told, visible, "after {op:?}");
        self.seen.stale_listeners += u64::from(self.told_of_coming != visible);
    }

    fn check(&mut self, op: &Op) {
        self.follow_journal(op);
        if let Err(what) = self.index.check_consistency() {
            assert_eq!(what, "", "after {op:?}");
        }
        self.check_no_late_write();
        self.check_copies();
        self.seen.limbo += u64::from(self.index.stats().limbo_bytes > 0);
        for key in self.visible() {
            assert!(self.stored.contains_key(&key), "{key:?} is visible and not all shards were written");
        }
        for (key, _) in self.leases.values().flat_map(|lease| &lease.blocks) {
            assert!(self.stored.contains_key(key) || !self.visible().contains(key));
        }
        for owner in 0..OWNERS {
            let held = self.leases.values().filter(|lease| lease.owner == OwnerId(owner)).count();
            assert_eq!(self.index.leases_of(OwnerId(owner)), held, "leases of owner {owner} after {op:?}");
        }
    }

    /// The store counts the copies that the model has, and those that are being fetched.
    fn check_copies(&mut self) {
        let visible = self.visible();
        self.copies.retain(|key, _| visible.contains(key));
        let is_coming = |(key, shards, origin): &&(Key, Vec<ShardClaim>, Origin)| {
            let lives = self.claims.get(key).is_some_and(|claim| claim.id == shards[0].block);
            lives && *origin == Origin::OtherHost
        };
        let coming = self.fetching.iter().filter(is_coming).map(|(key, ..)| key);
        let pages: Vec<u64> =
            self.copies.keys().chain(coming).map(|key| SPACES[key.0].iter().sum()).collect();
        let stats = self.index.stats();
        let bytes = pages.iter().sum::<u64>() * PAGE_BYTES;
        assert_eq!((stats.copied_blocks, stats.copied_bytes), (pages.len() as u64, bytes));
    }

    fn some_leases(&self, keep: usize) -> Vec<LeaseId> {
        self.leases.keys().copied().skip(1).step_by(keep + 1).collect()
    }

    fn claim(
        &mut self,
        (origin, owner): (Origin, OwnerId),
        space: usize,
        shard: u32,
        prompt: u8,
        blocks: Range<u8>,
    ) {
        let chain = match blocks.start {
            _ if space == WINDOW_SPACE => Chain::Unchained,
            0 => Chain::Start,
            from => Chain::After(hash(prompt, from - 1)),
        };
        let hashes: Vec<BlockHash> = blocks.map(|block| hash(prompt, block)).collect();
        let writer = writer(owner.0, shard);
        let mut outcomes = Vec::new();
        let (id, now) = (self.spaces[space], self.now);
        let caller = Caller { owner, writer, space: id, shard: ShardNumber(shard), now };
        match origin {
            Origin::Engine => self.index.claim(&caller, chain, &hashes, &mut outcomes),
            _ => self.index.claim_from(origin, &caller, chain, &hashes, &mut outcomes),
        }
        assert_eq!(outcomes.len(), hashes.len());
        let visible = self.visible();
        for (hash, outcome) in hashes.into_iter().zip(outcomes) {
            let key = (space, hash);
            let claim = self.claims.get(&key);
            match outcome {
                ClaimOutcome::Claimed(claimed) => {
                    assert!(!visible.contains(&key), "{key:?} is stored and claimed");
                    assert!(claim.is_none_or(|claim| claim.owner == owner), "two engines copy {key:?}");
                    assert!(
                        claim.is_none_or(|claim| !claim.asked.contains(&shard)),
                        "{key:?} is copied twice"
                    );
                    self.writing.push(Writing { writer, key, shard: claimed });
                    let child = (space, child_of(hash));
                    self.seen.filled_gaps += u64::from(space != WINDOW_SPACE && visible.contains(&child));
                    let claim = self.claims.entry(key).or_insert(LiveClaim {
                        owner,
                        id: claimed.block,
                        asked: BTreeSet::new(),
                        written: BTreeMap::new(),
                        since: now,
                    });
                    assert_eq!(claim.id, claimed.block, "one claim of {key:?}");
                    self.seen.joined_claims += u64::from(!claim.asked.is_empty());
                    claim.asked.insert(shard);
                }
                ClaimOutcome::Present => {
                    let own = claim.is_some_and(|claim| claim.owner == owner && claim.asked.contains(&shard));
                    assert!(own || self.stored.contains_key(&key), "{key:?} is not present");
                }
                ClaimOutcome::InFlight => {
                    assert!(claim.is_some_and(|claim| claim.owner != owner), "nobody saves {key:?}");
                }
                ClaimOutcome::NoRoom => {
                    assert!(claim.is_none() && !visible.contains(&key), "{key:?} needs no room");
                }
            }
        }
    }

    /// What a claim evicted was not leased and had no children.
    fn check_evictions(&mut self, visible_before: &BTreeSet<Key>) {
        let visible = self.visible();
        for &(space, hash) in visible_before.difference(&visible) {
            let leased = self.leases.values().flat_map(|lease| &lease.blocks);
            let Some(pages) = self.stored.get(&(space, hash)) else { continue };
            let mut leased = leased.filter(|(key, leased)| *key == (space, hash) && leased == pages);
            assert!(leased.next().is_none(), "leased block {hash} was evicted");
            for prompt in (0..PROMPTS).filter(|_| space != WINDOW_SPACE) {
                let position = (0..PROMPT_BLOCKS - 1).find(|&block| self::hash(prompt, block) == hash);
                if let Some(position) = position {
                    let child = (space, self::hash(prompt, position + 1));
                    assert!(!visible.contains(&child), "{hash} was evicted before its child {child:?}");
                    // Unless it was evicted early in the call and claimed again later in it.
                    let again = self.claims.contains_key(&(space, hash));
                    let orphaned = !again && self.claims.contains_key(&child);
                    assert!(!orphaned, "{hash} was evicted under a claim of its child");
                }
            }
            self.stored.remove(&(space, hash));
            self.copies.remove(&(space, hash));
        }
    }

    fn commit(&mut self, pick: usize) {
        if self.writing.is_empty() {
            return;
        }
        let Writing { key, shard, .. } = self.writing.remove(pick % self.writing.len());
        self.index.commit(&[shard], self.now);
        if let Some(claim) = self.claims.get_mut(&key)
            && claim.id == shard.block
        {
            claim.written.insert(shard.shard.0, shard.page);
            claim.since = self.now;
            if claim.written.len() == SPACES[key.0].len() {
                let pages = claim.written.values().copied().collect();
                self.claims.remove(&key);
                self.stored.insert(key, pages);
            }
        }
    }

    fn start_fetch(&mut self, space: usize, prompt: u8, blocks: Range<u8>, origin: Origin) {
        let visible_before = self.visible();
        let is_own = |key: &&Key| !self.copies.contains_key(key);
        let own_before: BTreeSet<Key> = visible_before.iter().filter(is_own).copied().collect();
        self.claim_fetch(space, prompt, blocks.clone(), origin);
        // With several blocks, copies that find free memory may follow one that displaced an own block.
        let cost_own = !self.visible().is_superset(&own_before);
        if origin == Origin::OtherHost && blocks.len() == 1 && cost_own {
            let bytes = self.index.stats().copied_bytes;
            assert!(bytes <= COPIES_MAX, "copies of {bytes} bytes displaced an own block");
            self.seen.own_victims_of_copies += 1;
        }
        self.check_evictions(&visible_before);
    }

    /// As the store does it: blocks of which only some shards could be claimed are given back.
    fn claim_fetch(&mut self, space: usize, prompt: u8, blocks: Range<u8>, origin: Origin) {
        let shards = SPACES[space].len();
        for shard in 0..shards as u32 {
            self.claim((origin, FETCHER), space, shard, prompt, blocks.clone());
        }
        let is_fetch = |writing: &Writing| (0..shards as u32).any(|s| writing.writer == writer(FETCHER.0, s));
        let (claimed, rest): (Vec<Writing>, _) = self.writing.drain(..).partition(is_fetch);
        self.writing = rest;
        let mut by_block: BTreeMap<Key, Vec<ShardClaim>> = BTreeMap::new();
        for writing in claimed {
            by_block.entry(writing.key).or_default().push(writing.shard);
        }
        for (key, claims) in by_block {
            if claims.len() == shards {
                self.fetching.push((key, claims, origin));
            } else {
                self.index.abort(&claims, self.now);
                self.claims.remove(&key);
            }
        }
    }

    fn end_fetch(&mut self, pick: usize, came: bool, by_another: bool) {
        if self.fetching.is_empty() {
            return;
        }
        let (key, claims, mut origin) = self.fetching.swap_remove(pick % self.fetching.len());
        let id = claims[0].block;
        let lives = self.claims.get(&key).is_some_and(|claim| claim.id == id);
        if lives {
            self.claims.remove(&key);
        }
        if !came {
            return self.index.abort(&claims, self.now);
        }
        if by_another {
            origin = if origin == Origin::OtherHost { Origin::ThisHost } else { Origin::OtherHost };
            self.seen.corrected_copies += u64::from(lives);
        }
        self.index.restore(&claims, &vec![1; claims.len()], origin);
        self.seen.fetched += u64::from(lives);
        self.seen.stale_fetches += u64::from(!lives);
        if lives {
            self.stored.insert(key, claims.iter().map(|claim| claim.page).collect());
            assert!(self.visible().contains(&key), "what came back is visible at once");
            if origin == Origin::OtherHost {
                self.copies.insert(key, 0);
            }
        }
    }

    fn end_check(&mut self, check: Check, intact: bool) {
        // Which kind it was does not matter to the model: checks of unsealed blocks have checksum 0.
        let sealing = check.shards().all(|(_, _, crc)| crc == 0);
        if sealing {
            let crcs = vec![1; check.shards().count()];
            self.index.finish_seal(check, &crcs);
        } else if let Some(damaged) = self.index.finish_scrub(check, intact) {
            assert!(!intact);
            let dropped = (0..SPACES.len()).find(|&space| namespace(space) == damaged.namespace);
            let key = (dropped.unwrap(), damaged.hash);
            assert!(self.stored.remove(&key).is_some() && !self.visible().contains(&key));
        }
    }

    fn lookup(&mut self, owner: OwnerId, space: usize, prompt: u8, blocks: u8, with_window: bool) {
        let hashes: Vec<BlockHash> = (0..blocks).map(|block| hash(prompt, block)).collect();
        let group = |space: usize| LookupGroup {
            space: self.spaces[space],
            tokens_per_block: if space == 0 { 2 } else { 4 },
            window_blocks: if space == WINDOW_SPACE { 2 } else { 0 },
            hashes: &hashes,
        };
        let mut asked = vec![space];
        if with_window && space != WINDOW_SPACE {
            asked.push(WINDOW_SPACE);
        }
        let groups: Vec<LookupGroup<'_>> = asked.iter().map(|&space| group(space)).collect();
        let max_tokens = 25;
        let visible = self.visible();
        let needed = |group: &LookupGroup<'_>, tokens: u64| {
            let end = tokens / u64::from(group.tokens_per_block);
            let start = if group.window_blocks == 0 { 0 } else { end.saturating_sub(2) };
            start..end
        };
        let is_hit = |tokens: &u64| {
            groups.iter().zip(&asked).all(|(group, &space)| {
                let resident = |block: u64| {
                    hashes.get(block as usize).is_some_and(|hash| visible.contains(&(space, *hash)))
                };
                tokens.is_multiple_of(u64::from(group.tokens_per_block))
                    && *tokens <= u64::from(blocks) * u64::from(group.tokens_per_block)
                    && needed(group, *tokens).all(resident)
            })
        };
        let expected = (1..=max_tokens).rev().find(is_hit);
        let hit = self.index.lookup(owner, &groups, max_tokens, self.now);
        assert_eq!(hit.as_ref().map(|hit| hit.tokens), expected);
        let Some(Hit { tokens, lease, groups: found }) = hit else { return };
        self.seen.hits += 1;
        let mut held = Vec::new();
        for ((group, &space), found) in groups.iter().zip(&asked).zip(found) {
            let range = needed(group, tokens);
            assert_eq!(found.first_block, range.start);
            let beyond = hashes.get(range.end as usize..).unwrap_or_default();
            let stored = beyond.iter().take_while(|&&hash| visible.contains(&(space, hash))).count() as u64;
            assert_eq!(found.stored_blocks, range.end + stored);
            let mut pages = found.pages.chunks_exact(SPACES[space].len());
            assert_eq!(pages.len() as u64, range.end - range.start);
            for (block, pages) in range.zip(&mut pages) {
                let key = (space, hashes[block as usize]);
                assert_eq!(pages, self.stored[&key], "pages of {key:?}");
                held.push((key, pages.to_vec()));
                match self.copies.get_mut(&key) {
                    Some(hits) if *hits == 0 => *hits = 1,
                    Some(_) => {
                        self.copies.remove(&key);
                        self.seen.adopted_copies += 1;
                    }
                    None => {}
                }
            }
        }
        self.leases.insert(lease, HeldLease { owner, renewed: self.now, blocks: held });
    }

    /// Everybody gives back what it has; then all memory is free again.
    fn wind_down(&mut self) {
        while let Some(check) = self.checks.pop() {
            self.end_check(check, true);
        }
        while let Some(spill) = self.spills.pop() {
            self.index.finish_spill(&spill, false);
        }
        while !self.fetching.is_empty() {
            self.end_fetch(0, true, false);
        }
        for owner in 0..OWNERS {
            self.index.release_owner(OwnerId(owner));
            self.leases.retain(|_, lease| lease.owner != OwnerId(owner));
            (0..2).for_each(|shard| self.index.writer_gone(writer(owner, shard), self.now));
        }
        self.writing.clear();
        let stats = self.index.stats();
        assert_eq!((stats.limbo_bytes, stats.leased_blocks, stats.leases), (0, 0, 0));
        self.index.expire(self.now + TTL + TTL);
        assert_eq!(self.index.stats().claimed_blocks, 0);
        for space in 0..SPACES.len() {
            let blocks = self.index.blocks_of(namespace(space));
            self.index.drop_blocks(&blocks);
        }
        assert_eq!(self.index.check_consistency(), Ok(()));
        assert_eq!(self.index.stats().used_bytes, 0);
        let counters = stats.counters;
        assert_eq!(counters.adopted_copies, self.seen.adopted_copies);
        self.seen.evicted_copies = counters.evicted_copies;
        self.seen.evicted = counters.evicted_blocks;
        self.seen.no_room = counters.no_room;
        self.seen.not_admitted = counters.not_admitted;
        self.seen.in_flight = counters.dedup_in_flight;
        self.seen.damaged = counters.scrub_bad;
        self.seen.stale_commits = counters.stale_commits;
        self.seen.expired_leases = counters.expired_leases;
        self.seen.expired_claims = counters.expired_claims;
    }
}

#[test]
fn any_order_of_calls_keeps_the_promises() {
    let total = std::cell::RefCell::new(Vec::new());
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    // Each begins with another policy; runs without a switch among them stay with it.
    let cases = ((0..PolicyKind::ALL.len()), any::<bool>(), prop::collection::vec(op(), 1..130));
    let run = TestRunner::new(config).run(&cases, |(policy, may_switch, mut ops)| {
        ops.retain(|op| may_switch || !matches!(op, Op::SwitchPolicy(_)));
        let mut world = World::new(PolicyKind::ALL[policy]);
        for op in &ops {
            world.apply(op);
        }
        world.wind_down();
        total.borrow_mut().push(world.seen);
        Ok(())
    });
    assert!(run.is_ok(), "{}", run.unwrap_err());
    let total = total.into_inner();
    let sum = |field: fn(&Seen) -> u64| total.iter().map(field).sum::<u64>();
    let reached = [
        ("hits", sum(|seen| seen.hits)),
        ("claims joined by a second worker", sum(|seen| seen.joined_claims)),
        ("memory in limbo", sum(|seen| seen.limbo)),
        ("evictions", sum(|seen| seen.evicted)),
        ("no room", sum(|seen| seen.no_room)),
        ("not admitted", sum(|seen| seen.not_admitted)),
        ("switches of policy", sum(|seen| seen.switches)),
        ("in flight elsewhere", sum(|seen| seen.in_flight)),
        ("damaged blocks", sum(|seen| seen.damaged)),
        ("stale commits", sum(|seen| seen.stale_commits)),
        ("expired leases", sum(|seen| seen.expired_leases)),
        ("expired claims", sum(|seen| seen.expired_claims)),
        ("gaps filled", sum(|seen| seen.filled_gaps)),
        ("fetched blocks", sum(|seen| seen.fetched)),
        ("fetches of what died meanwhile", sum(|seen| seen.stale_fetches)),
        ("copies evicted", sum(|seen| seen.evicted_copies)),
        ("copies adopted", sum(|seen| seen.adopted_copies)),
        ("blocks that came from another source", sum(|seen| seen.corrected_copies)),
        ("own blocks evicted for a copy", sum(|seen| seen.own_victims_of_copies)),
        ("spilled blocks", sum(|seen| seen.spilled)),
        ("listeners that hear of nothing that goes", sum(|seen| seen.stale_listeners)),
    ];
    println!("{reached:?}");
    assert!(reached.iter().all(|&(_, times)| times > 10), "{reached:?}");
}
