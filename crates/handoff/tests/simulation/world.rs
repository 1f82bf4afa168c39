//! Engines in simulated time, the plans of their applications, and the losses, restarts and resets that a seed draws.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use kvlane_handoff::{
    Computed, HandoffId, LandingAction, LendingAction, Message, OfferingAction, ReadingAction, Wanted,
};

use crate::agents::{Agent, address};
use crate::dice::Dice;
use crate::engine::{EARLY, Engine, LEASE, Rank, Shape};
use crate::faults::Fault;
use crate::network::{LATE_MS, Ways};
use crate::reads::Read;

/// Applications begin nothing after that.
const BUSY_MS: u64 = 2000;
const PATIENCE_MS: u64 = 2500;
/// All is over long before.
const REST: Duration = Duration::from_secs(60);

pub(crate) enum Event {
    Deliver {
        from: Agent,
        to: Agent,
        connection: u64,
        message: Message,
    },
    /// The first hears that the second is lost.
    Gone(Agent, Agent),
    Dialled(Agent, SocketAddr),
    /// A prompt goes on.
    Step(Agent, HandoffId),
    Computed(Agent, HandoffId, Computed),
    /// There are blocks for a request.
    Room(Agent, HandoffId),
    Copy(u64),
    Closed(Agent, HandoffId),
    /// [`Fault::ClearsLate`].
    Clear(Agent, HandoffId),
    Plan(Plan),
}

/// What is to happen to an engine, in whichever run it then is.
pub(crate) enum Plan {
    Prompt {
        engine: usize,
        id: HandoffId,
        content: [u8; 16],
        total: u32,
    },
    Task {
        engine: usize,
        id: HandoffId,
        wanted: Wanted,
        room: usize,
        overflows: Option<usize>,
        has_to_land: bool,
    },
    Lose(usize, usize, Option<u32>),
    Restart(usize),
    Reset(usize),
}

/// What seeds have seen.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) ends: BTreeMap<String, u64>,
    pub(crate) cached: u64,
    /// Blocks that had arrived and were given as room again.
    pub(crate) passed: u64,
    /// Hashes of blocks that had not arrived.
    pub(crate) early_hashes: u64,
    pub(crate) hashes: u64,
    pub(crate) reads: u64,
    pub(crate) failed: u64,
    pub(crate) cancelled: u64,
    pub(crate) closed_amid: u64,
    /// Pieces that readers copied by themselves after their blocks were given back.
    pub(crate) stale: u64,
    /// READs with such pieces, all of which were copied.
    pub(crate) refused: u64,
    /// READs that counted although their owner was dead.
    pub(crate) of_dead: u64,
    pub(crate) losses: u64,
    pub(crate) restarts: u64,
}

impl Seen {
    pub(crate) fn add(&mut self, other: &Seen) {
        for (end, count) in &other.ends {
            *self.ends.entry(end.clone()).or_default() += count;
        }
        self.cached += other.cached;
        self.passed += other.passed;
        self.early_hashes += other.early_hashes;
        self.hashes += other.hashes;
        self.reads += other.reads;
        self.failed += other.failed;
        self.cancelled += other.cancelled;
        self.closed_amid += other.closed_amid;
        self.stale += other.stale;
        self.refused += other.refused;
        self.of_dead += other.of_dead;
        self.losses += other.losses;
        self.restarts += other.restarts;
    }
}

pub(crate) struct World {
    pub(crate) dice: Dice,
    pub(crate) fault: Fault,
    pub(crate) now: Duration,
    pub(crate) engines: Vec<Engine>,
    /// Former runs of engines, by number and run. Others may still copy their memory.
    pub(crate) dead: BTreeMap<(usize, u64), Engine>,
    pub(crate) ways: Ways,
    pub(crate) reads: BTreeMap<u64, Read>,
    pub(crate) read_count: u64,
    pub(crate) windows: u32,
    pub(crate) seen: Seen,
    /// Nothing goes wrong: what is wanted has to land.
    pub(crate) is_calm: bool,
    pub(crate) checks_wire: bool,
    pub(crate) late_one_in: Option<u64>,
    pub(crate) abort_one_in: Option<u64>,
    /// The longest that a part of a READ takes, if it does not hang.
    pub(crate) copy_ms: u64,
    queue: BTreeMap<(Duration, u64), Event>,
    queued: u64,
}

impl World {
    pub(crate) fn new(seed: u64, fault: Fault) -> World {
        let mut dice = Dice(seed);
        let is_calm = fault == Fault::None && dice.one_in(6);
        let often = |dice: &mut Dice| match dice.below(3) {
            _ if is_calm => None,
            0 => None,
            1 => Some(30),
            _ => Some(150),
        };
        let (late_one_in, abort_one_in) = (often(&mut dice), often(&mut dice));
        let copy_ms = if is_calm { 15 } else { [3, 15, 80][dice.below(3) as usize] };
        let mut shape = Shape {
            digest: [1; 16],
            ranks: dice.between(1, 2) as u32,
            regions: dice.between(1, 2) as u32,
            lendings_max: if is_calm || !dice.one_in(5) { 64 } else { 2 },
            host: 0,
        };
        let mut engines = Vec::new();
        for number in 0..dice.between(2, 3) as usize {
            shape.host = dice.below(2);
            engines.push(Engine::new(number, 0, shape));
            // The next one may be cut otherwise, or say so.
            match dice.below(40) {
                _ if is_calm => {}
                0 => shape.digest = [2; 16],
                1 => shape.ranks = 3 - shape.ranks,
                _ => {}
            }
        }
        let mut world = World {
            dice,
            fault,
            now: Duration::ZERO,
            engines,
            dead: BTreeMap::new(),
            ways: BTreeMap::new(),
            reads: BTreeMap::new(),
            read_count: 0,
            windows: 0,
            seen: Seen::default(),
            is_calm,
            checks_wire: seed.is_multiple_of(16),
            late_one_in,
            abort_one_in,
            copy_ms,
            queue: BTreeMap::new(),
            queued: 0,
        };
        world.plan();
        world
    }

    fn plan(&mut self) {
        let count = if self.is_calm { 2 } else { self.dice.between(1, 5) };
        for number in 0..count {
            self.plan_hand_off(HandoffId([number as u8 + 1; 16]));
        }
        if self.is_calm {
            return;
        }
        let engines = self.engines.len() as u64;
        for _ in 0..self.dice.below(4) {
            let one = self.dice.below(engines);
            let other = (one + self.dice.between(1, engines - 1)) % engines;
            let rank = self.dice.below(3).checked_sub(1).map(|rank| rank as u32);
            self.plan_at(BUSY_MS, Plan::Lose(one as usize, other as usize, rank));
        }
        if self.dice.one_in(3) {
            let engine = self.dice.below(engines) as usize;
            self.plan_at(BUSY_MS, Plan::Restart(engine));
        }
        if self.dice.one_in(4) {
            let engine = self.dice.below(engines) as usize;
            self.plan_at(BUSY_MS, Plan::Reset(engine));
        }
    }

    /// A request, sent to both engines at about the same time.
    fn plan_hand_off(&mut self, id: HandoffId) {
        let (calm, engines) = (self.is_calm, self.engines.len() as u64);
        let wild = |dice: &mut Dice, count| !calm && dice.one_in(count);
        let dice = &mut self.dice;
        let p = dice.below(engines);
        let d = (p + dice.between(1, engines - 1)) % engines;
        let content = [dice.below(2) as u8; 16];
        let total = dice.between(1, 7) as u32;
        let begins = dice.ms(200, BUSY_MS / 2);
        if !wild(dice, 15) {
            let content = if wild(dice, 20) { [2; 16] } else { content };
            let prompt = Plan::Prompt { engine: p as usize, id, content, total };
            self.at(begins, Event::Plan(prompt));
        }
        let dice = &mut self.dice;
        let tasks = if wild(dice, 8) { 2 } else { u64::from(!wild(dice, 15)) };
        for task in 0..tasks {
            let dice = &mut self.dice;
            // The second one is the same engine's once more, or another one's.
            let d = if task == 1 && dice.one_in(2) { dice.below(engines) } else { d };
            let first_block = dice.below(u64::from(total)) as u32;
            let end_block = if wild(dice, 20) {
                total + 1
            } else {
                let all = dice.one_in(2);
                if all { total } else { dice.between(u64::from(first_block) + 1, u64::from(total)) as u32 }
            };
            // More room than is wanted is for what the request computes itself.
            let room = (end_block - first_block) as usize + dice.below(5).saturating_sub(2) as usize;
            let patience = if calm { Duration::from_millis(PATIENCE_MS) } else { dice.ms(300, PATIENCE_MS) };
            let address = address(if wild(dice, 30) { 9 } else { p as usize });
            let budget = patience * 2;
            let wanted = Wanted { address, content, first_block, end_block, patience, budget };
            let overflows = dice.one_in(3).then(|| dice.between(1, 3) as usize);
            let task = Plan::Task { engine: d as usize, id, wanted, room, overflows, has_to_land: calm };
            let near = begins + dice.ms(0, 280) - Duration::from_millis(140);
            let at = if wild(dice, 5) { dice.ms(0, BUSY_MS) } else { near };
            self.at(at, Event::Plan(task));
        }
    }

    fn plan_at(&mut self, most: u64, plan: Plan) {
        self.after(100, most, Event::Plan(plan));
    }

    /// Until a hand-off that is given up is over: Stop, the ends of its READs, and Stopped.
    pub(crate) fn stop_bound(&self) -> Duration {
        Duration::from_millis(2 * LATE_MS + 500)
    }

    /// The last Want comes late and brings a lease; then Close, windows' ends, Closed.
    pub(crate) fn lending_bound(&self) -> Duration {
        let wanted = Duration::from_millis(BUSY_MS + PATIENCE_MS + LATE_MS);
        wanted + EARLY + LEASE + self.stop_bound()
    }

    pub(crate) fn at(&mut self, at: Duration, event: Event) {
        self.queued += 1;
        self.queue.insert((at, self.queued), event);
    }

    pub(crate) fn after(&mut self, least: u64, most: u64, event: Event) {
        let delay = self.dice.ms(least, most);
        self.at(self.now + delay, event);
    }

    pub(crate) fn is_alive(&self, agent: Agent) -> bool {
        let engine = &self.engines[agent.engine];
        engine.run == agent.run && agent.rank.is_none_or(|rank| (rank as usize) < engine.ranks.len())
    }

    pub(crate) fn scheduler(&self, engine: usize) -> Agent {
        Agent { engine, run: self.engines[engine].run, rank: None }
    }

    pub(crate) fn rank(&mut self, agent: Agent) -> &mut Rank {
        &mut self.engines[agent.engine].ranks[agent.rank.unwrap_or(0) as usize]
    }

    /// Until nothing happens any more.
    pub(crate) fn run(&mut self) -> Result<(), String> {
        loop {
            let ticks = self.engines.iter().enumerate();
            let tick = ticks.filter_map(|(number, engine)| Some((engine.next_tick()?, number))).min();
            let next = self.queue.first_key_value().map(|((at, _), _)| *at);
            let Some(time) = next.into_iter().chain(tick.map(|(at, _)| at)).min() else { break };
            if time > REST {
                return Err(format!("it does not come to rest: {:?}", self.left_over()));
            }
            self.now = self.now.max(time);
            match tick {
                Some((at, number)) if next.is_none_or(|next| at <= next) => {
                    self.engines[number].tick(self.now);
                    self.settle(number)?;
                    if self.engines[number].next_tick().is_some_and(|next| next <= self.now) {
                        return Err("it ticks without end".into());
                    }
                }
                _ => {
                    let Some((_, event)) = self.queue.pop_first() else { break };
                    self.happen(event)?;
                }
            }
        }
        match self.left_over() {
            Some(left) => Err(format!("not over at rest: {left}")),
            None => Ok(()),
        }
    }

    fn left_over(&self) -> Option<String> {
        self.engines.iter().find_map(Engine::left_over)
    }

    fn happen(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Deliver { from, to, connection, message } => {
                let is_lost = self.ways.get(&(from, to)).is_some_and(|way| way.connection != connection);
                if is_lost || !self.is_alive(to) { Ok(()) } else { self.deliver(from, to, message) }
            }
            Event::Gone(at, gone) if self.is_alive(at) => self.gone(at, gone),
            Event::Dialled(at, address) if self.is_alive(at) => self.dialled(at, address),
            Event::Step(at, id) if self.is_alive(at) => {
                self.step(at, id);
                self.settle(at.engine)
            }
            Event::Computed(at, id, computed) if self.is_alive(at) => {
                self.computed(at, id, computed)?;
                self.settle(at.engine)
            }
            Event::Room(at, id) if self.is_alive(at) => {
                self.give_room(at, id)?;
                self.settle(at.engine)
            }
            Event::Closed(at, id) if self.is_alive(at) => {
                self.windows_closed(at, id);
                self.settle(at.engine)
            }
            Event::Clear(at, id) if self.is_alive(at) => {
                self.clear_marks(at, id);
                Ok(())
            }
            Event::Copy(read) => self.copy(read),
            Event::Plan(plan) => self.carry_out(plan),
            _ => Ok(()),
        }
    }

    fn carry_out(&mut self, plan: Plan) -> Result<(), String> {
        let engine = match plan {
            Plan::Prompt { engine, id, content, total } => {
                self.begin_prompt(self.scheduler(engine), id, content, total);
                engine
            }
            Plan::Task { engine, id, wanted, room, overflows, has_to_land } => {
                self.begin_task(self.scheduler(engine), id, wanted, (room, overflows), has_to_land);
                engine
            }
            Plan::Lose(one, other, rank) => {
                let of = |engine| Agent { rank, ..self.scheduler(engine) };
                self.lose(of(one), of(other));
                one
            }
            Plan::Restart(engine) => {
                self.restart(engine);
                engine
            }
            Plan::Reset(engine) => {
                self.reset(self.scheduler(engine));
                engine
            }
        };
        self.settle(engine)
    }

    /// Carries out what an engine's machines have decided, as its agents do.
    pub(crate) fn settle(&mut self, number: usize) -> Result<(), String> {
        let at = self.scheduler(number);
        let rank_of = |rank| Agent { rank: Some(rank), ..at };
        while let Some(action) = self.engines[number].lendings.next_action() {
            match action {
                LendingAction::Send(to, message) => self.send(at, Agent::of(to), message),
                LendingAction::Rank(rank, message) => self.send(at, rank_of(rank), message),
            }
        }
        while let Some(action) = self.engines[number].landings.next_action() {
            match action {
                LandingAction::Dial(address) => self.after(1, 20, Event::Dialled(at, address)),
                LandingAction::Send(to, message) => self.send(at, Agent::of(to), message),
                LandingAction::Rank(rank, message) => self.send(at, rank_of(rank), message),
            }
        }
        for rank in 0..self.engines[number].shape.ranks {
            let rank = rank_of(rank);
            while let Some(action) = self.rank(rank).offering.next_action() {
                match action {
                    OfferingAction::Offer(id, reader, computed) => self.offer(rank, id, &reader, &computed),
                    OfferingAction::CloseWindows(id) => self.close_windows(rank, id),
                    OfferingAction::Answer(message) => self.send(rank, at, message),
                }
            }
            while let Some(action) = self.rank(rank).reading.next_action() {
                match action {
                    ReadingAction::Read { id, number, source, offer, skip, blocks } => {
                        self.begin_read(rank, (id, number), &source, &offer, (skip, &blocks));
                    }
                    ReadingAction::Cancel(id) => self.cancel_reads(rank, id),
                    ReadingAction::Answer(message) => self.send(rank, at, message),
                }
            }
        }
        self.take_free(at)?;
        self.take_over(at)
    }
}
