//! An engine's worker: its link, the driver's part, and the properties that both must keep. Copies of this process take time
//! here.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use kvlane_block::{Rank, Region};
use kvlane_client::links::flags::{FlagTable, Flags};
use kvlane_client::links::group::GroupMemory;
use kvlane_client::links::ids::{ConnectionId, CopyId, JobKey, ProcessId};
use kvlane_client::links::promises::Promises;
use kvlane_client::links::worker::WorkerLink;
use kvlane_client::links::worker::event::{
    Card, Peer, StepState, WorkerAction, WorkerEvent, WorkerLinkOptions,
};
use kvlane_client::links::worker::failures::{NotCopied, NotMapped};
use kvlane_client::{Copied, Finished, Job, JobKind, LoadGroup, OwnError, SaveMethod, Work, WorkerGroupSpec};
use kvlane_proto::{Address, v1, v1::reply::Body as Answer, v1::request::Body as Ask};

use crate::copies::{BLOCKS, EVENTS, Known};
use crate::daemon::Name;
use crate::defects::Defect;
use crate::scheduler::{NAMESPACES, engine_id};
use crate::wire::Arrived;
use crate::world::{MS, Next, SECOND, WORKERS, World};

const SAVE_TIMEOUT: u64 = 10 * SECOND;
/// An own copy takes so long at most.
const OWN_US: u64 = 2 * SECOND;
/// Between the time that a driver is to wake at, and when it does.
const LATE_TURN_US: u64 = 10 * MS;

/// Two turns that come late, and the way to the daemon.
const SLACK_US: u64 = 2 * LATE_TURN_US + 2 * MS;

pub(crate) fn worker_index(engine: usize, rank: usize) -> usize {
    engine * 2 + rank
}

pub(crate) fn worker_nonce(worker: usize) -> Name {
    [100 + worker as u8; 16]
}

/// A copy of this process.
struct OwnCopy {
    /// The run whose pool it is, and what to move: block, page.
    run: usize,
    places: Vec<(u32, u32)>,
    is_out: bool,
    /// Blocks that are still to be moved.
    left: usize,
    /// The link was told already, by a defect.
    is_told: bool,
}

pub(crate) struct WorkerSide {
    pub(crate) index: usize,
    pub(crate) method: SaveMethod,
    link: WorkerLink,
    actions: VecDeque<WorkerAction>,
    line: Option<(ConnectionId, usize)>,
    inbox: Vec<Job>,
    seen: StepState,
    closes: bool,
    told_ended: Vec<ProcessId>,
    mapped: BTreeSet<Name>,
    copies: BTreeMap<CopyId, OwnCopy>,
    is_closed: bool,
    has_exited: bool,
    stopped_until: u64,
    /// All the time in which it was stopped.
    stopped: u64,
    turn_at: Option<u64>,
    connected_at: Option<u64>,
    /// Attempts in a row after which it was not served.
    failures: u32,
    ends: u64,
    /// What the link does now, for the count of ways to end.
    cause: Cause,
}

/// Why a link wants what it wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    Started,
    Answered,
    Refused,
    Lost,
    Silent,
    Other,
}

impl WorkerSide {
    pub(crate) fn new(
        (engine, rank): (usize, usize),
        (ranks, groups): (usize, usize),
        method: SaveMethod,
        world: &World,
    ) -> Self {
        let group = |group: usize| {
            let region = Region {
                base: (group as u64 + 1) << 30,
                block_stride: 4096,
                blocks: BLOCKS as u64,
                piece_bytes: 4096,
                piece_offsets: vec![0],
            };
            let (namespace, layout) = ([NAMESPACES[group]; 16], [2; 16]);
            let spec = WorkerGroupSpec { namespace, layout, regions: vec![region], replicas: 1 };
            GroupMemory::new(spec, Rank(rank as u32)).unwrap()
        };
        let index = worker_index(engine, rank);
        let options = WorkerLinkOptions {
            address: Address::Unix("simulated".into()),
            engine_id: engine_id(engine),
            client: "simulation".into(),
            nonce: worker_nonce(index),
            rank: Rank(rank as u32),
            workers: ranks as u32,
            groups: (0..groups).map(group).collect(),
            save_method: method,
            save_timeout: Duration::from_micros(SAVE_TIMEOUT),
            release_ahead: kvlane_client::ReleaseAhead::default(),
            fence_address: 0x40,
            card: (method == SaveMethod::Gpu).then(|| Card {
                described: v1::WorkerGpu::default(),
                batches: rank + 1,
                flags: FlagTable::new(0x1000, EVENTS),
            }),
        };
        Self {
            index,
            method,
            link: WorkerLink::new(options, world.instant()),
            actions: VecDeque::new(),
            line: None,
            inbox: Vec::new(),
            seen: StepState::default(),
            closes: false,
            told_ended: Vec::new(),
            mapped: BTreeSet::new(),
            copies: BTreeMap::new(),
            is_closed: false,
            has_exited: false,
            stopped_until: 0,
            stopped: 0,
            turn_at: None,
            connected_at: None,
            failures: 0,
            ends: 0,
            cause: Cause::Other,
        }
    }

    // ------------------------------------------------------------------------------------------------------ the engine

    pub(crate) fn begin_step(
        &mut self,
        jobs: Vec<(JobKey, Work)>,
        promises: Promises,
        length: u64,
        world: &mut World,
    ) {
        if self.is_closed {
            return;
        }
        for (key, work) in jobs {
            let memory = &mut world.memories[self.index];
            let event = (self.method == SaveMethod::Gpu).then(|| memory.free_events.pop_first()).flatten();
            if self.method == SaveMethod::Gpu && event.is_none() {
                world.is_wrong(|| "W8: no event is free".into());
                return;
            }
            let known = memory.jobs.get_mut(&key).unwrap();
            (known.is_queued, known.event) = (true, event);
            let number = known.number;
            self.inbox.push(Job { key, number, queued: world.instant(), work, event });
        }
        let shortest_step = Some(Duration::from_micros(length)).filter(|step| !step.is_zero());
        self.seen = StepState { in_step: true, promises: Some(promises), shortest_step };
        world.soon(MS, Next::Turn(WORKERS + self.index));
    }

    pub(crate) fn end_step(&mut self, is_in_step: bool, world: &mut World) {
        self.seen.in_step = is_in_step;
        self.schedule(world.now, world);
    }

    pub(crate) fn close(&mut self, world: &mut World) {
        (self.closes, self.is_closed) = (true, true);
        world.seen.push("closed");
        self.schedule(world.now, world);
    }

    pub(crate) fn stop(&mut self, until: u64, world: &mut World) {
        if until > self.stopped_until {
            self.stopped += until - self.stopped_until.max(world.now);
            self.stopped_until = until;
        }
        self.schedule(until, world);
    }

    fn schedule(&mut self, at: u64, world: &mut World) {
        if self.turn_at.is_none_or(|before| before <= world.now || at < before) {
            self.turn_at = Some(at);
            world.later(at, Next::Turn(WORKERS + self.index));
        }
    }

    // ------------------------------------------------------------------------------------------------------ the driver

    pub(crate) fn turn(&mut self, world: &mut World) {
        if self.has_exited {
            return;
        }
        if world.now < self.stopped_until {
            return self.schedule(self.stopped_until, world);
        }
        if std::mem::take(&mut self.closes) {
            self.feed(WorkerEvent::Close, world);
        }
        for job in std::mem::take(&mut self.inbox) {
            self.bound(&job, world);
            self.feed(WorkerEvent::Start(job), world);
        }
        self.take_replies(world);
        for run in 0..world.processes.len() {
            let process = ProcessId(run as u64 + 1);
            if world.processes[run].has_ended
                && self.link.needs(process)
                && !self.told_ended.contains(&process)
            {
                self.told_ended.push(process);
                self.feed(WorkerEvent::ProcessEnded(process), world);
            }
        }
        let seen = StepState { promises: self.seen.promises.take(), ..self.seen.clone() };
        self.feed(WorkerEvent::Step(seen), world);
        if world.defect != Defect::NeverTicks || self.line.is_none() {
            if world.defect == Defect::TicksAhead && self.line.is_none() {
                self.feed_at(WorkerEvent::Tick, 10 * SECOND, world);
            } else {
                self.feed(WorkerEvent::Tick, world);
            }
            if let Some(at) = self.link.wake_at().filter(|at| *at <= world.instant())
                && world.defect != Defect::TicksAhead
            {
                world.is_wrong(|| format!("a timer that is due is not done: {at:?} {:?}", self.link));
            }
        }
        if self.link.is_over() {
            self.has_exited = true;
            world.memories[self.index].is_gone = true;
            world.soon(SECOND, Next::WorkerExits(self.index));
        } else if let Some(at) = self.link.wake_at() {
            let at = world.micros(at).max(world.now) + 1 + world.dice.below(LATE_TURN_US);
            if world.defect != Defect::NeverTicks || self.line.is_none() {
                self.schedule(at, world);
            }
        }
    }

    fn take_replies(&mut self, world: &mut World) {
        while let Some((connection, line)) = self.line {
            match world.lines[line].wire.to_engine.receive::<v1::Reply>(world.now) {
                Arrived::Message(reply) => self.feed(WorkerEvent::Reply { connection, reply }, world),
                Arrived::End => {
                    self.feed(WorkerEvent::Lost { connection, why: "cut".into() }, world);
                    if self.line == Some((connection, line)) {
                        self.line = None;
                        world.close(line);
                    }
                    if world.defect == Defect::EndsWithItsConnection {
                        let process = ProcessId(world.run_of(line) as u64 + 1);
                        self.feed(WorkerEvent::ProcessEnded(process), world);
                    }
                }
                Arrived::Nothing => return,
            }
        }
    }

    fn feed(&mut self, event: WorkerEvent, world: &mut World) {
        self.feed_at(event, 0, world);
    }

    fn feed_at(&mut self, event: WorkerEvent, ahead: u64, world: &mut World) {
        let now = world.instant() + Duration::from_micros(ahead);
        self.cause = match &event {
            WorkerEvent::Start(_) => Cause::Started,
            WorkerEvent::Reply { reply: v1::Reply { body: Some(Answer::Refused(_)), .. }, .. } => {
                Cause::Refused
            }
            WorkerEvent::Reply { .. } => Cause::Answered,
            _ => Cause::Other,
        };
        self.link.handle(event, now, &mut self.actions);
        while let Some(action) = self.actions.pop_front() {
            if let Some(event) = self.carry_out(action, world) {
                self.link.handle(event, now, &mut self.actions);
            }
        }
    }

    /// A copy of this process has ended.
    pub(crate) fn hand(&mut self, copy: CopyId, copied: Result<Copied, NotCopied>, world: &mut World) {
        if self.has_exited {
            return;
        }
        if world.now < self.stopped_until {
            return world.later(self.stopped_until, Next::OwnEnds { worker: self.index, copy, copied });
        }
        // Two stops, one within the other, can put off its last blocks for longer than its end.
        if self.copies.get(&copy).is_some_and(|of| of.left > 0) {
            return world.later(world.now, Next::OwnEnds { worker: self.index, copy, copied });
        }
        if let Some(of) = self.copies.remove(&copy)
            && !of.is_told
        {
            self.feed(WorkerEvent::Copied { copy, copied }, world);
        }
        self.turn(world);
    }

    pub(crate) fn own_move(&mut self, copy: CopyId, place: usize, world: &mut World) {
        if world.now < self.stopped_until {
            return world.later(self.stopped_until, Next::OwnMoves { worker: self.index, copy, place });
        }
        let Some(of) = self.copies.get_mut(&copy) else { return };
        of.left -= 1;
        let (run, is_out, (block, page)) = (of.run, of.is_out, of.places[place]);
        if is_out {
            let token = world.memories[self.index].cells[block as usize].token;
            world.processes[run].pool.insert(page, token);
        } else {
            let token = world.processes[run].pool.get(&page).copied().unwrap_or_default();
            world.write_block(self.index, block, token, "the worker");
        }
    }

    /// A pool is mapped, or cannot be.
    pub(crate) fn map_ends(
        &mut self,
        connection: ConnectionId,
        boot: Name,
        is_mapped: bool,
        world: &mut World,
    ) {
        if self.has_exited {
            return;
        }
        if world.now < self.stopped_until {
            let next = Next::MapEnds { worker: self.index, connection, boot, is_mapped };
            return world.later(self.stopped_until, next);
        }
        if is_mapped {
            self.mapped.insert(boot);
        }
        let mapped = if is_mapped { Ok(()) } else { Err(NotMapped::NoDescriptor) };
        self.feed(WorkerEvent::Mapped { connection, boot, mapped }, world);
        self.turn(world);
    }

    fn carry_out(&mut self, action: WorkerAction, world: &mut World) -> Option<WorkerEvent> {
        match action {
            WorkerAction::Connect(connection) => return Some(self.connect(connection, world)),
            WorkerAction::Send { connection, request } => {
                let (_, line) = self.line.filter(|(present, _)| *present == connection)?;
                let is_writing = self.copies.values().any(|copy| copy.is_out);
                if is_writing && matches!(request.body, Some(Ask::Hello(_) | Ask::Bye(_))) {
                    world.is_wrong(|| "W7: a worker that writes into the pool says that it does not".into());
                }
                if let Some(Ask::Commit(v1::Commit { written: false, .. })) = &request.body {
                    let is_answered = self.cause == Cause::Answered;
                    world.seen.push(if is_answered { "claim handed back" } else { "write failed" });
                }
                world.send(line, &request);
            }
            WorkerAction::ShareChunks { connection, id, batch: _ } => {
                let (_, line) = self.line.filter(|(present, _)| *present == connection)?;
                if !world.is_calm && world.is_unlucky(12) {
                    return Some(WorkerEvent::NotShared { connection, why: "no chunks".into() });
                }
                let body = Some(Ask::ShareChunks(v1::ShareChunks::default()));
                world.send(line, &v1::Request { id, body });
            }
            WorkerAction::MapPool { connection, boot, .. } => {
                let is_mapped = world.is_calm || !world.is_unlucky(12);
                let next = Next::MapEnds { worker: self.index, connection, boot, is_mapped };
                let most = [0, 0, 20 * MS, 2 * SECOND][world.dice.below(4) as usize];
                world.soon(most, next);
            }
            WorkerAction::Unmap(boot) if world.defect != Defect::NeverUnmaps => {
                self.mapped.remove(&boot);
            }
            WorkerAction::RaiseFence { epoch } if world.defect != Defect::LowFence => {
                world.memories[self.index].fence = epoch;
            }
            WorkerAction::CopyIn { copy, boot, groups, .. } => {
                self.check_stream(groups[0].block_ids[0].0, world);
                return self.copy_in(copy, boot, &groups, world);
            }
            WorkerAction::CopyOut { copy, places } => {
                let places = places.into_iter().flat_map(|(_, places)| places);
                let places = places.map(|(id, page)| (id.0, page.0)).collect();
                let Some((_, line)) = self.line else {
                    return Some(WorkerEvent::Copied { copy, copied: Err(NotCopied::NoPool) });
                };
                self.copy(copy, world.run_of(line), places, true, world);
            }
            WorkerAction::WriteFlags(flags)
                if world.defect == Defect::WritesFlagsLate
                    && self.actions.iter().any(|next| matches!(next, WorkerAction::CopyIn { .. })) =>
            {
                self.actions.push_back(WorkerAction::WriteFlags(flags));
            }
            WorkerAction::WriteFlags(flags) if world.defect != Defect::KeepsFlags => {
                world.memories[self.index].flags.insert(flags.address, flags.value);
            }
            WorkerAction::Release { key, finished, flags } => self.released(key, &finished, flags, world),
            WorkerAction::End { key, finished } => {
                self.ends += 1;
                if world.defect == Defect::LosesEnds && world.memories[self.index].jobs[&key].is_released {
                    return None;
                }
                if world.defect == Defect::EndsTwice && self.ends.is_multiple_of(4) {
                    self.ended(key, finished.clone(), world);
                }
                self.ended(key, finished, world);
            }
            WorkerAction::Registered { .. } => {
                self.failures = 0;
                world.seen.push("registered");
            }
            WorkerAction::Log(notice) if notice.sentence.contains("the worker copies it itself") => {
                self.cause = Cause::Silent;
            }
            WorkerAction::Unregistered { was_open } => {
                self.cause = Cause::Lost;
                if was_open {
                    world.seen.push("lost");
                }
                self.lost(world);
            }
            WorkerAction::CountTimeouts(_) => world.seen.push("given up"),
            WorkerAction::Close(connection) => {
                if let Some((_, line)) = self.line.take_if(|(present, _)| *present == connection) {
                    world.close(line);
                }
            }
            _ => {}
        }
        None
    }

    fn connect(&mut self, connection: ConnectionId, world: &mut World) -> WorkerEvent {
        if let Some(before) = self.connected_at {
            let doubled = (50 * MS) << self.failures.saturating_sub(1).min(10);
            let pause = doubled.min(2 * SECOND);
            if world.now < before + pause {
                let failures = self.failures;
                world.is_wrong(|| {
                    format!(
                        "W9: connects {} us after the last time, {failures} in vain",
                        world_gap(before, pause)
                    )
                });
            }
        }
        self.connected_at = Some(world.now);
        self.failures += 1;
        match world.connect(WORKERS + self.index) {
            Ok((line, life)) => {
                self.line = Some((connection, line));
                WorkerEvent::Connected { connection, peer: Peer { life, pid: 42 } }
            }
            Err(why) => {
                world.seen.push("not connected");
                WorkerEvent::NotConnected { connection, why }
            }
        }
    }

    /// The link's connection is over, as it says itself.
    fn lost(&mut self, world: &mut World) {
        if world.defect == Defect::UnmapsAtLoss {
            self.mapped.clear();
        }
        if world.defect == Defect::WritesGoOn {
            for (copy, of) in self.copies.iter_mut().filter(|(_, of)| of.is_out && !of.is_told) {
                of.is_told = true;
                world.later(world.now, Next::ToldEarly { worker: self.index, copy: *copy });
            }
        }
        let asked = world.memories[self.index].jobs.iter();
        let open = asked.filter(|(_, job)| job.is_queued && job.ended.is_none()).map(|(key, _)| *key);
        let open: Vec<JobKey> = open.collect();
        for key in open {
            let at = world.now + 10 * SECOND + OWN_US * self.turns_before(key, world) + SLACK_US;
            world.later(at, Next::EndDue { worker: self.index, key, stopped: self.stopped, at, whole: true });
        }
    }

    pub(crate) fn told_early(&mut self, copy: CopyId, world: &mut World) {
        self.feed(WorkerEvent::Copied { copy, copied: Err(NotCopied::NoPool) }, world);
        self.turn(world);
    }

    fn copy_in(
        &mut self,
        copy: CopyId,
        boot: Name,
        groups: &[LoadGroup],
        world: &mut World,
    ) -> Option<WorkerEvent> {
        let run = world.processes.iter().position(|process| process.run.boot == boot).unwrap();
        if !self.mapped.contains(&boot) {
            if world.came_back.contains(&run) {
                self.note_failure(groups[0].block_ids[0].0, world);
            } else if !self.is_closed {
                world.is_wrong(|| format!("W3b: the pool of a promised load is not there: {:?}", self.link));
            }
            return Some(WorkerEvent::Copied { copy, copied: Err(NotCopied::NoPool) });
        }
        world.seen.push(match self.cause {
            Cause::Started => "own copy, not served",
            Cause::Refused => "own copy, refused",
            Cause::Lost => "own copy, daemon lost",
            Cause::Silent => "own copy, daemon silent",
            Cause::Answered | Cause::Other => "own copy, once more",
        });
        let places = |group: &LoadGroup| {
            let pages = group.pages.iter().map(|page| page.0);
            group.block_ids.iter().map(|id| id.0).zip(pages).collect::<Vec<_>>()
        };
        let places: Vec<(u32, u32)> = groups.iter().flat_map(places).collect();
        if world.defect == Defect::CopiesNothing {
            return Some(WorkerEvent::Copied { copy, copied: Ok(Copied { blocks: 1, bytes: 4096 }) });
        }
        self.copy(copy, run, places, false, world);
        None
    }

    /// W10. The copy of the load that holds this block waits for its event, and that may stand behind flags.
    fn check_stream(&self, block: u32, world: &mut World) {
        let Some(key) = world.memories[self.index].cells[block as usize].pin else { return };
        // Where no flags are written at all, W6 is to find it.
        if world.defect != Defect::KeepsFlags && self.flags_before(key, world).is_some() {
            world.is_wrong(|| format!("W10: the copy of {key:?} waits for a stream that waits for flags"));
        }
    }

    /// A load before this one for whose flags the engine's stream waits still.
    fn flags_before(&self, key: JobKey, world: &World) -> Option<JobKey> {
        let memory = &world.memories[self.index];
        let is_held = |job: &Known| {
            let flags = job.flags.as_ref().filter(|_| job.is_released && job.ended.is_none());
            flags.is_some_and(|flags| {
                memory.flags.get(&flags.address).copied().unwrap_or_default() < flags.value
            })
        };
        memory.jobs.range(..key).find(|(_, job)| is_held(job)).map(|(key, _)| *key)
    }

    /// The load that holds this block need not go well any more.
    fn note_failure(&self, block: u32, world: &mut World) {
        let memory = &mut world.memories[self.index];
        if let Some(key) = memory.cells[block as usize].pin {
            memory.jobs.get_mut(&key).unwrap().own_failed = true;
        }
    }

    /// At moments of its own.
    fn copy(&mut self, copy: CopyId, run: usize, places: Vec<(u32, u32)>, is_out: bool, world: &mut World) {
        let fails = !world.is_calm && world.is_unlucky(4);
        let most = [MS, 500 * MS, OWN_US - LATE_TURN_US, OWN_US - LATE_TURN_US][world.dice.below(4) as usize];
        let moves = if fails { places.len() / 2 } else { places.len() };
        let mut at = world.now;
        for place in 0..moves {
            at += world.dice.below(most / moves as u64);
            world.later(at, Next::OwnMoves { worker: self.index, copy, place });
        }
        let blocks = places.len() as u64;
        let copied = if fails {
            Err(NotCopied::Own(OwnError::NotWritable))
        } else {
            Ok(Copied { blocks, bytes: blocks * 4096 })
        };
        if fails && !is_out {
            self.note_failure(places[0].0, world);
        }
        self.copies.insert(copy, OwnCopy { run, places, is_out, left: moves, is_told: false });
        world.later(at, Next::OwnEnds { worker: self.index, copy, copied });
        if let Some((_, line)) = self.line.filter(|_| is_out) {
            world.amid_copy(line, at - world.now);
        }
    }

    // ----------------------------------------------------------------------------------------------- what is asked of it

    /// W2, from when the driver has taken the job.
    fn bound(&self, job: &Job, world: &mut World) {
        let (is_save, key) = (matches!(job.work, Work::Save(_)), job.key);
        let most = match is_save {
            true if self.method == SaveMethod::Mapped => 2 * SAVE_TIMEOUT + OWN_US,
            true => SAVE_TIMEOUT,
            false => 5 * SECOND + OWN_US * self.turns_before(key, world),
        };
        let at = world.now + most + SLACK_US;
        world.later(at, Next::EndDue { worker: self.index, key, stopped: self.stopped, at, whole: is_save });
    }

    /// Copies of this process that may come before the end of this load: one that has begun, those of the loads before it,
    /// once more where they failed, and its own.
    fn turns_before(&self, key: JobKey, world: &World) -> u64 {
        let before = world.memories[self.index].jobs.range(..key);
        let open = before.filter(|(_, job)| !job.is_save && job.is_queued && job.ended.is_none()).count();
        2 * open as u64 + 2
    }

    /// By now a job is to be over; of a load, as a whole or for its request.
    pub(crate) fn end_due(&mut self, key: JobKey, stopped: u64, at: u64, whole: bool, world: &mut World) {
        if self.stopped > stopped {
            let (at, stopped) = (at + self.stopped - stopped, self.stopped);
            return world.later(at, Next::EndDue { worker: self.index, key, stopped, at, whole });
        }
        let jobs = &world.memories[self.index].jobs;
        let in_the_way =
            |job: &Known| job.is_released && job.flags.is_some() && job.ended.is_none() && job.own_failed;
        if !jobs[&key].is_save && jobs.range(..key).any(|(_, job)| in_the_way(job)) {
            // As far as the link knows, the stream waits for the daemon, and this load for the stream.
            let at = world.now + OWN_US * self.turns_before(key, world) + SLACK_US;
            let stopped = self.stopped;
            return world.later(at, Next::EndDue { worker: self.index, key, stopped, at, whole });
        }
        let of = &jobs[&key];
        let after = of.held_until + OWN_US * self.turns_before(key, world) + SLACK_US;
        if of.held_until > 0 && world.now < after {
            let stopped = self.stopped;
            return world.later(after, Next::EndDue { worker: self.index, key, stopped, at: after, whole });
        }
        // What waits for the daemon since this process cannot do it has no bound.
        let is_there = of.ended.is_some() || !whole && of.is_released || of.own_failed;
        if !is_there && !self.has_exited && !self.is_closed {
            let what = if of.is_save { "save" } else { "load" };
            world.is_wrong(|| format!("W2: {what} {key:?} is not over in time: {:?}", self.link));
        }
    }

    fn released(&mut self, key: JobKey, finished: &Finished, flags: Option<Flags>, world: &mut World) {
        let of = world.memories[self.index].jobs.get_mut(&key).unwrap();
        let is_second =
            of.is_released || of.ended.is_some() || of.is_save || finished.kind != JobKind::Released;
        of.is_released = true;
        if flags.is_some() {
            of.flags = flags;
            world.seen.push("released early");
        } else {
            world.seen.push("released");
            self.check_blocks(key, world);
        }
        if is_second {
            world.is_wrong(|| format!("W1: {key:?} is released a second time, or after its end"));
        }
    }

    /// W3.
    fn check_blocks(&self, key: JobKey, world: &mut World) {
        let memory = &world.memories[self.index];
        let wrong = memory.jobs[&key]
            .blocks
            .iter()
            .find(|(block, token)| memory.cells[*block as usize].token != *token);
        if let Some((block, _)) = wrong.copied() {
            world.is_wrong(|| {
                format!("W3: block {block} of a load that went well does not hold what its name says")
            });
        }
    }

    fn ended(&mut self, key: JobKey, finished: Finished, world: &mut World) {
        let memory = &mut world.memories[self.index];
        let of = memory.jobs.get_mut(&key).unwrap();
        if of.ended.is_some() {
            return world.is_wrong(|| format!("W1: {key:?} ends twice"));
        }
        of.ended = Some(finished.clone());
        let (is_save, is_released, own_failed) = (of.is_save, of.is_released, of.own_failed);
        let held = of.flags.as_ref().map(|flags| (flags.address, flags.value));
        let (blocks, event) = (of.blocks.clone(), of.event);
        if own_failed && of.flags.is_some() {
            memory.jobs.range_mut(key..).for_each(|(_, job)| job.held_until = world.now);
        }
        memory.free_events.extend(event);
        if let Some((address, value)) = held
            && memory.flags.get(&address).copied().unwrap_or_default() < value
        {
            world.is_wrong(|| format!("W6: {key:?} has ended, and streams wait for its flags"));
        }
        if !is_save && finished.ok {
            self.check_blocks(key, world);
        }
        if !is_save && !finished.ok && !own_failed && !self.is_closed {
            let what = if is_released { "W6: a released load failed" } else { "W3: a promised load failed" };
            world.is_wrong(|| format!("{what}: {}", finished.detail));
        }
        world.seen.push(match (is_save, finished.ok, finished.detail.as_str()) {
            (true, true, _) => "saved",
            (true, false, "no kvlane daemon") => "save without daemon",
            (true, false, "the daemon went away") => "save lost",
            (true, false, "the daemon did not answer in time") => "save given up",
            (true, false, why) if why.contains("cancelled") => "save cancelled",
            (true, false, _) => "save refused",
            (false, true, _) => "loaded",
            (false, false, _) => "load failed",
        });
        // Whoever gets the blocks next writes into them at once.
        let is_used = world.dice.one_in(2);
        for (block, _) in blocks {
            let token = world.unlike_any();
            let cell = &mut world.memories[self.index].cells[block as usize];
            cell.pin = None;
            if is_used {
                cell.token = token;
            }
        }
    }

    pub(crate) fn describe(&self) -> String {
        format!("{:?}", self.link)
    }

    pub(crate) fn judge(&mut self, world: &mut World) {
        let memory = &world.memories[self.index];
        if let Some((key, _)) = memory.jobs.iter().find(|(_, job)| job.is_queued && job.ended.is_none()) {
            let key = *key;
            return world
                .is_wrong(|| format!("W8: {key:?} never ends, its blocks are pinned: {:?}", self.link));
        }
        if memory.free_events.len() != EVENTS as usize {
            world.is_wrong(|| "W8: an event is not given back".into());
        }
        if self.is_closed {
            if !self.has_exited {
                world.is_wrong(|| format!("a worker that was closed is not over: {:?}", self.link));
            }
            return;
        }
        if self.mapped.len() > 1 {
            let count = self.mapped.len();
            world.is_wrong(|| format!("W8: {count} pools are mapped still: {:?}", self.link));
        }
        if !self.link.at_rest() {
            world.is_wrong(|| format!("W8: the worker's link is not at rest: {:?}", self.link));
        }
    }
}

fn world_gap(before: u64, pause: u64) -> String {
    format!("(last {before}, pause {pause})")
}
