//! A worker's handle: jobs in, ends of jobs out. The mover thread does the rest.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use kvlane_block::{BlockHash, LayoutError, Region};
use kvlane_gpu::GpuError;
use kvlane_proto::Address;
use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};

use crate::{
    BootId, DaemonUser,
    gpu::{Flags, WorkerGpu},
    group::GroupMemory,
    mover,
    pace::Pace,
    pools::Promises,
};

/// Jobs that may be queued or under way; further ones end at once, as failed.
const JOBS_MAX: usize = 16384;
/// How long a new worker waits for its first registration, so that the first request can already hit.
const FIRST_REGISTRATION: Duration = Duration::from_secs(5);

/// How saves travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaveMethod {
    /// process_vm where a probe shows that it works, else mapped.
    Auto,
    /// The daemon copies out of this process.
    ProcessVm,
    /// The daemon copies out of and into this process's GPU memory; chosen by giving a GPU.
    Gpu,
    /// This process writes through its mapping of the pool.
    Mapped,
}

/// This rank's part of one KV cache group.
#[derive(Debug, Clone)]
pub struct WorkerGroupSpec {
    /// As the scheduler names it.
    pub namespace: [u8; 16],
    /// Digest of the shard's shape; the same in all ranks that hold the same blocks.
    pub layout: [u8; 16],
    /// Where the blocks lie in this process.
    pub regions: Vec<Region>,
    /// Consecutive ranks that hold the same blocks, this one among them: each saves a slice of a block, and loads all
    /// slices. 1 for blocks of its own.
    pub replicas: u32,
}

/// What a worker needs to know.
#[derive(Debug, Clone)]
pub struct WorkerOptions {
    /// The daemon's Unix socket.
    pub address: Address,
    /// Whose daemon it may be beside this user's and root's.
    pub daemon_user: DaemonUser,
    /// Name of the engine instance; its scheduler gives the same.
    pub engine_id: String,
    /// Name and version for the daemon's logs.
    pub client: String,
    /// This worker's shard.
    pub rank: u32,
    /// Number of the engine's workers.
    pub workers: u32,
    /// Groups in the scheduler's order.
    pub groups: Vec<WorkerGroupSpec>,
    /// How saves travel.
    pub save_method: SaveMethod,
    /// A save without an answer for so long is given up.
    pub save_timeout: Duration,
    /// The GPU that the regions lie on; None for host memory.
    pub gpu: Option<Arc<WorkerGpu>>,
}

/// Consecutive blocks of one prompt to save.
#[derive(Debug, Clone)]
pub struct SaveGroupSpec {
    /// Index of the group.
    pub group: u32,
    /// Hash of the block before the first one.
    pub parent: Option<BlockHash>,
    /// Their hashes.
    pub hashes: Vec<BlockHash>,
    /// Their block ids in the engine.
    pub block_ids: Vec<u32>,
}

/// Blocks to load from the pool.
#[derive(Debug, Clone)]
pub struct LoadGroup {
    /// Index of the group.
    pub group: u32,
    /// Block ids in the engine.
    pub block_ids: Vec<u32>,
    /// Pool pages, one a block. Of blocks that several ranks hold, those of the first rank's slices, then those of the
    /// second's, and so on.
    pub pages: Vec<u32>,
}

/// When the request of a load may compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// When every byte has arrived.
    AtEnd,
    /// When what is left is predicted to take no longer than a step of the engine: for an engine that computes for other
    /// requests, which would have to wait with this one.
    WhenNear,
    /// As soon as the load is under way: nothing else computes.
    AtOnce,
}

/// What a job did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobKind {
    /// A load that is on its way and cannot fail any more: computing may begin, in streams that wait for it
    /// ([`Worker::wait_for_loads`]). Its end comes later, as a load's.
    Released,
    /// Engine to pool.
    Save,
    /// Pool to engine.
    Load,
}

/// The end of a job; exactly one comes for each. Before that of a load that is released, one of [`JobKind::Released`] comes.
#[derive(Debug, Clone)]
pub struct Finished {
    /// The caller's number.
    pub job: u64,
    /// What it was.
    pub kind: JobKind,
    /// Load: every byte arrived. Save: it was carried out, whatever was already there.
    pub ok: bool,
    /// Blocks copied.
    pub blocks: u64,
    /// Save: blocks that the pool had, or that another engine was saving.
    pub present: u64,
    /// Bytes copied.
    pub bytes: u64,
    /// From queueing to the end.
    pub seconds: f64,
    /// Why it failed, or empty.
    pub detail: String,
}

/// Counters since the last [`Worker::take_stats`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct WorkerStats {
    /// Registrations with a daemon.
    pub connects: u64,
    /// Connections lost.
    pub losses: u64,
    /// Saves given up because the daemon was silent.
    pub save_timeouts: u64,
}

#[derive(Debug)]
pub(crate) enum Work {
    Save(Vec<SaveGroupSpec>),
    Load { boot: BootId, groups: Vec<LoadGroup>, release: Release },
}

/// A load that was released and has not ended.
#[derive(Debug)]
pub(crate) struct Outstanding {
    pub(crate) job: u64,
    pub(crate) flags: Flags,
}

/// The event that a copy of a GPU waits for; given back when the job is over.
#[derive(Debug)]
pub(crate) struct After {
    gpu: Arc<WorkerGpu>,
    pub(crate) event: u32,
}

impl Drop for After {
    fn drop(&mut self) {
        self.gpu.give_back(self.event);
    }
}

impl Work {
    fn kind(&self) -> JobKind {
        match self {
            Self::Save(..) => JobKind::Save,
            Self::Load { .. } => JobKind::Load,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) number: u64,
    pub(crate) queued: Instant,
    pub(crate) work: Work,
    /// What a job of a worker on a GPU waits for.
    pub(crate) after: Option<After>,
}

impl Job {
    /// The end of this job without effect.
    pub(crate) fn failed(&self, detail: impl Into<String>) -> Finished {
        Finished {
            job: self.number,
            kind: self.work.kind(),
            ok: false,
            blocks: 0,
            present: 0,
            bytes: 0,
            seconds: self.queued.elapsed().as_secs_f64(),
            detail: detail.into(),
        }
    }
}

/// What the handle and the mover share.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) queue: Vec<Job>,
    pub(crate) finished: Vec<Finished>,
    /// Jobs queued or under way.
    pub(crate) open: usize,
    pub(crate) stop: bool,
    pub(crate) registered: bool,
    pub(crate) method: String,
    pub(crate) reason: String,
    pub(crate) refusal: String,
    /// What the last step told of its scheduler's promises, until the mover has seen it.
    pub(crate) promises: Option<Promises>,
    /// A step began and has not polled yet.
    pub(crate) in_step: bool,
    pub(crate) outstanding: Vec<Outstanding>,
    pub(crate) pace: Pace,
    pub(crate) stats: WorkerStats,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) state: Mutex<State>,
    pub(crate) changed: Condvar,
    /// `state.finished.len()`, readable without the lock.
    pub(crate) ready: AtomicUsize,
    pub(crate) wake: OwnedFd,
}

impl Shared {
    /// The load is under way and can only succeed; streams are to wait for its flags.
    pub(crate) fn release(&self, job: &Job, flags: Flags) {
        self.state.lock().outstanding.push(Outstanding { job: job.number, flags });
        self.release_loaded(job);
    }

    /// Everything is there although the load's end is still to come.
    pub(crate) fn release_loaded(&self, job: &Job) {
        let mut state = self.state.lock();
        state.finished.push(Finished { ok: true, kind: JobKind::Released, ..job.failed("") });
        self.ready.store(state.finished.len(), Ordering::Release);
        self.changed.notify_all();
    }

    pub(crate) fn finish(&self, finished: Finished) {
        let mut state = self.state.lock();
        state.open -= 1;
        state.outstanding.retain(|load| load.job != finished.job);
        state.finished.push(finished);
        self.ready.store(state.finished.len(), Ordering::Release);
        self.changed.notify_all();
    }
}

/// One rank of an engine.
#[derive(Debug)]
pub struct Worker {
    shared: Arc<Shared>,
    gpu: Option<Arc<WorkerGpu>>,
    mover: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts the mover, and waits up to five seconds for a first registration where a daemon answers.
    ///
    /// # Errors
    /// [`LayoutError`] for regions that make no sense, replicas that do not divide the workers, or the kernel's refusal
    /// of a thread or descriptor.
    ///
    /// # Safety
    /// The regions' memory must stay mapped and writable until [`close`](Self::close) has returned: the mover
    /// writes loads into it and reads saves from it.
    pub unsafe fn start(mut options: WorkerOptions) -> Result<Self, StartError> {
        let groups = std::mem::take(&mut options.groups);
        let groups = groups.into_iter().map(|group| {
            let (replicas, workers) = (group.replicas, options.workers);
            if replicas == 0 || !workers.is_multiple_of(replicas) {
                return Err(StartError::Replicas { replicas, workers });
            }
            Ok(GroupMemory::new(group, options.rank)?)
        });
        let groups = groups.collect::<Result<Vec<_>, StartError>>()?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(io::Error::from)?;
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
            ready: AtomicUsize::new(0),
            wake,
        });
        let for_mover = Arc::clone(&shared);
        let gpu = options.gpu.clone();
        let mover = std::thread::Builder::new()
            .name("kvlane-mover".into())
            .spawn(move || mover::run(options, groups, &for_mover))?;
        let worker = Self { shared, gpu, mover: Some(mover) };
        worker.wait_registered(FIRST_REGISTRATION);
        Ok(worker)
    }

    /// Registered with a daemon, and its pool mapped.
    pub fn is_connected(&self) -> bool {
        self.shared.state.lock().registered
    }

    /// How saves travel and why, once registered.
    pub fn method(&self) -> (String, String) {
        let state = self.shared.state.lock();
        (state.method.clone(), state.reason.clone())
    }

    /// The daemon's last refusal, or empty.
    pub fn refusal(&self) -> String {
        self.shared.state.lock().refusal.clone()
    }

    /// Waits until registered. False at the timeout, or at once when nobody answers.
    pub fn wait_registered(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut state = self.shared.state.lock();
        while !state.registered && state.refusal.is_empty() {
            if self.shared.changed.wait_until(&mut state, deadline).timed_out() {
                break;
            }
        }
        state.registered
    }

    /// Queues a save. The blocks must not change until the job is finished.
    ///
    /// # Panics
    /// For a worker on a GPU: see [`save_after`](Self::save_after).
    pub fn save(&self, job: u64, groups: Vec<SaveGroupSpec>) {
        assert!(self.gpu.is_none(), "a worker on a GPU names the stream that computes its blocks");
        self.queue(job, Work::Save(groups), None);
    }

    /// Queues a load from the pool of that boot.
    ///
    /// # Panics
    /// For a worker on a GPU: see [`load_after`](Self::load_after).
    pub fn load(&self, job: u64, boot: BootId, groups: Vec<LoadGroup>) {
        assert!(self.gpu.is_none(), "a worker on a GPU names the stream that used its blocks");
        self.queue(job, Work::Load { boot, groups, release: Release::AtEnd }, None);
    }

    /// Queues a save of blocks that `stream` has been told to compute.
    ///
    /// # Safety
    /// `stream` is a live stream of the worker's GPU in this process, or 0 for its default stream.
    pub unsafe fn save_after(&self, job: u64, groups: Vec<SaveGroupSpec>, stream: u64) {
        // SAFETY: the caller's promise.
        unsafe { self.queue_after(job, Work::Save(groups), stream) };
    }

    /// Queues a load from the pool of that boot, into blocks that `stream` may still be using. `release` says when it may be
    /// reported as released, which it is not where its parts cannot be waited for.
    ///
    /// # Safety
    /// As for [`save_after`](Self::save_after).
    pub unsafe fn load_after(
        &self,
        job: u64,
        boot: BootId,
        groups: Vec<LoadGroup>,
        stream: u64,
        release: Release,
    ) {
        // SAFETY: the caller's promise.
        unsafe { self.queue_after(job, Work::Load { boot, groups, release }, stream) };
    }

    /// Whether a load was released and has not ended.
    pub fn has_outstanding_loads(&self) -> bool {
        !self.shared.state.lock().outstanding.is_empty()
    }

    /// Later work of `stream` starts once this region of every load that was released is there; None is all regions.
    /// Every load counts, not only those of the requests at hand: its blocks may have been found by another request, or
    /// belong to one by now.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// As for [`save_after`](Self::save_after).
    pub unsafe fn wait_for_loads(&self, region: Option<u32>, stream: u64) -> Result<(), GpuError> {
        let Some(gpu) = &self.gpu else { return Ok(()) };
        for load in &self.shared.state.lock().outstanding {
            // SAFETY: the caller's promise.
            unsafe { gpu.hold_up(stream, &load.flags, region)? };
        }
        Ok(())
    }

    /// # Safety
    /// As for [`save_after`](Self::save_after).
    unsafe fn queue_after(&self, number: u64, work: Work, stream: u64) {
        let Some(gpu) = &self.gpu else { return self.queue(number, work, None) };
        // SAFETY: the caller's promise.
        match unsafe { gpu.record(stream) } {
            Ok(event) => {
                let after = event.map(|event| After { gpu: Arc::clone(gpu), event });
                self.queue(number, work, after);
            }
            Err(error) => {
                self.shared.state.lock().open += 1;
                let job = Job { number, queued: Instant::now(), work, after: None };
                self.shared.finish(job.failed(error.to_string()));
            }
        }
    }

    /// The engine begins a step, which ends with the next [`poll`](Self::poll), and may compute in it. Its loads come after
    /// this call, and those of the steps before it have come. `promises` says which pools of daemons that died no load will
    /// be of any more; until then they stay mapped, however long that takes.
    pub fn step_begins(&self, computes: bool, promises: Promises) {
        let mut state = self.shared.state.lock();
        state.in_step = true;
        state.promises = Some(promises);
        state.pace.step_began(Instant::now(), computes);
    }

    /// Jobs that ended since the last call.
    pub fn poll(&self) -> Vec<Finished> {
        let mut state = self.shared.state.lock();
        state.in_step = false;
        self.shared.ready.store(0, Ordering::Release);
        std::mem::take(&mut state.finished)
    }

    /// Whether [`poll`](Self::poll) has something.
    pub fn has_finished(&self) -> bool {
        self.shared.ready.load(Ordering::Acquire) > 0
    }

    /// Waits until a job ended or none is open. False at the timeout.
    pub fn wait(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut state = self.shared.state.lock();
        while state.finished.is_empty() && state.open > 0 {
            if self.shared.changed.wait_until(&mut state, deadline).timed_out() {
                return false;
            }
        }
        true
    }

    /// Counters since the last call.
    pub fn take_stats(&self) -> WorkerStats {
        std::mem::take(&mut self.shared.state.lock().stats)
    }

    /// Ends all jobs, waits for copies under way, unmaps the pool and says goodbye.
    pub fn close(&mut self) {
        self.shared.state.lock().stop = true;
        self.wake();
        if let Some(mover) = self.mover.take()
            && mover.join().is_err()
        {
            tracing::error!("the mover thread had panicked");
        }
    }

    fn queue(&self, number: u64, work: Work, after: Option<After>) {
        let job = Job { number, queued: Instant::now(), work, after };
        let mut state = self.shared.state.lock();
        state.open += 1;
        if state.open > JOBS_MAX || state.stop {
            drop(state);
            self.shared.finish(job.failed("too many jobs are open, or the worker is closed"));
            return;
        }
        state.queue.push(job);
        drop(state);
        self.wake();
    }

    fn wake(&self) {
        // Full or interrupted: the mover is awake anyway.
        let _ = rustix::io::write(self.shared.wake.as_fd(), &1u64.to_ne_bytes());
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.close();
    }
}

/// A worker that could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Regions that make no sense.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Blocks shared by a number of ranks that the engine does not consist of.
    #[error("{workers} workers cannot share the blocks of a group by {replicas}")]
    Replicas {
        /// Ranks that share a block.
        replicas: u32,
        /// Workers of the engine.
        workers: u32,
    },
    /// No thread or descriptor to be had.
    #[error("cannot start the mover: {0}")]
    Io(#[from] io::Error),
}
