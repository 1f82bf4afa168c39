//! An engine's scheduler: its link, the driver's part, the connector's use of hits, and the properties S1 to S7 that all
//! of it must keep.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kvlane_block::Rank;
use kvlane_client::links::ids::{ConnectionId, ProcessId};
use kvlane_client::links::scheduler::{
    BlockChange, BlockChanges, LookupState, SchedulerAction, SchedulerEvent, SchedulerLink,
    SchedulerLinkOptions,
};
use kvlane_client::{AwaitedSave, GroupSpec, Hit};
use kvlane_proto::{Address, WIRE_OF_JOURNAL, v1, v1::reply::Body as Answer, v1::request::Body as Ask};

use crate::daemon::Name;
use crate::defects::Defect;
use crate::wire::Arrived;
use crate::world::{MS, Next, SECOND, World};

pub(crate) const TOKENS: u64 = 16;
const PROMPTS: usize = 3;
const FETCH_MAX_US: u64 = 60 * SECOND;
pub(crate) const NAMESPACES: [u8; 2] = [3, 4];

/// What the engine does.
#[derive(Debug, Clone)]
pub(crate) enum SchedulerAct {
    LookUp { index: usize },
    Poll { index: usize },
    PollAgain { index: usize },
    Forget { index: usize },
    Promise { hit: Hit, index: usize },
    Release { boot: Name, lease: u64 },
    Save { prompt: usize },
    Cancel { patience: u64 },
    Close,
}

/// One lookup, as the engine knows it.
struct Known {
    prompt: usize,
    max_tokens: u64,
    timeout: u64,
    forget_after: Option<u64>,
    awaited_save: Option<AwaitedSave>,
    /// Has to be a hit of the whole prompt.
    is_last: bool,
    bound: u64,
    /// The connection over which it was sent, its id and when.
    sent: Option<(ConnectionId, u64, u64)>,
    is_over: bool,
    has_hit: bool,
    /// For a defect.
    answer: Hit,
}

pub(crate) struct SchedulerSide {
    engine: usize,
    link: SchedulerLink,
    actions: VecDeque<SchedulerAction>,
    /// The present connection and its line.
    line: Option<(ConnectionId, usize)>,
    connected_at: Instant,
    /// The run that has welcomed us over a connection of which no end was heard.
    welcomed_by: Option<Name>,
    told_ended: Vec<ProcessId>,
    known: Vec<Known>,
    /// Of unanswered lookups, by the id of their request.
    by_id: BTreeMap<u64, usize>,
    /// A lookup was in vain and nothing was heard since.
    is_silent: bool,
    heard_at: u64,
    last_job: u64,
    cancelling: Option<u64>,
    /// What cancel_saves has told to be true.
    pub(crate) cancelled_below: u64,
    /// Leases that a defect keeps.
    kept: Vec<u64>,
    follows_journal: bool,
    /// The question about the journal that is open.
    journal_asked: Option<(ConnectionId, u64)>,
    /// By group and hash, what the engine takes for stored by that run.
    told: BTreeSet<(u32, Name)>,
    told_of: Option<Name>,
    is_closed: bool,
    has_exited: bool,
    stopped_until: u64,
    turn_at: Option<u64>,
}

pub(crate) fn engine_id(engine: usize) -> String {
    format!("engine {engine}")
}

/// Of its scheduler.
pub(crate) fn nonce(engine: usize) -> Name {
    [engine as u8 + 1; 16]
}

pub(crate) fn prompt_blocks(prompt: usize) -> u64 {
    1 + prompt as u64
}

pub(crate) fn hash(prompt: usize, block: u64) -> Name {
    let mut hash = [7; 16];
    hash[0] = prompt as u8;
    hash[1..9].copy_from_slice(&block.to_le_bytes());
    hash
}

/// The blocks of a prompt in all groups, as the daemon names them.
pub(crate) fn blocks_of(prompt: usize) -> Vec<(Name, Name)> {
    let blocks = (0..prompt_blocks(prompt)).map(|block| hash(prompt, block));
    blocks.flat_map(|hash| NAMESPACES.map(|namespace| ([namespace; 16], hash))).collect()
}

fn micros(time: u64) -> Duration {
    Duration::from_micros(time)
}

impl SchedulerSide {
    pub(crate) fn new(engine: usize, follows_journal: bool, now: Instant) -> Self {
        let group = |namespace: u8| GroupSpec {
            namespace: [namespace; 16],
            name: "g".into(),
            tokens_per_block: TOKENS as u32,
            window_blocks: u32::from(namespace == NAMESPACES[1]),
            crosses_hosts: false,
        };
        let options = SchedulerLinkOptions {
            address: Address::Unix("simulated".into()),
            engine_id: engine_id(engine),
            client: "simulation".into(),
            nonce: nonce(engine),
            groups: NAMESPACES.map(group).to_vec(),
            workers: 2,
            lookup_timeout: micros(250 * MS),
            follows_journal,
        };
        Self {
            engine,
            link: SchedulerLink::new(options, now),
            actions: VecDeque::new(),
            line: None,
            connected_at: now,
            welcomed_by: None,
            told_ended: Vec::new(),
            known: Vec::new(),
            by_id: BTreeMap::new(),
            is_silent: false,
            heard_at: 0,
            last_job: 0,
            cancelling: None,
            cancelled_below: 0,
            kept: Vec::new(),
            follows_journal,
            journal_asked: None,
            told: BTreeSet::new(),
            told_of: None,
            is_closed: false,
            has_exited: false,
            stopped_until: 0,
            turn_at: None,
        }
    }

    /// What the engine does while things go wrong.
    pub(crate) fn plan(&mut self, world: &mut World, trouble: u64) {
        let engine = self.engine;
        for index in 0..1 + world.dice.below(8) as usize {
            let prompt = world.dice.below(PROMPTS as u64) as usize;
            let max_tokens =
                prompt_blocks(prompt) * TOKENS - world.dice.below(2) * world.dice.below(20).min(15);
            let timeout = [250 * MS, 250 * MS, 50 * MS, 2 * SECOND][world.dice.below(4) as usize];
            let forget_after = world.dice.one_in(6).then(|| world.dice.below(timeout));
            let awaited_save = world.dice.one_in(3).then(|| self.awaited_save(prompt, world));
            self.know(prompt, max_tokens, timeout, (forget_after, awaited_save), false);
            let at = world.dice.below(trouble);
            world.later(at, Next::Engine(engine, SchedulerAct::LookUp { index }));
        }
        for _ in 0..world.dice.below(7) {
            let prompt = world.dice.below(PROMPTS as u64) as usize;
            let at = if world.dice.one_in(2) { world.dice.below(SECOND) } else { world.dice.below(trouble) };
            world.later(at, Next::Engine(engine, SchedulerAct::Save { prompt }));
            if world.dice.one_in(2) {
                let at = at + world.dice.below(3 * SECOND);
                let patience = [5 * MS, 500 * MS, 10 * SECOND, 70 * SECOND][world.dice.below(4) as usize];
                world.later(at, Next::Engine(engine, SchedulerAct::Cancel { patience }));
            }
        }
    }

    fn know(
        &mut self,
        prompt: usize,
        max_tokens: u64,
        timeout: u64,
        (forget_after, awaited_save): (Option<u64>, Option<AwaitedSave>),
        is_last: bool,
    ) {
        self.known.push(Known {
            prompt,
            max_tokens,
            timeout,
            forget_after,
            awaited_save,
            is_last,
            bound: 0,
            sent: None,
            is_over: false,
            has_hit: false,
            answer: Hit::default(),
        });
    }

    /// Of an engine that may be there or not, in this life or another.
    fn awaited_save(&self, prompt: usize, world: &mut World) -> AwaitedSave {
        let saver = world.dice.below(2) as usize;
        let run = if world.dice.one_in(8) { [0xdd; 16] } else { nonce(saver) };
        let tokens = prompt_blocks(prompt) * TOKENS + world.dice.below(2 * TOKENS);
        let wait_ms = [0, 100, 2000, 2000, 10_000, u32::MAX][world.dice.below(6) as usize];
        AwaitedSave { engine_id: engine_id(saver), run, tokens, wait_ms }
    }

    /// Nothing goes wrong any more. Then a prompt is saved and looked up: after it, or before, and then it waits for it. Begun
    /// late in its time, the save may last beyond it.
    pub(crate) fn calm_down(&mut self, at: u64, world: &mut World) {
        self.stopped_until = world.now;
        self.schedule(world.now, world);
        if self.is_closed {
            return;
        }
        let prompt = world.dice.below(PROMPTS as u64) as usize;
        let index = self.known.len();
        let tokens = prompt_blocks(prompt) * TOKENS;
        let (engine_id, run) = (engine_id(self.engine), nonce(self.engine));
        let is_before = world.dice.one_in(2);
        let awaited_save = is_before.then_some(AwaitedSave { engine_id, run, tokens, wait_ms: 5500 });
        self.know(prompt, tokens, 250 * MS, (None, awaited_save), true);
        let look_at = if is_before { at.saturating_sub(4 * SECOND) } else { at + 6 * SECOND };
        world.later(at, Next::Engine(self.engine, SchedulerAct::Save { prompt }));
        world.later(look_at, Next::Engine(self.engine, SchedulerAct::LookUp { index }));
    }

    pub(crate) fn stop(&mut self, until: u64, world: &mut World) {
        self.stopped_until = self.stopped_until.max(until);
        self.schedule(until, world);
    }

    fn schedule(&mut self, at: u64, world: &mut World) {
        if self.turn_at.is_none_or(|before| before <= world.now || at < before) {
            self.turn_at = Some(at);
            world.later(at, Next::Turn(self.engine));
        }
    }

    // ------------------------------------------------------------------------------------------------------ the driver

    fn clock(&self, world: &World) -> Instant {
        if world.defect == Defect::ClockStands { self.connected_at } else { world.instant() }
    }

    /// What a call of the engine begins with.
    pub(crate) fn turn(&mut self, world: &mut World) {
        if world.now < self.stopped_until {
            return self.schedule(self.stopped_until, world);
        }
        self.advance(world);
        if self.cancelling.is_some()
            && let Some(is_cancelled) = self.link.cancelled(self.clock(world))
        {
            let below = self.cancelling.take().unwrap();
            world.seen.push(if is_cancelled { "cancelled" } else { "not cancelled" });
            if is_cancelled {
                self.cancelled_below = self.cancelled_below.max(below);
            }
        }
        if self.is_closed && self.link.is_over() && !self.has_exited {
            self.has_exited = true;
            world.soon(SECOND, Next::Exits(self.engine));
        }
        let is_due = self.link.wake_at().is_some_and(|at| at <= world.instant());
        if is_due && world.defect != Defect::ClockStands {
            world.is_wrong(|| format!("a timer that is due is not done: {:?}", self.link));
        }
        self.schedule_next(world);
    }

    fn schedule_next(&mut self, world: &mut World) {
        if let Some(at) = self.link.wake_at() {
            // The engine calls in between its steps.
            let at = world.micros(at).max(world.now) + 1 + world.dice.below(10 * MS);
            self.schedule(at, world);
        }
    }

    fn advance(&mut self, world: &mut World) {
        while let Some((connection, line)) = self.line {
            match world.lines[line].wire.to_engine.receive::<v1::Reply>(world.now) {
                Arrived::Message(reply) => self.take_reply(connection, reply, world),
                Arrived::End => {
                    self.line = None;
                    self.welcomed_by = None;
                    world.close(line);
                    if world.defect == Defect::HidesLoss {
                        world.later(world.now + 10 * SECOND, Next::LateLoss(self.engine));
                    } else {
                        self.feed(SchedulerEvent::Lost { connection, why: "cut".into() }, world);
                    }
                    self.is_silent = false;
                }
                Arrived::Nothing => break,
            }
        }
        for run in 0..world.processes.len() {
            let process = ProcessId(run as u64 + 1);
            if world.processes[run].has_ended
                && self.link.needs(process)
                && !self.told_ended.contains(&process)
            {
                self.told_ended.push(process);
                self.feed(SchedulerEvent::ProcessEnded(process), world);
            }
        }
        self.feed(SchedulerEvent::Tick, world);
        self.follow_journal(world);
    }

    /// As the connector does it: what another run had means nothing.
    fn follow_journal(&mut self, world: &mut World) {
        if let Some(boot) = self.link.boot().filter(|boot| self.told_of != Some(*boot)) {
            self.told_of = Some(boot);
            self.told.clear();
        }
        let taken = self.link.take_changes();
        if taken != BlockChanges::default() {
            // There may be more already.
            self.feed(SchedulerEvent::Tick, world);
        }
        let BlockChanges { start_again, changes } = taken;
        if start_again {
            world.seen.push("told to start again");
            self.told.clear();
        }
        for BlockChange { group, hash, is_visible } in changes {
            if is_visible {
                self.told.insert((group, hash));
            } else if world.defect != Defect::HearsOfNoEnds {
                world.seen.push("told of an end");
                self.told.remove(&(group, hash));
            }
        }
    }

    /// Of a connection whose number is the last one, as nothing was begun since.
    pub(crate) fn hear_of_loss(&mut self, world: &mut World) {
        if self.line.is_none() {
            for connection in 1..=world.lines.len() as u64 {
                let connection = ConnectionId(connection);
                self.feed(SchedulerEvent::Lost { connection, why: "cut".into() }, world);
            }
        }
        self.schedule_next(world);
    }

    fn take_reply(&mut self, connection: ConnectionId, reply: v1::Reply, world: &mut World) {
        self.is_silent = false;
        self.heard_at = world.now;
        self.journal_asked.take_if(|asked| *asked == (connection, reply.id));
        match &reply.body {
            Some(Answer::Welcome(_)) if self.welcomed_by.is_none() => {
                self.welcomed_by = reply.boot_id.as_ref().try_into().ok();
            }
            Some(Answer::LookupPending(pending)) => {
                if let Some(known) = self.by_id.get(&reply.id).map(|index| &mut self.known[*index])
                    && let Some((sent_over, _, sent_at)) = known.sent
                    && sent_over == connection
                {
                    let wait = (u64::from(pending.wait_ms) * MS).min(FETCH_MAX_US);
                    let latest = sent_at + FETCH_MAX_US + known.timeout;
                    known.bound = known.bound.max((world.now + wait + known.timeout).min(latest));
                    world.seen.push("pending");
                }
            }
            _ => {}
        }
        self.feed(SchedulerEvent::Reply { connection, reply }, world);
    }

    fn feed(&mut self, event: SchedulerEvent, world: &mut World) {
        let now = self.clock(world);
        self.link.handle(event, now, &mut self.actions);
        while let Some(action) = self.actions.pop_front() {
            if let Some(event) = self.carry_out(action, world) {
                let now = self.clock(world);
                self.link.handle(event, now, &mut self.actions);
            }
        }
    }

    fn carry_out(&mut self, action: SchedulerAction, world: &mut World) -> Option<SchedulerEvent> {
        match action {
            SchedulerAction::Connect(connection) => {
                if self.is_closed {
                    world.is_wrong(|| "a connection was made after the goodbye".into());
                }
                match world.connect(self.engine) {
                    Ok((line, life)) => {
                        self.connected_at = world.instant();
                        self.line = Some((connection, line));
                        Some(SchedulerEvent::Connected { connection, life })
                    }
                    Err(why) => {
                        world.seen.push("not connected");
                        self.connected_at = world.instant();
                        Some(SchedulerEvent::NotConnected { connection, why })
                    }
                }
            }
            SchedulerAction::Send { connection, request } => self.send(connection, request, world),
            SchedulerAction::Close(connection) => {
                if let Some((_, line)) = self.line.take_if(|(present, _)| *present == connection) {
                    self.welcomed_by = None;
                    self.is_silent = false;
                    world.close(line);
                }
                None
            }
            SchedulerAction::Log(_) => None,
        }
    }

    fn send(
        &mut self,
        connection: ConnectionId,
        mut request: v1::Request,
        world: &mut World,
    ) -> Option<SchedulerEvent> {
        let (_, line) = self.line.filter(|(present, _)| *present == connection)?;
        match &mut request.body {
            Some(Ask::Lookup(lookup)) => {
                // The last hash of a lookup tells which it is; no block has it.
                let of_first = &lookup.groups[0].hashes;
                if let Some(tail) = of_first.len().checked_sub(8) {
                    let index = u64::from_le_bytes(of_first[tail..].try_into().unwrap()) as usize;
                    self.known[index].sent = Some((connection, request.id, world.now));
                    self.by_id.insert(request.id, index);
                }
            }
            Some(Ask::ReadJournal(_)) => {
                let before = self.journal_asked.replace((connection, request.id));
                if !self.follows_journal || before.is_some_and(|(over, _)| over == connection) {
                    world.is_wrong(|| "S6: the journal is asked for unasked, or twice at once".into());
                }
            }
            Some(Ask::Release(release)) if world.defect == Defect::KeepsLeases => {
                self.kept.extend(&release.leases);
                return None;
            }
            Some(
                Ask::Heartbeat(v1::Heartbeat { live_leases }) | Ask::Hello(v1::Hello { live_leases, .. }),
            ) => {
                live_leases.extend(&self.kept);
            }
            Some(Ask::CancelSaves(_)) if world.defect == Defect::CancelsByItself => {
                let body = Some(Answer::Done(v1::Done::default()));
                let boot_id = self.welcomed_by.unwrap_or_default().to_vec().into();
                let reply = v1::Reply { id: request.id, boot_id, body };
                return Some(SchedulerEvent::Reply { connection, reply });
            }
            _ => {}
        }
        world.send(line, &request);
        None
    }

    // ------------------------------------------------------------------------------------------------------ the engine

    pub(crate) fn act(&mut self, act: SchedulerAct, world: &mut World) {
        if self.is_closed {
            return;
        }
        // An engine that waits for its saves does nothing else meanwhile.
        if world.now < self.stopped_until || self.cancelling.is_some() {
            let at = self.stopped_until.max(world.now + 100 * MS) + world.dice.below(SECOND);
            return world.later(at, Next::Engine(self.engine, act));
        }
        match act {
            SchedulerAct::LookUp { index } => self.look_up(index, world),
            SchedulerAct::Poll { index } => self.poll(index, world),
            SchedulerAct::PollAgain { index } => {
                if self.poll_link(index, world) != LookupState::Over(Hit::default()) {
                    world.is_wrong(|| format!("S1: lookup {index} was answered twice"));
                }
            }
            SchedulerAct::Forget { index } => {
                if !self.known[index].is_over {
                    self.known[index].is_over = true;
                    self.feed(SchedulerEvent::Forget { request: index.to_string() }, world);
                    world.soon(SECOND, Next::Engine(self.engine, SchedulerAct::PollAgain { index }));
                }
            }
            SchedulerAct::Promise { hit, index } => self.promise(hit, index, world),
            SchedulerAct::Release { boot, lease } => {
                self.feed(SchedulerEvent::Release { boot, lease }, world);
            }
            SchedulerAct::Save { prompt } => {
                self.last_job += 1;
                let (engine, job) = (self.engine, self.last_job);
                world.soon(50 * MS, Next::StandInSave { engine, job, prompt });
            }
            SchedulerAct::Cancel { patience } => {
                let below = self.last_job + 1;
                self.cancelling = Some(below);
                let until = self.clock(world) + micros(patience);
                self.feed(SchedulerEvent::CancelSaves { below, until }, world);
                return self.turn(world);
            }
            SchedulerAct::Close => {
                self.feed(SchedulerEvent::Close, world);
                self.is_closed = true;
                world.seen.push("closed");
                return self.turn(world);
            }
        }
        self.schedule_next(world);
    }

    fn look_up(&mut self, index: usize, world: &mut World) {
        self.advance(world);
        let known = &mut self.known[index];
        known.bound = world.now + known.timeout;
        let (prompt, max_tokens, timeout) = (known.prompt, known.max_tokens, known.timeout);
        let awaited_save = known.awaited_save.clone();
        let group = |group: usize| {
            let mut hashes: Vec<u8> =
                (0..prompt_blocks(prompt)).flat_map(|block| hash(prompt, block)).collect();
            hashes.extend([0xff; 8]);
            hashes.extend((index as u64).to_le_bytes());
            v1::LookupGroup { group: group as u32, hashes: Bytes::from(hashes) }
        };
        let groups = (0..NAMESPACES.len()).map(group).collect();
        let must_not_wait = self.is_silent;
        let request = index.to_string();
        self.feed(
            SchedulerEvent::LookUp {
                request,
                number: index as u64,
                again: false,
                traceparent: String::new(),
                groups,
                max_tokens,
                awaited_save,
                tokens_per_s: 0,
                timeout: micros(timeout),
            },
            world,
        );
        if let Some(after) = self.known[index].forget_after {
            world.later(world.now + after, Next::Engine(self.engine, SchedulerAct::Forget { index }));
        }
        let waits = matches!(self.poll_link(index, world), LookupState::Pending { .. });
        if must_not_wait && waits {
            world.is_wrong(|| format!("S2: lookup {index} waits for a daemon that is silent"));
        }
        // That poll was the last one if it is over.
        if waits { self.poll(index, world) } else { self.over(index, Hit::default(), world) }
    }

    fn poll_link(&mut self, index: usize, world: &mut World) -> LookupState {
        let now = self.clock(world);
        let state = self.link.poll_lookup(&index.to_string(), now);
        let known = &mut self.known[index];
        if world.defect == Defect::AnswersTwice && known.is_over && known.answer.tokens > 0 {
            return LookupState::Over(known.answer.clone());
        }
        state
    }

    fn poll(&mut self, index: usize, world: &mut World) {
        if self.known[index].is_over {
            return;
        }
        self.advance(world);
        match self.poll_link(index, world) {
            LookupState::Pending { .. } => {
                let late = world.now.saturating_sub(self.known[index].bound);
                if world.now >= self.known[index].bound {
                    world.is_wrong(|| format!("S2: lookup {index} waits {late} us beyond its bound"));
                }
                // The engine asks again in its next step, or as soon as its time is over.
                let left = self.known[index].bound.saturating_sub(world.now);
                let at = world.now + left.min(1 + world.dice.below(50 * MS)).max(1);
                world.later(at, Next::Engine(self.engine, SchedulerAct::Poll { index }));
            }
            LookupState::Over(hit) => self.over(index, hit, world),
        }
    }

    /// A lookup has its answer, or will not get any.
    fn over(&mut self, index: usize, hit: Hit, world: &mut World) {
        let known = &mut self.known[index];
        known.is_over = true;
        known.answer = hit.clone();
        if hit.tokens == 0 {
            let is_sent_here = |(over, _, at): (ConnectionId, u64, u64)| {
                self.line.is_some_and(|(present, _)| present == over) && self.heard_at < at
            };
            let in_vain = world.now >= known.bound && known.sent.is_some_and(is_sent_here);
            self.is_silent |= in_vain;
            world.seen.push(if world.now >= known.bound { "timeout" } else { "miss" });
            if known.is_last {
                world.is_wrong(|| {
                    format!("calm: nothing goes wrong, and yet a lookup is a miss: {:?}", self.link)
                });
            }
        } else {
            known.has_hit = true;
            world.seen.push("hit");
            if hit.tokens > known.max_tokens {
                world.is_wrong(|| "S3: a hit is beyond its question".into());
            }
            self.check_pages(&hit, world);
            let next = SchedulerAct::Promise { hit, index };
            let most = [20 * MS, SECOND, 10 * SECOND, 20 * SECOND][world.dice.below(4) as usize];
            world.soon(most, Next::Engine(self.engine, next));
        }
        world.soon(SECOND, Next::Engine(self.engine, SchedulerAct::PollAgain { index }));
    }

    fn check_pages(&self, hit: &Hit, world: &mut World) {
        let end = hit.tokens / TOKENS;
        let groups: Vec<_> = hit.groups().collect();
        let whole = groups.len() == NAMESPACES.len()
            && groups.iter().all(|(group, first)| {
                (0..2).all(|rank| hit.pages(*group, Rank(rank)).len() as u64 == (end - first) * 4)
            });
        if !whole {
            world.is_wrong(|| "S3: a hit does not have the pages of its blocks".into());
        }
    }

    /// As the connector does: a hit is promised only of the run that the scheduler is connected to.
    fn promise(&mut self, hit: Hit, index: usize, world: &mut World) {
        self.advance(world);
        let (boot, lease) = (hit.boot, hit.lease);
        if self.link.boot() != Some(boot) || !self.link.is_ready() {
            world.seen.push("dropped");
            return self.feed(SchedulerEvent::Release { boot, lease }, world);
        }
        world.seen.push("promised");
        if self.welcomed_by != Some(boot) {
            world.is_wrong(|| "S3: a hit was promised of a run that is not connected to".into());
        }
        if self.known[index].is_last && hit.tokens != self.known[index].max_tokens {
            world.is_wrong(|| "calm: a prompt that was saved is not a hit as a whole".into());
        }
        let most = [10 * MS, SECOND, 20 * SECOND][world.dice.below(3) as usize];
        world.soon(most, Next::Engine(self.engine, SchedulerAct::Release { boot, lease }));
    }

    pub(crate) fn describe(&self) -> String {
        format!("{:?}", self.link)
    }

    /// At the end of the calm.
    pub(crate) fn judge(&mut self, world: &mut World) {
        if self.is_closed {
            if !self.link.is_over() {
                world.is_wrong(|| "a scheduler that was closed is not over".into());
            }
            return;
        }
        if let Some(index) = self.known.iter().position(|known| !known.is_over) {
            world.is_wrong(|| format!("S1: lookup {index} never ends"));
        }
        if !self.known.iter().any(|known| known.is_last && known.has_hit) {
            world.is_wrong(|| "calm: nothing goes wrong any more, and yet nothing was found".into());
        }
        let run =
            self.told_of.and_then(|boot| world.processes.iter().find(|process| process.run.boot == boot));
        let stale = self.told.iter().find(|(group, hash)| {
            let key = ([NAMESPACES[*group as usize]; 16], *hash);
            run.is_none_or(|process| !process.run.has(&key))
        });
        if let Some(stale) = stale.copied() {
            world.is_wrong(|| format!("S6: {stale:?} is gone, and the engine takes it for stored"));
        } else if self.follows_journal && run.is_some_and(|process| process.run.wire >= WIRE_OF_JOURNAL) {
            let last = self.known.iter().rfind(|known| known.is_last).map(|known| known.prompt);
            let has = |group: usize, hash| self.told.contains(&(group as u32, hash));
            let all = |prompt| {
                (0..prompt_blocks(prompt)).all(|block| (0..2).all(|group| has(group, hash(prompt, block))))
            };
            if last.is_some_and(|prompt| !all(prompt)) {
                world.is_wrong(|| "S6: what was saved last is not told of".into());
            }
        }
        if !self.link.at_rest() {
            world.is_wrong(|| format!("S5: the scheduler's link is not at rest: {:?}", self.link));
        }
        let stats = self.link.take_stats();
        for (count, what) in
            [(stats.timeouts, "timed out"), (stats.unavailable, "unavailable"), (stats.losses, "lost")]
        {
            (0..count).for_each(|_| world.seen.push(what));
        }
    }
}
