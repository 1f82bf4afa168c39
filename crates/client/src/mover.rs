//! The worker's thread: connects and registers, asks for saves, copies loads, gives up on a silent daemon.
//!
//! ```text
//!   Down --connect--> Greeting --Welcome--> Sharing --Done of each--> Registering --WorkerRegistered--> Mapping
//!    ^                                                                                                    | descriptor
//!    +------------------------------ lost, refused (backoff) <------- Open <----- Done ----- Confirming <-+
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use kvlane_memory::{PeerCredentials, allow_ptrace_by};
use kvlane_proto::{
    WIRE_MAX, WIRE_MIN, v1, v1::refused::Reason, v1::reply::Body as Answer, v1::request::Body as Ask,
};
use rustix::event::{PollFd, PollFlags};

use crate::{
    boot::BootId,
    connection::{ConnectError, Connection, Lost, poll_for},
    copies::OwnCopies,
    fence::Fence,
    gpu::ChunkBatch,
    jobs::{Copied, Finished, Job, JobKind, LoadGroup, Release, SaveGroupSpec, SaveMethod, Work},
    links::{
        backoff::Backoff,
        flags::{FlagTable, Flags},
        group::{GroupMemory, Places},
        ids::JobKey,
        pace::LoadPace,
        promises::{PoolBook, ROUND},
        standing::{Standing, describe, tell},
    },
    loading::{Loading, Takeover},
    pools::MappedPools,
    processes::Processes,
    shared::{Shared, WorkerOptions},
};

/// How long a daemon whose connection ended is watched for its end, before the blocks of its loads count as free. Its GPU
/// work ends with it, and unpinning a large pool takes a while; one that lives on has ended the session, and waited for
/// its copies before.
const PEERS_END: Duration = Duration::from_secs(10);
/// Blocks of one save; their hashes and ids have to fit into a frame.
const SAVE_BLOCKS_MAX: usize = 2 << 20;

/// Runs until the handle says stop.
pub(crate) fn run(options: WorkerOptions, nonce: [u8; 16], groups: Vec<GroupMemory>, shared: &Shared) {
    let now = Instant::now();
    let mover = Mover {
        fence: Fence::new(nonce, options.gpu.clone()),
        backoff: Backoff::new(now),
        link: None,
        pools: PoolBook::default(),
        mapped: MappedPools::default(),
        processes: Processes::default(),
        flags: options.gpu.as_ref().map(|gpu| gpu.flag_table()),
        pace: LoadPace::default(),
        shortest_step: None,
        copies: OwnCopies::new(groups.clone(), options.gpu.clone()),
        round_at: now + ROUND,
        standing: Standing::new(format!("rank {}", options.rank), options.address.clone(), now),
        options,
        groups,
        shared,
    };
    mover.run();
}

struct Mover<'a> {
    options: WorkerOptions,
    groups: Vec<GroupMemory>,
    shared: &'a Shared,
    fence: Fence,
    backoff: Backoff,
    link: Option<Link>,
    /// Which pools stay mapped.
    pools: PoolBook,
    mapped: MappedPools,
    processes: Processes,
    flags: Option<FlagTable>,
    pace: LoadPace,
    shortest_step: Option<Duration>,
    copies: OwnCopies,
    round_at: Instant,
    standing: Standing,
}

/// A connection and what was asked over it.
struct Link {
    connection: Connection,
    last_request: u64,
    boot: BootId,
    /// What the daemon said of itself, for the log.
    daemon: String,
    stage: Stage,
    /// What is still to be shared before registering.
    batches: std::vec::IntoIter<ChunkBatch>,
    method: SaveMethod,
    asked: BTreeMap<u64, Asked>,
    /// A save timed out and nothing was heard since: do not ask for more.
    silent: bool,
}

impl Link {
    fn send(&mut self, body: Ask) -> Result<u64, Lost> {
        self.send_with(body, Vec::new())
    }

    fn send_with(&mut self, body: Ask, descriptors: Vec<OwnedFd>) -> Result<u64, Lost> {
        self.last_request += 1;
        let request = v1::Request { id: self.last_request, body: Some(body) };
        self.connection.send_with(&request, descriptors)?;
        Ok(self.last_request)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Greeting,
    /// GPU memory, chunk by chunk, where it consists of chunks.
    Sharing,
    Registering,
    Mapping,
    Confirming,
    Open,
}

/// A save on its way.
enum Asked {
    /// Save by the daemon: the answer ends the job.
    Save { job: Job, deadline: Instant },
    /// Load by the daemon, which was promised: it is carried out here if the daemon cannot.
    Load(Loading),
    /// Save through the mapping: the answer says where to write.
    Claim { job: Job, deadline: Instant },
    /// Written through the mapping: the answer ends the job, as told.
    Commit { key: JobKey, end: Finished, deadline: Instant },
    /// Given up; a claim that is granted now must be handed back.
    GivenUp,
}

impl Mover<'_> {
    fn run(mut self) {
        loop {
            let now = Instant::now();
            let (jobs, stop, promises, in_step) = {
                let mut state = self.shared.state.lock();
                self.shortest_step = state.steps.shortest();
                (std::mem::take(&mut state.queue), state.stop, state.promises.take(), state.in_step)
            };
            if stop {
                return self.stop(jobs);
            }
            jobs.into_iter().for_each(|job| self.start(job));
            self.connect_if_due(now);
            self.take_replies();
            self.give_up_overdue(Instant::now());
            self.release_near(Instant::now());
            self.take_over_overdue(Instant::now());
            if self.pools.has_former() {
                let ended = self.processes.take_ended();
                ended.into_iter().for_each(|process| self.pools.process_ended(process));
            }
            let in_use = BTreeSet::new();
            if let Some(promises) = promises {
                // After the jobs that were queued before that step.
                let unmapped = self.pools.step_begins(&promises, &in_use);
                self.unmap(unmapped);
            }
            if self.pools.has_former() && now >= self.round_at {
                self.round_at = now + ROUND;
                let unmapped = self.pools.round(in_step, &in_use);
                self.unmap(unmapped);
            }
            self.processes.retain(|process| self.pools.needs(process));
            // A GPU's loads come through this mapping only when the daemon is gone.
            let busy = self.options.gpu.is_none() && self.mapped.prefault_some();
            self.wait(busy);
        }
    }

    fn unmap(&mut self, pools: Vec<BootId>) {
        pools.iter().for_each(|boot| self.mapped.unmap(boot));
    }

    fn start(&mut self, job: Job) {
        match job.work.clone() {
            Work::Load { boot, groups, release } => {
                let flags = match release {
                    Release::AtEnd => None,
                    Release::WhenNear | Release::AtOnce => self.flags(&groups, job.event),
                };
                let beside_compute = release != Release::AtOnce;
                match self.ask_for_load(&boot, &groups, job.event, flags.as_ref(), beside_compute) {
                    Some(id) => self.asked_for_load(id, job, flags),
                    None => self.load_here(&job, None),
                }
            }
            Work::Save(groups) => {
                let blocks = groups.iter().map(|group| group.block_ids.len()).sum::<usize>();
                if blocks > SAVE_BLOCKS_MAX {
                    let detail =
                        format!("{blocks} blocks in one save, at most {SAVE_BLOCKS_MAX} are possible");
                    return self.fail(&job, detail);
                }
                let deadline = Instant::now() + self.options.save_timeout;
                let groups = groups.iter().map(wire_group).collect();
                let open = self.link.as_mut().filter(|link| link.stage == Stage::Open && !link.silent);
                let Some(link) = open else { return self.fail(&job, "no kvlane daemon") };
                let (ask, asked) = if link.method == SaveMethod::Mapped {
                    let ask = Ask::Claim(v1::Claim { groups, job: job.number });
                    (ask, Asked::Claim { job, deadline })
                } else {
                    let event = job.event;
                    let epoch = self.fence.epoch();
                    let ask = Ask::Save(v1::Save { groups, epoch, event, job: job.number });
                    (ask, Asked::Save { job, deadline })
                };
                match link.send(ask) {
                    Ok(id) => {
                        link.asked.insert(id, asked);
                    }
                    Err(lost) => {
                        self.end(asked, "the daemon went away");
                        self.lose(&lost);
                    }
                }
            }
        }
    }

    /// The daemon has to load now. It can only succeed from here on: by the daemon, or by this process.
    fn asked_for_load(&mut self, id: u64, job: Job, flags: Option<Flags>) {
        let Work::Load { groups, .. } = &job.work else { return };
        let (now, bytes) = (Instant::now(), self.bytes_of(groups));
        let alone = self.loads().next().is_none();
        if alone {
            self.pace.is_idle();
        }
        let near = self.pace.asked(now, bytes, self.shortest_step);
        let load = Loading::asked(job, flags, bytes, now, alone, near, self.shared);
        if let Some(link) = &mut self.link {
            link.asked.insert(id, Asked::Load(load));
        }
    }

    /// Releases the loads that are near their end.
    fn release_near(&mut self, now: Instant) {
        for asked in self.link.iter_mut().flat_map(|link| link.asked.values_mut()) {
            if let Asked::Load(load) = asked {
                load.release_if_due(now, self.shared);
            }
        }
    }

    /// Loads that the daemon was asked for.
    fn loads(&self) -> impl Iterator<Item = &Loading> {
        self.link.iter().flat_map(|link| link.asked.values()).filter_map(|asked| match asked {
            Asked::Load(load) => Some(load),
            _ => None,
        })
    }

    /// Asks the daemon to load, where it copies for this worker. None where this process has to.
    fn ask_for_load(
        &mut self,
        boot: &BootId,
        groups: &[LoadGroup],
        event: Option<u32>,
        flags: Option<&Flags>,
        beside_compute: bool,
    ) -> Option<u64> {
        let epoch = self.fence.epoch();
        let link = self.link.as_mut()?;
        if link.stage != Stage::Open || link.method != SaveMethod::Gpu || link.boot != *boot {
            return None;
        }
        let groups = groups.iter().map(|group| v1::LoadGroup {
            group: group.group,
            block_ids: group.block_ids.clone(),
            pages: group.pages.clone(),
        });
        let flags = flags.map(wire_flags);
        let ask = Ask::Load(v1::Load { groups: groups.collect(), epoch, event, flags, beside_compute });
        match link.send(ask) {
            Ok(id) => Some(id),
            Err(lost) => {
                self.lose(&lost);
                None
            }
        }
    }

    /// Flags for a load of one group; several groups are loaded as a whole.
    fn flags(&mut self, groups: &[LoadGroup], event: Option<u32>) -> Option<Flags> {
        let ([group], Some(event), Some(flags)) = (groups, event, &mut self.flags) else { return None };
        flags.next(event, self.groups.get(group.group as usize)?)
    }

    fn fail(&self, job: &Job, why: impl Into<String>) {
        self.shared.finish(job.key, job.failed(why, Instant::now()));
    }

    /// Bytes of a load.
    fn bytes_of(&self, groups: &[LoadGroup]) -> u64 {
        let block_bytes =
            |group: &LoadGroup| self.groups.get(group.group as usize).map_or(0, GroupMemory::block_bytes);
        groups.iter().map(|group| group.block_ids.len() as u64 * block_bytes(group)).sum()
    }

    /// Carries a load out in this process, and ends it.
    fn load_here(&self, job: &Job, flags: Option<&Flags>) {
        let end = self.carry_out(job);
        // Whatever came of it: a stream that waits for ever would stop the engine.
        self.lift(flags);
        self.shared.finish(job.key, end);
    }

    /// Copies a load in this process; its end is given.
    fn carry_out(&self, job: &Job) -> Finished {
        let Work::Load { boot, groups, .. } = &job.work else {
            return job.failed("not a load", Instant::now());
        };
        match self.copies.load(groups, job.event, self.mapped.of(boot)) {
            Ok(Copied { blocks, bytes }) => {
                Finished { ok: true, blocks, bytes, ..job.failed("", Instant::now()) }
            }
            Err(detail) => job.failed(detail, Instant::now()),
        }
    }

    /// Writes the flags that the engine's streams may be waiting for.
    fn lift(&self, flags: Option<&Flags>) {
        if let (Some(gpu), Some(flags)) = (&self.options.gpu, flags) {
            gpu.lift(flags);
        }
    }

    /// Carries out the loads of a silent daemon.
    fn take_over_overdue(&mut self, now: Instant) {
        let Some(link) = &self.link else { return };
        let is_overdue = |asked: &Asked| asked.due().is_some_and(|due| now >= due);
        let overdue = link.asked.iter().filter(|(_, asked)| is_overdue(asked)).map(|(id, _)| *id);
        let overdue: Vec<u64> = overdue.collect();
        for id in overdue {
            let Some(Asked::Load(mut load)) = self.link.as_mut().and_then(|link| link.asked.remove(&id))
            else {
                continue;
            };
            tracing::warn!(
                job = load.job.number,
                "kvlane: the daemon does not answer; the worker carries out its load itself"
            );
            self.take_over(&mut load);
            if let Some(link) = &mut self.link {
                link.asked.insert(id, Asked::Load(load));
            }
        }
    }

    /// Gives the engine what a load was to bring, while the daemon may still bring it too.
    fn take_over(&self, load: &mut Loading) {
        let end = self.carry_out(&load.job);
        load.release_at = None;
        if !end.ok {
            let job = load.job.number;
            tracing::warn!(job, detail = end.detail, "kvlane: the worker could not carry out a load itself");
            load.takeover = Takeover::Failed;
            return;
        }
        self.lift(load.flags.as_ref());
        if !load.released {
            let told = load.job.failed("", Instant::now());
            let told = Finished { ok: true, kind: JobKind::Released, ..told };
            self.shared.release(load.job.key, told, None);
            load.released = true;
        }
        load.takeover = Takeover::Done(end);
    }

    /// The daemon will not carry a load out any more.
    fn end_load(&self, load: Loading) {
        match load.takeover {
            Takeover::Done(end) => self.shared.finish(load.job.key, end),
            Takeover::Due(_) | Takeover::Failed => self.load_here(&load.job, load.flags.as_ref()),
        }
    }

    fn connect_if_due(&mut self, now: Instant) {
        if self.link.is_some() || !self.backoff.is_due(now) {
            return;
        }
        let mut connection = match Connection::connect(&self.options.address, self.options.daemon_user) {
            Ok(connection) => connection,
            Err(error @ (ConnectError::Folder(_) | ConnectError::Stranger { .. })) => {
                self.refuse(&error.to_string());
                return self.backoff.failed(now);
            }
            Err(error) => {
                let sentence = error.to_string();
                tell(self.standing.absent(&sentence));
                self.note_refusal(&sentence);
                return self.backoff.failed(now);
            }
        };
        let hello = v1::Hello {
            wire_min: WIRE_MIN,
            wire_max: WIRE_MAX,
            client: self.options.client.clone(),
            role: v1::hello::Role::Worker.into(),
            engine_id: self.options.engine_id.clone(),
            process_nonce: Bytes::copy_from_slice(&self.fence.nonce()),
            live_leases: Vec::new(),
        };
        let hello = v1::Request { id: 1, body: Some(Ask::Hello(hello)) };
        if let Err(lost) = connection.send(&hello) {
            tell(self.standing.broken_off(&lost.to_string()));
            self.note_refusal(&lost.to_string());
            return self.backoff.failed(now);
        }
        self.link = Some(Link {
            connection,
            last_request: hello.id,
            boot: [0; 16],
            daemon: String::new(),
            stage: Stage::Greeting,
            batches: self.options.gpu.as_ref().map_or_else(Vec::new, |gpu| gpu.chunk_batches()).into_iter(),
            method: self.options.save_method,
            asked: BTreeMap::new(),
            silent: false,
        });
    }

    fn take_replies(&mut self) {
        loop {
            let Some(link) = &mut self.link else { return };
            match link.connection.flush().and_then(|()| link.connection.receive()) {
                Ok(Some(reply)) => {
                    link.silent = false;
                    if let Err(lost) = self.take_reply(reply) {
                        self.lose(&lost);
                    }
                }
                Ok(None) => return,
                Err(lost) => return self.lose(&lost),
            }
        }
    }

    fn take_reply(&mut self, reply: v1::Reply) -> Result<(), Lost> {
        let Some(link) = &mut self.link else { return Ok(()) };
        let asked = link.asked.remove(&reply.id);
        match reply.body {
            Some(Answer::Welcome(welcome)) => {
                link.daemon = describe(&welcome);
                link.boot = reply.boot_id.as_ref().try_into().unwrap_or_default();
                if let Some(credentials) = link.connection.unix().and_then(|s| PeerCredentials::of(s).ok()) {
                    // Without Yama there is nothing to allow; refused elsewhere, the daemon's probe will tell.
                    let _ = allow_ptrace_by(Some(credentials.pid).filter(|pid| *pid != 0));
                }
                return self.share_or_register();
            }
            Some(Answer::WorkerRegistered(registered)) => {
                let method;
                (link.method, method) = match registered.method() {
                    v1::register_worker::Method::ProcessVm => (SaveMethod::ProcessVm, "process_vm"),
                    v1::register_worker::Method::Gpu => (SaveMethod::Gpu, "gpu"),
                    _ => (SaveMethod::Mapped, "mapped"),
                };
                let by_daemon = link.method != SaveMethod::Mapped;
                let mut state = self.shared.state.lock();
                state.method = method.into();
                state.reason = registered.reason;
                drop(state);
                link.stage = Stage::Mapping;
                link.send(Ask::MapPool(v1::MapPool { writable: !by_daemon }))?;
            }
            Some(Answer::PoolDescriptor(described)) => match self.map_pool(&described) {
                Ok(()) => {
                    let Some(link) = &mut self.link else { return Ok(()) };
                    link.stage = Stage::Confirming;
                    link.send(Ask::PoolMapped(v1::PoolMapped {}))?;
                }
                Err(detail) => {
                    self.refuse(&detail);
                    return Err(Lost::Closed);
                }
            },
            Some(Answer::Done(_)) if link.stage == Stage::Sharing => return self.share_or_register(),
            Some(Answer::Done(_)) if link.stage == Stage::Confirming => {
                link.stage = Stage::Open;
                self.backoff.succeeded();
                let mut state = self.shared.state.lock();
                let how = format!("{}, saves by {} ({})", link.daemon, state.method, state.reason);
                tell(self.standing.connected(&how, Instant::now()));
                state.registered = true;
                state.refusal.clear();
                state.stats.connects += 1;
                self.shared.changed.notify_all();
            }
            Some(Answer::Done(_)) => {
                if let Some(Asked::Commit { key, end, .. }) = asked {
                    self.shared.finish(key, end);
                }
            }
            Some(Answer::SaveResult(result)) => {
                if let Some(Asked::Save { job, .. }) = asked {
                    let detail = if result.failed > 0 { "the copy failed or was cancelled" } else { "" };
                    let end = Finished {
                        ok: result.failed == 0,
                        blocks: result.saved,
                        present: result.present + result.in_flight,
                        bytes: result.bytes,
                        ..job.failed(detail, Instant::now())
                    };
                    self.shared.finish(job.key, end);
                }
            }
            Some(Answer::LoadResult(result)) => {
                if let Some(Asked::Load(load)) = asked {
                    let (blocks, bytes) = (result.blocks, result.bytes);
                    let now = Instant::now();
                    load.note_pace(&mut self.pace, now);
                    let end = Finished { ok: true, blocks, bytes, ..load.job.failed("", now) };
                    self.shared.finish(load.job.key, end);
                }
            }
            Some(Answer::ClaimResult(result)) => match asked {
                Some(Asked::Claim { job, .. }) => self.write_claimed(job, &result)?,
                Some(Asked::GivenUp) => {
                    link.send(Ask::Commit(v1::Commit { claim: result.claim, written: false }))?;
                }
                _ => {}
            },
            Some(Answer::Refused(refused)) => {
                let is_open = link.stage == Stage::Open;
                if !is_open {
                    self.refuse(&refused.sentence);
                } else if refused.reason() != Reason::Cancelled && self.note_refusal(&refused.sentence) {
                    let (address, sentence) = (&self.options.address, &refused.sentence);
                    tracing::warn!("kvlane: the daemon at {address} refused a request: {sentence}");
                }
                if let Some(asked) = asked {
                    self.end(asked, &refused.sentence);
                } else if !is_open {
                    return Err(Lost::Closed);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Shares the next chunks of GPU memory, or registers when all are shared.
    fn share_or_register(&mut self) -> Result<(), Lost> {
        let Some(link) = &mut self.link else { return Ok(()) };
        if let (Some(gpu), Some(batch)) = (&self.options.gpu, link.batches.next()) {
            link.stage = Stage::Sharing;
            return match gpu.share(&batch) {
                Ok((message, descriptors)) => {
                    link.send_with(Ask::ShareChunks(message), descriptors)?;
                    Ok(())
                }
                Err(error) => {
                    self.refuse(&error.to_string());
                    Err(Lost::Closed)
                }
            };
        }
        link.stage = Stage::Registering;
        let groups = self.groups.iter().map(GroupMemory::to_wire).collect();
        let method = match self.options.save_method {
            SaveMethod::Auto => v1::register_worker::Method::Auto,
            SaveMethod::ProcessVm => v1::register_worker::Method::ProcessVm,
            SaveMethod::Mapped => v1::register_worker::Method::Mapped,
            SaveMethod::Gpu => v1::register_worker::Method::Gpu,
        };
        let gpu = self.options.gpu.as_ref().map(|gpu| gpu.to_wire());
        link.send(Ask::RegisterWorker(v1::RegisterWorker {
            rank: self.options.rank,
            workers: self.options.workers,
            groups,
            fence_address: self.fence.address(),
            method: method.into(),
            gpu,
        }))?;
        Ok(())
    }

    fn map_pool(&mut self, described: &v1::PoolDescriptor) -> Result<(), String> {
        let Some(link) = &mut self.link else { return Ok(()) };
        let descriptor =
            link.connection.take_descriptor().ok_or("the daemon sent no descriptor of its pool")?;
        let life = self.processes.watch(link.connection.unix());
        let writable = !matches!(link.method, SaveMethod::ProcessVm | SaveMethod::Gpu);
        self.mapped.map(link.boot, descriptor, described.bytes, writable)?;
        let unmapped = self.pools.set(link.boot, life);
        self.unmap(unmapped);
        Ok(())
    }

    /// Writes the blocks that were claimed for us, and commits.
    fn write_claimed(&mut self, job: Job, result: &v1::ClaimResult) -> Result<(), Lost> {
        let Some(link) = &mut self.link else { return Ok(()) };
        let Work::Save(groups) = &job.work else { return Ok(()) };
        let written = claimed_places(groups, result)
            .and_then(|(places, present)| Ok((self.copies.save(&places, self.mapped.present())?, present)));
        let now = Instant::now();
        let (end, ok) = match written {
            Ok((Copied { blocks, bytes }, present)) => {
                (Finished { ok: true, blocks, present, bytes, ..job.failed("", now) }, true)
            }
            Err(detail) => (job.failed(detail, now), false),
        };
        let deadline = Instant::now() + self.options.save_timeout;
        match link.send(Ask::Commit(v1::Commit { claim: result.claim, written: ok })) {
            Ok(id) => {
                link.asked.insert(id, Asked::Commit { key: job.key, end, deadline });
                Ok(())
            }
            Err(lost) => {
                let end = Finished { ok: false, detail: "the daemon went away".into(), ..end };
                self.shared.finish(job.key, end);
                Err(lost)
            }
        }
    }

    /// Ends saves whose answer does not come. The fence is raised first: whatever the daemon still copies on
    /// their behalf is discarded, so the engine may reuse the blocks.
    fn give_up_overdue(&mut self, now: Instant) {
        let Some(link) = &mut self.link else { return };
        let overdue =
            link.asked.values().any(|asked| asked.deadline().is_some_and(|deadline| now >= deadline));
        if !overdue {
            return;
        }
        self.fence.raise();
        link.silent = true;
        // Not loads: the daemon may still be about to write.
        let saves = link.asked.values_mut().filter(|asked| !matches!(asked, Asked::Load(_)));
        let given_up: Vec<Asked> = saves.map(|asked| std::mem::replace(asked, Asked::GivenUp)).collect();
        let mut ended = 0;
        for asked in given_up {
            ended += u64::from(!matches!(asked, Asked::GivenUp));
            self.end(asked, "the daemon did not answer in time");
        }
        self.shared.state.lock().stats.save_timeouts += ended;
        tracing::warn!(saves = ended, "kvlane: the daemon does not answer; the worker gives up its saves");
    }

    fn end(&self, asked: Asked, why: &str) {
        match asked {
            Asked::Save { job, .. } | Asked::Claim { job, .. } => self.fail(&job, why),
            Asked::Commit { key, end, .. } => {
                let end = Finished { ok: false, blocks: 0, bytes: 0, detail: why.into(), ..end };
                self.shared.finish(key, end);
            }
            Asked::Load(load) => self.end_load(load),
            Asked::GivenUp => {}
        }
    }

    fn lose(&mut self, lost: &Lost) {
        let Some(link) = self.link.take() else { return };
        // The connection may have ended without the daemon: what it still copies must not count.
        self.fence.raise();
        let open = link.stage == Stage::Open;
        // The engine goes on first. Its blocks are free once nothing can write them any more.
        let mut asked: Vec<Asked> = link.asked.into_values().collect();
        let mut loads = false;
        for asked in &mut asked {
            if let Asked::Load(load) = asked {
                loads = true;
                if matches!(load.takeover, Takeover::Due(_)) {
                    self.take_over(load);
                }
            }
        }
        if loads {
            link.connection.wait_for_peers_end(PEERS_END);
        }
        asked.into_iter().for_each(|asked| self.end(asked, "the daemon went away"));
        self.backoff.failed(Instant::now());
        tell(if open {
            self.standing.lost(&lost.to_string(), Instant::now())
        } else {
            self.standing.broken_off(&lost.to_string())
        });
        let mut state = self.shared.state.lock();
        if open {
            state.registered = false;
            state.stats.losses += 1;
        }
        drop(state);
        let unmapped = self.pools.lost();
        self.unmap(unmapped);
        self.mapped.lost();
        self.round_at = Instant::now() + ROUND;
    }

    /// This daemon cannot be used.
    fn refuse(&mut self, sentence: &str) {
        tell(self.standing.refused(sentence, Instant::now()));
        self.note_refusal(sentence);
    }

    /// Whoever waits for the registration learns why it does not come. True for a sentence that is new.
    fn note_refusal(&self, sentence: &str) -> bool {
        let mut state = self.shared.state.lock();
        let is_new = state.refusal != sentence;
        if is_new {
            state.refusal = sentence.into();
            self.shared.changed.notify_all();
        }
        is_new
    }

    /// Waits for a job, an answer or a deadline; while `busy` only looks for them.
    fn wait(&self, busy: bool) {
        let now = Instant::now();
        let asked = self.link.iter().flat_map(|link| link.asked.values());
        let deadlines =
            asked.flat_map(|asked| asked.deadline().into_iter().chain(asked.due()).chain(asked.release_at()));
        let round = self.pools.has_former().then_some(self.round_at);
        let busy = busy.then_some(now);
        let deadline = deadlines.chain(round).chain(busy).min().map(|at| at.saturating_duration_since(now));
        let wake = self.shared.wake.as_fd();
        match &self.link {
            Some(link) => link.connection.wait(deadline, Some(wake)),
            None => {
                let timeout = deadline.unwrap_or(Duration::MAX).min(self.backoff.until_due(now));
                poll_for(&mut [PollFd::from_borrowed_fd(wake, PollFlags::IN)], Some(timeout));
            }
        }
        let mut count = [0; 8];
        let _ = rustix::io::read(wake, &mut count);
    }

    fn stop(mut self, jobs: Vec<Job>) {
        self.fence.raise();
        jobs.iter().for_each(|job| self.fail(job, "the worker is closed"));
        if let Some(mut link) = self.link.take() {
            let asked = std::mem::take(&mut link.asked);
            // Its answer comes after what the daemon was still copying.
            link.connection.say_goodbye(link.last_request + 1);
            for asked in asked.into_values() {
                match asked {
                    Asked::Load(load) => {
                        self.lift(load.flags.as_ref());
                        self.fail(&load.job, "the worker is closed");
                    }
                    other => self.end(other, "the worker is closed"),
                }
            }
        }
        self.shared.state.lock().registered = false;
    }
}

impl Asked {
    fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Save { deadline, .. } | Self::Claim { deadline, .. } | Self::Commit { deadline, .. } => {
                Some(*deadline)
            }
            Self::Load(_) | Self::GivenUp => None,
        }
    }

    /// When a load is carried out here.
    fn due(&self) -> Option<Instant> {
        match self {
            Self::Load(Loading { takeover: Takeover::Due(due), .. }) => Some(*due),
            _ => None,
        }
    }

    /// When a load is released.
    fn release_at(&self) -> Option<Instant> {
        match self {
            Self::Load(load) => load.release_at,
            _ => None,
        }
    }
}

/// Outcomes of a claim, as `ClaimResult` numbers them.
const CLAIMED: u8 = 0;
const NO_ROOM: u8 = 3;

/// Where claimed blocks are to be written, by group, and how many the daemon has or gets from another.
fn claimed_places(
    groups: &[SaveGroupSpec],
    result: &v1::ClaimResult,
) -> Result<(Vec<(u32, Places)>, u64), String> {
    let mut answers = result.outcome.iter().zip(result.pages.chunks_exact(4));
    let (mut by_group, mut present) = (Vec::new(), 0);
    for group in groups {
        let mut places = Places::new();
        for &block_id in &group.block_ids {
            let (&outcome, page) = answers.next().ok_or("the daemon answered for fewer blocks than asked")?;
            if outcome == CLAIMED {
                places.push((block_id, u32::from_le_bytes(page.try_into().unwrap_or_default())));
            } else if outcome != NO_ROOM {
                present += 1;
            }
        }
        by_group.push((group.group, places));
    }
    Ok((by_group, present))
}

fn wire_flags(flags: &Flags) -> v1::LoadFlags {
    v1::LoadFlags { address: flags.address, value: flags.value, region_ends: flags.ends_in_slices.clone() }
}

fn wire_group(group: &SaveGroupSpec) -> v1::SaveGroup {
    let mut hashes = BytesMut::with_capacity(group.hashes.len() * 16);
    group.hashes.iter().for_each(|hash| hashes.extend_from_slice(&hash.0));
    v1::SaveGroup {
        group: group.group,
        parent: group.parent.map_or_else(Bytes::new, |parent| Bytes::copy_from_slice(&parent.0)),
        hashes: hashes.freeze(),
        block_ids: group.block_ids.clone(),
    }
}
