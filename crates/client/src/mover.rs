//! The worker's thread: connects and registers, asks for saves, copies loads, gives up on a silent daemon.
//!
//! ```text
//!   Down --connect--> Greeting --Welcome--> Sharing --Done of each--> Registering --WorkerRegistered--> Mapping
//!    ^                                                                                                    | descriptor
//!    +------------------------------ lost, refused (backoff) <------- Open <----- Done ----- Confirming <-+
//! ```

use std::{
    collections::BTreeMap,
    os::fd::AsFd,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use kvlane_block::{Region, plan};
use kvlane_memory::{
    EngineMemory, OwnMemory, PAGE_BYTES, PeerCredentials, PoolView, allow_ptrace_by, peer_pidfd,
};
use kvlane_proto::{
    WIRE_MAX, WIRE_MIN, v1, v1::refused::Reason, v1::reply::Body as Answer, v1::request::Body as Ask,
};
use rustix::event::{PollFd, PollFlags};

use crate::{
    BootId,
    backoff::Backoff,
    connection::{ConnectError, Connection, Lost, poll_for},
    fence::Fence,
    gpu::{ChunkBatch, Flags},
    group::{GroupMemory, Places},
    loading::{Loading, Takeover},
    nonce::random_nonce,
    pools::{Mapped, Pools, ROUND},
    standing::{Standing, describe, tell},
    worker::{
        After, Finished, Job, LoadGroup, Release, SaveGroupSpec, SaveMethod, Shared, Work, WorkerOptions,
    },
};

/// How long a daemon whose connection ended is watched for its end, before the blocks of its loads count as free. Its GPU
/// work ends with it, and unpinning a large pool takes a while; one that lives on has ended the session, and waited for
/// its copies before.
const PEERS_END: Duration = Duration::from_secs(10);
/// Blocks of one save; their hashes and ids have to fit into a frame.
const SAVE_BLOCKS_MAX: usize = 2 << 20;

/// Runs until the handle says stop.
pub(crate) fn run(options: WorkerOptions, groups: Vec<GroupMemory>, shared: &Shared) {
    let now = Instant::now();
    let mover = Mover {
        fence: Fence::new(random_nonce(), options.gpu.clone()),
        backoff: Backoff::new(now),
        link: None,
        pools: Pools::default(),
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
    pools: Pools,
    round_at: Instant,
    standing: Standing,
}

/// A connection and what was asked over it.
struct Link {
    connection: Connection,
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
    Commit { end: Finished, deadline: Instant },
    /// Given up; a claim that is granted now must be handed back.
    GivenUp,
}

impl Mover<'_> {
    fn run(mut self) {
        loop {
            let now = Instant::now();
            let (jobs, stop, promises, in_step) = {
                let mut state = self.shared.state.lock();
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
            if let Some(promises) = promises {
                // After the jobs that were queued before that step.
                self.pools.step_begins(&promises);
            }
            if self.pools.has_former() && now >= self.round_at {
                self.round_at = now + ROUND;
                self.pools.round(in_step);
            }
            // A GPU's loads come through this mapping only when the daemon is gone.
            let busy = self.options.gpu.is_none() && self.pools.prefault_some();
            self.wait(busy);
        }
    }

    fn start(&mut self, job: Job) {
        match &job.work {
            Work::Load { boot, groups, release } => {
                let flags = match release {
                    Release::AtEnd => None,
                    Release::WhenNear | Release::AtOnce => self.flags(groups, job.after.as_ref()),
                };
                let beside_compute = *release != Release::AtOnce;
                match self.ask_for_load(boot, groups, job.after.as_ref(), flags.as_ref(), beside_compute) {
                    Some(id) => self.asked_for_load(id, job, flags),
                    None => self.load_here(&job, None),
                }
            }
            Work::Save(groups) => {
                let blocks = groups.iter().map(|group| group.block_ids.len()).sum::<usize>();
                if blocks > SAVE_BLOCKS_MAX {
                    let detail =
                        format!("{blocks} blocks in one save, at most {SAVE_BLOCKS_MAX} are possible");
                    return self.shared.finish(job.failed(detail));
                }
                let deadline = Instant::now() + self.options.save_timeout;
                let groups = groups.iter().map(wire_group).collect();
                let open = self.link.as_mut().filter(|link| link.stage == Stage::Open && !link.silent);
                let Some(link) = open else { return self.shared.finish(job.failed("no kvlane daemon")) };
                let (ask, asked) = if link.method == SaveMethod::Mapped {
                    let ask = Ask::Claim(v1::Claim { groups, job: job.number });
                    (ask, Asked::Claim { job, deadline })
                } else {
                    let event = job.after.as_ref().map(|after| after.event);
                    let epoch = self.fence.epoch();
                    let ask = Ask::Save(v1::Save { groups, epoch, event, job: job.number });
                    (ask, Asked::Save { job, deadline })
                };
                match link.connection.send(ask) {
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
        let load = Loading::asked(job, flags, bytes, now, alone, self.shared);
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
        after: Option<&After>,
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
        let event = after.map(|after| after.event);
        let flags = flags.map(Flags::to_wire);
        let ask = Ask::Load(v1::Load { groups: groups.collect(), epoch, event, flags, beside_compute });
        match link.connection.send(ask) {
            Ok(id) => Some(id),
            Err(lost) => {
                self.lose(&lost);
                None
            }
        }
    }

    /// Flags for a load of one group; several groups are loaded as a whole.
    fn flags(&self, groups: &[LoadGroup], after: Option<&After>) -> Option<Flags> {
        let ([group], Some(after), Some(gpu)) = (groups, after, &self.options.gpu) else { return None };
        gpu.flags(after.event, self.groups.get(group.group as usize)?)
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
        self.shared.finish(end);
    }

    /// Copies a load in this process; its end is given.
    fn carry_out(&self, job: &Job) -> Finished {
        let Work::Load { boot, groups, .. } = &job.work else { return job.failed("not a load") };
        match self.load(boot, groups, job.after.as_ref()) {
            Ok((blocks, bytes)) => Finished { ok: true, blocks, bytes, ..job.failed("") },
            Err(detail) => job.failed(detail),
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
            self.shared.release_loaded(&load.job);
            load.released = true;
        }
        load.takeover = Takeover::Done(end);
    }

    /// The daemon will not carry a load out any more.
    fn end_load(&self, load: Loading) {
        match load.takeover {
            Takeover::Done(end) => self.shared.finish(end),
            Takeover::Due(_) | Takeover::Failed => self.load_here(&load.job, load.flags.as_ref()),
        }
    }

    /// Copies blocks from the mapped pool into the engine. The daemon has no part in it.
    fn load(&self, boot: &BootId, groups: &[LoadGroup], after: Option<&After>) -> Result<(u64, u64), String> {
        let pool = self.pools.of(boot).ok_or("the pool of that boot is not mapped")?;
        let mut blocks = 0;
        let mut bytes = 0;
        for group in groups {
            let memory = self.groups.get(group.group as usize).ok_or("no such group")?;
            let mut runs = Vec::new();
            for (regions, places) in memory.places(group)? {
                runs.extend(plan_in_pool(regions, &places, &pool.reading)?);
            }
            // SAFETY: the regions are valid memory while the worker runs (`Worker::start`); the pages are leased
            // until the scheduler hears of the end of this job, and `plan_in_pool` checked that they lie in the view.
            unsafe {
                match &self.options.gpu {
                    Some(gpu) => gpu
                        .write(&runs, pool.reading.base(), after.map(|after| after.event))
                        .map_err(|error| error.to_string())?,
                    None => OwnMemory.write(&runs, pool.reading.base()).map_err(|error| error.to_string())?,
                }
            }
            blocks += group.block_ids.len() as u64;
            bytes += runs.iter().map(|run| run.len).sum::<u64>();
        }
        Ok((blocks, bytes))
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
        if let Err(lost) = connection.send(Ask::Hello(hello)) {
            tell(self.standing.broken_off(&lost.to_string()));
            self.note_refusal(&lost.to_string());
            return self.backoff.failed(now);
        }
        self.link = Some(Link {
            connection,
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
                link.connection.send(Ask::MapPool(v1::MapPool { writable: !by_daemon }))?;
            }
            Some(Answer::PoolDescriptor(described)) => match self.map_pool(&described) {
                Ok(()) => {
                    let Some(link) = &mut self.link else { return Ok(()) };
                    link.stage = Stage::Confirming;
                    link.connection.send(Ask::PoolMapped(v1::PoolMapped {}))?;
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
                if let Some(Asked::Commit { end, .. }) = asked {
                    self.shared.finish(end);
                }
            }
            Some(Answer::SaveResult(result)) => {
                if let Some(Asked::Save { job, .. }) = asked {
                    let detail = if result.failed > 0 { "the copy failed or was cancelled" } else { "" };
                    self.shared.finish(Finished {
                        ok: result.failed == 0,
                        blocks: result.saved,
                        present: result.present + result.in_flight,
                        bytes: result.bytes,
                        ..job.failed(detail)
                    });
                }
            }
            Some(Answer::LoadResult(result)) => {
                if let Some(Asked::Load(load)) = asked {
                    let (blocks, bytes) = (result.blocks, result.bytes);
                    load.note_pace(self.shared);
                    self.shared.finish(Finished { ok: true, blocks, bytes, ..load.job.failed("") });
                }
            }
            Some(Answer::ClaimResult(result)) => match asked {
                Some(Asked::Claim { job, .. }) => self.write_claimed(job, &result)?,
                Some(Asked::GivenUp) => {
                    link.connection.send(Ask::Commit(v1::Commit { claim: result.claim, written: false }))?;
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
                    link.connection.send_with(Ask::ShareChunks(message), descriptors)?;
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
        link.connection.send(Ask::RegisterWorker(v1::RegisterWorker {
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
        let map = |fd, writable| {
            PoolView::map(fd, described.bytes, writable)
                .map(Arc::new)
                .map_err(|error| format!("the pool of {} bytes cannot be mapped: {error}", described.bytes))
        };
        let writing = match link.method {
            SaveMethod::ProcessVm | SaveMethod::Gpu => None,
            _ => {
                let second =
                    descriptor.try_clone().map_err(|error| format!("no descriptor left: {error}"))?;
                Some(map(second, true)?)
            }
        };
        let daemon = link.connection.unix().and_then(|stream| peer_pidfd(stream).ok()).map(Arc::new);
        let reading = map(descriptor, false)?;
        self.pools.set(Mapped { boot: link.boot, reading, writing, prefaulted: 0, daemon });
        Ok(())
    }

    /// Writes the blocks that were claimed for us, and commits.
    fn write_claimed(&mut self, job: Job, result: &v1::ClaimResult) -> Result<(), Lost> {
        let Some(link) = &mut self.link else { return Ok(()) };
        let Work::Save(groups) = &job.work else { return Ok(()) };
        let written = write_groups(groups, result, &self.groups, self.pools.present());
        let (end, ok) = match written {
            Ok(written) => (
                Finished {
                    ok: true,
                    blocks: written.blocks,
                    present: written.present,
                    bytes: written.bytes,
                    ..job.failed("")
                },
                true,
            ),
            Err(detail) => (job.failed(detail), false),
        };
        let deadline = Instant::now() + self.options.save_timeout;
        match link.connection.send(Ask::Commit(v1::Commit { claim: result.claim, written: ok })) {
            Ok(id) => {
                link.asked.insert(id, Asked::Commit { end, deadline });
                Ok(())
            }
            Err(lost) => {
                self.shared.finish(Finished { ok: false, detail: "the daemon went away".into(), ..end });
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
            Asked::Save { job, .. } | Asked::Claim { job, .. } => self.shared.finish(job.failed(why)),
            Asked::Commit { end, .. } => {
                self.shared.finish(Finished { ok: false, blocks: 0, bytes: 0, detail: why.into(), ..end });
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
        self.pools.lost();
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
        jobs.iter().for_each(|job| self.shared.finish(job.failed("the worker is closed")));
        if let Some(mut link) = self.link.take() {
            let asked = std::mem::take(&mut link.asked);
            // Its answer comes after what the daemon was still copying.
            link.connection.say_goodbye();
            for asked in asked.into_values() {
                match asked {
                    Asked::Load(load) => {
                        self.lift(load.flags.as_ref());
                        self.shared.finish(load.job.failed("the worker is closed"));
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

#[derive(Default)]
struct Written {
    blocks: u64,
    present: u64,
    bytes: u64,
}

/// Outcomes of a claim, as `ClaimResult` numbers them.
const CLAIMED: u8 = 0;
const NO_ROOM: u8 = 3;

fn write_groups(
    groups: &[SaveGroupSpec],
    result: &v1::ClaimResult,
    known: &[GroupMemory],
    pool: Option<&Mapped>,
) -> Result<Written, String> {
    let view = pool.and_then(|pool| pool.writing.as_ref()).ok_or("the pool is not mapped writable")?;
    let mut answers = result.outcome.iter().zip(result.pages.chunks_exact(4));
    let mut written = Written::default();
    for group in groups {
        let regions = known.get(group.group as usize).ok_or("no such group")?.shard();
        let mut places = Places::new();
        for &block_id in &group.block_ids {
            let (&outcome, page) = answers.next().ok_or("the daemon answered for fewer blocks than asked")?;
            if outcome == CLAIMED {
                places.push((block_id, u32::from_le_bytes(page.try_into().unwrap_or_default())));
            } else if outcome != NO_ROOM {
                written.present += 1;
            }
        }
        let runs = plan_in_pool(regions, &places, view)?;
        // SAFETY: the regions are valid memory while the worker runs (`Worker::start`); the daemon gave these pages
        // to this claim alone until it is committed, and `plan_in_pool` checked that they lie in the view.
        unsafe { OwnMemory.read(&runs, view.base()) }.map_err(|error| error.to_string())?;
        written.blocks += places.len() as u64;
        written.bytes += runs.iter().map(|run| run.len).sum::<u64>();
    }
    Ok(written)
}

fn plan_in_pool(
    regions: &[Region],
    places: &[(u32, u32)],
    view: &PoolView,
) -> Result<Vec<kvlane_block::Run>, String> {
    let blocks: Vec<(u32, u64)> =
        places.iter().map(|&(id, page)| (id, u64::from(page) * PAGE_BYTES)).collect();
    let runs = plan(regions, &blocks).map_err(|error| error.to_string())?;
    match runs.iter().find(|run| run.pool_offset + run.len > view.bytes()) {
        Some(run) => Err(format!("{} bytes at {} are not inside the pool", run.len, run.pool_offset)),
        None => Ok(runs),
    }
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
