//! State that callers share with the devices' threads: the index, and per device the queue, the counters and the pins.
//!
//! A caller queues a job, then wakes the thread if `sleeping` is set. The thread sets `sleeping`, then checks the queue
//! once more before it waits. In this order no job waits for the thread's timeout.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::ThreadId;

use kvlane_block::{BlockKey, Namespace};
use kvlane_store::Judge;
use parking_lot::{Condvar, Mutex};

use crate::health::Health;
use crate::holdings::Holdings;
use crate::index::Index;
use crate::io::Waker;
use crate::job::{Accepted, ReadJob, WriteJob};
use crate::latency::Latency;
use crate::stats::{Counters, DeviceStatus};
use crate::way::PathStatus;

/// State of the tier.
pub(crate) struct Shared {
    pub(crate) index: Mutex<Stored>,
    pub(crate) counters: Counters,
    /// Scores blocks for cleaning; set at most once.
    pub(crate) judge: OnceLock<Arc<dyn Judge>>,
    /// Hit density of the records that each device gave up lately. None before it gave up any, or without a judge.
    pub(crate) given_up: Mutex<Vec<Option<f32>>>,
}

/// Blocks that are stored, and writes that are accepted.
pub(crate) struct Stored {
    pub(crate) index: Index,
    /// Keys of accepted writes, with the device of each. A drop of its namespace removes a key before its write ends.
    pub(crate) pending: HashMap<BlockKey, Accepted>,
    /// Drops of each namespace while writes of it were accepted. Forgotten by a drop that finds no such write.
    pub(crate) drops: HashMap<Namespace, u64>,
    /// Count of writes that were accepted and have not ended, by device and namespace, dropped namespaces included.
    pub(crate) writing: HashMap<(u8, Namespace), u64>,
}

impl Stored {
    pub(crate) fn drops_of(&self, namespace: &Namespace) -> u64 {
        self.drops.get(namespace).copied().unwrap_or(0)
    }

    /// Records an accepted write.
    pub(crate) fn add_pending(&mut self, key: &BlockKey, accepted: Accepted) {
        self.pending.insert(*key, accepted);
        *self.writing.entry((accepted.device, key.space.namespace)).or_default() += 1;
    }

    /// Removes a write that has ended. Its key may belong to another write by now, and then stays.
    pub(crate) fn remove_pending(&mut self, key: &BlockKey, accepted: Accepted) {
        if self.pending.get(key) == Some(&accepted) {
            self.pending.remove(key);
        }
        let owner = (accepted.device, key.space.namespace);
        if let Some(count) = self.writing.get_mut(&owner) {
            *count -= 1;
            if *count == 0 {
                self.writing.remove(&owner);
            }
        }
    }
}

/// State of one device.
pub(crate) struct DeviceShared {
    pub(crate) queue: Mutex<JobQueue>,
    /// The thread waits in its I/O interface, or is about to.
    sleeping: AtomicBool,
    waker: OnceLock<Waker>,
    /// Bytes of writes accepted and not ended.
    pub(crate) backlog: AtomicU64,
    /// Bytes of writes ever accepted.
    pub(crate) assigned: AtomicU64,
    /// Reads accepted and not ended.
    pub(crate) reads: AtomicU64,
    /// Of the reads that found their block, and of the writes that were stored.
    pub(crate) read_latency: Latency,
    pub(crate) write_latency: Latency,
    /// Reads in flight from each segment. Raised under the index's lock while the block is in the index.
    pub(crate) pins: Vec<AtomicU32>,
    pub(crate) health: Mutex<Health>,
    pub(crate) holdings: Mutex<Holdings>,
    pub(crate) free_segments: AtomicU32,
    /// Which way transfers go; the device's thread decides.
    pub(crate) path_taken: Mutex<PathStatus>,
    /// The parts of the status that never change; [`DeviceShared::status`] fills in the others.
    pub(crate) facts: DeviceStatus,
    /// Set by the device's thread when it starts.
    thread: OnceLock<ThreadId>,
    ended: Mutex<bool>,
    ended_changed: Condvar,
}

/// Jobs that callers have queued and the device's thread has not taken yet.
#[derive(Default)]
pub(crate) struct JobQueue {
    pub(crate) reads: Vec<ReadJob>,
    pub(crate) writes: Vec<WriteJob>,
    /// No more jobs are accepted. Never reset.
    pub(crate) closed: bool,
}

impl DeviceShared {
    pub(crate) fn new(facts: DeviceStatus, holdings: Holdings) -> Arc<DeviceShared> {
        let segments = facts.segments;
        Arc::new(DeviceShared {
            queue: Mutex::default(),
            sleeping: AtomicBool::new(false),
            waker: OnceLock::new(),
            backlog: AtomicU64::new(0),
            assigned: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            read_latency: Latency::default(),
            write_latency: Latency::default(),
            pins: (0..segments).map(|_| AtomicU32::new(0)).collect(),
            health: Mutex::default(),
            holdings: Mutex::new(holdings),
            free_segments: AtomicU32::new(0),
            path_taken: Mutex::new(facts.path_taken.clone()),
            facts,
            thread: OnceLock::new(),
            ended: Mutex::new(false),
            ended_changed: Condvar::new(),
        })
    }

    pub(crate) fn set_waker(&self, waker: Waker) {
        let _ = self.waker.set(waker);
    }

    /// Queues jobs and wakes the thread. Returns false, and drops the jobs, if the device is closed.
    pub(crate) fn submit(&self, read: Option<ReadJob>, write: Option<WriteJob>) -> bool {
        let mut queue = self.queue.lock();
        if queue.closed {
            return false;
        }
        queue.reads.extend(read);
        queue.writes.extend(write);
        drop(queue);
        self.wake();
        true
    }

    /// Accepts no more jobs, and wakes the thread so that it ends.
    pub(crate) fn close(&self) {
        self.queue.lock().closed = true;
        self.wake();
    }

    fn wake(&self) {
        if self.sleeping.swap(false, Ordering::SeqCst)
            && let Some(waker) = self.waker.get()
        {
            waker();
        }
    }

    /// Called by the thread before it waits. Returns false if there are jobs, or a close that it does not know of: then
    /// it must not wait.
    pub(crate) fn fall_asleep(&self, knows_closed: bool) -> bool {
        self.sleeping.store(true, Ordering::SeqCst);
        let queue = self.queue.lock();
        let nothing = queue.reads.is_empty() && queue.writes.is_empty() && queue.closed == knows_closed;
        if !nothing {
            self.sleeping.store(false, Ordering::SeqCst);
        }
        nothing
    }

    pub(crate) fn awake(&self) {
        self.sleeping.store(false, Ordering::SeqCst);
    }

    /// Records the calling thread as the device's.
    pub(crate) fn thread_began(&self) {
        let _ = self.thread.set(std::thread::current().id());
    }

    /// Whether the caller runs on the device's thread.
    pub(crate) fn is_own_thread(&self) -> bool {
        self.thread.get() == Some(&std::thread::current().id())
    }

    /// Releases the callers of [`DeviceShared::await_end`].
    pub(crate) fn thread_ended(&self) {
        *self.ended.lock() = true;
        self.ended_changed.notify_all();
    }

    /// Waits for the thread to end; returns whether it has. On the device's own thread it returns false at once.
    pub(crate) fn await_end(&self, until: std::time::Instant) -> bool {
        if self.is_own_thread() {
            return false;
        }
        let mut ended = self.ended.lock();
        while !*ended {
            if self.ended_changed.wait_until(&mut ended, until).timed_out() {
                return *ended;
            }
        }
        true
    }

    pub(crate) fn status(&self) -> DeviceStatus {
        DeviceStatus {
            free_segments: self.free_segments.load(Ordering::Relaxed),
            path_taken: self.path_taken.lock().clone(),
            degraded: self.health.lock().reason().map(str::to_owned),
            backlog_bytes: self.backlog.load(Ordering::Relaxed),
            reads: self.reads.load(Ordering::Relaxed),
            read_latencies: self.read_latency.read(),
            write_latencies: self.write_latency.read(),
            ..self.facts.clone()
        }
    }
}
