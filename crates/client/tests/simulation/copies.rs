//! Simulated memory: each block of a worker and each page of a pool holds one word, which names its last write. The daemon's
//! copies move words one by one, at random times, so that the test sees a block that is reused in the middle of a copy.

use std::collections::{BTreeMap, BTreeSet};

use kvlane_client::Finished;
use kvlane_client::links::flags::Flags;
use kvlane_client::links::ids::JobKey;
use kvlane_proto::v1::request::Body as Ask;

use crate::daemon::{Copy, Name, Shard};
use crate::world::{MS, Next, SECOND, World};

pub(crate) const BLOCKS: usize = 48;
pub(crate) const EVENTS: u32 = 256;

/// What a block of this name and rank holds.
pub(crate) fn token((namespace, hash): &(Name, Name), rank: u32) -> u64 {
    let number = u64::from_le_bytes([hash[1], hash[2], hash[3], hash[4], 0, 0, 0, 0]);
    u64::from(namespace[0]) << 48 | u64::from(hash[0]) << 40 | number << 8 | u64::from(rank)
}

/// A block of a worker.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Cell {
    pub(crate) token: u64,
    /// The job that holds it.
    pub(crate) pin: Option<JobKey>,
}

/// A job, as the engine knows it.
pub(crate) struct Known {
    pub(crate) number: u64,
    pub(crate) is_save: bool,
    /// Blocks, and what they hold after a load.
    pub(crate) blocks: Vec<(u32, u64)>,
    pub(crate) event: Option<u32>,
    pub(crate) flags: Option<Flags>,
    pub(crate) is_queued: bool,
    pub(crate) is_released: bool,
    pub(crate) ended: Option<Finished>,
    /// A copy of this process failed, as the seed wanted it.
    pub(crate) own_failed: bool,
    /// Until then a load before it was in the way, which this process could not copy.
    pub(crate) held_until: u64,
}

/// A worker's memory, and its jobs.
pub(crate) struct Memory {
    pub(crate) cells: Vec<Cell>,
    /// The epoch in its fence.
    pub(crate) fence: u64,
    pub(crate) flags: BTreeMap<u64, u32>,
    pub(crate) jobs: BTreeMap<JobKey, Known>,
    pub(crate) free_events: BTreeSet<u32>,
    /// Its process has ended.
    pub(crate) is_gone: bool,
}

impl Memory {
    pub(crate) fn new() -> Self {
        Self {
            cells: vec![Cell::default(); BLOCKS],
            fence: 1,
            flags: BTreeMap::new(),
            jobs: BTreeMap::new(),
            free_events: (0..EVENTS).collect(),
            is_gone: false,
        }
    }
}

/// A copy that the daemon makes.
pub(crate) struct DaemonCopy {
    line: usize,
    run: usize,
    worker: usize,
    request: u64,
    ask: Ask,
    copy: Copy,
    /// Block and page.
    places: Vec<(u32, u32)>,
    /// Once begun it goes on although the daemon is stopped.
    by_gpu: bool,
    in_vain: bool,
}

impl World {
    pub(crate) fn unlike_any(&mut self) -> u64 {
        self.last_token += 1;
        1 << 63 | self.last_token
    }

    pub(crate) fn write_block(&mut self, worker: usize, block: u32, token: u64, who: &str) {
        let cell = &mut self.memories[worker].cells[block as usize];
        let pin = cell.pin;
        cell.token = token;
        let is_loading = pin.is_some_and(|key| !self.memories[worker].jobs[&key].is_save);
        if !is_loading {
            self.is_wrong(|| {
                format!("W4: {who} writes block {block} of worker {worker} after its load's end")
            });
        }
    }

    /// The daemon looks at the fence and begins.
    pub(crate) fn copy_begins(&mut self, line: usize, request: u64, ask: Ask, copy: Copy) {
        let (run, worker, by_gpu) = (self.run_of(line), self.worker_of(line), self.is_gpu(line));
        let (epoch, places) = match &copy {
            Copy::Save { epoch, shards, .. } => {
                (*epoch, shards.iter().map(|shard| (shard.block_id, shard.page)).collect())
            }
            Copy::Load { epoch, places, .. } => (*epoch, places.clone()),
        };
        let memory = &self.memories[worker];
        let in_vain = memory.fence != epoch || memory.is_gone;
        let of_copy = self.copies.len();
        let most = [MS, 500 * MS, 3 * SECOND, 3 * SECOND][self.dice.below(4) as usize];
        let mut at = self.now;
        // The last one is of the flags.
        let moves = if in_vain { 0 } else { places.len() + 1 };
        for place in 0..moves {
            at += self.dice.below(most / moves as u64 + 1);
            self.later(at, Next::CopyMoves { copy: of_copy, place });
        }
        at += self.dice.below(MS);
        self.later(at, Next::CopyEnds { copy: of_copy });
        self.amid_copy(line, at - self.now);
        self.copies.push(DaemonCopy { line, run, worker, request, ask, copy, places, by_gpu, in_vain });
    }

    pub(crate) fn copy_moves(&mut self, copy: usize, place: usize) {
        let (run, worker) = (self.copies[copy].run, self.copies[copy].worker);
        let may = if self.copies[copy].by_gpu {
            !self.processes[run].has_ended
        } else {
            self.may_happen(run, || Next::CopyMoves { copy, place })
        };
        if !may || self.memories[worker].is_gone {
            return;
        }
        let of = &self.copies[copy];
        match (&of.copy, of.places.get(place).copied()) {
            (Copy::Save { .. }, Some((block, page))) => {
                let token = self.memories[worker].cells[block as usize].token;
                self.processes[run].pool.insert(page, token);
            }
            (Copy::Load { .. }, Some((block, page))) => {
                let token = self.processes[run].pool.get(&page).copied().unwrap_or_default();
                self.write_block(worker, block, token, "the daemon");
            }
            (Copy::Load { flags: Some(flags), .. }, None) => {
                let (address, value) = (flags.address, flags.value);
                let word = self.memories[worker].flags.entry(address).or_default();
                *word = value;
            }
            _ => {}
        }
    }

    pub(crate) fn copy_ends(&mut self, copy: usize) {
        let DaemonCopy { run, line, worker, request, .. } = self.copies[copy];
        if !self.may_happen(run, || Next::CopyEnds { copy }) {
            return;
        }
        let (of, session) = (&self.copies[copy], line as u64 + 1);
        let (ask, memory) = (of.ask.clone(), &self.memories[worker]);
        let is_held = |epoch: u64| memory.fence == epoch && !memory.is_gone && !of.in_vain;
        let daemon = &mut self.processes[run].run;
        let (answer, is_save) = match &of.copy {
            Copy::Save { job, epoch, .. } => {
                let copied = is_held(*epoch) && !daemon.is_cancelled(session, *job);
                (daemon.save_ends(session, &of.copy, copied), true)
            }
            Copy::Load { epoch, .. } => (daemon.load_ends(session, &of.copy, is_held(*epoch)), false),
        };
        self.look_at_sealed(run);
        self.look_at_gates(run);
        self.say(line, request, &ask, answer);
        if is_save && self.is_gpu(line) {
            self.lines[line].is_saving = false;
            // One that is refused is not worked for.
            while !self.lines[line].is_saving && !self.lines[line].is_hung_up {
                let Some(next) = self.lines[line].row.pop_front() else { break };
                self.take_request(line, next);
            }
        } else {
            self.lines[line].is_busy = false;
        }
        self.later(self.now, Next::Read(line));
        for (line, request) in std::mem::take(&mut self.processes[run].greetings) {
            self.lines[line].is_busy = false;
            self.take_request(line, request);
            self.later(self.now, Next::Read(line));
        }
    }

    /// W5, of all that has become a block.
    pub(crate) fn look_at_sealed(&mut self, run: usize) {
        for Shard { key, rank, page, .. } in std::mem::take(&mut self.processes[run].run.sealed) {
            if self.is_of_workers() && self.processes[run].pool.get(&page) != Some(&token(&key, rank)) {
                self.is_wrong(|| {
                    format!("W5: page {page} became a block and does not hold what its name says")
                });
            }
        }
    }
}
