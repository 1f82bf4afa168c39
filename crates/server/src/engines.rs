//! Engines: which sessions belong together, and which spaces their groups use.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use kvlane_block::{Cut, LayoutDigest, Namespace, Region, shard_bytes};
use kvlane_store::{OwnerId, SpaceId, Store};
use parking_lot::Mutex;
use thiserror::Error;

use crate::save_gate::SaveGate;

/// One connection, unique in a run of the daemon.
pub(crate) type SessionId = u64;

/// Groups of one engine; vLLM has rarely more than five.
const GROUPS_MAX: usize = 64;
/// Workers of one engine.
const WORKERS_MAX: u32 = 1024;

/// Spaces are never forgotten, so their number is bounded.
const SPACES_MAX: usize = 4096;

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
    Rank { rank: u32, workers: u32 },
    #[error("{0} groups were opened; 1 to {GROUPS_MAX} are possible")]
    Groups(usize),
    #[error("group {group} has {tokens} tokens a block")]
    Tokens { group: usize, tokens: u32 },
    #[error(
        "{SPACES_MAX} different namespaces and layouts are known, the most this daemon keeps apart: restart it"
    )]
    Spaces,
    #[error("the worker's groups do not match those of its scheduler: {0}")]
    Mismatch(String),
}

/// A KV cache group as the scheduler opened it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GroupSpec {
    pub(crate) namespace: Namespace,
    pub(crate) name: String,
    pub(crate) tokens_per_block: u32,
    pub(crate) window_blocks: u32,
}

/// A worker's part of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WorkerGroup {
    pub(crate) namespace: Namespace,
    pub(crate) layout: LayoutDigest,
    /// Of the worker's shard.
    pub(crate) regions: Vec<Region>,
    /// What a load brings: the shard alone, or the slices of all ranks that hold the same block.
    pub(crate) slices: Vec<Vec<Region>>,
}

/// What a session needs to know to serve lookups and saves of a group.
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
    groups: Vec<GroupSpec>,
    workers: HashMap<u32, WorkerSlot>,
    open: Vec<OpenGroup>,
}

impl Engine {
    fn ready(&self) -> bool {
        !self.open.is_empty() && self.workers.values().all(|worker| worker.mapped)
    }

    /// Ranks that share their blocks must cut them alike: each reads what the others saved.
    fn check_slices(&self, index: usize, rank: u32, part: &WorkerGroup) -> Result<(), EngineError> {
        if part.slices.len() < 2 {
            return Ok(());
        }
        let first = rank - rank % part.slices.len() as u32;
        for (peer, slice) in (first..).zip(&part.slices) {
            let other = self.workers.get(&peer).and_then(|worker| worker.groups.get(index));
            let agrees = |other: &WorkerGroup| {
                other.slices.len() == part.slices.len()
                    && other.layout == part.layout
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

    /// Once scheduler and all workers are there, each group's space is known: its namespace and the cut that all
    /// shards together make.
    fn open_spaces(&mut self, store: &Store) -> Result<(), EngineError> {
        self.open.clear();
        if self.scheduler.is_none() || self.workers.len() < self.workers_expected as usize {
            return Ok(());
        }
        let mut ranks: Vec<_> = self.workers.iter().collect();
        ranks.sort_by_key(|(rank, _)| **rank);
        let mut found = Vec::new();
        for (index, group) in self.groups.iter().enumerate() {
            let mut layouts = Vec::new();
            let mut sizes = Vec::new();
            for (rank, worker) in &ranks {
                let Some(part) = worker.groups.get(index).filter(|part| part.namespace == group.namespace)
                else {
                    let found =
                        worker.groups.iter().map(|g| g.namespace.to_string()).collect::<Vec<_>>().join(", ");
                    return Err(EngineError::Mismatch(format!(
                        "group {index} is {} for the scheduler, rank {rank} has [{found}]",
                        group.namespace
                    )));
                };
                self.check_slices(index, **rank, part)?;
                layouts.push(part.layout);
                sizes.push(shard_bytes(&part.regions));
            }
            found.push((group, Cut::of(&layouts, &sizes), sizes));
        }
        let known: HashSet<_> = store.spaces().iter().map(|space| (space.namespace, space.cut)).collect();
        let new = found.iter().filter(|(group, cut, _)| !known.contains(&(group.namespace, *cut))).count();
        if known.len() + new > SPACES_MAX {
            return Err(EngineError::Spaces);
        }
        let open = found
            .into_iter()
            .map(|(group, cut, sizes)| OpenGroup {
                space: store.space(group.namespace, &group.name, cut, &sizes),
                tokens_per_block: group.tokens_per_block,
                window_blocks: group.window_blocks,
            })
            .collect();
        self.open = open;
        Ok(())
    }
}

/// All engines.
#[derive(Debug, Default)]
pub(crate) struct Engines {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    engines: HashMap<String, Engine>,
    next_owner: u64,
}

impl Inner {
    fn engine(&mut self, id: &str, workers: u32) -> Result<&mut Engine, EngineError> {
        if !self.engines.contains_key(id) {
            self.next_owner += 1;
            let engine = Engine {
                owner: OwnerId(self.next_owner),
                saves: Arc::default(),
                workers_expected: workers,
                scheduler: None,
                groups: Vec::new(),
                workers: HashMap::new(),
                open: Vec::new(),
            };
            self.engines.insert(id.to_owned(), engine);
        }
        match self.engines.get_mut(id) {
            Some(engine) if engine.workers_expected == workers => Ok(engine),
            found => {
                let before = found.map_or(0, |engine| engine.workers_expected);
                Err(EngineError::Workers { engine: id.into(), now: workers, before })
            }
        }
    }
}

impl Engines {
    /// The scheduler opens its groups. Answers the engine's owner and whether it is ready.
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
            return Err(EngineError::Rank { rank: 0, workers });
        }
        if groups.is_empty() || groups.len() > GROUPS_MAX {
            return Err(EngineError::Groups(groups.len()));
        }
        if let Some((group, spec)) = groups.iter().enumerate().find(|(_, g)| g.tokens_per_block == 0) {
            return Err(EngineError::Tokens { group, tokens: spec.tokens_per_block });
        }
        let mut inner = self.inner.lock();
        let engine = inner.engine(id, workers)?;
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
        if let Err(error) = engine.open_spaces(store) {
            engine.scheduler = None;
            return Err(error);
        }
        Ok((engine.owner, engine.ready()))
    }

    /// A worker describes its memory.
    pub(crate) fn register(
        &self,
        id: &str,
        session: SessionId,
        rank: u32,
        workers: u32,
        groups: Vec<WorkerGroup>,
        store: &Store,
    ) -> Result<OwnerId, EngineError> {
        if workers == 0 || workers > WORKERS_MAX || rank >= workers {
            return Err(EngineError::Rank { rank, workers });
        }
        if groups.is_empty() || groups.len() > GROUPS_MAX {
            return Err(EngineError::Groups(groups.len()));
        }
        let mut inner = self.inner.lock();
        let engine = inner.engine(id, workers)?;
        if let Some(other) = engine.workers.get(&rank).filter(|slot| slot.session != session) {
            let session = other.session;
            return Err(EngineError::Taken { engine: id.into(), what: format!("rank {rank}"), session });
        }
        engine.workers.insert(rank, WorkerSlot { session, groups, mapped: false });
        if let Err(error) = engine.open_spaces(store) {
            engine.workers.remove(&rank);
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

    /// Runs `serve` with the open groups and the number of shards, when the engine is ready.
    pub(crate) fn with_ready<T>(&self, id: &str, serve: impl FnOnce(&[OpenGroup], u32) -> T) -> Option<T> {
        let (open, workers) = {
            let inner = self.inner.lock();
            let engine = inner.engines.get(id).filter(|engine| engine.ready())?;
            (engine.open.clone(), engine.workers_expected)
        };
        Some(serve(&open, workers))
    }

    /// Which saves of an engine may become blocks.
    pub(crate) fn save_gate(&self, id: &str) -> Option<Arc<SaveGate>> {
        self.inner.lock().engines.get(id).map(|engine| Arc::clone(&engine.saves))
    }

    /// The namespaces of all engines' groups.
    pub(crate) fn all_namespaces(&self) -> HashSet<Namespace> {
        let inner = self.inner.lock();
        inner.engines.values().flat_map(|engine| &engine.groups).map(|group| group.namespace).collect()
    }

    /// The same process came back over a new connection: it takes its former place, without its mapping.
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

    /// A session's process can no longer touch anything. Answers the owner when it was the engine's last one.
    pub(crate) fn leave(&self, id: &str, session: SessionId) -> Option<OwnerId> {
        let mut inner = self.inner.lock();
        let engine = inner.engines.get_mut(id)?;
        if engine.scheduler == Some(session) {
            engine.scheduler = None;
            engine.open.clear();
        }
        let before = engine.workers.len();
        engine.workers.retain(|_, slot| slot.session != session);
        if engine.workers.len() < before {
            engine.open.clear();
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

    use kvlane_memory::{Arena, ArenaOptions, HugePages, Numa};
    use kvlane_store::StoreOptions;

    use super::*;

    fn store() -> Arc<Store> {
        let options =
            ArenaOptions { bytes: 16 << 20, hugepages: HugePages::Off, numa: Numa::Off, threads: 1 };
        let arena = Arc::new(Arena::create(&options, &|_| {}).unwrap());
        let ttl = std::time::Duration::from_secs(60);
        Store::new(arena, StoreOptions { lease_ttl: ttl, claim_ttl: ttl, ..StoreOptions::default() })
    }

    fn scheduler_group() -> GroupSpec {
        GroupSpec { namespace: Namespace([1; 16]), name: "m".into(), tokens_per_block: 16, window_blocks: 0 }
    }

    fn worker_group(piece_bytes: u64) -> WorkerGroup {
        let region =
            Region { base: 4096, block_stride: 8192, blocks: 10, piece_bytes, piece_offsets: vec![0] };
        let slices = vec![vec![region.clone()]];
        WorkerGroup {
            namespace: Namespace([1; 16]),
            layout: LayoutDigest([2; 16]),
            regions: vec![region],
            slices,
        }
    }

    #[test]
    fn an_engine_is_ready_when_every_worker_has_mapped_the_pool() {
        let (engines, store) = (Engines::default(), store());
        engines.register("e", 1, 0, 2, vec![worker_group(4096)], &store).unwrap();
        let (_, ready) = engines.open("e", 2, 2, vec![scheduler_group()], 0, &store).unwrap();
        assert!(!ready);
        engines.register("e", 3, 1, 2, vec![worker_group(4096)], &store).unwrap();
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
        engines.register("e", 1, 0, 1, vec![worker_group(4096)], &store).unwrap();
        engines.open("e", 2, 1, vec![scheduler_group()], 0, &store).unwrap();
        engines.mapped("e", 1);
        let other = engines.register("e", 7, 0, 1, vec![worker_group(2048)], &store).unwrap_err().to_string();
        assert!(other.contains("'e'") && other.contains("rank 0"), "{other}");
        let workers = engines.register("e", 7, 1, 2, vec![worker_group(2048)], &store).unwrap_err();
        assert!(matches!(workers, EngineError::Workers { now: 2, before: 1, .. }));
        assert!(engines.with_ready("e", |_, _| ()).is_some());
    }

    #[test]
    fn ranks_that_share_blocks_must_cut_them_alike() {
        let shared = |rank: usize, bytes: [u64; 2]| {
            let slices = bytes.map(|bytes| worker_group(bytes).regions).to_vec();
            WorkerGroup { regions: slices[rank].clone(), slices, ..worker_group(1) }
        };
        let other_layout = WorkerGroup { layout: LayoutDigest([3; 16]), ..shared(1, [4096, 2048]) };
        let cases = [
            (shared(1, [4096, 2048]), None),
            (shared(1, [4096, 1024]), Some("rank 0 shares the blocks of group 0 with rank 1")),
            (worker_group(2048), Some("rank 1")),
            (other_layout, Some("rank 1")),
        ];
        for (second, sentence) in cases {
            let (engines, store) = (Engines::default(), store());
            engines.open("e", 9, 2, vec![scheduler_group()], 0, &store).unwrap();
            engines.register("e", 1, 0, 2, vec![shared(0, [4096, 2048])], &store).unwrap();
            let registered = engines.register("e", 2, 1, 2, vec![second], &store);
            match sentence {
                None => assert!(registered.is_ok()),
                Some(sentence) => assert!(registered.unwrap_err().to_string().contains(sentence)),
            }
        }
    }

    #[test]
    fn groups_that_do_not_match_are_named() {
        let (engines, store) = (Engines::default(), store());
        let mut foreign = worker_group(4096);
        foreign.namespace = Namespace([9; 16]);
        engines.register("e", 1, 0, 1, vec![foreign], &store).unwrap();
        let error = engines.open("e", 2, 1, vec![scheduler_group()], 0, &store).unwrap_err().to_string();
        assert!(error.contains("group 0"), "{error}");
    }
}
