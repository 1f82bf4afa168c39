//! One seed: engines, the daemon's runs and the connections between them, in simulated time.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::time::{Duration, Instant};

use kvlane_client::links::ids::{ConnectionId, CopyId, JobKey, Life, NotConnected, ProcessId};
use kvlane_client::links::worker::failures::NotCopied;
use kvlane_client::{Copied, SaveMethod};
use kvlane_proto::WIRE_OF_JOURNAL;
use kvlane_proto::v1::{self, refused::Reason, reply::Body as Answer, request::Body as Ask};

use crate::copies::{DaemonCopy, Memory};
use crate::daemon::{Name, Run, Said};
use crate::defects::Defect;
use crate::dice::Dice;
use crate::engine::{Engine, Meta};
use crate::scheduler::{SchedulerAct, SchedulerSide};
use crate::wire::{Arrived, Wire};
use crate::worker::{WorkerSide, worker_index, worker_nonce};

/// More than any seed needs.
const EVENTS_MAX: u64 = 20_000;
pub(crate) const MS: u64 = 1000;
pub(crate) const SECOND: u64 = 1_000_000;
/// An answer comes late by so much at most, with up to three words before it that it will.
const LATE_US: u64 = 30 * SECOND;
/// After the last fault, until nothing of it is under way.
const SETTLED_US: u64 = 35 * SECOND;
/// How long nothing goes wrong before a seed is judged: longer than leases that nobody names live, and a heartbeat.
const CALM_US: u64 = 80 * SECOND;
/// Sides from here on are workers.
pub(crate) const WORKERS: usize = 16;
const POOL_BYTES: u64 = 4 << 20;

/// What is going to happen.
pub(crate) enum Next {
    /// A driver looks at what has come and at its clock.
    Turn(usize),
    /// The daemon reads from a connection.
    Read(usize),
    /// The daemon sends an answer.
    Say {
        wire: usize,
        reply: Box<v1::Reply>,
    },
    /// A connection's loss reaches a link that a defect has kept it from.
    LateLoss(usize),
    Engine(usize, SchedulerAct),
    Fault(Fault),
    Resume {
        run: usize,
    },
    Starts,
    ProcessEnds(usize),
    /// An engine's process ends, after its goodbye.
    Exits(usize),
    /// The workers of an engine, which are not simulated here, are there.
    Ready {
        run: usize,
        engine: String,
    },
    StandInSave {
        engine: usize,
        job: u64,
        prompt: usize,
    },
    StandInSaveEnds {
        run: usize,
        engine: usize,
        job: u64,
        prompt: usize,
    },
    GateDeadline {
        run: usize,
    },
    /// The daemon looks at the clock of lookups that wait.
    Waits {
        run: usize,
    },
    /// An engine's step: what it wants, what its workers hear, and its end.
    Step(usize),
    Meta {
        engine: usize,
        meta: Box<Meta>,
    },
    StepEnds {
        engine: usize,
    },
    /// The daemon's copy moves a block, and ends.
    CopyMoves {
        copy: usize,
        place: usize,
    },
    CopyEnds {
        copy: usize,
    },
    /// A worker's own copy does.
    OwnMoves {
        worker: usize,
        copy: CopyId,
        place: usize,
    },
    OwnEnds {
        worker: usize,
        copy: CopyId,
        copied: Result<Copied, NotCopied>,
    },
    /// A worker has mapped a pool, or cannot.
    MapEnds {
        worker: usize,
        connection: ConnectionId,
        boot: Name,
        is_mapped: bool,
    },
    /// By a defect a link hears of the end of a copy that goes on.
    ToldEarly {
        worker: usize,
        copy: CopyId,
    },
    /// A job is to be over by now.
    EndDue {
        worker: usize,
        key: JobKey,
        stopped: u64,
        at: u64,
        whole: bool,
    },
    WorkerExits(usize),
    Calm,
    End,
}

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    Stops,
    Dies,
    Cuts,
    /// This one.
    CutsLine(usize),
    Nonsense,
    EngineStops,
    EngineCloses,
}

struct Entry {
    at: u64,
    order: u64,
    next: Next,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}
impl Eq for Entry {}
impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// Which kinds of fault a seed has.
#[derive(Default)]
struct Plan {
    refuses: bool,
    late: bool,
    twice: bool,
    wrong: bool,
    connect: bool,
    worker: bool,
    /// In the midst of copies.
    amid: bool,
    /// The kernel tells the end of processes.
    tells_ends: bool,
}

/// A run of the daemon and its process.
pub(crate) struct Process {
    pub(crate) run: Run,
    /// What its pool holds, by page.
    pub(crate) pool: BTreeMap<u32, u64>,
    /// Greetings that wait for copies of a former connection.
    pub(crate) greetings: Vec<(usize, v1::Request)>,
    /// It was killed.
    pub(crate) is_dead: bool,
    /// So is its process.
    pub(crate) has_ended: bool,
    pub(crate) is_stopped: bool,
    /// What happens to it when it goes on.
    deferred: Vec<Next>,
    /// Sessions that wait for saves: connection, request, below, until.
    gates: Vec<(usize, u64, u64, u64)>,
    /// Lookups that wait for another engine, by the run's number: connection, request, what was asked.
    waits: BTreeMap<u64, (usize, u64, Ask)>,
    /// When it looks at their clocks.
    waits_at: Option<u64>,
}

/// A connection, and the ends of it.
pub(crate) struct Line {
    pub(crate) wire: Wire,
    run: usize,
    side: usize,
    /// The daemon works for it and reads no further.
    pub(crate) is_busy: bool,
    /// The daemon knows that it is over.
    pub(crate) is_hung_up: bool,
    /// Saves of a GPU go beside the rest, one after the other.
    pub(crate) is_saving: bool,
    pub(crate) row: VecDeque<v1::Request>,
    has_opened: bool,
}

/// Whose links a seed plays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Half {
    Schedulers,
    Workers,
}

pub(crate) struct World {
    pub(crate) dice: Dice,
    pub(crate) now: u64,
    pub(crate) defect: Defect,
    pub(crate) is_calm: bool,
    pub(crate) processes: Vec<Process>,
    pub(crate) lines: Vec<Line>,
    /// What is wrong.
    pub(crate) wrong: Option<String>,
    /// Ends that the seed has seen.
    pub(crate) seen: Vec<&'static str>,
    /// Taken out while it acts.
    schedulers: Vec<Option<Box<SchedulerSide>>>,
    workers: Vec<Option<Box<WorkerSide>>>,
    engines: Vec<Option<Box<Engine>>>,
    /// Of the workers.
    pub(crate) memories: Vec<Memory>,
    pub(crate) copies: Vec<DaemonCopy>,
    pub(crate) last_token: u64,
    /// Runs that a scheduler left and came back to, where the kernel does not tell the end of processes. Then a worker has only
    /// the scheduler's word for it that a run is over, and lets its pool go, though loads on it may be promised anew before
    /// the worker is connected again: these need not go well. See links/promises.rs.
    pub(crate) came_back: BTreeSet<usize>,
    half: Half,
    /// Workers whose blocks lie on a GPU.
    gpus: BTreeSet<usize>,
    plan: Plan,
    /// For a defect: who has greeted.
    greeted: BTreeSet<Vec<u8>>,
    base: Instant,
    agenda: BinaryHeap<Reverse<Entry>>,
    made: u64,
    is_over: bool,
}

impl World {
    pub(crate) fn new(half: Half, seed: u64, defect: Defect, base: Instant) -> World {
        let mut dice = Dice(seed);
        let faultless = dice.one_in(10);
        let mut plan = Plan { tells_ends: !dice.one_in(4), ..Plan::default() };
        if !faultless {
            for kind in [
                &mut plan.refuses,
                &mut plan.late,
                &mut plan.twice,
                &mut plan.wrong,
                &mut plan.connect,
                &mut plan.worker,
            ] {
                *kind = dice.one_in(3);
            }
            plan.amid = half == Half::Workers && dice.one_in(2);
        }
        let engines = if dice.one_in(10) { 2 } else { 1 };
        let mut world = World {
            dice,
            now: 0,
            defect,
            is_calm: false,
            processes: Vec::new(),
            lines: Vec::new(),
            wrong: None,
            seen: Vec::new(),
            schedulers: Vec::new(),
            workers: Vec::new(),
            engines: Vec::new(),
            memories: Vec::new(),
            copies: Vec::new(),
            last_token: 0,
            came_back: BTreeSet::new(),
            half,
            gpus: BTreeSet::new(),
            plan,
            greeted: BTreeSet::new(),
            base,
            agenda: BinaryHeap::new(),
            made: 0,
            is_over: false,
        };
        let trouble = 2 * SECOND + world.dice.below(38 * SECOND);
        if world.dice.one_in(4) {
            let at = world.dice.below(3 * SECOND);
            world.later(at, Next::Starts);
        } else {
            world.start_daemon();
        }
        for engine in 0..engines {
            if half == Half::Workers {
                // Engines that share blocks have as many ranks.
                world.add_engine(engine, engines == 1, trouble);
                continue;
            }
            // Its questions make a seed six times as long.
            let follows_journal = world.dice.one_in(12) || defect == Defect::HearsOfNoEnds;
            let mut side = SchedulerSide::new(engine, follows_journal, world.instant());
            side.plan(&mut world, trouble);
            world.schedulers.push(Some(Box::new(side)));
            world.later(0, Next::Turn(engine));
        }
        if !faultless {
            let most = if half == Half::Workers { 16 } else { 12 };
            for _ in 0..world.dice.below(most) {
                let fault = match world.dice.below(12) {
                    0..3 => Fault::Stops,
                    3..6 => Fault::Dies,
                    6..9 => Fault::Cuts,
                    9 => Fault::Nonsense,
                    10 => Fault::EngineStops,
                    _ => {
                        if world.dice.one_in(if half == Half::Workers { 6 } else { 3 }) {
                            Fault::EngineCloses
                        } else {
                            Fault::Cuts
                        }
                    }
                };
                let at = world.dice.below(trouble);
                world.later(at, Next::Fault(fault));
            }
        }
        world.later(trouble, Next::Calm);
        world
    }

    fn add_engine(&mut self, engine: usize, alone: bool, trouble: u64) {
        let ranks = if self.dice.one_in(4) && alone { 2 } else { 1 };
        let groups = 1 + self.dice.below(2) as usize;
        let method = match self.dice.below(4) {
            0 => SaveMethod::Mapped,
            1 => SaveMethod::ProcessVm,
            _ => SaveMethod::Gpu,
        };
        for rank in 0..2 {
            let side = WorkerSide::new((engine, rank), (ranks, groups), method, self);
            let is_there = rank < ranks;
            if method == SaveMethod::Gpu {
                self.gpus.insert(worker_index(engine, rank));
            }
            self.workers.push(is_there.then(|| Box::new(side)));
            self.memories.push(Memory::new());
            if is_there {
                let at = self.dice.below(2 * SECOND) * self.dice.below(2);
                self.later(at, Next::Turn(WORKERS + worker_index(engine, rank)));
            }
        }
        let mut of = Engine::new(engine, ranks, groups);
        of.plan(self, trouble);
        self.engines.push(Some(Box::new(of)));
    }

    pub(crate) fn is_of_workers(&self) -> bool {
        self.half == Half::Workers
    }

    /// Something of a worker goes wrong, once in so many times, if its seed has that.
    pub(crate) fn is_unlucky(&mut self, count: u64) -> bool {
        self.plan.worker && self.dice.one_in(count)
    }

    /// A copy begins that takes so long. In seeds that have that, something goes wrong in the midst of it.
    pub(crate) fn amid_copy(&mut self, line: usize, lasts: u64) {
        if self.plan.amid && !self.is_calm && self.dice.one_in(4) {
            let fault = match self.dice.below(8) {
                0 => Fault::Dies,
                1..3 => Fault::Stops,
                _ => Fault::CutsLine(line),
            };
            self.soon(lasts, Next::Fault(fault));
        }
    }

    pub(crate) fn tells_ends(&self) -> bool {
        self.plan.tells_ends
    }

    pub(crate) fn run_of(&self, line: usize) -> usize {
        self.lines[line].run
    }

    pub(crate) fn worker_of(&self, line: usize) -> usize {
        self.lines[line].side - WORKERS
    }

    /// Where saves travel in a row of their own.
    pub(crate) fn is_gpu(&self, line: usize) -> bool {
        self.gpus.contains(&self.worker_of(line))
    }

    pub(crate) fn later(&mut self, at: u64, next: Next) {
        self.made += 1;
        self.agenda.push(Reverse(Entry { at: at.max(self.now), order: self.made, next }));
    }

    pub(crate) fn instant(&self) -> Instant {
        self.base + Duration::from_micros(self.now)
    }

    pub(crate) fn micros(&self, instant: Instant) -> u64 {
        instant.saturating_duration_since(self.base).as_micros() as u64
    }

    pub(crate) fn is_wrong(&mut self, what: impl FnOnce() -> String) {
        self.wrong.get_or_insert_with(what);
    }

    pub(crate) fn run(&mut self) -> Result<(), String> {
        let mut events = 0;
        while !self.is_over {
            let Some(Reverse(Entry { at, next, .. })) = self.agenda.pop() else {
                return Err("nothing happens any more".into());
            };
            self.now = at;
            events += 1;
            if events > EVENTS_MAX {
                let links = self.schedulers.iter().flatten().map(|side| side.describe());
                let links = links.chain(self.workers.iter().flatten().map(|side| side.describe()));
                return Err(format!("it goes round and round: {}", links.collect::<String>()));
            }
            self.happen(next);
            if let Some(wrong) = self.wrong.take() {
                // Links describe themselves at length.
                return Err(format!("at {} us: {wrong:.2000}", self.now));
            }
        }
        Ok(())
    }

    fn happen(&mut self, next: Next) {
        match next {
            Next::Turn(side) if side >= WORKERS => {
                self.with_worker(side - WORKERS, |side, world| side.turn(world))
            }
            Next::Turn(side) => self.with_scheduler(side, |side, world| side.turn(world)),
            Next::LateLoss(side) => self.with_scheduler(side, |side, world| side.hear_of_loss(world)),
            Next::Engine(side, act) => self.with_scheduler(side, |side, world| side.act(act, world)),
            Next::Read(wire) => self.read(wire),
            Next::Say { wire, reply } => self.say_now(wire, reply),
            Next::Fault(fault) => self.go_wrong(fault),
            Next::Resume { run } => self.resume(run),
            Next::Starts => {
                if self.processes.last().is_none_or(|process| process.is_dead) {
                    self.start_daemon();
                }
            }
            Next::ProcessEnds(run) => {
                self.processes[run].has_ended = true;
                for side in (0..self.schedulers.len()).chain(WORKERS..WORKERS + self.workers.len()) {
                    self.soon(20 * MS, Next::Turn(side));
                }
            }
            Next::Exits(engine) => {
                for process in &mut self.processes {
                    process.run.exits(crate::scheduler::nonce(engine));
                }
            }
            Next::Ready { run, ref engine } => {
                if self.may_happen(run, || Next::Ready { run, engine: engine.clone() }) {
                    self.processes[run].run.stand_in_for_workers(engine);
                }
            }
            Next::StandInSave { engine, job, prompt } => self.save(engine, job, prompt),
            Next::StandInSaveEnds { run, engine, job, prompt } => {
                if self.may_happen(run, || Next::StandInSaveEnds { run, engine, job, prompt }) {
                    self.save_ends(run, engine, job, prompt);
                }
            }
            Next::GateDeadline { run } => {
                if self.may_happen(run, || Next::GateDeadline { run }) {
                    self.look_at_gates(run);
                }
            }
            Next::Waits { run } => self.processes[run].waits_at = None,
            Next::Step(engine) => self.with_engine(engine, |engine, world| engine.step(world)),
            Next::Meta { engine, meta } => {
                self.with_engine(engine, |engine, world| engine.begin_step(*meta, world));
            }
            Next::StepEnds { engine } => self.with_engine(engine, |engine, world| engine.end_step(world)),
            Next::CopyMoves { copy, place } => self.copy_moves(copy, place),
            Next::CopyEnds { copy } => self.copy_ends(copy),
            Next::OwnMoves { worker, copy, place } => {
                self.with_worker(worker, |worker, world| worker.own_move(copy, place, world));
            }
            Next::OwnEnds { worker, copy, copied } => {
                self.with_worker(worker, |worker, world| worker.hand(copy, copied, world));
            }
            Next::MapEnds { worker, connection, boot, is_mapped } => {
                self.with_worker(worker, |worker, world| worker.map_ends(connection, boot, is_mapped, world));
            }
            Next::ToldEarly { worker, copy } => {
                self.with_worker(worker, |worker, world| worker.told_early(copy, world));
            }
            Next::EndDue { worker, key, stopped, at, whole } => {
                self.with_worker(worker, |worker, world| worker.end_due(key, stopped, at, whole, world));
            }
            Next::WorkerExits(worker) => {
                for process in &mut self.processes {
                    process.run.exits(worker_nonce(worker));
                }
            }
            Next::Calm => self.calm_down(),
            Next::End => {
                self.is_over = true;
                self.judge();
            }
        }
        (0..self.processes.len()).for_each(|run| self.look_at_waits(run));
    }

    /// Tells those who wait for another engine what has become of it.
    fn look_at_waits(&mut self, run: usize) {
        let process = &mut self.processes[run];
        if process.is_dead || process.is_stopped || process.waits.is_empty() {
            return;
        }
        for (number, answer) in process.run.turn_waits(self.now) {
            let is_over = !matches!(answer, Answer::LookupPending(_));
            if is_over && self.defect == Defect::WaitsForEver && !self.is_calm {
                continue;
            }
            let waits = &mut self.processes[run].waits;
            let waiting = if is_over { waits.remove(&number) } else { waits.get(&number).cloned() };
            let Some((line, id, ask)) = waiting else { continue };
            if is_over {
                self.seen.push("waited");
                self.say(line, id, &ask, answer);
            } else if self.defect != Defect::SaysOnce {
                self.seen.push("waits longer");
                self.say_pending(line, id, answer);
            }
        }
        let process = &mut self.processes[run];
        if let Some(at) = process.run.waits_until()
            && process.waits_at.is_none_or(|before| at < before)
        {
            process.waits_at = Some(at);
            self.later(at, Next::Waits { run });
        }
    }

    fn say_pending(&mut self, line: usize, id: u64, pending: Answer) {
        let boot_id = self.processes[self.lines[line].run].run.boot.to_vec().into();
        let reply = Box::new(v1::Reply { id, boot_id, body: Some(pending) });
        self.later(self.now, Next::Say { wire: line, reply });
    }

    fn with_scheduler(&mut self, index: usize, act: impl FnOnce(&mut SchedulerSide, &mut World)) {
        if let Some(mut side) = self.schedulers[index].take() {
            act(&mut side, self);
            self.schedulers[index] = Some(side);
        }
    }

    pub(crate) fn with_worker(&mut self, index: usize, act: impl FnOnce(&mut WorkerSide, &mut World)) {
        if let Some(mut side) = self.workers[index].take() {
            act(&mut side, self);
            self.workers[index] = Some(side);
        }
    }

    fn with_engine(&mut self, index: usize, act: impl FnOnce(&mut Engine, &mut World)) {
        if let Some(mut engine) = self.engines[index].take() {
            act(&mut engine, self);
            self.engines[index] = Some(engine);
        }
    }

    pub(crate) fn soon(&mut self, within: u64, next: Next) {
        let at = self.now + self.dice.below(within + 1);
        self.later(at, next);
    }

    /// Whether that happens to this run now: not to a dead one, and later to one that is stopped.
    pub(crate) fn may_happen(&mut self, run: usize, next: impl FnOnce() -> Next) -> bool {
        let process = &mut self.processes[run];
        if process.is_dead {
            return false;
        }
        if process.is_stopped {
            process.deferred.push(next());
        }
        !process.is_stopped
    }

    // ---------------------------------------------------------------------------------------------------- the daemon

    fn start_daemon(&mut self) {
        let mut boot: Name = [0; 16];
        boot[..8].copy_from_slice(&(self.processes.len() as u64 + 1).to_le_bytes());
        let mut run = Run::new(boot, POOL_BYTES);
        if self.half == Half::Schedulers && self.dice.one_in(8) {
            run.wire = WIRE_OF_JOURNAL - 1;
        }
        self.processes.push(Process {
            run,
            pool: BTreeMap::new(),
            greetings: Vec::new(),
            is_dead: false,
            has_ended: false,
            is_stopped: false,
            deferred: Vec::new(),
            gates: Vec::new(),
            waits: BTreeMap::new(),
            waits_at: None,
        });
    }

    /// A driver connects: the connection, and what is known of the process.
    pub(crate) fn connect(&mut self, side: usize) -> Result<(usize, Life), NotConnected> {
        let goes_wrong = !self.is_calm && self.plan.connect && self.dice.one_in(4);
        if goes_wrong && self.dice.one_in(3) {
            return Err(NotConnected::Refused("a stranger listens".into()));
        }
        let run = self.processes.len().wrapping_sub(1);
        let listens = self.processes.last().is_some_and(|process| !process.is_dead);
        if !listens || goes_wrong && self.dice.one_in(2) {
            return Err(NotConnected::Absent("nobody answers".into()));
        }
        let line = self.lines.len();
        self.lines.push(Line {
            wire: Wire::default(),
            run,
            side,
            is_busy: false,
            is_hung_up: false,
            is_saving: false,
            row: VecDeque::new(),
            has_opened: false,
        });
        if goes_wrong {
            // It hangs up, before its welcome or after it.
            let at = self.now + self.dice.below(5 * MS);
            self.cut(line, at, at);
        }
        let life =
            if self.plan.tells_ends { Life::Watched(ProcessId(run as u64 + 1)) } else { Life::Unknown };
        Ok((line, life))
    }

    /// An engine sends; nothing comes of it where the connection has ended.
    pub(crate) fn send(&mut self, line: usize, request: &v1::Request) {
        let at = self.now + 10 + self.dice.below(500);
        if let Some(at) = self.lines[line].wire.to_daemon.send(request, at, &mut self.dice) {
            self.later(at, Next::Read(line));
        }
    }

    /// An engine closes a connection.
    pub(crate) fn close(&mut self, line: usize) {
        let at = self.now + self.dice.below(500);
        let at = self.lines[line].wire.to_daemon.end(at);
        self.later(at, Next::Read(line));
    }

    fn read(&mut self, line: usize) {
        let run = self.lines[line].run;
        if !self.may_happen(run, || Next::Read(line)) {
            return;
        }
        while !self.lines[line].is_busy && !self.lines[line].is_hung_up {
            match self.lines[line].wire.to_daemon.receive::<v1::Request>(self.now) {
                Arrived::Message(request) => self.take_request(line, request),
                Arrived::End => self.hang_up(line),
                Arrived::Nothing => return,
            }
        }
    }

    fn hang_up(&mut self, line: usize) {
        let run = self.lines[line].run;
        self.lines[line].is_hung_up = true;
        self.processes[run].run.hung_up(line as u64 + 1);
        let at = self.now + self.dice.below(500);
        let at = self.lines[line].wire.to_engine.end(at);
        self.later(at, Next::Turn(self.lines[line].side));
    }

    pub(crate) fn take_request(&mut self, line: usize, request: v1::Request) {
        let (run, id) = (self.lines[line].run, request.id);
        if let Some(Ask::Hello(hello)) = &request.body
            && self.processes[run].run.is_copying_for(hello)
        {
            self.lines[line].is_busy = true;
            return self.processes[run].greetings.push((line, request));
        }
        if matches!(request.body, Some(Ask::Save(_))) && self.lines[line].is_saving {
            return self.lines[line].row.push_back(request);
        }
        let Some(ask) = request.body else { return };
        if let Ask::Hello(hello) = &ask
            && self.defect == Defect::WelcomesOnce
            && !self.greeted.insert(hello.process_nonce.to_vec())
        {
            return;
        }
        if !self.is_calm && self.plan.refuses && !matches!(ask, Ask::Bye(_)) && self.dice.one_in(6) {
            let reasons =
                [Reason::Invalid, Reason::Stopping, Reason::Limit, Reason::Unknown, Reason::Cancelled];
            let reason = reasons[self.dice.below(reasons.len() as u64) as usize].into();
            // The daemon refuses a commit only after it has given the claim back.
            if let Ask::Commit(commit) = &ask {
                let back = Ask::Commit(v1::Commit { written: false, ..*commit });
                self.processes[run].run.ask(line as u64 + 1, &back, self.now);
            }
            return self.say(line, id, &ask, Answer::Refused(v1::Refused { reason, sentence: "no".into() }));
        }
        if matches!(ask, Ask::ReadJournal(_)) {
            if self.processes[run].run.wire < WIRE_OF_JOURNAL {
                self.is_wrong(|| "S6: a daemon is asked for a journal that it does not have".into());
            }
            if !self.is_calm && self.dice.one_in(8) {
                let pick = self.dice.below(1000);
                self.processes[run].run.evict(pick);
            }
        }
        let said = self.processes[run].run.ask(line as u64 + 1, &ask, self.now);
        match said {
            Said::Answer(answer) => {
                self.look_at_sealed(run);
                if let Ask::OpenEngine(_) = ask {
                    self.lines[line].has_opened = true;
                    let engine = crate::scheduler::engine_id(self.lines[line].side);
                    self.soon(300 * MS, Next::Ready { run, engine });
                }
                if matches!(ask, Ask::Claim(_)) && self.plan.amid && self.dice.one_in(2) {
                    // What it has granted is told when it goes on.
                    self.later(self.now, Next::Fault(Fault::Stops));
                }
                self.say(line, id, &ask, answer);
            }
            Said::Waits { number, pending } => {
                self.seen.push("waits");
                self.processes[run].waits.insert(number, (line, id, ask));
                self.say_pending(line, id, pending);
            }
            Said::Gate { below, timeout_ms } => {
                let until = self.now + u64::from(timeout_ms) * MS;
                self.lines[line].is_busy = true;
                self.processes[run].gates.push((line, id, below, until));
                self.later(until, Next::GateDeadline { run });
                self.look_at_gates(run);
            }
            Said::Copy(copy) => {
                if matches!(ask, Ask::Save(_)) && self.is_gpu(line) {
                    self.lines[line].is_saving = true;
                } else {
                    self.lines[line].is_busy = true;
                }
                self.copy_begins(line, id, ask, copy);
            }
        }
    }

    /// Answers those whose saves are over, or whose time is.
    pub(crate) fn look_at_gates(&mut self, run: usize) {
        for gate in std::mem::take(&mut self.processes[run].gates) {
            let (line, id, below, until) = gate;
            let is_closed = self.processes[run].run.is_gate_closed(line as u64 + 1, below);
            if !is_closed && self.now < until {
                self.processes[run].gates.push(gate);
                continue;
            }
            self.lines[line].is_busy = false;
            let cancel = Ask::CancelSaves(v1::CancelSaves::default());
            self.say(line, id, &cancel, Run::gate_answer(is_closed));
            self.later(self.now, Next::Read(line));
        }
    }

    /// The daemon has an answer, and sends it as the seed wants it.
    pub(crate) fn say(&mut self, line: usize, id: u64, ask: &Ask, answer: Answer) {
        let boot_id = self.processes[self.lines[line].run].run.boot.to_vec().into();
        let reply = Box::new(v1::Reply { id, boot_id, body: Some(answer) });
        let mut at = self.now + self.dice.below(2 * MS);
        if self.is_calm {
            return self.later(at, Next::Say { wire: line, reply });
        }
        let may_wait = matches!(ask, Ask::Lookup(lookup) if lookup.may_wait);
        if self.plan.late && self.dice.one_in(4) {
            let most = [10 * MS, 300 * MS, 3 * SECOND, LATE_US][self.dice.below(4) as usize];
            if may_wait && self.dice.one_in(2) {
                let times = 1 + self.dice.below(3);
                for _ in 0..times {
                    let wait_ms = [0, 100, 5000, 90_000, u32::MAX][self.dice.below(5) as usize];
                    let pending = Answer::LookupPending(v1::LookupPending { wait_ms });
                    let body = Some(pending);
                    self.later(
                        at,
                        Next::Say { wire: line, reply: Box::new(v1::Reply { body, ..(*reply).clone() }) },
                    );
                    at += self.dice.below(most / 4);
                }
            }
            // No words come before those to workers.
            at += self.dice.below(if self.is_of_workers() { most } else { most / 4 });
        }
        if self.plan.wrong && self.dice.one_in(8) {
            let wrong = self.wrong_answer(ask, &reply);
            self.later(self.now, Next::Say { wire: line, reply: wrong });
        }
        if self.plan.twice && self.dice.one_in(4) {
            let again = at + self.dice.below(SECOND);
            // By then there may be another connection, over which nobody has asked that.
            self.later(again, Next::Say { wire: line, reply: reply.clone() });
        }
        self.later(at, Next::Say { wire: line, reply });
    }

    /// Something else than the answer, which comes after it.
    fn wrong_answer(&mut self, ask: &Ask, right: &v1::Reply) -> Box<v1::Reply> {
        let mut reply = Box::new(right.clone());
        match self.dice.below(8) {
            0 => reply.id = 0,
            1 => reply.body = None,
            2 => reply.id += 1000,
            // A welcome is what names the run.
            3 if !matches!(ask, Ask::Hello(_)) => reply.boot_id = vec![0xee; 16].into(),
            4 if !matches!(ask, Ask::OpenEngine(_)) => {
                reply.body = Some(Answer::EngineOpened(v1::EngineOpened { ready: true }))
            }
            5 if !matches!(ask, Ask::Hello(_)) => reply.body = Some(Answer::Welcome(v1::Welcome::default())),
            6 if !matches!(ask, Ask::Save(_)) => {
                reply.body = Some(Answer::SaveResult(v1::SaveResult::default()))
            }
            _ => match (&mut reply.body, ask) {
                (Some(Answer::LookupResult(result)), Ask::Lookup(lookup)) => match self.dice.below(3) {
                    0 => result.tokens = lookup.max_tokens + 1 + self.dice.below(64),
                    1 if !result.groups.is_empty() => drop(result.groups.pop()),
                    _ => result.groups.iter_mut().for_each(|group| group.pages.truncate(3)),
                },
                (Some(Answer::JournalEntries(told)), _) => match self.dice.below(3) {
                    0 => told.cursor = 0,
                    1 => told.entries = vec![0; 17].into(),
                    _ => told.entries = [&[0, 200][..], &[7; 16]].concat().into(),
                },
                (Some(Answer::ClaimResult(result)), _) if self.dice.one_in(2) => {
                    result.outcome.truncate(result.outcome.len() / 2);
                }
                _ => reply.body = Some(Answer::Status(Box::default())),
            },
        }
        reply
    }

    fn say_now(&mut self, wire: usize, reply: Box<v1::Reply>) {
        let run = self.lines[wire].run;
        if !self.may_happen(run, || Next::Say { wire, reply: reply.clone() }) {
            return;
        }
        let at = self.now + 10 + self.dice.below(500);
        let side = self.lines[wire].side;
        let line = &mut self.lines[wire];
        let mut sent = line.wire.to_engine.send(&*reply, at, &mut self.dice);
        if sent.is_none() && self.plan.twice {
            // The engine's next connection gets what was said to its former one.
            let next = self.lines.iter_mut().rfind(|line| line.side == side && line.run == run);
            sent = next.and_then(|line| line.wire.to_engine.send(&*reply, at, &mut self.dice));
        }
        if let Some(at) = sent {
            self.later(at, Next::Turn(side));
        }
    }

    // ------------------------------------------------------------------------------------- saves of workers elsewhere

    fn save(&mut self, engine: usize, job: u64, prompt: usize) {
        let run = self.processes.len().wrapping_sub(1);
        if self.processes.is_empty()
            || !self.may_happen(run, || Next::StandInSave { engine, job, prompt })
            || !self.processes[run].run.stand_in_save_begins(
                &crate::scheduler::engine_id(engine),
                job,
                &crate::scheduler::blocks_of(prompt),
                self.now,
            )
        {
            return;
        }
        let most = [5 * MS, 500 * MS, 5 * SECOND][self.dice.below(3) as usize];
        self.soon(most, Next::StandInSaveEnds { run, engine, job, prompt });
    }

    fn save_ends(&mut self, run: usize, engine: usize, job: u64, prompt: usize) {
        let id = crate::scheduler::engine_id(engine);
        let keys = crate::scheduler::blocks_of(prompt);
        let is_sealed = self.processes[run].run.stand_in_save_ends(&id, job, &keys, self.now);
        let told = self.schedulers[engine].as_ref().map_or(0, |side| side.cancelled_below);
        if is_sealed && job < told {
            self.is_wrong(|| format!("S4: save {job} became a block after all below {told} were cancelled"));
        }
        self.look_at_gates(run);
    }

    // --------------------------------------------------------------------------------------------------------- faults

    fn go_wrong(&mut self, fault: Fault) {
        let Some(run) = self.processes.len().checked_sub(1).filter(|_| !self.is_calm) else { return };
        match fault {
            Fault::Stops if !self.processes[run].is_dead && !self.processes[run].is_stopped => {
                self.processes[run].is_stopped = true;
                let most = [MS, 100 * MS, 3 * SECOND, 90 * SECOND][self.dice.below(4) as usize];
                self.soon(most, Next::Resume { run });
            }
            Fault::Dies if !self.processes[run].is_dead => {
                self.processes[run].is_dead = true;
                for line in
                    (0..self.lines.len()).filter(|line| self.lines[*line].run == run).collect::<Vec<_>>()
                {
                    let at = self.now + self.dice.below(50 * MS);
                    self.cut(line, at, at);
                }
                // Unpinning a large pool takes a while.
                let most = [MS, 50 * MS, 3 * SECOND][self.dice.below(3) as usize];
                self.soon(most, Next::ProcessEnds(run));
                self.soon(5 * SECOND, Next::Starts);
            }
            Fault::Cuts | Fault::Nonsense => {
                let open = (0..self.lines.len()).filter(|line| !self.lines[*line].wire.to_engine.is_ended());
                let open: Vec<usize> = open.collect();
                if open.is_empty() {
                    return;
                }
                let line = open[self.dice.below(open.len() as u64) as usize];
                if fault == Fault::Nonsense {
                    let at = self.lines[line].wire.to_engine.send_nonsense(self.now + 100);
                    return self.later(at, Next::Turn(self.lines[line].side));
                }
                self.cut_somewhen(line);
            }
            Fault::CutsLine(line) => {
                if !self.lines[line].wire.to_engine.is_ended() {
                    self.cut_somewhen(line);
                }
            }
            Fault::EngineStops => {
                let most = [10 * MS, 500 * MS, 5 * SECOND][self.dice.below(3) as usize];
                let until = self.now + self.dice.below(most);
                if self.is_of_workers() {
                    let worker = self.dice.below(self.workers.len() as u64) as usize;
                    return self.with_worker(worker, |worker, world| worker.stop(until, world));
                }
                let side = self.dice.below(self.schedulers.len() as u64) as usize;
                self.with_scheduler(side, |side, world| side.stop(until, world));
            }
            Fault::EngineCloses if self.is_of_workers() => {
                let engine = self.dice.below(self.engines.len() as u64) as usize;
                self.with_engine(engine, |engine, _| engine.is_closed = true);
                for rank in 0..2 {
                    self.with_worker(worker_index(engine, rank), |worker, world| worker.close(world));
                }
            }
            Fault::EngineCloses => {
                let side = self.dice.below(self.schedulers.len() as u64) as usize;
                self.later(self.now, Next::Engine(side, SchedulerAct::Close));
            }
            Fault::Stops | Fault::Dies => {}
        }
    }

    /// One end hears of it first.
    fn cut_somewhen(&mut self, line: usize) {
        let first = self.now + self.dice.below(50 * MS);
        let second = self.now + self.dice.below(2 * SECOND);
        let (to_engine, to_daemon) = if self.dice.one_in(2) { (first, second) } else { (second, first) };
        self.cut(line, to_engine, to_daemon);
    }

    /// Both ends hear of it, each in its time.
    fn cut(&mut self, line: usize, engine_at: u64, daemon_at: u64) {
        let side = self.lines[line].side;
        let at = self.lines[line].wire.to_engine.cut(engine_at, &mut self.dice);
        self.later(at, Next::Turn(side));
        let at = self.lines[line].wire.to_daemon.cut(daemon_at, &mut self.dice);
        self.later(at, Next::Read(line));
    }

    fn resume(&mut self, run: usize) {
        self.processes[run].is_stopped = false;
        for next in std::mem::take(&mut self.processes[run].deferred) {
            self.later(self.now, next);
        }
    }

    /// Nothing goes wrong any more.
    fn calm_down(&mut self) {
        self.is_calm = true;
        (0..self.processes.len()).for_each(|run| self.resume(run));
        self.later(self.now, Next::Starts);
        for side in 0..self.schedulers.len() {
            self.with_scheduler(side, |side, world| side.calm_down(world.now + SETTLED_US, world));
        }
        for engine in 0..self.engines.len() {
            self.with_engine(engine, |engine, world| engine.calm_down(world.now + SETTLED_US, world));
        }
        self.later(self.now + SETTLED_US + CALM_US, Next::End);
    }

    fn judge(&mut self) {
        let is_open = |line: usize| !self.lines[line].is_hung_up;
        let waits = self.processes.last().is_some_and(|process| {
            process.run.waits() > 0 || process.waits.values().any(|(line, ..)| is_open(*line))
        });
        if waits {
            self.is_wrong(|| "S7: a lookup still waits for another engine".into());
        }
        for side in 0..self.schedulers.len() {
            self.with_scheduler(side, |side, world| side.judge(world));
        }
        for worker in 0..self.workers.len() {
            self.with_worker(worker, |worker, world| worker.judge(world));
        }
        for engine in 0..self.engines.len() {
            self.with_engine(engine, |engine, world| engine.judge(world));
        }
        let left = self.processes.last().map(|process| process.run.leases()).unwrap_or_default();
        if !left.is_empty() {
            self.is_wrong(|| format!("S5: the daemon still has leases {left:?}"));
        }
    }
}
