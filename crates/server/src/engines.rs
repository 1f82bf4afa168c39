//! Engines: which sessions belong to one engine, and which space each of its groups uses.
//!
//! ```text
//!   OpenEngine (scheduler) ---+
//!   RegisterWorker (rank 0) --+--> all are there: spaces opened --> all workers have mapped the pool: ready
//!   RegisterWorker (rank n) --+         ^                                     |
//!                                       '------- a session leaves <-----------'
//! ```
//! - Only a ready engine is served: its lookups may promise blocks, and its saves make blocks.
//! - Workers must match the scheduler's groups, and ranks that share blocks must cut and describe them alike. A session
//!   that does not match is refused, and those that came before go on.
//! - A space is not forgotten while an [`Opened`] with it is held, by its engine or by a call that is being served.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, Weak},
};

use kvlane_block::{Cut, CutDigest, LayoutDifferences, Namespace, Rank, Region, shard_bytes};
use kvlane_store::{OwnerId, SpaceId, Store};
use parking_lot::Mutex;
use thiserror::Error;

use crate::{
    descriptions::{Descriptions, Shard, contradiction},
    save_gate::SaveGate,
};

/// Number of a session; unique in a run of the daemon.
pub(crate) type SessionId = u64;

/// Most groups of one engine. vLLM rarely has more than five.
const GROUPS_MAX: usize = 64;
/// Most workers of one engine.
const WORKERS_MAX: u32 = 1024;

/// Most spaces: those of connected engines, and those with blocks in the pool.
const SPACES_MAX: usize = 4096;

/// How many spaces are forgotten at once when one more would be too many.
const FORGOTTEN_AT_ONCE: usize = 256;

/// Why an engine's request is refused.
#[derive(Debug, Error, PartialEq, Eq)]
pub(crate) enum EngineError {
    #[error(
        "engine '{engine}' {what} is already served for another live process (session {session}): give each engine its own kv_connector engine_id"
    )]
    Taken { engine: String, what: String, session: SessionId },
    #[error("engine '{engine}' says {now} workers, but its other sessions said {before}")]
    Workers { engine: String, now: u32, before: u32 },
    #[error(
        "rank {rank} is not below the engine's {workers} workers, of which 1 to {WORKERS_MAX} are possible"
    )]
    NoSuchRank { rank: Rank, workers: u32 },
    #[error("{0} groups were opened; 1 to {GROUPS_MAX} are possible")]
    Groups(usize),
    #[error("group {group} has {tokens} tokens a block")]
    Tokens { group: usize, tokens: u32 },
    #[error(
        "{SPACES_MAX} different namespaces and layouts are in use, the most this daemon keeps apart: end some engines, or start another daemon"
    )]
    Spaces,
    #[error("the worker's groups do not match those of its scheduler: {0}")]
    Mismatch(String),
    #[error(
        "rank {rank} says of group {group} what another worker of the same namespace and layout digest does not ({differences}): run the same version of kvlane in both engines, or give them different words for kvlane.namespace"
    )]
    Described { rank: Rank, group: usize, differences: LayoutDifferences },
}

/// A KV cache group as the scheduler opened it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GroupSpec {
    pub(crate) namespace: Namespace,
    pub(crate) name: String,
    pub(crate) tokens_per_block: u32,
    pub(crate) window_blocks: u32,
    /// Other hosts may have its blocks.
    pub(crate) crosses_hosts: bool,
}

/// A worker's part of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WorkerGroup {
    pub(crate) namespace: Namespace,
    pub(crate) shard: Shard,
    /// The regions of the worker's shard.
    pub(crate) regions: Vec<Region>,
    /// The regions of each slice that a load brings: the shard alone, or the slices of all ranks that hold the same block.
    pub(crate) slices: Vec<Vec<Region>>,
}

/// A group whose space is open: all that lookups and saves of it need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OpenGroup {
    pub(crate) space: SpaceId,
    pub(crate) tokens_per_block: u32,
    pub(crate) window_blocks: u32,
}

#[derive(Debug)]
struct WorkerSlot {
    session: SessionId,
    groups: Vec<WorkerGroup>,
    mapped: bool,
}

#[derive(Debug)]
struct Engine {
    owner: OwnerId,
    saves: Arc<SaveGate>,
    workers_expected: u32,
    scheduler: Option<SessionId>,
    /// As the scheduler opened them.
    groups: Vec<GroupSpec>,
    workers: HashMap<Rank, WorkerSlot>,
    /// Empty while the scheduler or a worker is missing.
    open: Opened,
}

/// A ready engine, whose saves a lookup may await.
#[derive(Debug)]
pub(crate) struct SavingEngine {
    pub(crate) owner: OwnerId,
    pub(crate) scheduler: SessionId,
    pub(crate) workers: Vec<SessionId>,
    pub(crate) open: Arc<Vec<OpenGroup>>,
}

/// The open groups of an engine. While one of these is held, its spaces are not forgotten.
type Opened = Arc<Vec<OpenGroup>>;

/// Every [`Opened`] that is still held, by an engine or by a session that serves a call.
#[derive(Debug, Default)]
struct Uses(Vec<Weak<Vec<OpenGroup>>>);

impl Uses {
    fn add(&mut self, open: &Opened) {
        self.0.retain(|open| open.strong_count() > 0);
        self.0.push(Arc::downgrade(open));
    }

    fn spaces(&self) -> HashSet<SpaceId> {
        let held = self.0.iter().filter_map(Weak::upgrade);
        held.flat_map(|open| open.iter().map(|group| group.space).collect::<Vec<_>>()).collect()
    }
}

impl Engine {
    fn ready(&self) -> bool {
        !self.open.is_empty() && self.workers.values().all(|worker| worker.mapped)
    }

    /// Ranks that share blocks must cut them alike, because each reads the slices that the others saved.
    fn check_slices(&self, index: usize, rank: Rank, part: &WorkerGroup) -> Result<(), EngineError> {
        if part.slices.len() < 2 {
            return Ok(());
        }
        let first = rank.first_of(part.slices.len());
        for (peer, slice) in (first.0..).map(Rank).zip(&part.slices) {
            let other = self.workers.get(&peer).and_then(|worker| worker.groups.get(index));
            let agrees = |other: &WorkerGroup| {
                other.slices.len() == part.slices.len()
                    && other.shard.digest == part.shard.digest
                    && shard_bytes(&other.regions) == shard_bytes(slice)
            };
            if !other.is_some_and(agrees) {
                return Err(EngineError::Mismatch(format!(
                    "rank {rank} shares the blocks of group {index} with rank {peer}, which cuts them differently"
                )));
            }
        }
        Ok(())
    }

    /// Compares a worker's descriptions with those of other engines and of this one's other ranks. Equal layout digests
    /// mean equal bytes only if the descriptions agree.
    fn check_descriptions(&self, rank: Rank, descriptions: &Descriptions) -> Result<(), EngineError> {
        let groups = self.workers.get(&rank).map_or(&[][..], |worker| &worker.groups);
        for (group, part) in groups.iter().enumerate() {
            let ranks = self.workers.iter().filter(|(other, _)| **other != rank);
            let parts = ranks.filter_map(|(_, worker)| worker.groups.get(group));
            let parts = parts.filter(|other| other.namespace == part.namespace);
            let among_ranks = contradiction(&part.shard, parts.map(|other| &other.shard));
            let among_spaces = descriptions.contradiction(part.namespace, &part.shard);
            if let Some(differences) = among_spaces.or(among_ranks) {
                return Err(EngineError::Described { rank, group, differences });
            }
        }
        Ok(())
    }

    /// Opens the space of each group once the scheduler and all workers are there. The layouts of all shards together
    /// are the space's cut. Does nothing while one is missing.
    fn open_spaces(
        &mut self,
        id: &str,
        store: &Store,
        uses: &mut Uses,
        descriptions: &mut Descriptions,
    ) -> Result<(), EngineError> {
        self.open = Opened::default();
        if self.scheduler.is_none() || self.workers.len() < self.workers_expected as usize {
            return Ok(());
        }
        self.check_against(descriptions)?;
        let groups = self.cut_groups()?;
        make_room(&groups, store, uses, descriptions)?;
        let open = groups.iter().map(|group| group.open(store)).collect();
        groups.into_iter().for_each(|group| group.describe(id, descriptions));
        self.open = Arc::new(open);
        uses.add(&self.open);
        Ok(())
    }

    fn workers_by_rank(&self) -> Vec<(Rank, &WorkerSlot)> {
        let mut ranks: Vec<_> = self.workers.iter().map(|(rank, worker)| (*rank, worker)).collect();
        ranks.sort_by_key(|(rank, _)| *rank);
        ranks
    }

    /// Compares all workers with the descriptions that came since they registered.
    fn check_against(&self, descriptions: &Descriptions) -> Result<(), EngineError> {
        for (rank, worker) in self.workers_by_rank() {
            for (group, part) in worker.groups.iter().enumerate() {
                if let Some(differences) = descriptions.contradiction(part.namespace, &part.shard) {
                    return Err(EngineError::Described { rank, group, differences });
                }
            }
        }
        Ok(())
    }

    /// Computes the cut of each group from the shards of all workers. These have to match the scheduler's groups.
    fn cut_groups(&self) -> Result<Vec<CutGroup<'_>>, EngineError> {
        let ranks = self.workers_by_rank();
        let cut = |(index, spec)| self.cut_group(index, spec, &ranks);
        self.groups.iter().enumerate().map(cut).collect()
    }

    fn cut_group<'a>(
        &self,
        index: usize,
        spec: &'a GroupSpec,
        ranks: &[(Rank, &WorkerSlot)],
    ) -> Result<CutGroup<'a>, EngineError> {
        let mut layouts = Vec::new();
        let mut shards = Vec::new();
        let mut sizes = Vec::new();
        for (rank, worker) in ranks {
            let Some(part) = worker.groups.get(index).filter(|part| part.namespace == spec.namespace) else {
                let found =
                    worker.groups.iter().map(|g| g.namespace.to_string()).collect::<Vec<_>>().join(", ");
                return Err(EngineError::Mismatch(format!(
                    "group {index} is {} for the scheduler, rank {rank} has [{found}]",
                    spec.namespace
                )));
            };
            self.check_slices(index, *rank, part)?;
            layouts.push(part.shard.digest);
            sizes.push(shard_bytes(&part.regions));
            shards.push(part.shard.clone());
        }
        Ok(CutGroup { spec, cut: Cut::of(&layouts, &sizes), sizes, shards })
    }
}

/// A group with its cut. It has no space yet.
struct CutGroup<'a> {
    spec: &'a GroupSpec,
    cut: CutDigest,
    /// Bytes of each rank's shard.
    sizes: Vec<u64>,
    /// One for each rank, in rank order.
    shards: Vec<Shard>,
}

impl CutGroup<'_> {
    fn has_space(&self, store: &Store) -> bool {
        store.has_space(self.spec.namespace, self.cut, &self.sizes)
    }

    /// Finds or makes the group's space.
    fn open(&self, store: &Store) -> OpenGroup {
        let space = store.space(self.spec.namespace, &self.spec.name, self.cut, &self.sizes);
        if self.spec.crosses_hosts {
            store.let_cross_hosts(space);
        }
        OpenGroup {
            space,
            tokens_per_block: self.spec.tokens_per_block,
            window_blocks: self.spec.window_blocks,
        }
    }

    /// Keeps the shards' descriptions. Logs how the layout differs from the namespace's last one.
    fn describe(self, engine_id: &str, descriptions: &mut Descriptions) {
        if let Some(differences) = descriptions.keep(self.spec.namespace, self.cut, self.shards) {
            // Log: another layout of the same model came; its engines find no blocks of the others. Do: give the
            // engines the same tensor parallel size, backend and settings.
            tracing::info!(
                engine = engine_id,
                namespace = %self.spec.namespace,
                name = self.spec.name,
                "engine's layout differs from the namespace's previous one, and engines of different layouts share no blocks: {differences}"
            );
        }
    }
}

/// Forgets unused spaces if these groups could be too many, and refuses the groups if they still are.
fn make_room(
    groups: &[CutGroup<'_>],
    store: &Store,
    uses: &Uses,
    descriptions: &mut Descriptions,
) -> Result<(), EngineError> {
    // Some of the groups may have a space already. Then a few more than needed are forgotten.
    if store.count_spaces() + groups.len() > SPACES_MAX {
        store.forget_spaces(SPACES_MAX - FORGOTTEN_AT_ONCE, &uses.spaces());
        let left: HashSet<_> = store.spaces().into_iter().map(|space| (space.namespace, space.cut)).collect();
        descriptions.retain(|namespace, cut| left.contains(&(namespace, cut)));
    }
    let new = groups.iter().filter(|group| !group.has_space(store)).count();
    if store.count_spaces() + new > SPACES_MAX {
        return Err(EngineError::Spaces);
    }
    Ok(())
}

#[derive(Debug, Default)]
pub(crate) struct Engines {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    engines: HashMap<String, Engine>,
    next_owner: u64,
    uses: Uses,
    descriptions: Descriptions,
}

impl Inner {
    fn engine(
        &mut self,
        id: &str,
        workers: u32,
    ) -> Result<(&mut Engine, &mut Uses, &mut Descriptions), EngineError> {
        if !self.engines.contains_key(id) {
            self.next_owner += 1;
            let engine = Engine {
                owner: OwnerId(self.next_owner),
                saves: Arc::default(),
                workers_expected: workers,
                scheduler: None,
                groups: Vec::new(),
                workers: HashMap::new(),
                open: Opened::default(),
            };
            self.engines.insert(id.to_owned(), engine);
        }
        match self.engines.get_mut(id) {
            Some(engine) if engine.workers_expected == workers => {
                Ok((engine, &mut self.uses, &mut self.descriptions))
            }
            found => {
                let before = found.map_or(0, |engine| engine.workers_expected);
                Err(EngineError::Workers { engine: id.into(), now: workers, before })
            }
        }
    }
}

impl Engines {
    /// A scheduler opens its groups. Returns the engine's owner, and whether the engine is ready.
    pub(crate) fn open(
        &self,
        id: &str,
        session: SessionId,
        workers: u32,
        groups: Vec<GroupSpec>,
        cancelled_below: u64,
        store: &Store,
    ) -> Result<(OwnerId, bool), EngineError> {
        if workers == 0 || workers > WORKERS_MAX {
            return Err(EngineError::NoSuchRank { rank: Rank(0), workers });
        }
        if groups.is_empty() || groups.len() > GROUPS_MAX {
            return Err(EngineError::Groups(groups.len()));
        }
        if let Some((group, spec)) = groups.iter().enumerate().find(|(_, g)| g.tokens_per_block == 0) {
            return Err(EngineError::Tokens { group, tokens: spec.tokens_per_block });
        }
        let mut inner = self.inner.lock();
        let (engine, uses, descriptions) = inner.engine(id, workers)?;
        if let Some(other) = engine.scheduler.filter(|other| *other != session) {
            return Err(EngineError::Taken {
                engine: id.into(),
                what: "its scheduler".into(),
                session: other,
            });
        }
        engine.scheduler = Some(session);
        engine.saves.set(cancelled_below);
        engine.groups = groups;
        if let Err(error) = engine.open_spaces(id, store, uses, descriptions) {
            engine.scheduler = None;
            return Err(error);
        }
        Ok((engine.owner, engine.ready()))
    }

    /// A worker registers its memory. Returns the engine's owner.
    pub(crate) fn register(
        &self,
        id: &str,
        session: SessionId,
        rank: Rank,
        workers: u32,
        groups: Vec<WorkerGroup>,
        store: &Store,
    ) -> Result<OwnerId, EngineError> {
        if workers == 0 || workers > WORKERS_MAX || rank.0 >= workers {
            return Err(EngineError::NoSuchRank { rank, workers });
        }
        if groups.is_empty() || groups.len() > GROUPS_MAX {
            return Err(EngineError::Groups(groups.len()));
        }
        let mut inner = self.inner.lock();
        let (engine, uses, descriptions) = inner.engine(id, workers)?;
        if let Some(other) = engine.workers.get(&rank).filter(|slot| slot.session != session) {
            let session = other.session;
            return Err(EngineError::Taken { engine: id.into(), what: format!("rank {rank}"), session });
        }
        engine.workers.insert(rank, WorkerSlot { session, groups, mapped: false });
        let checked = engine.check_descriptions(rank, descriptions);
        if let Err(error) = checked.and_then(|()| engine.open_spaces(id, store, uses, descriptions)) {
            engine.workers.remove(&rank);
            engine.open = Opened::default();
            return Err(error);
        }
        Ok(engine.owner)
    }

    /// A worker has mapped the pool.
    pub(crate) fn mapped(&self, id: &str, session: SessionId) {
        let mut inner = self.inner.lock();
        let slots = inner.engines.get_mut(id).into_iter().flat_map(|engine| engine.workers.values_mut());
        slots.filter(|slot| slot.session == session).for_each(|slot| slot.mapped = true);
    }

    /// The open groups and the number of shards of a ready engine. The spaces stay while the groups are held, even if the
    /// engine goes.
    pub(crate) fn ready(&self, id: &str) -> Option<(Arc<Vec<OpenGroup>>, u32)> {
        let inner = self.inner.lock();
        let engine = inner.engines.get(id).filter(|engine| engine.ready())?;
        Some((Arc::clone(&engine.open), engine.workers_expected))
    }

    /// Whether a session is the engine's scheduler, or one of its workers.
    pub(crate) fn has_session(&self, id: &str, session: SessionId) -> bool {
        let inner = self.inner.lock();
        inner.engines.get(id).is_some_and(|engine| {
            engine.scheduler == Some(session)
                || engine.workers.values().any(|worker| worker.session == session)
        })
    }

    /// The sessions that save an engine's blocks. None if the engine is not ready.
    pub(crate) fn saver(&self, id: &str) -> Option<SavingEngine> {
        let inner = self.inner.lock();
        let engine = inner.engines.get(id).filter(|engine| engine.ready())?;
        Some(SavingEngine {
            owner: engine.owner,
            scheduler: engine.scheduler?,
            workers: engine.workers.values().map(|worker| worker.session).collect(),
            open: Arc::clone(&engine.open),
        })
    }

    /// The open groups, even while workers have yet to map the pool. Empty while one is missing. See [`ready`](Self::ready).
    pub(crate) fn opened(&self, id: &str) -> Arc<Vec<OpenGroup>> {
        self.inner.lock().engines.get(id).map(|engine| Arc::clone(&engine.open)).unwrap_or_default()
    }

    /// Runs `serve` with the open groups and the number of shards of a ready engine. Its result must not hold the id of a
    /// space.
    pub(crate) fn with_ready<T>(&self, id: &str, serve: impl FnOnce(&[OpenGroup], u32) -> T) -> Option<T> {
        let (open, workers) = self.ready(id)?;
        Some(serve(&open, workers))
    }

    /// The gate that decides which saves of an engine may become blocks.
    pub(crate) fn save_gate(&self, id: &str) -> Option<Arc<SaveGate>> {
        self.inner.lock().engines.get(id).map(|engine| Arc::clone(&engine.saves))
    }

    /// A space's layout in short; empty if no worker has described it.
    pub(crate) fn layout_in_short(&self, namespace: Namespace, cut: CutDigest) -> String {
        self.inner.lock().descriptions.in_short(namespace, cut)
    }

    /// The namespaces of all engines' groups.
    pub(crate) fn all_namespaces(&self) -> HashSet<Namespace> {
        let inner = self.inner.lock();
        inner.engines.values().flat_map(|engine| &engine.groups).map(|group| group.namespace).collect()
    }

    /// How many engines are ready, by the namespace of their first group and its name.
    pub(crate) fn ready_by_namespace(&self) -> Vec<(Namespace, String, u64)> {
        let inner = self.inner.lock();
        let mut counts: BTreeMap<Namespace, (&str, u64)> = BTreeMap::new();
        for engine in inner.engines.values().filter(|engine| engine.ready()) {
            if let Some(group) = engine.groups.first() {
                counts.entry(group.namespace).or_insert((&group.name, 0)).1 += 1;
            }
        }
        counts.into_iter().map(|(namespace, (name, count))| (namespace, name.to_owned(), count)).collect()
    }

    /// Puts a process's new session in the place of its former one. Its mapping of the pool does not count any more.
    pub(crate) fn replace(&self, id: &str, former: SessionId, session: SessionId) -> Option<OwnerId> {
        let mut inner = self.inner.lock();
        let engine = inner.engines.get_mut(id)?;
        if engine.scheduler == Some(former) {
            engine.scheduler = Some(session);
        }
        for slot in engine.workers.values_mut().filter(|slot| slot.session == former) {
            slot.session = session;
            slot.mapped = false;
        }
        Some(engine.owner)
    }

    /// Removes a session whose process can no longer touch anything. Returns the owner if it was the engine's last session.
    pub(crate) fn leave(&self, id: &str, session: SessionId) -> Option<OwnerId> {
        let mut inner = self.inner.lock();
        let engine = inner.engines.get_mut(id)?;
        if engine.scheduler == Some(session) {
            engine.scheduler = None;
            engine.open = Opened::default();
        }
        let before = engine.workers.len();
        engine.workers.retain(|_, slot| slot.session != session);
        if engine.workers.len() < before {
            engine.open = Opened::default();
        }
        if engine.scheduler.is_some() || !engine.workers.is_empty() {
            return None;
        }
        inner.engines.remove(id).map(|engine| engine.owner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kvlane_block::{LayerLayout, LayoutDigest, ShardLayout, ShardPlace};
    use kvlane_memory::{Arena, ArenaOptions, HugePages, Numa};
    use kvlane_store::StoreOptions;
    use tracing::{Event, Metadata, field::Field, span};

    use super::*;

    fn store() -> Arc<Store> {
        let options =
            ArenaOptions { bytes: 16 << 20, hugepages: HugePages::Off, numa: Numa::Off, threads: 1 };
        let arena = Arc::new(Arena::create(&options, &|_| {}).unwrap());
        let ttl = std::time::Duration::from_secs(60);
        Store::new(arena, StoreOptions { lease_ttl: ttl, claim_ttl: ttl, ..StoreOptions::default() })
    }

    fn scheduler_group() -> GroupSpec {
        GroupSpec {
            namespace: Namespace([1; 16]),
            name: "m".into(),
            tokens_per_block: 16,
            window_blocks: 0,
            crosses_hosts: false,
        }
    }

    fn worker_group(piece_bytes: u64) -> WorkerGroup {
        let region =
            Region { base: 4096, block_stride: 8192, blocks: 10, piece_bytes, piece_offsets: vec![0] };
        let slices = vec![vec![region.clone()]];
        WorkerGroup {
            namespace: Namespace([1; 16]),
            shard: Shard { digest: LayoutDigest([2; 16]), layout: None },
            regions: vec![region],
            slices,
        }
    }

    #[test]
    fn an_engine_is_ready_when_every_worker_has_mapped_the_pool() {
        let (engines, store) = (Engines::default(), store());
        engines.register("e", 1, Rank(0), 2, vec![worker_group(4096)], &store).unwrap();
        let (_, ready) = engines.open("e", 2, 2, vec![scheduler_group()], 0, &store).unwrap();
        assert!(!ready);
        engines.register("e", 3, Rank(1), 2, vec![worker_group(4096)], &store).unwrap();
        engines.mapped("e", 1);
        assert!(engines.with_ready("e", |_, _| ()).is_none());
        engines.mapped("e", 3);
        assert_eq!(engines.with_ready("e", |groups, workers| (groups.len(), workers)), Some((1, 2)));
        assert_eq!(engines.leave("e", 3), None);
        assert!(engines.with_ready("e", |_, _| ()).is_none(), "a worker is missing again");
        assert_eq!(engines.leave("e", 1), None);
        assert!(engines.leave("e", 2).is_some(), "the last session frees the owner");
    }

    #[test]
    fn a_second_engine_with_the_same_id_is_refused_and_the_first_goes_on() {
        let (engines, store) = (Engines::default(), store());
        engines.register("e", 1, Rank(0), 1, vec![worker_group(4096)], &store).unwrap();
        engines.open("e", 2, 1, vec![scheduler_group()], 0, &store).unwrap();
        engines.mapped("e", 1);
        let other =
            engines.register("e", 7, Rank(0), 1, vec![worker_group(2048)], &store).unwrap_err().to_string();
        assert!(other.contains("'e'") && other.contains("rank 0"), "{other}");
        let workers = engines.register("e", 7, Rank(1), 2, vec![worker_group(2048)], &store).unwrap_err();
        assert!(matches!(workers, EngineError::Workers { now: 2, before: 1, .. }));
        assert!(engines.with_ready("e", |_, _| ()).is_some());
    }

    #[test]
    fn ranks_that_share_blocks_must_cut_them_alike() {
        let shared = |rank: usize, bytes: [u64; 2]| {
            let slices = bytes.map(|bytes| worker_group(bytes).regions).to_vec();
            WorkerGroup { regions: slices[rank].clone(), slices, ..worker_group(1) }
        };
        let other_layout = WorkerGroup {
            shard: Shard { digest: LayoutDigest([3; 16]), layout: None },
            ..shared(1, [4096, 2048])
        };
        let cases = [
            (shared(1, [4096, 2048]), None),
            (shared(1, [4096, 1024]), Some("rank 0 shares the blocks of group 0 with rank 1")),
            (worker_group(2048), Some("rank 1")),
            (other_layout, Some("rank 1")),
        ];
        for (second, sentence) in cases {
            let (engines, store) = (Engines::default(), store());
            engines.open("e", 9, 2, vec![scheduler_group()], 0, &store).unwrap();
            engines.register("e", 1, Rank(0), 2, vec![shared(0, [4096, 2048])], &store).unwrap();
            let registered = engines.register("e", 2, Rank(1), 2, vec![second], &store);
            match sentence {
                None => assert!(registered.is_ok()),
                Some(sentence) => assert!(registered.unwrap_err().to_string().contains(sentence)),
            }
        }
    }

    /// The only worker of an engine, or one of two that hold the same.
    fn described(digest: u8, holders: u32, dtype: &str) -> WorkerGroup {
        let layer = LayerLayout {
            name: "model.layers.0.attn".into(),
            part: 0,
            dtype: dtype.into(),
            element_bytes: 2,
            backend: String::new(),
            dimensions: Vec::new(),
            heads: None,
            tokens: Some(16),
        };
        let place = ShardPlace { index: 0, holders, tensor_parallel: holders, pipeline_parallel: 1 };
        let layout = Some(Arc::new(ShardLayout { place, layers: vec![layer] }));
        let slices = vec![worker_group(4096).regions; holders as usize];
        WorkerGroup {
            shard: Shard { digest: LayoutDigest([digest; 16]), layout },
            slices,
            ..worker_group(4096)
        }
    }

    #[test]
    fn a_worker_that_describes_a_known_digest_otherwise_is_refused_and_the_others_go_on() {
        let (engines, store) = (Engines::default(), store());
        let start = |id: &str, session: u64, group: WorkerGroup| {
            engines.register(id, session, Rank(0), 1, vec![group], &store)?;
            engines.open(id, session + 1, 1, vec![scheduler_group()], 0, &store)
        };
        start("first", 1, described(2, 1, "torch.bfloat16")).unwrap();
        let refused = start("other", 3, described(2, 1, "torch.float16")).unwrap_err();
        assert!(matches!(&refused, EngineError::Described { rank: Rank(0), group: 0, differences }
            if differences.all().len() == 1));
        let sentence = refused.to_string();
        let difference =
            "layer model.layers.0.attn: torch.float16 of 2 bytes here, torch.bfloat16 of 2 bytes there";
        assert!(sentence.contains(difference) && sentence.contains("kvlane.namespace"), "{sentence}");
        // Workers that describe the same, or nothing, share.
        start("same", 5, described(2, 1, "torch.bfloat16")).unwrap();
        start("silent", 7, worker_group(4096)).unwrap();
        engines.mapped("first", 1);
        assert!(engines.with_ready("first", |_, _| ()).is_some());
        assert_eq!(store.count_spaces(), 1);
    }

    #[test]
    fn ranks_that_share_blocks_must_describe_them_alike() {
        let (engines, store) = (Engines::default(), store());
        engines.register("e", 1, Rank(0), 2, vec![described(2, 2, "torch.bfloat16")], &store).unwrap();
        let second = |dtype| engines.register("e", 2, Rank(1), 2, vec![described(2, 2, dtype)], &store);
        let refused = second("torch.float16").unwrap_err();
        assert!(matches!(refused, EngineError::Described { rank: Rank(1), group: 0, .. }));
        second("torch.bfloat16").unwrap();
    }

    #[test]
    fn of_two_engines_that_come_at_once_and_contradict_each_other_one_is_refused() {
        let (engines, store) = (Engines::default(), store());
        for (id, session, dtype) in [("a", 1, "torch.bfloat16"), ("b", 2, "torch.float16")] {
            engines.register(id, session, Rank(0), 1, vec![described(2, 1, dtype)], &store).unwrap();
        }
        engines.open("a", 3, 1, vec![scheduler_group()], 0, &store).unwrap();
        let refused = engines.open("b", 4, 1, vec![scheduler_group()], 0, &store).unwrap_err();
        assert!(matches!(refused, EngineError::Described { rank: Rank(0), .. }));
    }

    /// Keeps the messages of this thread that say how layouts differ.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<String>>>);

    impl tracing::Subscriber for Log {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            *metadata.level() == tracing::Level::INFO
        }

        fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
            span::Id::from_u64(1)
        }

        fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

        fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

        fn event(&self, event: &Event<'_>) {
            event.record(&mut |field: &Field, value: &dyn std::fmt::Debug| {
                let text = format!("{value:?}");
                if field.name() == "message" && text.contains("layout") {
                    self.0.lock().push(text);
                }
            });
        }

        fn enter(&self, _: &span::Id) {}

        fn exit(&self, _: &span::Id) {}
    }

    #[test]
    fn why_an_engine_of_another_layout_shares_no_blocks_is_logged_once() {
        let log = Log::default();
        let (engines, store) = (Engines::default(), store());
        let start = |id: &str, session: u64, group: WorkerGroup| {
            engines.register(id, session, Rank(0), 1, vec![group], &store).unwrap();
            engines.open(id, session + 1, 1, vec![scheduler_group()], 0, &store).unwrap();
            engines.leave(id, session);
            engines.leave(id, session + 1);
        };
        tracing::subscriber::with_default(log.clone(), || {
            start("first", 1, described(2, 1, "torch.bfloat16"));
            start("same", 3, described(2, 1, "torch.bfloat16"));
            assert_eq!(*log.0.lock(), Vec::<String>::new());
            start("other", 5, described(3, 1, "torch.float16"));
            start("other", 5, described(3, 1, "torch.float16"));
            start("first", 1, described(2, 1, "torch.bfloat16"));
        });
        let logged = log.0.lock();
        assert_eq!(logged.len(), 1, "{logged:?}");
        let difference =
            "layer model.layers.0.attn: torch.float16 of 2 bytes here, torch.bfloat16 of 2 bytes there";
        assert!(logged[0].contains("share no blocks") && logged[0].ends_with(difference), "{logged:?}");
    }

    fn named(number: u64) -> Namespace {
        let mut bytes = [7; 16];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        Namespace(bytes)
    }

    fn come(engines: &Engines, store: &Store, number: u64) -> Result<SpaceId, EngineError> {
        let (id, namespace, session) = (number.to_string(), named(number), number * 2 + 1);
        let worker = WorkerGroup { namespace, ..worker_group(4096) };
        engines.register(&id, session, Rank(0), 1, vec![worker], store)?;
        engines.open(&id, session + 1, 1, vec![GroupSpec { namespace, ..scheduler_group() }], 0, store)?;
        engines.mapped(&id, session);
        Ok(engines.ready(&id).unwrap().0[0].space)
    }

    fn go(engines: &Engines, number: u64) {
        engines.leave(&number.to_string(), number * 2 + 1);
        engines.leave(&number.to_string(), number * 2 + 2);
    }

    /// A daemon knew 4,096 namespaces in its life, and refused the engine after that until somebody restarted it.
    #[test]
    fn ten_thousand_engines_come_and_go() {
        let (engines, store) = (Engines::default(), store());
        come(&engines, &store, 0).unwrap();
        for number in 1..10_000 {
            come(&engines, &store, number).unwrap();
            go(&engines, number);
            assert!(store.count_spaces() <= SPACES_MAX);
        }
        assert!(store.spaces().iter().any(|space| space.namespace == named(0)), "it is still connected");
        assert!(engines.inner.lock().uses.0.len() < 16);
    }

    #[test]
    fn what_is_being_served_is_not_forgotten_although_its_engine_has_gone() {
        let (engines, store) = (Engines::default(), store());
        let space = come(&engines, &store, 0).unwrap();
        let serving = engines.ready("0").unwrap();
        go(&engines, 0);
        for number in 1..5_000 {
            come(&engines, &store, number).unwrap();
            go(&engines, number);
        }
        assert_eq!(store.namespace(space), named(0));
        drop(serving);
        (5_000..10_000).for_each(|number| {
            come(&engines, &store, number).unwrap();
            go(&engines, number);
        });
        assert!(store.spaces().iter().all(|space| space.namespace != named(0)));
        assert_ne!(come(&engines, &store, 0).unwrap(), space, "a number is never used again");
    }

    #[test]
    fn more_engines_at_once_than_can_be_kept_apart_are_refused() {
        let (engines, store) = (Engines::default(), store());
        for number in 0..SPACES_MAX as u64 {
            come(&engines, &store, number).unwrap();
        }
        let error = come(&engines, &store, 9999).unwrap_err();
        assert_eq!(error, EngineError::Spaces);
        go(&engines, 5);
        come(&engines, &store, 9999).unwrap();
    }

    #[test]
    fn groups_that_do_not_match_are_named() {
        let (engines, store) = (Engines::default(), store());
        let mut foreign = worker_group(4096);
        foreign.namespace = Namespace([9; 16]);
        engines.register("e", 1, Rank(0), 1, vec![foreign], &store).unwrap();
        let error = engines.open("e", 2, 1, vec![scheduler_group()], 0, &store).unwrap_err().to_string();
        assert!(error.contains("group 0"), "{error}");
    }
}
