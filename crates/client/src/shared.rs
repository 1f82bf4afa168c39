//! What a worker's handle and its mover thread share: the queue of jobs, their ends, and the standing of the registration.

use std::{collections::BTreeMap, os::fd::OwnedFd, sync::Arc, time::Duration};

use kvlane_block::Rank;
use kvlane_engine_memory::{OwnBlocks, WorkerGpu};
use kvlane_proto::Address;
use parking_lot::{Condvar, Mutex};

use crate::{
    daemon_user::DaemonUser,
    jobs::{Finished, Job, SaveMethod},
    links::{flags::Flags, ids::JobKey, pace::StepClock, promises::Promises, worker::event::Seen},
};

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
    /// Which of the engine's workers this is.
    pub rank: Rank,
    /// Number of the engine's workers.
    pub workers: u32,
    /// The engine's blocks, their groups in the scheduler's order.
    pub blocks: OwnBlocks,
    /// As the user wants it; `Auto` lets the daemon probe.
    pub save_method: SaveMethod,
    /// A save without an answer for so long is given up.
    pub save_timeout: Duration,
}

/// Counters since the last [`Worker::take_stats`](crate::Worker::take_stats).
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct WorkerStats {
    /// Registrations with a daemon.
    pub connects: u64,
    /// Registrations that ended, whoever ended them.
    pub losses: u64,
    /// Saves given up because the daemon was silent.
    pub save_timeouts: u64,
}

/// A load that was released and has not ended.
#[derive(Debug)]
pub(crate) struct Outstanding {
    key: JobKey,
    pub(crate) flags: Flags,
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
    /// Of jobs queued or under way, that wait for one.
    events: BTreeMap<JobKey, u32>,
    pub(crate) steps: StepClock,
    pub(crate) stats: WorkerStats,
}

/// What the mover takes in one go.
pub(crate) struct Inbox {
    pub(crate) jobs: Vec<Job>,
    pub(crate) stop: bool,
    pub(crate) seen: Seen,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) state: Mutex<State>,
    pub(crate) changed: Condvar,
    pub(crate) wake: OwnedFd,
    /// Takes events back.
    gpu: Option<Arc<WorkerGpu>>,
}

impl Shared {
    pub(crate) fn new(wake: OwnedFd, gpu: Option<Arc<WorkerGpu>>) -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), wake, gpu }
    }

    /// Counts a job and hands it to the mover.
    ///
    /// # Errors
    /// The job, which the caller is to end: there are too many, or the worker is closed.
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

    /// What the engine has asked for and told since the last time.
    pub(crate) fn take(&self) -> Inbox {
        let mut state = self.state.lock();
        let seen = Seen {
            in_step: state.in_step,
            promises: state.promises.take(),
            shortest_step: state.steps.shortest(),
        };
        Inbox { jobs: std::mem::take(&mut state.queue), stop: state.stop, seen }
    }

    /// The load is under way and can only succeed, or everything is there although its end is still to come. Streams are to
    /// wait for its flags, if it has any.
    pub(crate) fn release(&self, key: JobKey, told: Finished, flags: Option<Flags>) {
        let mut state = self.state.lock();
        // Before the release can be seen.
        state.outstanding.extend(flags.map(|flags| Outstanding { key, flags }));
        state.finished.push(told);
        self.changed.notify_all();
    }

    /// The job is over: its event is given back, and nobody waits for its flags.
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

    /// It does not any more.
    pub(crate) fn unregistered(&self, was_open: bool) {
        let mut state = self.state.lock();
        if was_open {
            state.registered = false;
            state.stats.losses += 1;
        }
    }

    /// Why it does not; whoever waits for the registration hears it.
    pub(crate) fn refused(&self, sentence: String) {
        self.state.lock().refusal = sentence;
        self.changed.notify_all();
    }
}
