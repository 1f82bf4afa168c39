//! [`SsdTier`]: opens the files, queues reads and writes for the devices' threads, drops namespaces, and closes.
//!
//! A write takes its key into `pending` under the index's lock, so that no second write of the key starts. A read pins
//! its segment under the same lock, so that the segment is not reused before the read has ended.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use kvlane_block::{BlockHash, BlockKey, Namespace, PoolExtent, PoolOffset, Space};
use kvlane_policy::Memo;
use kvlane_store::Judge;
use parking_lot::Mutex;

use crate::device::{Device, Start};
use crate::drops::DropTable;
use crate::error::OpenError;
use crate::file::TierFile;
use crate::headers::Headers;
use crate::holdings::Holdings;
use crate::index::Index;
use crate::io::{Io, Piece, Registration, WrapIo};
use crate::job::{Accepted, ReadJob, WriteJob};
use crate::latency::Latencies;
use crate::layout::{PAGE_BYTES, Superblock, record_pages};
use crate::log::{Log, largest_record};
use crate::memory::Memory;
use crate::options::Options;
use crate::path_chooser::PathChooser;
use crate::recover::begin_run;
use crate::request::{NotNoted, Read, ReadEnd, Record, Refused, SpaceUse, WriteEnd};
use crate::shared::{DeviceShared, Shared, Stored};
use crate::staging::Staging;
use crate::stats::{Counters, DeviceStatus, Stats};
use crate::threads::Threads;
use crate::uring::UringQueue;
use crate::way::{PathStatus, SsdPath};
use crate::way_file::RatesFile;

/// Reads of one device, queued and in flight together.
const READS_MAX: u64 = 8192;
/// How long `drop` waits for the devices' threads.
const DROP_TIMEOUT: Duration = Duration::from_secs(10);
/// Index slots that are visited under one hold of the lock, because callers wait for it.
const SLOTS_PER_LOCK: u32 = 4096;
/// Blocks that one hold of the lock finds.
const BLOCKS_PER_LOCK: usize = 256;

/// Blocks on SSDs. Thread-safe. Only [`open`](Self::open), [`close`](Self::close), `drop`,
/// [`note_forgotten`](Self::note_forgotten) and [`note_missing`](Self::note_missing) wait for a device.
pub struct SsdTier {
    memory: Arc<dyn Memory>,
    shared: Arc<Shared>,
    devices: Vec<Arc<DeviceShared>>,
    /// One for each of `devices`, in the same order.
    drops: Vec<DropTable>,
    backlog_bytes: u64,
}

/// How a device's thread opened its I/O interface; the thread reports it to [`SsdTier::open`].
struct Opened {
    io: &'static str,
    registration: Registration,
    notes: Vec<String>,
    path_taken: PathStatus,
    waker: crate::io::Waker,
}

impl SsdTier {
    /// Opens the files, makes those that are missing, and rebuilds the index from them. Blocks are written from and
    /// read into `memory`.
    ///
    /// # Errors
    /// [`OpenError`] says what is wrong with a file and what to do. No stored block is lost then.
    pub fn open(options: Options, memory: Arc<dyn Memory>) -> Result<SsdTier, OpenError> {
        if options.devices.is_empty() || options.devices.len() > usize::from(u8::MAX) {
            return Err(OpenError::DeviceCount(options.devices.len()));
        }
        let mut files: Vec<TierFile> = Vec::new();
        for device in &options.devices {
            let file = match TierFile::open(device, options.segment_bytes, options.buffered) {
                Err(OpenError::InUse { path }) if files.iter().any(|other| other.path == path) => {
                    return Err(OpenError::Twice { path });
                }
                file => file?,
            };
            files.push(file);
        }
        let mut index = Index::new();
        for file in &files {
            index.add_device(file.superblock.segments);
        }
        let shared = Arc::new(Shared {
            index: Mutex::new(Stored {
                index,
                pending: HashMap::new(),
                drops: HashMap::new(),
                writing: HashMap::new(),
            }),
            counters: Counters::default(),
            judge: OnceLock::new(),
            given_up: Mutex::new(vec![None; files.len()]),
        });
        let mut tier = SsdTier {
            memory,
            shared,
            devices: Vec::new(),
            drops: Vec::new(),
            backlog_bytes: options.backlog_bytes.max(1),
        };
        // From here on an error drops the tier, and its `drop` ends the threads that were started.
        for (number, file) in files.into_iter().enumerate() {
            let (device, drops) = tier.start_device(number as u8, file, &options)?;
            tier.devices.push(device);
            tier.drops.push(drops);
        }
        Ok(tier)
    }

    /// Recovers the file, starts its device's thread, and hands the log over to the thread.
    fn start_device(
        &self,
        number: u8,
        file: TierFile,
        options: &Options,
    ) -> Result<(Arc<DeviceShared>, DropTable), OpenError> {
        let (drops, log, holdings) = self.recover_file(number, &file)?;
        let (opened, start) = self.start_thread(number, &file, options)?;
        let waker = Arc::clone(&opened.waker);
        let status = initial_status(file, opened, log.free_segments());
        for note in &status.notes {
            // Log "the file system reserves no room, so writes may fail when it is full": others can fill the
            // disk under kvlane. Do: use ext4 or XFS, or keep room free.
            // Log "no io_uring, a few threads transfer: it is switched off": the SSD works, and is slower.
            // Log "no io_uring, a few threads transfer: <error>": the kernel or the container allows no io_uring;
            // the SSD works, and is slower. Do: allow io_uring, if the speed matters.
            // Log "memory is not registered with io_uring: <error>; a higher limit of locked memory (ulimit -l)
            // may help": the SSD works, and takes more CPU time. Do: raise that limit (LimitMEMLOCK= of systemd).
            tracing::warn!(path = %status.path.display(), "{note}");
        }
        let device = DeviceShared::new(status, holdings);
        device.set_waker(waker);
        device.free_segments.store(log.free_segments(), Ordering::Relaxed);
        // This cannot fail, because the thread has opened its interface and waits for the log.
        let _ = start.send((Arc::clone(&device), log));
        Ok((device, drops))
    }

    /// Reads the file's drop table, then its records into the index. Returns the file's log and holdings with the
    /// table.
    fn recover_file(&self, number: u8, file: &TierFile) -> Result<(DropTable, Log, Holdings), OpenError> {
        let began = Instant::now();
        let mut log = Log::new(file.superblock.segments, file.superblock.segment_pages());
        let drops = DropTable::read(file).map_err(fail(file, "cannot read which namespaces were dropped"))?;
        let found = begin_run(file, number, &drops, &mut self.shared.index.lock().index, &mut log)
            .map_err(fail(file, "cannot go on with what it holds"))?;
        Counters::add(&self.shared.counters.recovered_from_tables, found.from_tables);
        Counters::add(&self.shared.counters.recovered_by_scan, found.by_scan);
        // Log: the file is ready; the line says how many blocks were found again, and how long it took.
        tracing::info!(
            path = %file.path.display(), from_tables = found.from_tables, by_scan = found.by_scan,
            seconds = began.elapsed().as_secs_f64(), "SSD tier opened"
        );
        Ok((drops, log, found.holdings))
    }

    /// Starts the device's thread, and waits until it has opened its I/O interface. The thread then waits for its state
    /// and log from the sender, and ends if the sender is dropped.
    fn start_thread(
        &self,
        number: u8,
        file: &TierFile,
        options: &Options,
    ) -> Result<(Opened, Sender<DeviceAndLog>), OpenError> {
        let descriptor = file.file.try_clone().map_err(fail(file, "cannot use its descriptor twice"))?;
        let (report, reports) = crossbeam_channel::bounded(1);
        let (start, starts) = crossbeam_channel::bounded(1);
        let thread = DeviceThread {
            file: descriptor,
            number,
            superblock: file.superblock,
            memory: Arc::clone(&self.memory),
            shared: Arc::clone(&self.shared),
            path: file.path.clone(),
            ssd_path: options.path,
            staging_bytes: options.staging_bytes,
            direct_io: file.direct,
            threads: options.threads,
            wrap_io: options.wrap_io.clone(),
            write_rate: options.write_rate,
            checkpoint_interval: options.checkpoint_interval,
        };
        std::thread::Builder::new()
            .name(format!("kvlane-ssd{number}"))
            .spawn(move || thread.run(&report, &starts))
            .map_err(fail(file, "cannot start its thread"))?;
        let opened = reports
            .recv()
            .unwrap_or_else(|_| Err(std::io::Error::other("its thread ended")))
            .map_err(fail(file, "cannot transfer from and to it"))?;
        Ok((opened, start))
    }

    /// Queues a block to be written. A device's thread calls `done` exactly once, after the kernel's last read of the
    /// block's memory. `done` must return at once, and may call the tier. If the call is refused, `done` is dropped
    /// without being called.
    ///
    /// # Errors
    /// [`Refused`]: nothing was queued.
    pub fn write(&self, record: Record, done: impl FnOnce(WriteEnd) + Send + 'static) -> Result<(), Refused> {
        self.check(record.shards.iter().map(|shard| &shard.extent))?;
        let lengths = record.shards.iter().map(|shard| shard.extent.bytes);
        let pages = record_pages(lengths)
            .filter(|_| record.shards.iter().all(|shard| shard.extent.bytes <= u64::from(u32::MAX)));
        let pages =
            pages.ok_or(Refused::TooLarge { pages: u64::MAX, segment_pages: self.largest_segment() })?;
        let counters = &self.shared.counters;
        let (number, device) = self.device_for(pages).inspect_err(|refused| match refused {
            Refused::Full => Counters::add(&counters.writes_refused, 1),
            Refused::Degraded => Counters::add(&counters.writes_degraded, 1),
            _ => {}
        })?;
        let key = record.key;
        let accepted = {
            let mut stored = self.shared.index.lock();
            if stored.index.find(&key).is_some() || stored.pending.contains_key(&key) {
                return Err(Refused::Present);
            }
            let accepted = Accepted { device: number, drops: stored.drops_of(&key.space.namespace) };
            stored.add_pending(&key, accepted);
            accepted
        };
        let bytes = u64::from(pages) * PAGE_BYTES;
        device.backlog.fetch_add(bytes, Ordering::Relaxed);
        device.assigned.fetch_add(bytes, Ordering::Relaxed);
        let accepted_at = Instant::now();
        let job = WriteJob { record, pages, accepted, accepted_at, done: Box::new(done) };
        if !device.submit(None, Some(job)) {
            device.backlog.fetch_sub(bytes, Ordering::Relaxed);
            // A device's thread that panicked has removed its pending keys; another device may have this key by now.
            self.shared.index.lock().remove_pending(&key, accepted);
            return Err(Refused::Closed);
        }
        Ok(())
    }

    /// Queues a block to be read. Until `done` is called its memory belongs to the tier and the kernel, so let `done`
    /// own the guard of that memory. A device's thread calls `done` exactly once; if the thread panics, `done` is
    /// dropped instead. `done` must return at once, and may call the tier. If the call is refused, `done` is dropped
    /// without being called.
    ///
    /// # Errors
    /// [`Refused`]: nothing was queued.
    pub fn read(&self, read: Read, done: impl FnOnce(ReadEnd) + Send + 'static) -> Result<(), Refused> {
        self.check(read.into.iter())?;
        let pages = record_pages(read.into.iter().map(|extent| extent.bytes));
        let Read { key, into, deadline } = read;
        let mut stored = self.shared.index.lock();
        let location = stored.index.find(&key).ok_or(Refused::Absent)?;
        if pages != Some(location.pages) {
            Counters::add(&self.shared.counters.reads_lengths, 1);
            return Err(Refused::Lengths);
        }
        let device = &self.devices[usize::from(location.device)];
        if device.reads.load(Ordering::Relaxed) >= READS_MAX {
            return Err(Refused::Full);
        }
        stored.index.touch(&key);
        // Pin under the index's lock, because cleaning first takes a segment's blocks out of the index and then looks
        // at its pins.
        let pin = &device.pins[location.segment.index()];
        pin.fetch_add(1, Ordering::Acquire);
        drop(stored);
        device.reads.fetch_add(1, Ordering::Relaxed);
        let accepted_at = Instant::now();
        let job = ReadJob { key, location, into, deadline, accepted_at, done: Box::new(done) };
        if !device.submit(Some(job), None) {
            pin.fetch_sub(1, Ordering::Release);
            device.reads.fetch_sub(1, Ordering::Relaxed);
            return Err(Refused::Closed);
        }
        Ok(())
    }

    /// Sets the judge, which from now on says which blocks cleaning writes again. Without a judge, or without its answer,
    /// cleaning keeps blocks that were read since they were written. The first call wins.
    pub fn set_judge(&self, judge: Arc<dyn Judge>) {
        let _ = self.shared.judge.set(judge);
    }

    /// The policy's memo of a stored block, from when the block was written or left the pool.
    pub fn memo(&self, key: &BlockKey) -> Option<Memo> {
        self.shared.index.lock().index.memo(key)
    }

    /// Keeps the policy's memos of blocks that leave the pool, for those blocks that are stored here.
    pub fn remember(&self, blocks: impl IntoIterator<Item = (BlockKey, Memo)>) {
        let mut stored = self.shared.index.lock();
        blocks.into_iter().for_each(|(key, memo)| stored.index.remember(&key, memo));
    }

    /// Whether a block is stored.
    pub fn contains(&self, key: &BlockKey) -> bool {
        self.shared.index.lock().index.find(key).is_some()
    }

    /// The stored ones of these blocks, as ascending runs of positions. With `only_prefix` it ends at the first that is not
    /// stored.
    pub fn find_runs(&self, space: Space, hashes: &[BlockHash], only_prefix: bool) -> Vec<Range<u32>> {
        let mut runs: Vec<Range<u32>> = Vec::new();
        let mut position = 0;
        for part in hashes.chunks(BLOCKS_PER_LOCK) {
            let stored = self.shared.index.lock();
            for hash in part {
                if stored.index.find(&BlockKey { space, hash: *hash }).is_none() {
                    if only_prefix {
                        return runs;
                    }
                } else if let Some(run) = runs.last_mut().filter(|run| run.end == position) {
                    run.end += 1;
                } else {
                    runs.push(position..position + 1);
                }
                position += 1;
            }
        }
        runs
    }

    /// Removes a block from the index; false if it was not there. Reads in flight are not affected. A restart may find
    /// the block again; a read then verifies it like any other.
    pub fn remove(&self, key: &BlockKey) -> bool {
        self.shared.index.lock().index.remove(key).is_some()
    }

    /// Removes all blocks of a namespace from the index, and lets its writes in flight fail. Returns how many blocks were
    /// removed. Until [`note_forgotten`](Self::note_forgotten) has returned, a restart may bring them back.
    pub fn forget_namespace(&self, namespace: Namespace) -> u64 {
        {
            let mut stored = self.shared.index.lock();
            if stored.writing.keys().any(|(_, written)| *written == namespace) {
                *stored.drops.entry(namespace).or_default() += 1;
            } else {
                // No accepted write is left that compares the count when it ends.
                stored.drops.remove(&namespace);
            }
            stored.pending.retain(|key, _| key.space.namespace != namespace);
        }
        let (mut blocks, mut next) = (0, 0);
        loop {
            // Release the lock between pieces, because lookups wait for it.
            let mut stored = self.shared.index.lock();
            let end = stored.index.slots().min(next + SLOTS_PER_LOCK);
            let keys: Vec<BlockKey> = (next..end)
                .filter_map(|slot| stored.index.key_at(slot))
                .filter(|key| key.space.namespace == namespace)
                .collect();
            for key in &keys {
                blocks += u64::from(stored.index.remove(key).is_some());
            }
            if end == stored.index.slots() {
                return blocks;
            }
            next = end;
        }
    }

    /// Writes the dropped namespace into the drop table of each file, so that its records do not count after a restart.
    /// Returns the files that failed: a restart or a crash would bring their blocks back. Blocks of the namespace that
    /// are written from now on are found until the tier closes, but not after a restart. The file does not say which
    /// blocks of one run are newer than the drop. Waits for a small write to each device.
    pub fn note_forgotten(&self, namespace: Namespace) -> Vec<NotNoted> {
        let note = |(number, drops): (usize, &DropTable)| {
            let may_hold = |namespace: &Namespace, up_to| self.may_hold(number, namespace, up_to);
            let why = drops.drop_namespace(namespace, may_hold).err()?;
            Some(NotNoted { path: self.devices[number].facts.path.clone(), why })
        };
        self.drops.iter().enumerate().filter_map(note).collect()
    }

    /// Whether a segment of the device, of generation `up_to` or lower, may have a record of the namespace.
    fn may_hold(&self, device: usize, namespace: &Namespace, up_to: u64) -> bool {
        // Look at `writing` first: a write enters the holdings before it leaves `writing`, so one of the two has it.
        let is_written = self.shared.index.lock().writing.contains_key(&(device as u8, *namespace));
        is_written || self.devices[device].holdings.lock().may_hold(namespace, up_to)
    }

    /// Retries the drops that failed to reach the files. Returns the files that failed again. Waits for a device only if
    /// its file lacks a drop.
    pub fn note_missing(&self) -> Vec<NotNoted> {
        let note = |(number, drops): (usize, &DropTable)| {
            if drops.missing().is_empty() {
                return None;
            }
            let may_hold = |namespace: &Namespace, up_to| self.may_hold(number, namespace, up_to);
            let why = drops.note_missing(may_hold).err()?;
            Some(NotNoted { path: self.devices[number].facts.path.clone(), why })
        };
        self.drops.iter().enumerate().filter_map(note).collect()
    }

    /// Dropped namespaces that are missing in the drop table of a file: a restart would bring them back.
    pub fn missing_notes(&self) -> BTreeSet<Namespace> {
        self.drops.iter().flat_map(DropTable::missing).collect()
    }

    /// The namespaces and cuts that have stored blocks.
    pub fn spaces(&self) -> Vec<SpaceUse> {
        let stored = self.shared.index.lock();
        let of = |(space, blocks, pages)| SpaceUse { space, blocks, bytes: pages * PAGE_BYTES };
        stored.index.spaces().map(of).collect()
    }

    /// Calls `see` with the key of every stored block, in no order. Blocks that are added or removed meanwhile may be
    /// included or not.
    pub fn for_each_key(&self, mut see: impl FnMut(BlockKey)) {
        let mut next = 0;
        loop {
            let stored = self.shared.index.lock();
            let slots = stored.index.slots();
            let end = slots.min(next + SLOTS_PER_LOCK);
            let keys: Vec<BlockKey> = (next..end).filter_map(|slot| stored.index.key_at(slot)).collect();
            drop(stored);
            keys.into_iter().for_each(&mut see);
            if end == slots {
                return;
            }
            next = end;
        }
    }

    /// The counters since the tier was opened, and the index's size now.
    pub fn stats(&self) -> Stats {
        let stored = self.shared.index.lock();
        Stats {
            blocks: stored.index.blocks() as u64,
            block_bytes: stored.index.pages() * PAGE_BYTES,
            index_bytes: stored.index.memory_bytes(),
            ..self.shared.counters.snapshot()
        }
    }

    /// The status of each device, in the order of [`Options::devices`].
    pub fn status(&self) -> Vec<DeviceStatus> {
        let status = |(device, drops): (&Arc<DeviceShared>, &DropTable)| DeviceStatus {
            drops_not_noted: drops.missing().len(),
            ..device.status()
        };
        self.devices.iter().zip(&self.drops).map(status).collect()
    }

    /// Accepts nothing more, writes the backlog, then the tables from which the next start rebuilds its index, and ends
    /// the threads. Returns false if a device does not end in time: its thread, and the memory of its operations, then
    /// stay until it does. A call from inside `done` does not wait for its own thread, and returns false.
    pub fn close(&self, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        for device in &self.devices {
            device.close();
        }
        let ended: Vec<bool> = self.devices.iter().map(|device| device.await_end(until)).collect();
        ended.into_iter().all(|ended| ended)
    }

    fn largest_segment(&self) -> u32 {
        let pages = |device: &Arc<DeviceShared>| (device.facts.segment_bytes / PAGE_BYTES) as u32;
        self.devices.iter().map(pages).max().unwrap_or(0)
    }

    /// Chooses a device for a record of `pages`: of those that accept it, the one with the fewest bytes assigned for its
    /// capacity.
    fn device_for(&self, pages: u32) -> Result<(u8, &DeviceShared), Refused> {
        let now = Instant::now();
        let mut refused =
            Refused::TooLarge { pages: u64::from(pages), segment_pages: self.largest_segment() };
        let mut best: Option<(f64, (u8, &DeviceShared))> = None;
        for (number, device) in self.devices.iter().enumerate() {
            let segment_pages = (device.facts.segment_bytes / PAGE_BYTES) as u32;
            if pages > largest_record(segment_pages) {
                continue;
            }
            if !device.health.lock().accepts_writes(now) {
                refused = if refused == Refused::Full { refused } else { Refused::Degraded };
                continue;
            }
            let backlog = device.backlog.load(Ordering::Relaxed);
            // An empty backlog takes one block of any size.
            if backlog > 0 && backlog + u64::from(pages) * PAGE_BYTES > self.backlog_bytes {
                refused = Refused::Full;
                continue;
            }
            let assigned = device.assigned.load(Ordering::Relaxed) as f64 / device.facts.capacity as f64;
            if best.is_none_or(|(least, _)| assigned < least) {
                best = Some((assigned, (number as u8, device)));
            }
        }
        best.map(|(_, device)| device).ok_or(refused)
    }

    fn check<'a>(&self, mut extents: impl Iterator<Item = &'a PoolExtent>) -> Result<(), Refused> {
        let bytes = self.memory.bytes();
        let bad = |extent: &PoolExtent| {
            let end = extent.bytes.checked_next_multiple_of(PAGE_BYTES);
            let end = end.and_then(|length| extent.offset.end_inside(length, bytes));
            extent.bytes == 0 || !extent.offset.0.is_multiple_of(PAGE_BYTES) || end.is_none()
        };
        let mut any = false;
        let wrong = extents.find(|extent| {
            any = true;
            bad(extent)
        });
        match wrong {
            Some(extent) => Err(Refused::BadExtent { offset: extent.offset, bytes: extent.bytes }),
            None if !any => Err(Refused::BadExtent { offset: PoolOffset(0), bytes: 0 }),
            None => Ok(()),
        }
    }
}

impl Drop for SsdTier {
    fn drop(&mut self) {
        // The last owner may be a `done` on a device's thread; that thread ends a moment later.
        let on_own_thread = self.devices.iter().any(|device| device.is_own_thread());
        if !self.close(DROP_TIMEOUT) && !on_own_thread {
            // Log: an SSD did not finish its last transfers in time; the daemon ends without it. Do: look at the
            // disk and at dmesg.
            tracing::warn!(
                waited_s = DROP_TIMEOUT.as_secs(),
                "SSD device did not end; leaving its thread behind"
            );
        }
    }
}

/// Names the file and the step that failed in an error of the system.
fn fail(file: &TierFile, what: &'static str) -> impl FnOnce(std::io::Error) -> OpenError {
    let path = file.path.clone();
    move |source| OpenError::Io { path, what, source }
}

/// The status of a device that has just been opened; adds the interface's notes to the file's.
fn initial_status(file: TierFile, opened: Opened, free_segments: u32) -> DeviceStatus {
    let mut notes = file.notes;
    notes.extend(opened.notes);
    DeviceStatus {
        path: file.path,
        capacity: file.superblock.file_bytes().unwrap_or_default(),
        segment_bytes: file.superblock.segment_bytes,
        segments: file.superblock.segments,
        free_segments,
        io: opened.io,
        direct: file.direct,
        registered: opened.registration == Registration::Registered,
        notes,
        path_taken: opened.path_taken,
        degraded: None,
        drops_not_noted: 0,
        backlog_bytes: 0,
        reads: 0,
        read_latencies: Latencies::default(),
        write_latencies: Latencies::default(),
        warm: file.warm,
    }
}

/// A device's state and log, which its thread needs before it can run.
type DeviceAndLog = (Arc<DeviceShared>, Log);

/// Arguments of a device's thread.
struct DeviceThread {
    file: std::fs::File,
    number: u8,
    superblock: Superblock,
    memory: Arc<dyn Memory>,
    shared: Arc<Shared>,
    path: std::path::PathBuf,
    ssd_path: SsdPath,
    staging_bytes: u64,
    direct_io: bool,
    threads: bool,
    wrap_io: Option<Arc<dyn WrapIo>>,
    write_rate: Option<u64>,
    checkpoint_interval: Duration,
}

impl DeviceThread {
    /// Body of the thread: opens the I/O interface and reports it, waits for state and log, and runs the device. Opens
    /// the interface here, because an io_uring belongs to the thread that makes it.
    fn run(self, report: &Sender<std::io::Result<Opened>>, starts: &Receiver<DeviceAndLog>) {
        let rates_file = RatesFile::beside(&self.path, &self.file, self.staging_bytes);
        let mut chooser = PathChooser::new(self.ssd_path, self.memory.is_huge(), self.direct_io, rates_file);
        let (staging, note) = chooser.make_staging(self.staging_bytes);
        let DeviceThread { file, number, superblock, memory, shared, .. } = self;
        let headers = Headers::new();
        let mut small = vec![headers.memory()];
        small.extend(staging.as_ref().map(Staging::memory));
        small.extend(chooser.scratch_memory());
        let (io, mut opened) = match open_wrapped_io(file, &*memory, &small, self.threads, self.wrap_io) {
            Ok(made) => made,
            Err(error) => {
                let _ = report.send(Err(error));
                return;
            }
        };
        opened.notes.extend(note);
        opened.path_taken = chooser.status();
        let registration = opened.registration;
        let _ = report.send(Ok(opened));
        let Ok((device, log)) = starts.recv() else { return };
        device.thread_began();
        let ends = ThreadEndGuard(Arc::clone(&device));
        Device::new(Start {
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
            write_rate: self.write_rate,
            checkpoint_interval: self.checkpoint_interval,
        })
        .run();
        drop(ends);
    }
}

/// Reports the end of a device's thread, by return or by panic.
struct ThreadEndGuard(Arc<DeviceShared>);

impl Drop for ThreadEndGuard {
    fn drop(&mut self) {
        self.0.thread_ended();
    }
}

/// Opens the I/O interface, and puts the options' layer around it if there is one.
fn open_wrapped_io(
    file: std::fs::File,
    memory: &dyn Memory,
    small: &[Piece],
    threads: bool,
    wrap_io: Option<Arc<dyn WrapIo>>,
) -> std::io::Result<(Box<dyn Io>, Opened)> {
    let (mut io, mut opened) = open_io(file, memory, small, threads)?;
    if let Some(wrap) = wrap_io {
        io = wrap.wrap(io);
        opened.waker = io.waker();
    }
    Ok((io, opened))
}

/// Opens io_uring, or a pool of threads if io_uring is refused or `threads` is set. `small` is the device's own memory that its
/// transfers use. Takes the file, because each clone
/// of its descriptor that outlives the thread would keep its lock.
fn open_io(
    file: std::fs::File,
    memory: &dyn Memory,
    small: &[Piece],
    threads: bool,
) -> std::io::Result<(Box<dyn Io>, Opened)> {
    let mut notes = Vec::new();
    if threads {
        notes.push("no io_uring, a few threads transfer: it is switched off".to_owned());
    } else {
        let pool = Piece { address: memory.base(), bytes: memory.bytes() as usize };
        match UringQueue::new(file.try_clone()?, pool, small) {
            Ok((ring, not_registered)) => {
                let registration = match not_registered {
                    None => Registration::Registered,
                    Some(_) => Registration::Unregistered,
                };
                let opened = Opened {
                    io: "io_uring",
                    registration,
                    notes: not_registered.into_iter().collect(),
                    path_taken: PathStatus::default(),
                    waker: ring.waker(),
                };
                return Ok((Box::new(ring), opened));
            }
            Err(refused) => notes.push(format!("no io_uring, a few threads transfer: {refused}")),
        }
    }
    let threads = Threads::new(file)?;
    let waker = threads.waker();
    let registration = Registration::Unregistered;
    Ok((
        Box::new(threads),
        Opened { io: "threads", registration, notes, path_taken: PathStatus::default(), waker },
    ))
}
