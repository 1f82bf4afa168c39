//! A model of one run of the daemon: the answers of crates/server, without its threads and memory. Time is in microseconds.
//! `crates/server/tests/all/model_agrees.rs` compares its answers with the real daemon's.
#![allow(dead_code, unreachable_pub, reason = "a test of the server uses its part")]

use std::collections::{BTreeMap, BTreeSet};

use kvlane_proto::{
    WIRE_MAX,
    packed::{Change, ChangeKind, pack_changes},
    v1::{
        self, hello::Role, refused::Reason, register_worker::Method, reply::Body as Answer,
        request::Body as Ask,
    },
};

/// Entries of the journal that a reader may be behind.
const JOURNAL_MAX: usize = 16;
/// No lookup waits longer for another engine.
const WAIT_MAX_US: u64 = 30_000_000;
/// Leases that no heartbeat names live so long.
pub const LEASE_US: u64 = 60_000_000;

pub type Name = [u8; 16];
/// A block's namespace and hash.
pub type Key = (Name, Name);
/// A connection, as the daemon numbers them.
pub type SessionId = u64;
/// So long it is known what was not saved.
const NOT_SAVED_US: u64 = 5_000_000;
type Refusal = (Reason, &'static str);

/// One run of the daemon.
#[derive(Default)]
pub struct Run {
    pub boot: Name,
    pub pool_bytes: u64,
    /// The newest wire version that it speaks.
    pub wire: u32,
    /// All that came and went; the last of it can be read.
    journal: Vec<((Name, Name), ChangeKind)>,
    sessions: BTreeMap<SessionId, Session>,
    engines: BTreeMap<String, Engine>,
    /// By namespace and hash.
    blocks: BTreeMap<(Name, Name), Block>,
    leases: BTreeMap<u64, Lease>,
    last_lease: u64,
    last_page: u32,
    /// What has become a block since the last look.
    pub sealed: Vec<Shard>,
    /// Lookups that wait for another engine, by number.
    waits: BTreeMap<u64, Wait>,
    last_wait: u64,
    /// What engines were to save and did not, and when: who begins to wait for it soon after hears so at once.
    not_saved: BTreeMap<(String, Key), u64>,
    /// The last time that was told.
    now: u64,
}

/// A lookup that waits for what an engine saves.
struct Wait {
    session: SessionId,
    lookup: v1::Lookup,
    /// On what was there.
    lease: Option<u64>,
    saver: String,
    /// The hit that it waits for.
    target: u64,
    /// What is missing for it.
    keys: BTreeSet<Key>,
    /// Of these, what its saver has asked to save.
    asked: BTreeSet<Key>,
    since: u64,
    wait: u64,
    progress_at: u64,
    told: u64,
    told_at: u64,
    /// It does not come.
    is_lost: bool,
}

impl Wait {
    fn deadline(&self) -> u64 {
        (self.progress_at + self.wait).min(self.since + WAIT_MAX_US)
    }

    fn wake_at(&self) -> u64 {
        let deadline = self.deadline();
        if deadline > self.told { deadline.min(self.told_at + self.wait / 2) } else { deadline }
    }
}

struct Session {
    nonce: Name,
    role: Role,
    engine: String,
    /// False in limbo: the connection is over, the process may live.
    is_live: bool,
    opened: bool,
    worker: Option<Worker>,
    claims: BTreeMap<u64, Granted>,
    last_claim: u64,
    /// Copies that are under way for it.
    copies: u32,
}

struct Worker {
    rank: u32,
    method: Method,
}

struct Granted {
    job: u64,
    shards: Vec<Shard>,
}

#[derive(Default)]
struct Engine {
    groups: Vec<v1::Group>,
    workers: u32,
    /// By rank, the session that has mapped the pool.
    mapped: BTreeMap<u32, SessionId>,
    /// No save below comes in.
    closed_below: u64,
    /// Saves that are worked for.
    inside: Vec<u64>,
}

struct Lease {
    owner: Name,
    renewed: u64,
}

/// By rank.
#[derive(Default)]
struct Block {
    shards: BTreeMap<u32, (u32, bool)>,
    /// The engine that has claimed what is not sealed: to it that counts as present, to others as in flight.
    writers: BTreeMap<u32, String>,
    /// Shards that it needs to be whole.
    workers: u32,
}

/// One worker's part of a block, which is being saved.
#[derive(Debug, Clone)]
pub struct Shard {
    pub key: (Name, Name),
    pub rank: u32,
    pub block_id: u32,
    pub page: u32,
}

/// A copy that was asked for; its end answers the request.
#[derive(Debug, Clone)]
pub enum Copy {
    Save { job: u64, epoch: u64, shards: Vec<Shard>, result: v1::SaveResult },
    Load { epoch: u64, flags: Option<v1::LoadFlags>, places: Vec<(u32, u32)> },
}

/// What comes of a request.
#[derive(Debug, Clone)]
pub enum Said {
    Answer(Answer),
    /// Answered when the copy has ended.
    Copy(Copy),
    /// Answered by this, and when the wait of that number is over (`turn_waits`).
    Waits {
        number: u64,
        pending: Answer,
    },
    /// Answered when no save below is worked for, or it is too late.
    Gate {
        below: u64,
        timeout_ms: u32,
    },
}

fn refused((reason, sentence): Refusal) -> Answer {
    Answer::Refused(v1::Refused { reason: reason.into(), sentence: sentence.into() })
}

fn done() -> Answer {
    Answer::Done(v1::Done::default())
}

fn name(bytes: &[u8]) -> Result<Name, Refusal> {
    bytes.try_into().map_err(|_| (Reason::Invalid, "a name has 16 bytes"))
}

const NOT_ALLOWED: Refusal = (Reason::NotAllowed, "not in this role");
const CANCELLED: Refusal = (Reason::Cancelled, "its engine has cancelled this save");
const NOT_READY: Refusal = (Reason::Unknown, "the engine is not ready");

impl Run {
    pub fn new(boot: Name, pool_bytes: u64) -> Self {
        Self { boot, pool_bytes, wire: WIRE_MAX, ..Self::default() }
    }

    /// Whether copies go on for a former connection of who greets: then the greeting waits for them.
    pub fn is_copying_for(&self, hello: &v1::Hello) -> bool {
        self.sessions
            .values()
            .any(|session| session.nonce[..] == hello.process_nonce[..] && session.copies > 0)
    }

    /// What a request over this connection leads to.
    pub fn ask(&mut self, id: SessionId, ask: &Ask, now: u64) -> Said {
        self.now = now;
        match self.answer(id, ask, now) {
            Ok(said) => said,
            Err(refusal) => Said::Answer(refused(refusal)),
        }
    }

    fn answer(&mut self, id: SessionId, ask: &Ask, now: u64) -> Result<Said, Refusal> {
        if let Ask::Hello(hello) = ask {
            return self.greet(id, hello, now).map(Said::Answer);
        }
        let session = self.sessions.get_mut(&id).ok_or((Reason::Invalid, "the first message is Hello"))?;
        let engine_id = session.engine.clone();
        let answer = match ask {
            Ask::Bye(_) => {
                self.forget(id);
                done()
            }
            Ask::OpenEngine(open) => {
                if session.role != Role::Scheduler {
                    return Err(NOT_ALLOWED);
                }
                session.opened = true;
                let engine = self.engines.entry(engine_id.clone()).or_default();
                (engine.groups, engine.workers) = (open.groups.clone(), open.workers);
                engine.closed_below = open.cancelled_below;
                Answer::EngineOpened(v1::EngineOpened { ready: self.is_ready(&engine_id) })
            }
            Ask::Lookup(lookup) => {
                let owner = Self::scheduler(session)?;
                if let Some(waits) = self.wait_for(id, &engine_id, owner, lookup)? {
                    return Ok(waits);
                }
                Answer::LookupResult(self.look_up(&engine_id, owner, lookup, now)?)
            }
            Ask::Release(release) => {
                let owner = Self::scheduler(session)?;
                for lease in &release.leases {
                    if self.leases.get(lease).is_some_and(|lease| lease.owner == owner) {
                        self.leases.remove(lease);
                    }
                }
                done()
            }
            Ask::Heartbeat(heartbeat) => {
                let owner = Self::scheduler(session)?;
                let live = &heartbeat.live_leases;
                self.leases.retain(|id, lease| {
                    lease.owner != owner || live.contains(id) || now - lease.renewed <= LEASE_US
                });
                let named = self.leases.iter_mut().filter(|(id, of)| of.owner == owner && live.contains(id));
                named.for_each(|(_, lease)| lease.renewed = now);
                Answer::Done(v1::Done { is_recorded: Some(false) })
            }
            Ask::CancelSaves(cancel) => {
                Self::scheduler(session)?;
                self.lose(&engine_id);
                let engine = self.engines.entry(engine_id).or_default();
                engine.closed_below = engine.closed_below.max(cancel.below_job);
                return Ok(Said::Gate { below: cancel.below_job, timeout_ms: cancel.timeout_ms });
            }
            Ask::ReadJournal(read) => {
                Self::scheduler(session)?;
                Answer::JournalEntries(self.read_journal(&engine_id, read)?)
            }
            Ask::ShareChunks(_) if session.role == Role::Worker => done(),
            Ask::RegisterWorker(register) => {
                if session.role != Role::Worker {
                    return Err(NOT_ALLOWED);
                }
                let method = match register.method() {
                    Method::Auto if register.gpu.is_some() => Method::Gpu,
                    Method::Auto => Method::ProcessVm,
                    named => named,
                };
                session.worker = Some(Worker { rank: register.rank, method });
                let reason = String::from("as asked");
                Answer::WorkerRegistered(v1::WorkerRegistered { method: method.into(), reason })
            }
            Ask::MapPool(map) => {
                let writes = session.worker.as_ref().is_some_and(|worker| worker.method == Method::Mapped);
                if map.writable && !writes {
                    return Err(NOT_ALLOWED);
                }
                let (bytes, page_size) = (self.pool_bytes, "4 kB".into());
                Answer::PoolDescriptor(v1::PoolDescriptor { bytes, page_size })
            }
            Ask::PoolMapped(_) => {
                if let Some(worker) = &session.worker {
                    self.engines.entry(engine_id).or_default().mapped.insert(worker.rank, id);
                }
                done()
            }
            Ask::Save(save) => {
                let rank = Self::worker(session)?.rank;
                let (outcomes, shards) = self.claim(rank, &engine_id, save.job, &save.groups)?;
                let count = |of| outcomes.iter().filter(|outcome| **outcome == of).count() as u64;
                let (present, in_flight, no_room) = (count(1), count(2), count(3));
                let result = v1::SaveResult { present, in_flight, no_room, ..v1::SaveResult::default() };
                self.enter(id, &engine_id, save.job);
                return Ok(Said::Copy(Copy::Save { job: save.job, epoch: save.epoch, shards, result }));
            }
            Ask::Claim(claim) => {
                let rank = Self::worker(session)?.rank;
                let (outcomes, shards) = self.claim(rank, &engine_id, claim.job, &claim.groups)?;
                let mut pages = vec![0u32; outcomes.len()];
                let claimed = (0..outcomes.len()).filter(|index| outcomes[*index] == 0);
                claimed.zip(&shards).for_each(|(index, shard)| pages[index] = shard.page);
                let session = self.sessions.get_mut(&id).ok_or(NOT_ALLOWED)?;
                session.last_claim += 1;
                let number = session.last_claim;
                session.claims.insert(number, Granted { job: claim.job, shards });
                let pages = pages.into_iter().flat_map(u32::to_le_bytes).collect();
                Answer::ClaimResult(v1::ClaimResult { outcome: outcomes.into(), pages, claim: number })
            }
            Ask::Commit(commit) => {
                let granted = session.claims.remove(&commit.claim);
                let granted = granted.ok_or((Reason::Unknown, "that claim is not open"))?;
                let is_closed =
                    self.engines.get(&engine_id).is_none_or(|engine| granted.job < engine.closed_below);
                self.end_shards(&granted.shards, commit.written && !is_closed);
                if commit.written && is_closed {
                    return Err(CANCELLED);
                }
                done()
            }
            Ask::Load(load) => {
                if Self::worker(session)?.method != Method::Gpu {
                    return Err((Reason::NotAllowed, "this worker loads by itself"));
                }
                session.copies += 1;
                let places = |group: &v1::LoadGroup| {
                    group.block_ids.iter().copied().zip(group.pages.iter().copied()).collect::<Vec<_>>()
                };
                let places = load.groups.iter().flat_map(places).collect();
                return Ok(Said::Copy(Copy::Load { epoch: load.epoch, flags: load.flags.clone(), places }));
            }
            _ => return Err((Reason::Invalid, "nobody asks this here")),
        };
        Ok(Said::Answer(answer))
    }

    fn greet(&mut self, id: SessionId, hello: &v1::Hello, now: u64) -> Result<Answer, Refusal> {
        if self.sessions.contains_key(&id) {
            return Err((Reason::Invalid, "this connection has said Hello already"));
        }
        let nonce = name(&hello.process_nonce)?;
        let former = self.sessions.iter().find(|(_, session)| session.nonce == nonce).map(|(id, _)| *id);
        if let Some(former) = former {
            let kept: Vec<u64> = hello.live_leases.clone();
            let mut leases = std::mem::take(&mut self.leases);
            leases.retain(|id, lease| lease.owner != nonce || kept.contains(id));
            self.forget(former);
            leases.values_mut().filter(|lease| lease.owner == nonce).for_each(|lease| lease.renewed = now);
            self.leases = leases;
        }
        self.sessions.insert(
            id,
            Session {
                nonce,
                role: hello.role(),
                engine: hello.engine_id.clone(),
                is_live: true,
                opened: false,
                worker: None,
                claims: BTreeMap::new(),
                last_claim: 0,
                copies: 0,
            },
        );
        let (version, pool_bytes) = ("0.1.0".into(), self.pool_bytes);
        let wire = hello.wire_max.min(self.wire);
        Ok(Answer::Welcome(v1::Welcome { wire, version, session_id: id, pool_bytes }))
    }

    fn scheduler(session: &Session) -> Result<Name, Refusal> {
        match session {
            Session { role: Role::Scheduler, opened: true, nonce, .. } => Ok(*nonce),
            _ => Err((Reason::NotAllowed, "open the engine first")),
        }
    }

    fn worker(session: &Session) -> Result<&Worker, Refusal> {
        session.worker.as_ref().ok_or((Reason::NotAllowed, "register first"))
    }

    /// A connection is over; the process may live.
    pub fn hung_up(&mut self, id: SessionId) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.is_live = false;
            let engine_id = session.engine.clone();
            if let Some(engine) = self.engines.get_mut(&engine_id) {
                engine.mapped.retain(|_, mapped| *mapped != id);
            }
            // Whoever waited over it waits no more; others wait for its engine in vain.
            let is_of_it = |(_, wait): &(&u64, &Wait)| wait.session == id;
            let over: Vec<u64> = self.waits.iter().filter(is_of_it).map(|(number, _)| *number).collect();
            for number in over {
                self.waits.remove(&number).iter().for_each(|wait| self.end_hold(wait));
            }
            self.lose(&engine_id);
        }
    }

    /// A process has ended, and with it what it held.
    pub fn exits(&mut self, nonce: Name) {
        let of_it = |(_, session): &(&SessionId, &Session)| session.nonce == nonce;
        let ids: Vec<SessionId> = self.sessions.iter().filter(of_it).map(|(id, _)| *id).collect();
        ids.into_iter().for_each(|id| self.forget(id));
    }

    /// Whoever it was has nothing here any more.
    fn forget(&mut self, id: SessionId) {
        self.hung_up(id);
        if let Some(session) = self.sessions.remove(&id) {
            session.claims.values().for_each(|granted| self.end_shards(&granted.shards, false));
            self.leases.retain(|_, lease| lease.owner != session.nonce);
        }
    }

    fn is_ready(&self, engine_id: &str) -> bool {
        self.engines
            .get(engine_id)
            .is_some_and(|engine| !engine.groups.is_empty() && engine.mapped.len() as u32 == engine.workers)
    }

    /// All workers of an engine that has none in the simulation are there.
    pub fn stand_in_for_workers(&mut self, engine_id: &str) {
        let engine = self.engines.entry(engine_id.into()).or_default();
        engine.mapped.extend((0..engine.workers.max(1)).map(|rank| (rank, 0)));
    }

    fn look_up(
        &mut self,
        engine_id: &str,
        owner: Name,
        lookup: &v1::Lookup,
        now: u64,
    ) -> Result<v1::LookupResult, Refusal> {
        if !self.is_ready(engine_id) {
            return Ok(v1::LookupResult::default());
        }
        let wanted = self.wanted(engine_id, lookup)?;
        let workers = self.engines[engine_id].workers;
        let is_whole =
            |namespace: Name, hash: &Name| self.blocks.get(&(namespace, *hash)).is_some_and(Block::is_whole);
        let tokens = longest(&wanted, lookup.max_tokens, |(namespace, hash)| is_whole(namespace, &hash));
        if tokens == 0 {
            return Ok(v1::LookupResult { ready: true, ..v1::LookupResult::default() });
        }
        let groups = wanted.iter().enumerate().map(|(index, (namespace, of_block, window, hashes))| {
            let end = tokens / u64::from(*of_block);
            let first_block = first_of(end, *window);
            let of_hit = &hashes[first_block as usize..end as usize];
            let pages = of_hit.iter().flat_map(|hash| self.blocks[&(*namespace, *hash)].pages());
            let beyond = hashes[end as usize..].iter().take_while(|hash| is_whole(*namespace, hash)).count();
            v1::HitGroup {
                group: index as u32,
                first_block,
                pages: pages.flat_map(u32::to_le_bytes).collect(),
                workers,
                stored_blocks: end + beyond as u64,
            }
        });
        let groups = groups.collect();
        self.last_lease += 1;
        self.leases.insert(self.last_lease, Lease { owner, renewed: now });
        Ok(v1::LookupResult { tokens, lease: self.last_lease, groups, ready: true, is_recorded: false })
    }

    /// The lookup waits, if another engine is to save more of it.
    fn wait_for(
        &mut self,
        id: SessionId,
        engine_id: &str,
        owner: Name,
        lookup: &v1::Lookup,
    ) -> Result<Option<Said>, Refusal> {
        let Some(hand_off) = &lookup.hand_off else { return Ok(None) };
        let run = name(&hand_off.run)?;
        if hand_off.engine_id.is_empty() {
            return Err((Reason::Invalid, "the engine id is empty"));
        }
        let saver = self.sessions.values().find(|session| {
            session.role == Role::Scheduler && session.engine == hand_off.engine_id && session.is_live
        });
        let is_here = saver.is_some_and(|session| session.nonce == run) && self.is_ready(&hand_off.engine_id);
        let wait = (u64::from(hand_off.wait_ms) * 1000).min(WAIT_MAX_US);
        if !lookup.may_wait || !is_here || wait == 0 || !self.is_ready(engine_id) {
            return Ok(None);
        }
        let wanted = self.wanted(engine_id, lookup)?;
        let most = lookup.max_tokens.min(hand_off.tokens);
        let target = longest(&wanted, most, |_| true);
        let is_whole = |key: Key| self.blocks.get(&key).is_some_and(Block::is_whole);
        if longest(&wanted, most, is_whole) == target {
            return Ok(None);
        }
        let keys: BTreeSet<Key> = keys_of(&wanted, target).filter(|key| !is_whole(*key)).collect();
        let is_lost = keys.iter().any(|key| self.is_not_saved(&hand_off.engine_id, *key));
        let held = v1::Lookup { max_tokens: most, ..lookup.clone() };
        let lease = self.look_up(engine_id, owner, &held, self.now)?.lease;
        self.last_wait += 1;
        let now = self.now;
        let wait = Wait {
            session: id,
            lookup: lookup.clone(),
            lease: (lease > 0).then_some(lease),
            saver: hand_off.engine_id.clone(),
            target,
            keys,
            asked: BTreeSet::new(),
            since: now,
            wait,
            progress_at: now,
            told: now + wait,
            told_at: now,
            is_lost,
        };
        let pending = pending(wait.wait);
        self.waits.insert(self.last_wait, wait);
        Ok(Some(Said::Waits { number: self.last_wait, pending }))
    }

    /// What those who wait are told now, by their numbers; who gets a result waits no more.
    pub fn turn_waits(&mut self, now: u64) -> Vec<(u64, Answer)> {
        self.now = now;
        let mut told = Vec::new();
        for number in self.waits.keys().copied().collect::<Vec<_>>() {
            let Some(wait) = self.waits.get_mut(&number) else { continue };
            let is_whole = |key: &Key| self.blocks.get(key).is_some_and(Block::is_whole);
            if wait.is_lost || now >= wait.deadline() || wait.keys.iter().all(is_whole) {
                told.extend(self.waits.remove(&number).map(|wait| (number, self.end_wait(&wait))));
            } else if wait.deadline() > wait.told && now >= wait.wake_at() {
                (wait.told, wait.told_at) = (wait.deadline(), now);
                told.push((number, pending(wait.told - now)));
            }
        }
        told
    }

    /// When that is to be asked again, if nothing happens.
    pub fn waits_until(&self) -> Option<u64> {
        self.waits.values().map(Wait::wake_at).min()
    }

    pub fn waits(&self) -> usize {
        self.waits.len()
    }

    fn end_wait(&mut self, wait: &Wait) -> Answer {
        let session = &self.sessions[&wait.session];
        let (engine_id, owner) = (session.engine.clone(), session.nonce);
        let answer = self.look_up(&engine_id, owner, &wait.lookup, self.now);
        self.end_hold(wait);
        answer.map_or_else(refused, Answer::LookupResult)
    }

    fn end_hold(&mut self, wait: &Wait) {
        wait.lease.and_then(|lease| self.leases.remove(&lease));
    }

    /// An engine saves nothing of what it has promised any more.
    fn lose(&mut self, saver: &str) {
        self.waits.values_mut().filter(|wait| wait.saver == saver).for_each(|wait| wait.is_lost = true);
    }

    /// Whether an engine has tried to save a block a short while ago, in vain, and nobody else saves it.
    fn is_not_saved(&self, engine_id: &str, key: Key) -> bool {
        let at = self.not_saved.get(&(engine_id.into(), key));
        let is_fresh = at.is_some_and(|at| self.now - at <= NOT_SAVED_US);
        let others = |block: &Block| {
            block.shards.keys().any(|rank| block.writers.get(rank).is_none_or(|writer| writer != engine_id))
        };
        is_fresh && !self.blocks.get(&key).is_some_and(others)
    }

    /// An engine has asked to save a block, with this outcome.
    fn note_asked(&mut self, engine_id: &str, key: Key, outcome: u8) {
        match outcome {
            0 => drop(self.not_saved.remove(&(engine_id.into(), key))),
            3 => drop(self.not_saved.insert((engine_id.into(), key), self.now)),
            _ => {}
        }
        for wait in self.waits.values_mut().filter(|wait| wait.keys.contains(&key)) {
            if wait.saver == engine_id {
                wait.asked.insert(key);
                wait.is_lost |= outcome == 3;
            }
            if outcome == 0 {
                wait.progress_at = self.now;
            }
        }
    }

    /// A shard of a block is written, or will not be.
    fn note_end(&mut self, key: Key, is_written: bool) {
        for wait in self.waits.values_mut().filter(|wait| wait.keys.contains(&key)) {
            if is_written {
                wait.progress_at = self.now;
            } else {
                wait.is_lost |= wait.asked.contains(&key);
            }
        }
    }

    fn wanted(&self, engine_id: &str, lookup: &v1::Lookup) -> Result<Vec<Wanted>, Refusal> {
        let engine = &self.engines[engine_id];
        if lookup.groups.len() != engine.groups.len() {
            return Err((Reason::Invalid, "other groups than the engine's"));
        }
        let mut wanted = Vec::new();
        for (group, asked) in engine.groups.iter().zip(&lookup.groups) {
            let hashes = asked.hashes.chunks(16).map(name).collect::<Result<Vec<_>, _>>()?;
            wanted.push((name(&group.namespace)?, group.tokens_per_block, group.window_blocks, hashes));
        }
        Ok(wanted)
    }

    fn read_journal(&self, engine_id: &str, read: &v1::ReadJournal) -> Result<v1::JournalEntries, Refusal> {
        // A cursor is one more than the entries that were read.
        let end = self.journal.len();
        let from = match read.cursor.checked_sub(1).map(|from| from as usize) {
            Some(from) if from <= end && end - from <= JOURNAL_MAX => from,
            _ => {
                let cursor = end as u64 + 1;
                return Ok(v1::JournalEntries { cursor, start_again: true, ..v1::JournalEntries::default() });
            }
        };
        let to = if self.is_ready(engine_id) { end.min(from + read.max as usize) } else { from };
        let groups = &self.engines.get(engine_id).ok_or(NOT_READY)?.groups;
        let changes = self.journal[from..to].iter().flat_map(|((namespace, hash), kind)| {
            let of_it = groups.iter().enumerate().filter(|(_, group)| group.namespace[..] == namespace[..]);
            of_it.map(|(group, _)| Change { kind: *kind, group: group as u8, hash: *hash })
        });
        let entries = pack_changes(changes);
        let has_more = to > from && to < end;
        Ok(v1::JournalEntries { cursor: to as u64 + 1, start_again: false, has_more, entries })
    }

    /// Makes room: of the blocks that can be found, the one with this number goes. False if there is none.
    pub fn evict(&mut self, pick: u64) -> bool {
        let whole = self.blocks.iter().filter(|(_, block)| block.is_whole()).map(|(key, _)| *key);
        let whole: Vec<_> = whole.collect();
        let Some(key) = whole.get((pick % whole.len().max(1) as u64) as usize) else { return false };
        self.blocks.remove(key);
        self.journal.push((*key, ChangeKind::Gone));
        true
    }

    /// Whether lookups find a block.
    pub fn has(&self, key: &(Name, Name)) -> bool {
        self.blocks.get(key).is_some_and(Block::is_whole)
    }

    /// Outcomes as the wire numbers them, and the shards that are to be written.
    fn claim(
        &mut self,
        rank: u32,
        engine_id: &str,
        job: u64,
        groups: &[v1::SaveGroup],
    ) -> Result<(Vec<u8>, Vec<Shard>), Refusal> {
        let engine = self.engines.get(engine_id).ok_or(NOT_READY)?;
        if job < engine.closed_below {
            let keys = groups.iter().flat_map(|group| {
                let of = engine.groups.get(group.group as usize).and_then(|of| name(&of.namespace).ok());
                let hashes = group.hashes.chunks(16).filter_map(|hash| name(hash).ok());
                hashes.filter_map(move |hash| Some((of?, hash)))
            });
            // Who waits for them is told, but for what somebody else has saved or saves.
            let lost: Vec<Key> = keys.filter(|key| !self.blocks.contains_key(key)).collect();
            lost.into_iter().for_each(|key| self.note_asked(engine_id, key, 3));
            return Err(CANCELLED);
        }
        if !self.is_ready(engine_id) {
            return Err(NOT_READY);
        }
        let mut asked = Vec::new();
        let (mut outcomes, mut shards) = (Vec::new(), Vec::new());
        for group in groups {
            let of = engine.groups.get(group.group as usize).ok_or((Reason::Invalid, "no such group"))?;
            let namespace = name(&of.namespace)?;
            for (hash, block_id) in group.hashes.chunks(16).zip(&group.block_ids) {
                let key = (namespace, name(hash)?);
                let block = self.blocks.entry(key).or_default();
                block.workers = engine.workers;
                match block.shards.get(&rank) {
                    // In flight is what another writes.
                    Some((_, is_sealed)) => {
                        let is_own = block.writers.get(&rank).is_some_and(|writer| writer == engine_id);
                        outcomes.push(if *is_sealed || is_own { 1 } else { 2 });
                    }
                    None if u64::from(self.last_page + 1) * 4096 >= self.pool_bytes => outcomes.push(3),
                    None => {
                        self.last_page += 1;
                        let page = self.last_page;
                        block.shards.insert(rank, (page, false));
                        block.writers.insert(rank, engine_id.into());
                        shards.push(Shard { key, rank, block_id: *block_id, page });
                        outcomes.push(0);
                    }
                }
                asked.extend(outcomes.last().map(|outcome| (key, *outcome)));
            }
        }
        asked.into_iter().for_each(|(key, outcome)| self.note_asked(engine_id, key, outcome));
        Ok((outcomes, shards))
    }

    fn end_shards(&mut self, shards: &[Shard], seal: bool) {
        for shard in shards {
            let Some(block) = self.blocks.get_mut(&shard.key) else { continue };
            if seal {
                block.shards.insert(shard.rank, (shard.page, true));
                self.sealed.push(shard.clone());
                if block.is_whole() {
                    self.journal.push((shard.key, ChangeKind::Visible));
                }
            } else {
                // Its page is not used again here: whoever still writes it does no harm, and is seen.
                block.shards.remove(&shard.rank);
                if let Some(writer) = block.writers.get(&shard.rank) {
                    self.not_saved.insert((writer.clone(), shard.key), self.now);
                }
                self.journal.push((shard.key, ChangeKind::Gone));
                if block.shards.is_empty() {
                    self.blocks.remove(&shard.key);
                }
            }
            self.note_end(shard.key, seal);
        }
    }

    fn enter(&mut self, id: SessionId, engine_id: &str, job: u64) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.copies += 1;
        }
        self.engines.entry(engine_id.into()).or_default().inside.push(job);
    }

    fn leave(&mut self, id: SessionId, job: u64) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.copies = session.copies.saturating_sub(1);
        if let Some(engine) = self.engines.get_mut(&session.engine)
            && let Some(at) = engine.inside.iter().position(|inside| *inside == job)
        {
            engine.inside.swap_remove(at);
        }
    }

    /// Whether a save is cancelled while it is worked for.
    pub fn is_cancelled(&self, id: SessionId, job: u64) -> bool {
        let engine = self.sessions.get(&id).and_then(|session| self.engines.get(&session.engine));
        engine.is_none_or(|engine| job < engine.closed_below)
    }

    /// The copy of a save has ended. What was copied is sealed; its answer.
    pub fn save_ends(&mut self, id: SessionId, copy: &Copy, copied: bool) -> Answer {
        let Copy::Save { job, shards, result, .. } = copy else { return done() };
        self.leave(id, *job);
        self.end_shards(shards, copied);
        let count = shards.len() as u64;
        let (saved, failed) = if copied { (count, 0) } else { (0, count) };
        Answer::SaveResult(v1::SaveResult { saved, failed, bytes: saved * 4096, ..*result })
    }

    /// The copy of a load has ended.
    pub fn load_ends(&mut self, id: SessionId, copy: &Copy, copied: bool) -> Answer {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.copies = session.copies.saturating_sub(1);
        }
        match copy {
            Copy::Load { places, .. } if copied => {
                let blocks = places.len() as u64;
                Answer::LoadResult(v1::LoadResult { blocks, bytes: blocks * 4096 })
            }
            _ => refused((Reason::Invalid, "the copy failed or was cancelled")),
        }
    }

    /// A save of workers that are not simulated begins. False where it is not taken.
    pub fn stand_in_save_begins(&mut self, engine_id: &str, job: u64, keys: &[Key], now: u64) -> bool {
        self.now = now;
        let may = self.is_ready(engine_id) && job >= self.engines[engine_id].closed_below;
        if may {
            self.engines.entry(engine_id.into()).or_default().inside.push(job);
        }
        keys.iter().for_each(|key| self.note_asked(engine_id, *key, if may { 0 } else { 3 }));
        may
    }

    /// It ends: its blocks are there unless it was cancelled meanwhile. True if they are.
    pub fn stand_in_save_ends(&mut self, engine_id: &str, job: u64, keys: &[Key], now: u64) -> bool {
        self.now = now;
        let Some(engine) = self.engines.get_mut(engine_id) else { return false };
        if let Some(at) = engine.inside.iter().position(|inside| *inside == job) {
            engine.inside.swap_remove(at);
        }
        if job < engine.closed_below {
            for key in keys {
                self.note_end(*key, false);
                self.not_saved.insert((engine_id.into(), *key), now);
            }
            return false;
        }
        let workers = engine.workers;
        for key in keys {
            self.note_end(*key, true);
            let block = self.blocks.entry(*key).or_default();
            block.workers = workers;
            for rank in 0..workers {
                self.last_page += 1;
                block.shards.insert(rank, (self.last_page, true));
            }
            self.journal.push((*key, ChangeKind::Visible));
        }
        true
    }

    /// Whether the gate is closed behind all saves below.
    pub fn is_gate_closed(&self, id: SessionId, below: u64) -> bool {
        let engine = self.sessions.get(&id).and_then(|session| self.engines.get(&session.engine));
        engine.is_none_or(|engine| engine.inside.iter().all(|job| *job >= below))
    }

    pub fn gate_answer(is_closed: bool) -> Answer {
        if is_closed { done() } else { refused((Reason::Limit, "saves were still being copied")) }
    }

    pub fn leases(&self) -> BTreeSet<u64> {
        self.leases.keys().copied().collect()
    }
}

/// A group of a lookup: namespace, tokens a block, window, hashes.
type Wanted = (Name, u32, u32, Vec<Name>);

fn first_of(end: u64, window: u32) -> u64 {
    if window == 0 { 0 } else { end.saturating_sub(window.into()) }
}

/// The blocks that a hit of so many tokens needs.
fn keys_of(wanted: &[Wanted], tokens: u64) -> impl Iterator<Item = Key> + '_ {
    wanted.iter().flat_map(move |(namespace, of_block, window, hashes)| {
        let end = tokens / u64::from(*of_block);
        let of_hit = &hashes[first_of(end, *window) as usize..end as usize];
        of_hit.iter().map(|hash| (*namespace, *hash))
    })
}

/// The longest hit.
fn longest(wanted: &[Wanted], max_tokens: u64, is_whole: impl Fn(Key) -> bool) -> u64 {
    let step = wanted.iter().map(|(_, tokens, ..)| u64::from(*tokens)).max().unwrap_or(1);
    let mut tokens = max_tokens / step * step;
    for (_, of_block, _, hashes) in wanted {
        tokens = tokens.min(hashes.len() as u64 * u64::from(*of_block) / step * step);
    }
    while tokens > 0 && !keys_of(wanted, tokens).all(&is_whole) {
        tokens -= step;
    }
    tokens
}

fn pending(wait: u64) -> Answer {
    Answer::LookupPending(v1::LookupPending { wait_ms: wait.div_ceil(1000) as u32 })
}

impl Block {
    fn is_whole(&self) -> bool {
        self.workers > 0
            && self.shards.len() as u32 == self.workers
            && self.shards.values().all(|(_, sealed)| *sealed)
    }

    fn pages(&self) -> Vec<u32> {
        self.shards.values().map(|(page, _)| *page).collect()
    }
}
