//! State that a worker's handle shares with its mover thread: the queue of jobs, their ends, and the registration.

use std::{collections::BTreeMap, os::fd::OwnedFd, sync::Arc, time::Duration};

use kvlane_block::Rank;
use kvlane_engine_memory::{OwnBlocks, WorkerGpu};
use kvlane_proto::Address;
use parking_lot::{Condvar, Mutex};

use crate::{
    daemon_user::DaemonUser,
    jobs::{Finished, Job, SaveMethod},
    links::{
        flags::Flags,
        ids::JobKey,
        pace::{ReleaseAhead, StepClock},
        promises::Promises,
        worker::event::StepState,
    },
};

/// Arguments of [`Worker::start`](crate::Worker::start).
#[derive(Debug, Clone)]
pub struct WorkerOptions {
    /// The daemon's address.
    pub address: Address,
    /// A user whose daemon is trusted beside this user's and root's.
    pub daemon_user: DaemonUser,
    /// Name of the engine instance; its scheduler uses the same.
    pub engine_id: String,
    /// Name and version for the daemon's logs.
    pub client: String,
    /// This worker's rank.
    pub rank: Rank,
    /// Number of the engine's workers.
    pub workers: u32,
    /// The engine's blocks, with groups in the scheduler's order.
    pub blocks: OwnBlocks,
    /// The user's choice; `Auto` lets the daemon probe.
    pub save_method: SaveMethod,
    /// A save without an answer for this long is given up.
    pub save_timeout: Duration,
    /// When the requests of loads beside other requests may compute.
    pub release_ahead: ReleaseAhead,
}

/// Counters since the last [`Worker::take_stats`](crate::Worker::take_stats).
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct WorkerStats {
    /// Registrations with a daemon.
    pub connects: u64,
    /// Registrations that ended, by the daemon or by this worker.
    pub losses: u64,
    /// Saves given up because the daemon was silent.
    pub save_timeouts: u64,
}

/// A load that was released and has not ended.
#[derive(Debug)]
pub(crate) struct Outstanding {
    key: JobKey,
    /// The caller's number of the job.
    pub(crate) job: u64,
    pub(crate) flags: Flags,
}

/// Behind the lock of [`Shared`].
#[derive(Debug, Default)]
pub(crate) struct SharedState {
    pub(crate) queue: Vec<Job>,
    pub(crate) finished: Vec<Finished>,
    /// Number of jobs that have not ended.
    pub(crate) open: usize,
    pub(crate) stop: bool,
    pub(crate) registered: bool,
    pub(crate) method: String,
    pub(crate) reason: String,
    pub(crate) refusal: String,
    /// The last step's promises, until the mover takes them.
    pub(crate) promises: Option<Promises>,
    /// A step began and has not polled yet.
    pub(crate) in_step: bool,
    pub(crate) outstanding: Vec<Outstanding>,
    /// The GPU event of each job that has one and has not ended.
    events: BTreeMap<JobKey, u32>,
    pub(crate) steps: StepClock,
    pub(crate) stats: WorkerStats,
}

/// News from the engine, for one turn of the mover.
pub(crate) struct Inbox {
    pub(crate) jobs: Vec<Job>,
    pub(crate) stop: bool,
    pub(crate) seen: StepState,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) state: Mutex<SharedState>,
    pub(crate) changed: Condvar,
    pub(crate) wake: OwnedFd,
    /// Gets the events of ended jobs back.
    gpu: Option<Arc<WorkerGpu>>,
}

impl Shared {
    pub(crate) fn new(wake: OwnedFd, gpu: Option<Arc<WorkerGpu>>) -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), wake, gpu }
    }

    /// Counts a job and queues it for the mover.
    ///
    /// # Errors
    /// The job, which the caller has to end, because there are too many or the worker is closed.
    pub(crate) fn queue(&self, job: Job, most: usize) -> Result<(), Job> {
        let mut state = self.state.lock();
        state.open += 1;
        if let Some(event) = job.event {
            state.events.insert(job.key, event);
        }
        if state.open > most || state.stop {
            return Err(job);
        }
        state.queue.push(job);
        Ok(())
    }

    /// Jobs and step state since the last call.
    pub(crate) fn take(&self) -> Inbox {
        let mut state = self.state.lock();
        let seen = StepState {
            in_step: state.in_step,
            promises: state.promises.take(),
            shortest_step: state.steps.shortest(),
        };
        Inbox { jobs: std::mem::take(&mut state.queue), stop: state.stop, seen }
    }

    /// Reports a load as released: it cannot fail any more, or all its bytes have arrived before its end. Streams wait for its
    /// flags, if it has any.
    pub(crate) fn release(&self, key: JobKey, finished: Finished, flags: Option<Flags>) {
        let mut state = self.state.lock();
        // In the same critical section as the release, so that no step sees the release without the flags.
        state.outstanding.extend(flags.map(|flags| Outstanding { key, job: finished.job, flags }));
        state.finished.push(finished);
        self.changed.notify_all();
    }

    /// Reports the end of a job: its event is given back, and streams no longer wait for its flags.
    pub(crate) fn finish(&self, key: JobKey, finished: Finished) {
        let mut state = self.state.lock();
        state.open -= 1;
        state.outstanding.retain(|load| load.key != key);
        if let (Some(event), Some(gpu)) = (state.events.remove(&key), &self.gpu) {
            gpu.give_back(event);
        }
        state.finished.push(finished);
        self.changed.notify_all();
    }

    /// The daemon serves this worker.
    pub(crate) fn registered(&self, method: SaveMethod, reason: String) {
        let mut state = self.state.lock();
        state.method = method.name().into();
        state.reason = reason;
        state.registered = true;
        state.refusal.clear();
        state.stats.connects += 1;
        self.changed.notify_all();
    }

    /// The connection has ended; `was_open` if the daemon had served this worker.
    pub(crate) fn unregistered(&self, was_open: bool) {
        let mut state = self.state.lock();
        if was_open {
            state.registered = false;
            state.stats.losses += 1;
        }
    }

    /// The daemon does not serve this worker: wakes callers that wait for the registration.
    pub(crate) fn refused(&self, sentence: String) {
        self.state.lock().refusal = sentence;
        self.changed.notify_all();
    }
}
