//! A device's thread: takes queued jobs, decides which operations go next, posts them and reports their outcomes. While
//! it runs, only this thread writes to the file's segments; callers write nothing but the drop table.
//!
//! ```text
//!  job (read, write) ---> transfer ---> operations, cut to about 1 MiB ---> ready queue --turns, rate--> in flight
//!                            |                                                                              |
//!                            '--- complete, when all its operations have <--- completions ------------------'
//!                                     |
//!                                     '--> checksums, index, `done`
//! ```
//!
//! Each pass of [`Device::run`] does every step that is possible without waiting, then sleeps until a completion, a job
//! or a time that is due. The thread alone owns the log, so no step of it takes a lock on it.
//!
//! - A transfer owns the memory of its operations, except for the pool's, and leaves `transfers` after the last of them.
//! - A record counts once its own write and the write of its segment's head have succeeded, in either order: until then
//!   it is in `held`.
//! - Reads go first, because an engine waits for them (`turns`).
//! - If the thread panics, its blocks leave the index and its queue is dropped. Then dropping `io` ends the operations in
//!   flight. Only after that the jobs of these operations are dropped, with their `done`s.

mod copies;
mod operations;
mod reads;
mod state;
mod tables;
mod writes;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvlane_policy::Cleaner;

use self::state::{Stage, SyncState};
use crate::headers::Headers;
use crate::io::{Completion, Io, Registration};
use crate::job::{ReadJob, Transfer, UnfinishedOp, WriteJob};
use crate::layout::Superblock;
use crate::log::Log;
use crate::memory::Memory;
use crate::path_chooser::PathChooser;
use crate::rate::RateLimit;
use crate::request::{Miss, ReadEnd};
use crate::shared::{DeviceShared, JobQueue, Shared};
use crate::staging::{Slot, SlotUse, Staging};
use crate::turns::Turns;
use crate::way::Way;

/// Bytes in full segments from which on the two ways are measured.
const MEASURED_OVER: u64 = 64 << 20;
/// Longest sleep without a completion or a job.
const IDLE: Duration = Duration::from_secs(1);
/// Bytes whose checksums are taken before more operations are posted: 0.02 to 0.06 ms of work.
const CHECKED_AT_ONCE: u64 = 512 << 10;
/// Pause after [`Io::wait`] itself failed.
const RETRY: Duration = Duration::from_millis(10);

/// State of a device's thread. Fields are dropped in this order, and `io` comes first because dropping it ends the
/// operations that use the memory of the others.
pub(crate) struct Device {
    io: Box<dyn Io>,
    headers: Headers,
    staging: Option<Staging>,
    chooser: PathChooser,
    transfers: HashMap<u64, Transfer>,
    /// Operations in flight, by the id that they were posted with.
    parts: HashMap<u64, UnfinishedOp>,
    ready_reads: VecDeque<UnfinishedOp>,
    ready_writes: VecDeque<UnfinishedOp>,
    queued_reads: HashMap<u64, ReadJob>,
    read_order: VecDeque<u64>,
    deadlines: BinaryHeap<Reverse<(Instant, u64)>>,
    queued_writes: VecDeque<WriteJob>,
    /// Transfers whose operations have all completed; their outcomes are not handled yet.
    complete: VecDeque<Transfer>,
    /// Written records that wait for the write of their segment's head.
    held: Vec<Transfer>,
    memory: Arc<dyn Memory>,
    /// Whether `memory` and `headers` are registered with io_uring.
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
    sync: SyncState,
    /// Operations were posted since the last [`Io::wait`], so they may not have started.
    unsubmitted: bool,
    stage: Stage,
    reads_in_flight: u64,
    writes_ahead: u64,
    next_id: u64,
}

/// Arguments of [`Device::new`].
pub(crate) struct Start {
    pub(crate) io: Box<dyn Io>,
    pub(crate) headers: Headers,
    pub(crate) staging: Option<Staging>,
    pub(crate) chooser: PathChooser,
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
            staging,
            chooser,
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
            staging,
            chooser,
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
            sync: SyncState::Done,
            unsubmitted: false,
            stage: Stage::Accepting,
            reads_in_flight: 0,
            writes_ahead: 0,
            next_id: 0,
        }
    }

    /// Runs until the tier is closed, the backlog and the tables are written, and no operation is in flight.
    pub(crate) fn run(mut self) {
        let mut ended = Vec::new();
        loop {
            let now = Instant::now();
            self.take_jobs();
            self.expire_reads(now);
            self.start_reads();
            if !self.ready_reads.is_empty() && !self.queued_writes.is_empty() {
                // Writes may be copied now, and reads do not wait for that.
                self.post(now);
                self.poll_io(Duration::ZERO, &mut ended);
                // Before this thread may sleep until another completion.
                for end in ended.drain(..) {
                    self.operation_ended(end);
                }
            }
            self.clean();
            self.start_writes(now);
            self.finish_segments();
            self.checkpoint(now);
            let posted_until = self.post(now);
            self.device.free_segments.store(self.log.free_segments(), Ordering::Relaxed);
            if !self.complete.is_empty() {
                // Submit what was posted, so that the device works while this thread takes checksums.
                if self.unsubmitted {
                    self.poll_io(Duration::ZERO, &mut ended);
                }
                // Check a bounded number of bytes, then go round again to post what was queued meanwhile.
                let mut checked = 0;
                while checked < CHECKED_AT_ONCE
                    && let Some(transfer) = self.complete.pop_front()
                {
                    checked += transfer.read_bytes();
                    self.finish(transfer);
                }
            } else if self.is_finished() {
                return;
            } else if self.chooser.wants_rates() && self.can_measure() {
                self.measure();
            } else {
                let timeout = self.sleep_at_most(now, posted_until);
                if self.device.fall_asleep(self.is_closing()) {
                    self.poll_io(timeout, &mut ended);
                    self.device.awake();
                }
            }
            for end in ended.drain(..) {
                self.operation_ended(end);
            }
        }
    }

    fn poll_io(&mut self, timeout: Duration, ended: &mut Vec<Completion>) {
        self.unsubmitted = false;
        if let Err(error) = self.io.wait(timeout, ended) {
            // Log: the kernel's interface to this SSD failed; blocks on it are late or misses until it works. Do:
            // look at dmesg and at the disk.
            tracing::error!(
                path = %self.device.facts.path.display(), %error, retry_ms = RETRY.as_millis(),
                "I/O interface of an SSD device failed; retrying"
            );
            std::thread::sleep(RETRY);
        }
    }

    fn take_jobs(&mut self) {
        let (reads, writes, closed) = {
            let mut queue = self.device.queue.lock();
            (std::mem::take(&mut queue.reads), std::mem::take(&mut queue.writes), queue.closed)
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

    /// A slot for a transfer that is to go through staging and finds room there.
    fn take_staging(&mut self, bytes: u64, used_for: SlotUse) -> Option<Slot> {
        if self.chooser.way() == Way::Direct {
            return None;
        }
        self.staging.as_mut()?.take(bytes, used_for)
    }

    fn release_staging(&mut self, slot: Slot) {
        if let Some(staging) = self.staging.as_mut() {
            staging.release(slot);
        }
    }

    /// Whether nothing is queued or in flight, and there is enough to read.
    fn can_measure(&self) -> bool {
        self.transfers.is_empty()
            && !self.is_closing()
            && self.device.queue.lock().reads.is_empty()
            && self.log.sealed().count() as u64 * self.superblock.segment_bytes >= MEASURED_OVER
    }

    /// Measures both ways. Requests wait meanwhile, at most a second.
    fn measure(&mut self) {
        let segments = self.log.sealed().map(|segment| self.superblock.offset(segment, 0));
        let ranges: Vec<Range<u64>> =
            segments.map(|start| start..start + self.superblock.segment_bytes).collect();
        let next_id = &mut self.next_id;
        let mut id = || {
            *next_id += 1;
            *next_id
        };
        self.chooser.measure(&mut *self.io, &mut self.staging, &ranges, &mut id);
        let status = self.chooser.status();
        // Log: how the daemon reads and writes this SSD from now on, and the rates of both ways.
        tracing::info!(
            path = %self.device.facts.path.display(), staged = status.staged, reason = status.reason,
            rates = status.rates.map(|rates| rates.to_string()), "SSD path chosen"
        );
        *self.device.path_taken.lock() = status;
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
        // While closing no checkpoint moves this time on, and a time in the past would mean not to sleep at all.
        if !self.is_closing() && self.log.open.as_ref().is_some_and(|open| open.changed) {
            until = until.min(self.next_checkpoint);
        }
        until.saturating_duration_since(now).min(posted_until.unwrap_or(IDLE))
    }

    fn is_closing(&self) -> bool {
        self.stage == Stage::Closing
    }

    fn is_finished(&self) -> bool {
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
        // A panicked thread completes no more jobs: mark the device as ended, and drop its queue so that callers go on.
        let panicked = std::thread::panicking();
        if panicked {
            self.device.health.lock().ended("its thread panicked; it comes back with a restart".to_owned());
        }
        // Swap and close under one lock: jobs accepted before are dropped here, and none is accepted after.
        let closed = JobQueue { closed: true, ..JobQueue::default() };
        drop(std::mem::replace(&mut *self.device.queue.lock(), closed));
        if panicked {
            let mut stored = self.shared.index.lock();
            stored.pending.retain(|_, accepted| accepted.device != self.number);
            let dropped = stored.index.remove_device(self.number);
            drop(stored);
            // Log: a bug: this SSD is not used any more; other SSDs and the pool are. Do: restart the daemon, and
            // report its log.
            tracing::error!(
                path = %self.device.facts.path.display(), blocks = dropped,
                "thread of an SSD device panicked; its blocks are misses until a restart"
            );
        }
    }
}
