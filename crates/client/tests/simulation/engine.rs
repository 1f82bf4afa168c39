//! An engine as its workers see it: steps with saves and loads, and the promises of its scheduler. The scheduler's own link is
//! played in the other half of the simulation; here the seed decides whether it is connected.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use kvlane_block::{BlockHash, BlockId};
use kvlane_client::links::ids::JobKey;
use kvlane_client::links::promises::Promises;
use kvlane_client::{LoadGroup, Release, SaveGroupSpec, Work};
use kvlane_memory::PoolPage;
use kvlane_proto::v1::{self, hello::Role, reply::Body as Answer, request::Body as Ask};

use crate::copies::{BLOCKS, Known, token};
use crate::daemon::{Name, Said};
use crate::scheduler::{NAMESPACES, TOKENS, engine_id, hash, prompt_blocks};
use crate::worker::worker_index;
use crate::world::{MS, Next, SECOND, World};

const PROMPTS: u64 = 10;
/// Above all connections.
const SESSION: u64 = 1 << 40;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wish {
    Save(usize),
    Load(usize),
    Cancel,
}

/// What a step brings to the workers.
pub(crate) struct Meta {
    jobs: Vec<Vec<(JobKey, Work)>>,
    promises: Promises,
    length: u64,
}

pub(crate) struct Engine {
    index: usize,
    ranks: usize,
    groups: usize,
    wishes: Vec<(u64, Wish)>,
    /// The run that its scheduler is connected to.
    run: Option<usize>,
    gone: Vec<Name>,
    sessions: u64,
    last_job: u64,
    last_key: u64,
    step_ends: u64,
    pub(crate) is_closed: bool,
    /// Jobs of the calm.
    last_save: Option<JobKey>,
    last_load: Option<JobKey>,
    /// No steps any more.
    is_idle: bool,
}

impl Engine {
    pub(crate) fn new(index: usize, ranks: usize, groups: usize) -> Self {
        Self {
            index,
            ranks,
            groups,
            wishes: Vec::new(),
            run: None,
            gone: Vec::new(),
            sessions: 0,
            last_job: 0,
            last_key: 0,
            step_ends: 0,
            is_closed: false,
            last_save: None,
            last_load: None,
            is_idle: false,
        }
    }

    pub(crate) fn plan(&mut self, world: &mut World, trouble: u64) {
        for _ in 0..4 + world.dice.below(12) {
            let at =
                if world.dice.one_in(2) { world.dice.below(2 * SECOND) } else { world.dice.below(trouble) };
            let prompt = world.dice.below(PROMPTS) as usize;
            self.wishes.push((at, Wish::Save(prompt)));
            if world.dice.one_in(6) {
                self.wishes.push((at + world.dice.below(SECOND), Wish::Cancel));
            }
            for _ in 0..2 + world.dice.below(8) {
                self.wishes.push((at + world.dice.below(trouble), Wish::Load(prompt)));
            }
        }
        world.later(0, Next::Step(self.index));
    }

    /// Nothing goes wrong any more. Then a prompt is saved and loaded.
    pub(crate) fn calm_down(&mut self, at: u64, world: &mut World) {
        let prompt = world.dice.below(PROMPTS) as usize;
        self.wishes.clear();
        self.wishes.extend([(at, Wish::Save(prompt)), (at + 15 * SECOND, Wish::Load(prompt))]);
    }

    pub(crate) fn step(&mut self, world: &mut World) {
        if self.is_closed || self.is_idle {
            return;
        }
        self.look_at_connection(world);
        let mut meta = Meta { jobs: vec![Vec::new(); self.ranks], promises: Promises::default(), length: 0 };
        let wishes = std::mem::take(&mut self.wishes);
        for (at, wish) in wishes {
            let is_done = at <= world.now
                && match wish {
                    Wish::Save(prompt) => self.save(prompt, &mut meta, world),
                    // Until it is a hit.
                    Wish::Load(prompt) => self.load(prompt, &mut meta, world),
                    Wish::Cancel => self.cancel(world),
                };
            if !is_done {
                self.wishes.push((at, wish));
            }
        }
        let present = self.run.map(|run| world.processes[run].run.boot);
        // Where the kernel tells of ends, the scheduler says of a run that it is over when its process is.
        let is_over = |boot: &&Name| {
            let ended = world.processes.iter().any(|process| process.run.boot == **boot && process.has_ended);
            ended || !world.tells_ends()
        };
        meta.promises = Promises { present, gone: self.gone.iter().filter(is_over).copied().collect() };
        meta.length = match world.is_calm {
            true => world.dice.below(100 * MS),
            false => {
                let most = [20 * MS, 20 * MS, 300 * MS, 300 * MS, 8 * SECOND][world.dice.below(5) as usize];
                world.dice.below(most)
            }
        };
        let begins = world.now.max(self.step_ends) + world.dice.below(2 * MS);
        self.step_ends = begins + meta.length;
        let ahead = world.dice.below(meta.length + 1);
        let most = [MS, 300 * MS, 2 * SECOND][world.dice.below(3) as usize];
        let gap = if world.is_calm { SECOND } else { world.dice.below(most) };
        world.later(begins + ahead.max(1) + gap, Next::Step(self.index));
        world.later(begins, Next::Meta { engine: self.index, meta: Box::new(meta) });
        self.is_idle = world.is_calm && self.last_load.is_some() && world.dice.one_in(3);
    }

    pub(crate) fn begin_step(&mut self, meta: Meta, world: &mut World) {
        let Meta { jobs, promises, length } = meta;
        for (rank, jobs) in jobs.into_iter().enumerate() {
            let promises = promises.clone();
            world.with_worker(worker_index(self.index, rank), |worker, world| {
                worker.begin_step(jobs, promises, length, world);
            });
        }
        world.later(world.now + length, Next::StepEnds { engine: self.index });
    }

    pub(crate) fn end_step(&mut self, world: &mut World) {
        for rank in 0..self.ranks {
            let is_in_step = world.now < self.step_ends;
            world.with_worker(worker_index(self.index, rank), |worker, world| {
                worker.end_step(is_in_step, world);
            });
        }
    }

    fn session(&self) -> u64 {
        SESSION + self.index as u64 * 1000 + self.sessions
    }

    fn ask(&self, ask: Ask, world: &mut World) -> Option<Answer> {
        let process = &mut world.processes[self.run?];
        if process.is_dead || process.is_stopped {
            return None;
        }
        let now = world.now;
        match process.run.ask(self.session(), &ask, now) {
            Said::Answer(answer) => Some(answer),
            Said::Copy(_) | Said::Gate { .. } | Said::Waits { .. } => None,
        }
    }

    /// Its scheduler hears of an end some steps later, and of a new run.
    fn look_at_connection(&mut self, world: &mut World) {
        if let Some(run) = self.run {
            let is_over = world.processes[run].is_dead || !world.is_calm && world.dice.one_in(40);
            if is_over && world.dice.one_in(2) {
                let session = self.session();
                let process = &mut world.processes[run];
                process.run.hung_up(session);
                self.gone.retain(|boot| *boot != process.run.boot);
                self.gone.push(process.run.boot);
                let surplus = self.gone.len().saturating_sub(8);
                self.gone.drain(..surplus);
                self.run = None;
            }
        }
        let last = world.processes.len().wrapping_sub(1);
        let serves = world.processes.last().is_some_and(|process| !process.is_dead && !process.is_stopped);
        if self.run.is_none() && serves && (world.is_calm || world.dice.one_in(2)) {
            self.run = Some(last);
            self.sessions += 1;
            let boot = world.processes[last].run.boot;
            if self.gone.contains(&boot) && !world.tells_ends() {
                world.came_back.insert(last);
            }
            self.gone.retain(|gone| *gone != boot);
            let hello = v1::Hello {
                role: Role::Scheduler.into(),
                engine_id: engine_id(self.index),
                process_nonce: vec![200 + self.index as u8; 16].into(),
                ..v1::Hello::default()
            };
            self.ask(Ask::Hello(hello), world);
            let group = |group: usize| v1::Group {
                namespace: vec![NAMESPACES[group]; 16].into(),
                name: "g".into(),
                tokens_per_block: TOKENS as u32,
                window_blocks: 0,
                crosses_hosts: false,
            };
            let groups = (0..self.groups).map(group).collect();
            let workers = self.ranks as u32;
            self.ask(Ask::OpenEngine(v1::OpenEngine { groups, workers, cancelled_below: 0 }), world);
        }
    }

    /// Blocks that no job holds, at any rank.
    fn free_blocks(&self, count: usize, world: &mut World) -> Option<Vec<u32>> {
        let is_free = |block: &usize| {
            (0..self.ranks)
                .all(|rank| world.memories[worker_index(self.index, rank)].cells[*block].pin.is_none())
        };
        let mut free: Vec<u32> = (0..BLOCKS).filter(is_free).map(|block| block as u32).collect();
        if free.len() < count {
            return None;
        }
        for place in 0..count {
            let other = place + world.dice.below((free.len() - place) as u64) as usize;
            free.swap(place, other);
        }
        free.truncate(count);
        Some(free)
    }

    /// Pins the blocks of a job at a rank.
    fn know(&mut self, rank: usize, is_save: bool, blocks: Vec<(u32, u64)>, world: &mut World) -> JobKey {
        self.last_key += 1;
        let key = JobKey(self.last_key);
        let memory = &mut world.memories[worker_index(self.index, rank)];
        for (block, token) in &blocks {
            let cell = &mut memory.cells[*block as usize];
            cell.pin = Some(key);
            if is_save {
                cell.token = *token;
            }
        }
        let known = Known {
            number: self.last_job,
            is_save,
            blocks,
            event: None,
            flags: None,
            is_queued: false,
            is_released: false,
            ended: None,
            own_failed: false,
            held_until: 0,
        };
        memory.jobs.insert(key, known);
        key
    }

    fn save(&mut self, prompt: usize, meta: &mut Meta, world: &mut World) -> bool {
        // As the connector does: nothing is saved unless the workers are there.
        if self.run.is_none() && !world.dice.one_in(4) {
            return world.now > 60 * SECOND && !world.is_calm;
        }
        let count = prompt_blocks(prompt) as usize;
        let Some(blocks) = self.free_blocks(count * self.groups, world) else { return false };
        self.last_job += 1;
        for rank in 0..self.ranks {
            let (mut groups, mut held) = (Vec::new(), Vec::new());
            for (group, of_group) in blocks.chunks(count).enumerate() {
                let hashes: Vec<Name> = (0..count as u64).map(|block| hash(prompt, block)).collect();
                for (block, hash) in of_group.iter().zip(&hashes) {
                    held.push((*block, token(&([NAMESPACES[group]; 16], *hash), rank as u32)));
                }
                groups.push(SaveGroupSpec {
                    group: group as u32,
                    parent: None,
                    hashes: hashes.into_iter().map(BlockHash).collect(),
                    block_ids: of_group.iter().map(|id| BlockId(*id)).collect(),
                });
            }
            let key = self.know(rank, true, held, world);
            meta.jobs[rank].push((key, Work::Save(groups.into())));
            if world.is_calm {
                self.last_save = Some(key);
            }
        }
        true
    }

    fn load(&mut self, prompt: usize, meta: &mut Meta, world: &mut World) -> bool {
        let count = prompt_blocks(prompt);
        let hashes: Vec<u8> = (0..count).flat_map(|block| hash(prompt, block)).collect();
        let group =
            |group: usize| v1::LookupGroup { group: group as u32, hashes: Bytes::from(hashes.clone()) };
        let groups = (0..self.groups).map(group).collect();
        let lookup = v1::Lookup { groups, max_tokens: count * TOKENS, ..Default::default() };
        let Some(Answer::LookupResult(hit)) = self.ask(Ask::Lookup(lookup), world) else { return false };
        if hit.tokens == 0 {
            if world.is_calm {
                world.is_wrong(|| "calm: nothing goes wrong, and yet what was saved is not found".into());
            }
            return false;
        }
        let Some(run) = self.run else { return false };
        self.ask(Ask::Release(v1::Release { leases: vec![hit.lease] }), world);
        let found = (hit.tokens / TOKENS) as usize;
        let Some(blocks) = self.free_blocks(found * self.groups, world) else { return false };
        self.last_job += 1;
        let boot = world.processes[run].run.boot;
        let release = [Release::AtEnd, Release::WhenNear, Release::AtOnce][world.dice.below(3) as usize];
        for rank in 0..self.ranks {
            let (mut groups, mut held) = (Vec::new(), Vec::new());
            for (group, of_group) in blocks.chunks(found).enumerate() {
                let pages = &hit.groups[group].pages;
                let page = |block: usize| {
                    let at = (block * self.ranks + rank) * 4;
                    u32::from_le_bytes(pages[at..at + 4].try_into().unwrap())
                };
                for (index, block) in of_group.iter().enumerate() {
                    let key = ([NAMESPACES[group]; 16], hash(prompt, index as u64));
                    held.push((*block, token(&key, rank as u32)));
                }
                let pages = (0..found).map(page).map(PoolPage).collect();
                groups.push(LoadGroup {
                    group: group as u32,
                    block_ids: of_group.iter().map(|id| BlockId(*id)).collect(),
                    pages,
                });
            }
            let key = self.know(rank, false, held, world);
            if world.is_calm {
                self.last_load = Some(key);
            }
            meta.jobs[rank].push((key, Work::Load { boot, groups: Arc::from(groups), release }));
        }
        true
    }

    fn cancel(&mut self, world: &mut World) -> bool {
        let below_job = self.last_job + 1;
        self.ask(Ask::CancelSaves(v1::CancelSaves { below_job, timeout_ms: 0 }), world);
        true
    }

    pub(crate) fn judge(&mut self, world: &mut World) {
        if self.is_closed {
            return;
        }
        let memory = &world.memories[worker_index(self.index, self.ranks - 1)];
        let went_well = |key: &Option<JobKey>| {
            key.and_then(|key| memory.jobs[&key].ended.as_ref()).is_some_and(|told| told.ok)
        };
        if !went_well(&self.last_save) || !went_well(&self.last_load) {
            world.is_wrong(|| {
                "calm: nothing goes wrong any more, and yet nothing was saved and loaded".into()
            });
        }
        let pinned: BTreeSet<JobKey> = (0..self.ranks)
            .flat_map(|rank| world.memories[worker_index(self.index, rank)].cells.iter())
            .filter_map(|cell| cell.pin)
            .collect();
        if !pinned.is_empty() {
            world.is_wrong(|| format!("W8: blocks are pinned still, by {pinned:?}"));
        }
    }
}
