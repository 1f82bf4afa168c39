//! A worker's handle: queues jobs and returns their ends. The mover thread does the rest.

use std::{
    io,
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use kvlane_block::LayoutError;
use kvlane_engine_memory::{EngineStream, GpuError, WorkerGpu};
use kvlane_memory::random;
use rustix::event::{EventfdFlags, eventfd};

use crate::{
    boot::BootId,
    jobs::{Finished, Job, LoadGroup, Release, SaveGroupSpec, Work},
    links::{ids::JobKey, promises::Promises},
    mover,
    shared::{Shared, WorkerOptions, WorkerStats},
};

/// Most jobs that have not ended; further ones end at once, as failed.
const JOBS_MAX: usize = 16384;
/// How long a new worker waits for its first registration, so that the first request can already hit.
const FIRST_REGISTRATION: Duration = Duration::from_secs(5);

/// One rank of an engine.
#[derive(Debug)]
pub struct Worker {
    shared: Arc<Shared>,
    gpu: Option<Arc<WorkerGpu>>,
    mover: Option<JoinHandle<()>>,
    /// The last [`JobKey`], because the caller may repeat its own numbers.
    last_job: AtomicU64,
}

impl Worker {
    /// Starts the mover. If a daemon answers, waits up to five seconds for the first registration.
    ///
    /// # Errors
    /// Regions are inconsistent, replicas do not divide the workers, or the kernel refuses a thread, a descriptor, or random
    /// bytes for this process's nonce.
    pub fn start(options: WorkerOptions) -> Result<Self, StartError> {
        let workers = options.workers;
        for replicas in options.blocks.groups().iter().map(|group| group.replicas) {
            if replicas == 0 || !workers.is_multiple_of(replicas) {
                return Err(StartError::Replicas { replicas, workers });
            }
        }
        let copies = options.blocks.of_rank(options.rank)?;
        let nonce = random()?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(io::Error::from)?;
        let gpu = options.blocks.gpu().cloned();
        let shared = Arc::new(Shared::new(wake, gpu.clone()));
        let for_mover = Arc::clone(&shared);
        let mover = std::thread::Builder::new()
            .name("kvlane-mover".into())
            .spawn(move || mover::run(options, nonce, copies, &for_mover))?;
        let worker = Self { shared, gpu, mover: Some(mover), last_job: AtomicU64::new(0) };
        worker.wait_registered(FIRST_REGISTRATION);
        Ok(worker)
    }

    /// Whether the worker is registered with a daemon and has mapped its pool.
    pub fn is_connected(&self) -> bool {
        self.shared.state.lock().registered
    }

    /// The name of the save method and why the daemon chose it, once registered.
    pub fn method(&self) -> (String, String) {
        let state = self.shared.state.lock();
        (state.method.clone(), state.reason.clone())
    }

    /// The daemon's last refusal, or empty.
    pub fn refusal(&self) -> String {
        self.shared.state.lock().refusal.clone()
    }

    /// Waits until registered. False at the timeout, or at once if no daemon answers or it refuses.
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

    /// Queues a save. The blocks must not change until the job has ended.
    ///
    /// # Panics
    /// If the worker is on a GPU: use [`save_after`](Self::save_after).
    pub fn save(&self, job: u64, groups: Vec<SaveGroupSpec>) {
        assert!(self.gpu.is_none(), "a worker on a GPU names the stream that computes its blocks");
        self.queue(self.job(job, Work::Save(groups.into()), None));
    }

    /// Queues a load from the pool of that boot.
    ///
    /// # Panics
    /// If the worker is on a GPU: use [`load_after`](Self::load_after).
    pub fn load(&self, job: u64, boot: BootId, groups: Vec<LoadGroup>) {
        assert!(self.gpu.is_none(), "a worker on a GPU names the stream that used its blocks");
        let work = Work::Load { boot, groups: groups.into(), release: Release::AtEnd };
        self.queue(self.job(job, work, None));
    }

    /// Queues a save of blocks that work enqueued on `stream` computes.
    pub fn save_after(&self, job: u64, groups: Vec<SaveGroupSpec>, stream: &EngineStream) {
        self.queue_after(job, Work::Save(groups.into()), stream);
    }

    /// Queues a load from the pool of that boot, into blocks that work enqueued on `stream` may still use. `release` says when
    /// the load may be reported as released. A load without flags is not.
    pub fn load_after(
        &self,
        job: u64,
        boot: BootId,
        groups: Vec<LoadGroup>,
        stream: &EngineStream,
        release: Release,
    ) {
        self.queue_after(job, Work::Load { boot, groups: groups.into(), release }, stream);
    }

    /// Loads that were released and have not ended, by their numbers.
    pub fn outstanding_loads(&self) -> Vec<u64> {
        self.shared.state.lock().outstanding.iter().map(|load| load.job).collect()
    }

    /// Makes later work of `stream` wait until these released loads have brought a region, named by its group and its number;
    /// None is all of them. A step has to wait for every load whose release the engine knew when it planned the step, not only
    /// for those of the step's requests, because another request may have found their blocks, or own them by now.
    ///
    /// # Errors
    /// From the GPU's driver.
    pub fn wait_for_loads(
        &self,
        jobs: &[u64],
        region: Option<(u32, u32)>,
        stream: &EngineStream,
    ) -> Result<(), GpuError> {
        let Some(gpu) = &self.gpu else { return Ok(()) };
        let state = self.shared.state.lock();
        for load in state.outstanding.iter().filter(|load| jobs.contains(&load.job)) {
            gpu.hold_up(stream, &load.flags, region)?;
        }
        Ok(())
    }

    fn queue_after(&self, number: u64, work: Work, stream: &EngineStream) {
        let recorded = self.gpu.as_ref().map_or(Ok(None), |gpu| gpu.after(stream));
        match recorded {
            Ok(event) => self.queue(self.job(number, work, event)),
            Err(error) => {
                let job = self.job(number, work, None);
                self.shared.state.lock().open += 1;
                self.shared.finish(job.key, job.failed(error.to_string(), Instant::now()));
            }
        }
    }

    /// The engine begins a step, which ends with the next [`poll`](Self::poll). Loads of the step are queued after this call,
    /// and loads of earlier steps before it. `promises` names dead daemons whose pools no further load will read. Until a step
    /// names them, their pools stay mapped.
    pub fn step_begins(&self, computes: bool, promises: Promises) {
        let mut state = self.shared.state.lock();
        state.in_step = true;
        state.promises = Some(promises);
        state.steps.step_began(Instant::now(), computes);
    }

    /// Jobs that ended since the last call.
    pub fn poll(&self) -> Vec<Finished> {
        let mut state = self.shared.state.lock();
        state.in_step = false;
        std::mem::take(&mut state.finished)
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

    /// Ends all jobs, waits for copies in flight, unmaps the pool and says goodbye.
    pub fn close(&mut self) {
        self.shared.state.lock().stop = true;
        self.wake();
        if let Some(mover) = self.mover.take()
            && mover.join().is_err()
        {
            // Log: a bug: the thread that moves this worker's blocks ended; saves and loads of the worker failed
            // since then. Do: restart the engine, and report its log.
            tracing::error!("mover thread panicked");
        }
    }

    fn job(&self, number: u64, work: Work, event: Option<u32>) -> Job {
        let key = JobKey(self.last_job.fetch_add(1, Ordering::Relaxed) + 1);
        Job { key, number, queued: Instant::now(), work, event }
    }

    fn queue(&self, job: Job) {
        match self.shared.queue(job, JOBS_MAX) {
            Ok(()) => self.wake(),
            Err(job) => {
                let detail = "too many jobs are open, or the worker is closed";
                self.shared.finish(job.key, job.failed(detail, Instant::now()));
            }
        }
    }

    fn wake(&self) {
        // May fail if the counter is full or a signal came: the mover is awake then.
        let _ = rustix::io::write(self.shared.wake.as_fd(), &1u64.to_ne_bytes());
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.close();
    }
}

/// Why a worker could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A region is inconsistent in itself.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The number of ranks that share a group's blocks does not divide the number of workers.
    #[error("{workers} workers cannot share the blocks of a group by {replicas}")]
    Replicas {
        /// Ranks that share a block.
        replicas: u32,
        /// Workers of the engine.
        workers: u32,
    },
    /// The kernel refused a thread, a descriptor or random bytes.
    #[error("cannot start the mover: {0}")]
    Io(#[from] io::Error),
}
