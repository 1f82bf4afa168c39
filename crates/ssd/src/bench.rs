//! `kvlane bench ssd`: measures a tier's throughput, latency, CPU time and restarts on this machine.
//!
//! A read starts the next one from its `done`, so no thread waits for single blocks. The daemon's fetches likewise read
//! many blocks at once. Blocks have one shard.
#![expect(unsafe_code, reason = "fills the pool, and asks for the process's CPU time")]

use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use kvlane_block::{BlockHash, BlockKey, CutDigest, Namespace, PoolExtent, PoolOffset, SealedShard, Space};
use kvlane_memory::{Arena, ArenaError, ArenaOptions, HugePages, Numa};
use kvlane_policy::Memo;
use parking_lot::Mutex;
use thiserror::Error;

use crate::error::OpenError;
use crate::layout::{PAGE_BYTES, Superblock, header_pages, shard_pages};
use crate::options::{DeviceOptions, Options};
use crate::request::{Read, ReadEnd, Record, Refused, WriteEnd};
use crate::stats::{DeviceStatus, Stats};
use crate::tier::SsdTier;
use crate::way::SsdPath;
use crate::way_file::rates_path;

const SPACE: Space = Space { namespace: Namespace([1; 16]), cut: CutDigest([1; 16]) };
/// Timeout of every wait; only a hanging device takes longer.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Bytes of a block in [`restart`].
const RESTART_BLOCK_BYTES: u64 = PAGE_BYTES;

/// Why a measurement failed.
#[derive(Debug, Error)]
pub enum BenchError {
    /// The pool cannot be allocated.
    #[error(transparent)]
    Pool(#[from] ArenaError),
    /// A file is not a tier's, or cannot be one.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A file of the benchmark cannot be used.
    #[error("{0}")]
    File(#[from] io::Error),
    /// The tier refused a request, lost a block or hangs; or the arguments are impossible.
    #[error("{0}")]
    Answer(String),
}

/// Result of one phase of a benchmark.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Measured {
    /// Bytes of the blocks, without their headers.
    pub bytes: u64,
    /// From the first call to the last `done`.
    pub seconds: f64,
    /// CPU time of the whole process, kernel time included.
    pub cpu_seconds: f64,
    /// The part of it that the devices' threads used.
    pub device_cpu_seconds: f64,
    /// Latency of each block, in the order in which they ended.
    pub latencies_us: Vec<u64>,
}

/// A tier to measure. Dropping or closing it removes its files.
pub struct Bench {
    /// None after [`Bench::close`].
    tier: Option<Arc<SsdTier>>,
    paths: Vec<PathBuf>,
    arena: Arc<Arena>,
    block_bytes: u64,
    crc: u32,
    /// Blocks written so far.
    written: u64,
}

impl Bench {
    /// Opens a tier on new files of `capacity` bytes each, for blocks of one size. With `threads`, it does not use
    /// io_uring. Transfers take `path`.
    ///
    /// # Errors
    /// [`BenchError`]. A file that exists already is an error too, because it may be in use.
    pub fn open(
        paths: Vec<PathBuf>,
        capacity: u64,
        block_bytes: u64,
        pool_bytes: u64,
        threads: bool,
        path: SsdPath,
    ) -> Result<Bench, BenchError> {
        for path in &paths {
            if path.exists() {
                let why = format!("{} exists, and a benchmark makes its own files", path.display());
                return Err(BenchError::Answer(why));
            }
        }
        if block_bytes == 0 || !block_bytes.is_multiple_of(PAGE_BYTES) || pool_bytes < block_bytes {
            let why =
                format!("{block_bytes} bytes are no block of a pool of {pool_bytes}: a multiple of 4096 is");
            return Err(BenchError::Answer(why));
        }
        let arena = pool(pool_bytes)?;
        // SAFETY: the arena is ours alone, and nothing is in flight.
        let bytes = unsafe { std::slice::from_raw_parts_mut(arena.base(), block_bytes as usize) };
        let mut state = 1u64;
        for word in bytes.chunks_exact_mut(8) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            word.copy_from_slice(&state.to_le_bytes());
        }
        let crc = kvlane_block::crc32c(bytes);
        let device = |path: &PathBuf| DeviceOptions { path: path.clone(), capacity: Some(capacity) };
        let options = Options::new(paths.iter().map(device).collect());
        let backlog_bytes = options.backlog_bytes.min(capacity / 8);
        let options = Options { threads, backlog_bytes, path, ..options };
        let tier = SsdTier::open(options, arena.clone());
        // From here on an error drops the bench, which removes the files.
        let mut bench = Bench { tier: None, paths, arena, block_bytes, crc, written: 0 };
        bench.tier = Some(Arc::new(tier?));
        Ok(bench)
    }

    /// Status of each device.
    pub fn status(&self) -> Vec<DeviceStatus> {
        self.tier.as_ref().map(|tier| tier.status()).unwrap_or_default()
    }

    /// The tier's counters.
    pub fn stats(&self) -> Stats {
        self.tier.as_ref().map(|tier| tier.stats()).unwrap_or_default()
    }

    /// Size of the pool's pages, as text.
    pub fn pool_pages(&self) -> String {
        self.arena.page_size().to_owned()
    }

    /// Writes `count` new blocks, as fast as the backlog takes them.
    ///
    /// # Errors
    /// [`BenchError::Answer`] if one of them is not stored.
    pub fn write(&mut self, count: u64) -> Result<Measured, BenchError> {
        let meter = Meter::start();
        let latencies = self.writer()?.run(self.written, count, &mut || true)?;
        self.written += latencies.len() as u64;
        Ok(meter.measured(self.block_bytes, latencies))
    }

    /// Reads `count` blocks, `depth` at once, chosen at random from the newest `among`.
    ///
    /// # Errors
    /// [`BenchError::Answer`] if one of them is not found.
    pub fn read(&self, among: u64, count: u64, depth: u64) -> Result<Measured, BenchError> {
        let meter = Meter::start();
        let latencies = self.reader(among, count, depth)?.run()?;
        Ok(meter.measured(self.block_bytes, latencies))
    }

    /// Like [`read`](Self::read), while a second thread writes new blocks and keeps the backlog full, up to a quarter
    /// of the files. Returns the reads and the writes; the CPU time of each is that of both.
    ///
    /// # Errors
    /// Those of [`read`](Self::read) and [`write`](Self::write).
    pub fn read_beside_writes(
        &mut self,
        among: u64,
        count: u64,
        depth: u64,
    ) -> Result<(Measured, Measured), BenchError> {
        let reads = self.reader(among, count, depth)?;
        let (writer, first, block_bytes) = (self.writer()?, self.written, self.block_bytes);
        let capacity: u64 = self.status().iter().map(|device| device.capacity).sum();
        // More writes would make the tier drop the blocks that are read.
        let most = capacity / 4 / block_bytes;
        let (stop, stopped) = channel::<()>();
        let (begun, has_begun) = channel();
        let (read, write) = std::thread::scope(|scope| {
            let writer = scope.spawn(move || {
                let mut keep = || {
                    let _ = begun.send(());
                    matches!(stopped.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty))
                };
                let meter = Meter::start();
                // Writes that were accepted before the reads ended are still awaited.
                let latencies = writer.run(first, most, &mut keep);
                latencies.map(|latencies| meter.measured(block_bytes, latencies))
            });
            let _ = has_begun.recv();
            let meter = Meter::start();
            let read = reads.run().map(|latencies| meter.measured(block_bytes, latencies));
            drop(stop);
            (read, writer.join())
        });
        let write = write.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        self.written += write.latencies_us.len() as u64;
        Ok((read?, write))
    }

    /// Closes the tier and removes its files.
    pub fn close(&mut self) {
        if let Some(tier) = self.tier.take() {
            tier.close(TIMEOUT);
        }
        // `open` made these files, so nothing else needs them.
        for path in std::mem::take(&mut self.paths) {
            let _ = std::fs::remove_file(rates_path(&path));
            let _ = std::fs::remove_file(path);
        }
    }

    fn tier(&self) -> Result<&Arc<SsdTier>, BenchError> {
        self.tier.as_ref().ok_or_else(|| BenchError::Answer("the benchmark is closed".into()))
    }

    fn writer(&self) -> Result<WriteLoop, BenchError> {
        let shard = SealedShard { extent: self.slot(0), crc32c: self.crc };
        Ok(WriteLoop { tier: Arc::clone(self.tier()?), shard })
    }

    fn slot(&self, number: u64) -> PoolExtent {
        PoolExtent { offset: PoolOffset(number * self.block_bytes), bytes: self.block_bytes }
    }

    fn reader(&self, among: u64, count: u64, depth: u64) -> Result<Arc<ReadChains>, BenchError> {
        let among = among.min(self.written);
        // Slot 0 holds the bytes that are written.
        let slots = (self.arena.bytes() / self.block_bytes).saturating_sub(1);
        if among == 0 || depth == 0 || depth > slots {
            let why = format!(
                "{depth} reads at once of {among} blocks are not possible with {slots} slots in the pool"
            );
            return Err(BenchError::Answer(why));
        }
        let (end, ends) = channel();
        let progress = Progress {
            dice: 88_172_645_463_325_252,
            left: count,
            in_flight: 0,
            latencies_us: Vec::with_capacity(count as usize),
            failed: None,
            end: Some(end),
        };
        Ok(Arc::new(ReadChains {
            tier: Arc::clone(self.tier()?),
            first: self.written - among,
            among,
            slots: (1..=depth).map(|number| self.slot(number)).collect(),
            progress: Mutex::new(progress),
            ends: Mutex::new(ends),
        }))
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.close();
    }
}

/// Measures how long a tier with this many blocks of 4 KiB in a new file takes to open again. Returns the seconds from
/// its tables, and with `headers_too` those from the headers alone.
///
/// # Errors
/// Those of [`Bench::open`] and [`Bench::write`].
pub fn restart(path: PathBuf, blocks: u64, headers_too: bool) -> Result<(f64, Option<f64>), BenchError> {
    let segment_pages = LARGEST_SEGMENT / PAGE_BYTES;
    let pages = blocks * (header_pages(1) + shard_pages(RESTART_BLOCK_BYTES));
    let capacity = Superblock::SEGMENTS_START + (pages.div_ceil(segment_pages) + 8) * LARGEST_SEGMENT;
    let mut bench =
        Bench::open(vec![path.clone()], capacity, RESTART_BLOCK_BYTES, 1 << 20, false, SsdPath::Auto)?;
    bench.write(blocks)?;
    let tier = bench.tier.take();
    if !tier.is_some_and(|tier| tier.close(TIMEOUT)) {
        return Err(BenchError::Answer("the tier does not end".into()));
    }
    let arena = Arc::clone(&bench.arena);
    let open = |bench: &mut Bench| {
        let device = DeviceOptions { path: path.clone(), capacity: None };
        let began = Instant::now();
        let tier = SsdTier::open(Options::new(vec![device]), arena.clone())?;
        let (seconds, found) = (began.elapsed().as_secs_f64(), tier.stats().blocks);
        // Put the tier back, so that an error closes it and removes the file.
        bench.tier = Some(Arc::new(tier));
        if found == blocks {
            Ok(seconds)
        } else {
            Err(BenchError::Answer(format!("{found} blocks of {blocks} were found again")))
        }
    };
    let from_tables = open(&mut bench)?;
    let mut from_headers = None;
    if headers_too {
        if let Some(tier) = bench.tier.take() {
            tier.close(TIMEOUT);
        }
        drop_tables(&path, capacity)?;
        from_headers = Some(open(&mut bench)?);
    }
    Ok((from_tables, from_headers))
}

/// Segment size of [`restart`]'s file, in bytes.
const LARGEST_SEGMENT: u64 = 64 << 20;

/// Erases the foot of every segment, so that no table is found.
fn drop_tables(path: &std::path::Path, capacity: u64) -> io::Result<()> {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path)?;
    let mut page = [0; PAGE_BYTES as usize];
    for at in (0..capacity).step_by(PAGE_BYTES as usize) {
        if file.read_exact_at(&mut page, at).is_ok() && page.starts_with(b"kvlnFOOT") {
            file.write_all_at(&[0; PAGE_BYTES as usize], at)?;
        }
    }
    file.sync_all()
}

/// Measures crc32c over `bytes` in pieces, in more memory than a cache holds. Returns bytes per second of CPU time.
///
/// # Errors
/// [`BenchError::Pool`] if the memory cannot be allocated.
pub fn crc_rate(piece_bytes: u64, bytes: u64) -> Result<f64, BenchError> {
    let arena = pool(bytes.max(piece_bytes))?;
    // SAFETY: the arena is ours alone.
    let memory = unsafe { std::slice::from_raw_parts_mut(arena.base(), arena.bytes() as usize) };
    // Write every page, because untouched pages all map the same zero page.
    memory.fill(7);
    let before = cpu();
    let crcs = memory.chunks(piece_bytes as usize).fold(0, |sum, piece| sum ^ kvlane_block::crc32c(piece));
    std::hint::black_box(crcs);
    Ok(memory.len() as f64 / (cpu() - before).as_secs_f64())
}

fn pool(bytes: u64) -> Result<Arc<Arena>, ArenaError> {
    let options = ArenaOptions { bytes, hugepages: HugePages::Auto, numa: Numa::Off, threads: 1 };
    Ok(Arc::new(Arena::create(&options, &|_| {})?))
}

fn key(number: u64) -> BlockKey {
    let mut hash = [0; 16];
    hash[..8].copy_from_slice(&number.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
    BlockKey { space: SPACE, hash: BlockHash(hash) }
}

/// Writes the same bytes under new keys.
struct WriteLoop {
    tier: Arc<SsdTier>,
    shard: SealedShard,
}

impl WriteLoop {
    /// Writes `count` blocks from number `first` on, or fewer if `keep` returns false. Returns their latencies in
    /// microseconds.
    fn run(&self, first: u64, count: u64, keep: &mut dyn FnMut() -> bool) -> Result<Vec<u64>, BenchError> {
        let (end, ends) = channel();
        let (mut accepted, mut goes_on) = (0, true);
        let mut latencies = Vec::new();
        loop {
            goes_on = goes_on && accepted < count && keep();
            if goes_on {
                let record =
                    Record { key: key(first + accepted), shards: vec![self.shard], memo: Memo::NOTHING };
                let (end, at) = (end.clone(), Instant::now());
                match self.tier.write(record, move |how| {
                    let _ = end.send((how, at.elapsed()));
                }) {
                    Ok(()) => {
                        accepted += 1;
                        continue;
                    }
                    Err(Refused::Full) => {}
                    Err(refused) => return Err(BenchError::Answer(refused.to_string())),
                }
            } else if latencies.len() as u64 == accepted {
                return Ok(latencies);
            }
            // Take all outcomes that have come before writing more, so that this thread seldom wakes up.
            let first = ends.recv_timeout(TIMEOUT).map_err(|_| hangs())?;
            for (how, took) in std::iter::once(first).chain(ends.try_iter()) {
                if how != WriteEnd::Stored {
                    return Err(BenchError::Answer("a block was not stored".into()));
                }
                latencies.push(took.as_micros() as u64);
            }
        }
    }
}

/// Reads that each start the next one from their `done`, one chain per slot.
struct ReadChains {
    tier: Arc<SsdTier>,
    /// Number of the first block to choose from; `among` is how many there are.
    first: u64,
    among: u64,
    slots: Vec<PoolExtent>,
    progress: Mutex<Progress>,
    ends: Mutex<Receiver<()>>,
}

struct Progress {
    dice: u64,
    /// Reads that have not started.
    left: u64,
    in_flight: usize,
    latencies_us: Vec<u64>,
    failed: Option<String>,
    /// Dropped when all reads have ended, which wakes [`ReadChains::run`].
    end: Option<Sender<()>>,
}

impl Progress {
    /// Keeps the first reason: a block that was found damaged is absent from then on.
    fn fail(&mut self, why: String) {
        self.failed.get_or_insert(why);
    }
}

impl ReadChains {
    fn run(self: Arc<ReadChains>) -> Result<Vec<u64>, BenchError> {
        for slot in &self.slots {
            ReadChains::next(&self, *slot);
        }
        // With nothing to read, no `done` ends the phase.
        self.step_end();
        if self.ends.lock().recv_timeout(TIMEOUT) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            return Err(hangs());
        }
        let mut progress = self.progress.lock();
        match progress.failed.take() {
            Some(why) => Err(BenchError::Answer(why)),
            None => Ok(std::mem::take(&mut progress.latencies_us)),
        }
    }

    fn step_end(&self) {
        let mut progress = self.progress.lock();
        if progress.in_flight == 0 && (progress.left == 0 || progress.failed.is_some()) {
            progress.end = None;
        }
    }

    fn next(reader: &Arc<ReadChains>, slot: PoolExtent) {
        let number = {
            let mut progress = reader.progress.lock();
            if progress.left == 0 || progress.failed.is_some() {
                return;
            }
            progress.left -= 1;
            progress.in_flight += 1;
            progress.dice ^= progress.dice << 13;
            progress.dice ^= progress.dice >> 7;
            progress.dice ^= progress.dice << 17;
            reader.first + progress.dice % reader.among
        };
        let read = Read { key: key(number), into: vec![slot], deadline: None };
        let (again, at) = (Arc::clone(reader), Instant::now());
        let started = reader.tier.read(read, move |how| {
            let found = matches!(how, ReadEnd::Found { .. });
            {
                let mut progress = again.progress.lock();
                progress.in_flight -= 1;
                progress.latencies_us.push(at.elapsed().as_micros() as u64);
                if !found {
                    progress.fail(format!("block {number} was not found: {how:?}"));
                }
            }
            ReadChains::next(&again, slot);
            again.step_end();
        });
        if let Err(refused) = started {
            let mut progress = reader.progress.lock();
            progress.in_flight -= 1;
            progress.fail(format!("block {number}: {refused}"));
        }
    }
}

fn hangs() -> BenchError {
    BenchError::Answer(format!("a device does not answer for {} s", TIMEOUT.as_secs()))
}

struct Meter {
    began: Instant,
    cpu: Duration,
    device_cpu: Duration,
}

impl Meter {
    fn start() -> Meter {
        Meter { cpu: cpu(), device_cpu: device_cpu(), began: Instant::now() }
    }

    fn measured(&self, block_bytes: u64, latencies_us: Vec<u64>) -> Measured {
        Measured {
            bytes: latencies_us.len() as u64 * block_bytes,
            seconds: self.began.elapsed().as_secs_f64(),
            cpu_seconds: (cpu() - self.cpu).as_secs_f64(),
            device_cpu_seconds: device_cpu().saturating_sub(self.device_cpu).as_secs_f64(),
            latencies_us,
        }
    }
}

/// CPU time of this process, kernel time included.
fn cpu() -> Duration {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the call fills the structure, and zeroes are a valid one.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    let time = |part: libc::timeval| Duration::new(part.tv_sec as u64, part.tv_usec as u32 * 1000);
    time(usage.ru_utime) + time(usage.ru_stime)
}

/// CPU time of the threads whose names begin with "kvlane-ssd": the devices' threads.
fn device_cpu() -> Duration {
    let mut total = 0;
    for task in std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let read = |name| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        if read("comm").starts_with("kvlane-ssd") {
            total += read("schedstat").split(' ').next().and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0);
        }
    }
    Duration::from_nanos(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_tier_is_measured_and_its_files_are_gone_after() -> Result<(), BenchError> {
        let folder = tempfile::tempdir()?;
        let paths: Vec<PathBuf> = ["a", "b"].iter().map(|name| folder.path().join(name)).collect();
        let mut bench = Bench::open(paths.clone(), 32 << 20, 64 << 10, 2 << 20, false, SsdPath::Staged)?;
        let wrote = bench.write(64)?;
        assert_eq!((wrote.bytes, wrote.latencies_us.len()), (64 * (64 << 10), 64));
        assert!(wrote.seconds > 0.0);
        let read = bench.read(1000, 100, 8)?;
        assert_eq!(read.latencies_us.len(), 100);
        assert_eq!(bench.read(64, 0, 8)?.bytes, 0);
        let (beside, wrote) = bench.read_beside_writes(64, 100, 8)?;
        assert_eq!(beside.latencies_us.len(), 100);
        assert_eq!(bench.written, 64 + wrote.latencies_us.len() as u64);
        assert!(bench.stats().reads_found == 200 && bench.status().len() == 2);
        assert!(matches!(bench.read(1, 1, 1 << 20), Err(BenchError::Answer(_))));
        bench.close();
        assert!(bench.write(1).is_err() && paths.iter().all(|path| !path.exists()));

        std::fs::write(&paths[0], "somebody's")?;
        assert!(Bench::open(paths.clone(), 32 << 20, 64 << 10, 2 << 20, false, SsdPath::Staged).is_err());
        assert_eq!(std::fs::read(&paths[0])?, b"somebody's");
        Ok(())
    }

    #[test]
    fn all_blocks_are_back_after_a_restart_from_tables_and_from_headers() -> Result<(), BenchError> {
        let folder = tempfile::tempdir()?;
        let (tables, headers) = restart(folder.path().join("a"), 500, true)?;
        assert!(tables > 0.0 && headers.is_some_and(|seconds| seconds > 0.0));
        assert_eq!(folder.path().read_dir()?.count(), 0);
        assert!(crc_rate(4096, 1 << 20)? > 0.0);
        Ok(())
    }
}
