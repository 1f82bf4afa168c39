//! A device's thread: takes orders, decides what goes next, and carries it out. It alone writes to the file.

mod copies;
mod operations;
mod reads;
mod state;
mod tables;
mod writes;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvlane_policy::Cleaner;

use self::state::{Stage, Sync};
use crate::headers::Headers;
use crate::io::{Ended, Io, Registration};
use crate::job::{ReadJob, Transfer, UnfinishedOp, WriteJob};
use crate::layout::Superblock;
use crate::log::Log;
use crate::memory::Memory;
use crate::rate::RateLimit;
use crate::request::{Miss, ReadEnd};
use crate::shared::{DeviceShared, Orders, Shared};
use crate::turns::Turns;

/// Longest sleep.
const IDLE: Duration = Duration::from_secs(1);
/// Bytes whose checksums are taken before the next look at what is to be posted: a tenth of a millisecond.
const CHECKED_AT_ONCE: u64 = 1 << 20;
/// After the interface itself failed.
const RETRY: Duration = Duration::from_millis(10);

/// What a device's thread owns. Fields are dropped in this order: first what may have operations in flight.
pub(crate) struct Device {
    io: Box<dyn Io>,
    headers: Headers,
    transfers: HashMap<u64, Transfer>,
    /// Operations in flight.
    parts: HashMap<u64, UnfinishedOp>,
    ready_reads: VecDeque<UnfinishedOp>,
    ready_writes: VecDeque<UnfinishedOp>,
    queued_reads: HashMap<u64, ReadJob>,
    read_order: VecDeque<u64>,
    deadlines: BinaryHeap<Reverse<(Instant, u64)>>,
    queued_writes: VecDeque<WriteJob>,
    /// Transfers all of whose operations have ended.
    complete: VecDeque<Transfer>,
    /// Records whose segment's head is not on the device yet.
    held: Vec<Transfer>,
    memory: Arc<dyn Memory>,
    /// Whether io_uring knows `memory` and `headers`.
    registration: Registration,
    shared: Arc<Shared>,
    device: Arc<DeviceShared>,
    number: u8,
    superblock: Superblock,
    log: Log,
    cleaner: Cleaner,
    turns: Turns,
    rate: Option<RateLimit>,
    checkpoint_interval: Duration,
    next_checkpoint: Instant,
    sync: Sync,
    /// Operations were posted since the system was asked last.
    unsubmitted: bool,
    stage: Stage,
    reads_in_flight: u64,
    writes_ahead: u64,
    next_id: u64,
}

/// What a device begins with.
pub(crate) struct Start {
    pub(crate) io: Box<dyn Io>,
    pub(crate) headers: Headers,
    pub(crate) registration: Registration,
    pub(crate) memory: Arc<dyn Memory>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) device: Arc<DeviceShared>,
    pub(crate) number: u8,
    pub(crate) superblock: Superblock,
    pub(crate) log: Log,
    pub(crate) write_rate: Option<u64>,
    pub(crate) checkpoint_interval: Duration,
}

impl Device {
    pub(crate) fn new(start: Start) -> Device {
        let Start {
            io,
            headers,
            registration,
            memory,
            shared,
            device,
            number,
            superblock,
            log,
            write_rate,
            checkpoint_interval,
        } = start;
        Device {
            io,
            headers,
            registration,
            transfers: HashMap::new(),
            parts: HashMap::new(),
            ready_reads: VecDeque::new(),
            ready_writes: VecDeque::new(),
            queued_reads: HashMap::new(),
            read_order: VecDeque::new(),
            deadlines: BinaryHeap::new(),
            queued_writes: VecDeque::new(),
            complete: VecDeque::new(),
            held: Vec::new(),
            memory,
            shared,
            device,
            number,
            superblock,
            log,
            cleaner: Cleaner::default(),
            turns: Turns::default(),
            rate: write_rate.map(RateLimit::new),
            checkpoint_interval,
            next_checkpoint: Instant::now() + checkpoint_interval,
            sync: Sync::Done,
            unsubmitted: false,
            stage: Stage::Accepting,
            reads_in_flight: 0,
            writes_ahead: 0,
            next_id: 0,
        }
    }

    /// Works until the tier is closed and everything has ended.
    pub(crate) fn run(mut self) {
        let mut ended = Vec::new();
        loop {
            let now = Instant::now();
            self.take_orders();
            self.look_at_deadlines(now);
            self.start_reads();
            self.clean();
            self.start_writes(now);
            self.finish_segments();
            self.checkpoint(now);
            let posted_until = self.post(now);
            self.device.free_segments.store(self.log.free_segments(), Ordering::Relaxed);
            if !self.complete.is_empty() {
                // The device works on while checksums are taken.
                if self.unsubmitted {
                    self.enter(Duration::ZERO, &mut ended);
                }
                // What is asked for meanwhile is posted in between.
                let mut checked = 0;
                while checked < CHECKED_AT_ONCE
                    && let Some(transfer) = self.complete.pop_front()
                {
                    checked += transfer.read_bytes();
                    self.finish(transfer);
                }
            } else if self.is_over() {
                return;
            } else {
                let timeout = self.sleep_at_most(now, posted_until);
                if self.device.fall_asleep(self.is_closing()) {
                    self.enter(timeout, &mut ended);
                    self.device.awake();
                }
            }
            for end in ended.drain(..) {
                self.operation_ended(end);
            }
        }
    }

    fn enter(&mut self, timeout: Duration, ended: &mut Vec<Ended>) {
        self.unsubmitted = false;
        if let Err(error) = self.io.wait(timeout, ended) {
            tracing::error!(path = %self.device.facts.path.display(), %error, "the device cannot be asked");
            std::thread::sleep(RETRY);
        }
    }

    fn take_orders(&mut self) {
        let (reads, writes, closed) = {
            let mut orders = self.device.orders.lock();
            (std::mem::take(&mut orders.reads), std::mem::take(&mut orders.writes), orders.closed)
        };
        for job in reads {
            let id = self.id();
            if let Some(deadline) = job.deadline {
                self.deadlines.push(Reverse((deadline, id)));
            }
            self.queued_reads.insert(id, job);
            self.read_order.push_back(id);
        }
        self.queued_writes.extend(writes);
        if closed && !self.is_closing() {
            self.stage = Stage::Closing;
            let queued: Vec<u64> = self.read_order.drain(..).collect();
            for id in queued {
                if let Some(job) = self.queued_reads.remove(&id) {
                    self.end_read(job, ReadEnd::Miss(Miss::Closed));
                }
            }
        }
    }

    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn sleep_at_most(&self, now: Instant, posted_until: Option<Duration>) -> Duration {
        let mut until = now + IDLE;
        if let Some(Reverse((deadline, _))) = self.deadlines.peek() {
            until = until.min(*deadline);
        }
        // No checkpoint comes while closing, and a time that has passed would mean not to sleep at all.
        if !self.is_closing() && self.log.open.as_ref().is_some_and(|open| open.changed) {
            until = until.min(self.next_checkpoint);
        }
        until.saturating_duration_since(now).min(posted_until.unwrap_or(IDLE))
    }

    fn is_closing(&self) -> bool {
        self.stage == Stage::Closing
    }

    fn is_over(&self) -> bool {
        self.is_closing()
            && self.transfers.is_empty()
            && self.held.is_empty()
            && self.queued_writes.is_empty()
            && self.queued_reads.is_empty()
            && self.log.open.is_none()
            && self.log.finishing.is_empty()
            && !self.sync.is_due()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Also when the thread panicked: nobody waits for what will never come.
        let panicked = std::thread::panicking();
        if panicked {
            self.device.health.lock().ended("its thread panicked; it comes back with a restart".to_owned());
        }
        // Under one lock: what is accepted before is dropped here, and nothing is accepted after.
        let closed = Orders { closed: true, ..Orders::default() };
        drop(std::mem::replace(&mut *self.device.orders.lock(), closed));
        if panicked {
            let mut stored = self.shared.index.lock();
            stored.pending.retain(|_, accepted| accepted.device != self.number);
            let dropped = stored.index.remove_device(self.number);
            drop(stored);
            tracing::error!(
                path = %self.device.facts.path.display(), blocks = dropped,
                "the thread of a device panicked; its blocks are not found before a restart"
            );
        }
    }
}
