//! What callers and the devices' threads share.

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
use crate::stats::{Counters, DeviceStatus};

/// Of the tier.
pub(crate) struct Shared {
    pub(crate) index: Mutex<Stored>,
    pub(crate) counters: Counters,
    /// Says which blocks deserve to stay.
    pub(crate) judge: OnceLock<Arc<dyn Judge>>,
    /// How dense is what each device has given up lately; None of one that had to give up nothing yet, or was not told.
    pub(crate) given_up: Mutex<Vec<Option<f32>>>,
}

/// What is stored, and what is being stored.
pub(crate) struct Stored {
    pub(crate) index: Index,
    /// With the device that each goes to.
    pub(crate) pending: HashMap<BlockKey, Accepted>,
    /// How often each namespace was dropped, since it was last not being written.
    pub(crate) drops: HashMap<Namespace, u64>,
    /// Writes that were accepted and have not ended, those of dropped namespaces among them, by device and namespace.
    pub(crate) writing: HashMap<(u8, Namespace), u64>,
}

impl Stored {
    pub(crate) fn drops_of(&self, namespace: &Namespace) -> u64 {
        self.drops.get(namespace).copied().unwrap_or(0)
    }

    /// A write is accepted.
    pub(crate) fn now_pending(&mut self, key: &BlockKey, accepted: Accepted) {
        self.pending.insert(*key, accepted);
        *self.writing.entry((accepted.device, key.space.namespace)).or_default() += 1;
    }

    /// A write has ended. Its key may be another write's by now.
    pub(crate) fn no_longer_pending(&mut self, key: &BlockKey, accepted: Accepted) {
        if self.pending.get(key) == Some(&accepted) {
            self.pending.remove(key);
        }
        let place = (accepted.device, key.space.namespace);
        if let Some(count) = self.writing.get_mut(&place) {
            *count -= 1;
            if *count == 0 {
                self.writing.remove(&place);
            }
        }
    }
}

/// Of one device.
pub(crate) struct DeviceShared {
    pub(crate) orders: Mutex<Orders>,
    /// The thread waits, or is about to.
    sleeping: AtomicBool,
    waker: OnceLock<Waker>,
    /// Bytes of writes accepted and not ended.
    pub(crate) backlog: AtomicU64,
    /// Bytes of writes ever accepted.
    pub(crate) assigned: AtomicU64,
    /// Reads accepted and not ended.
    pub(crate) reads: AtomicU64,
    /// For each segment the reads from it. Raised under the index's lock while the block is in the index.
    pub(crate) pins: Vec<AtomicU32>,
    pub(crate) health: Mutex<Health>,
    pub(crate) holdings: Mutex<Holdings>,
    pub(crate) free_segments: AtomicU32,
    /// What does not change.
    pub(crate) facts: DeviceStatus,
    /// Its thread.
    thread: OnceLock<ThreadId>,
    ended: Mutex<bool>,
    ended_changed: Condvar,
}

/// What callers have asked for and the thread has not taken yet.
#[derive(Default)]
pub(crate) struct Orders {
    pub(crate) reads: Vec<ReadJob>,
    pub(crate) writes: Vec<WriteJob>,
    /// No more are accepted.
    pub(crate) closed: bool,
}

impl DeviceShared {
    pub(crate) fn new(facts: DeviceStatus, holdings: Holdings) -> Arc<DeviceShared> {
        let segments = facts.segments;
        Arc::new(DeviceShared {
            orders: Mutex::default(),
            sleeping: AtomicBool::new(false),
            waker: OnceLock::new(),
            backlog: AtomicU64::new(0),
            assigned: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            pins: (0..segments).map(|_| AtomicU32::new(0)).collect(),
            health: Mutex::default(),
            holdings: Mutex::new(holdings),
            free_segments: AtomicU32::new(0),
            facts,
            thread: OnceLock::new(),
            ended: Mutex::new(false),
            ended_changed: Condvar::new(),
        })
    }

    pub(crate) fn set_waker(&self, waker: Waker) {
        let _ = self.waker.set(waker);
    }

    /// Adds to the orders and sees to it that the thread looks at them. Gives the order back if the device is closed.
    pub(crate) fn order(&self, read: Option<ReadJob>, write: Option<WriteJob>) -> bool {
        let mut orders = self.orders.lock();
        if orders.closed {
            return false;
        }
        orders.reads.extend(read);
        orders.writes.extend(write);
        drop(orders);
        self.wake();
        true
    }

    /// No more orders.
    pub(crate) fn close(&self) {
        self.orders.lock().closed = true;
        self.wake();
    }

    fn wake(&self) {
        if self.sleeping.swap(false, Ordering::SeqCst)
            && let Some(waker) = self.waker.get()
        {
            waker();
        }
    }

    /// The thread is about to wait. False: there are orders, it must not.
    pub(crate) fn fall_asleep(&self, knows_closed: bool) -> bool {
        self.sleeping.store(true, Ordering::SeqCst);
        let orders = self.orders.lock();
        let nothing = orders.reads.is_empty() && orders.writes.is_empty() && orders.closed == knows_closed;
        if !nothing {
            self.sleeping.store(false, Ordering::SeqCst);
        }
        nothing
    }

    pub(crate) fn awake(&self) {
        self.sleeping.store(false, Ordering::SeqCst);
    }

    /// This is the thread.
    pub(crate) fn thread_began(&self) {
        let _ = self.thread.set(std::thread::current().id());
    }

    /// Whether the caller runs on the device's thread.
    pub(crate) fn is_own_thread(&self) -> bool {
        self.thread.get() == Some(&std::thread::current().id())
    }

    /// The thread has ended.
    pub(crate) fn thread_ended(&self) {
        *self.ended.lock() = true;
        self.ended_changed.notify_all();
    }

    /// Waits for the thread's end; not if the caller is that thread.
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
            degraded: self.health.lock().reason().map(str::to_owned),
            backlog_bytes: self.backlog.load(Ordering::Relaxed),
            reads: self.reads.load(Ordering::Relaxed),
            ..self.facts.clone()
        }
    }
}
