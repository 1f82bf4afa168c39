//! Engines on a (fake) GPU: the daemon copies out of and into memory that it imported.
#![allow(clippy::unwrap_used, reason = "a test may fail here")]

mod support;

use std::{
    io::Read,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use kvlane_block::Region;
use kvlane_client::{
    Finished, GroupSpec, JobKind, LoadGroup, SaveGroupSpec, SaveMethod, Scheduler, SchedulerOptions, Tool,
    Worker, WorkerGpu, WorkerGroupSpec, WorkerOptions,
};
use kvlane_gpu::{
    Copy, DeviceMemory, Gpu, Priority, RailOptions, Stream,
    fake::{FakeDriver, FakeOptions},
};
use kvlane_proto::Address;
use kvlane_server::ServeOptions;
use rustix::process::{Pid, Signal, kill_process};
use support::{PATIENCE, TOKENS, address, hashes, options};

const BLOCKS: u64 = 32;
const LAYERS: u64 = 4;
/// Two layers of a block are 256 KiB: a flag follows each second one.
const PIECE: u64 = 128 << 10;
const BLOCK: u64 = LAYERS * PIECE;

/// An engine whose KV cache lies on a fake GPU: a tensor a layer, in one allocation.
struct GpuEngine {
    scheduler: Scheduler,
    worker: Worker,
    stream: Stream,
    memory: DeviceMemory,
    jobs: u64,
}

fn driver() -> Arc<FakeDriver> {
    Arc::new(FakeDriver::new(FakeOptions::default()).unwrap())
}

/// A daemon in a process of its own, since a driver imports only what another process exported.
struct Daemon {
    process: Child,
}

/// Names the socket to the process that is to be a daemon.
const DAEMON: &str = "KVLANE_TEST_DAEMON_AT";
/// How slow its GPU is, in microseconds for each MiB.
const SLOW: &str = "KVLANE_TEST_DAEMON_SLOW";

/// Set where loads are to come over the other GPU's link too.
const RAILS: &str = "KVLANE_TEST_DAEMON_RAILS";

/// Not a test: the daemon's process, which the tests start from this very binary. It ends with its standard input.
#[test]
fn daemon_process() {
    let Some(socket) = std::env::var_os(DAEMON) else { return };
    let address = Address::Unix(socket.into());
    let driver = driver();
    driver.slow_down(Duration::from_micros(std::env::var(SLOW).unwrap().parse().unwrap()));
    let over_rails = std::env::var_os(RAILS).is_some();
    let rails = match over_rails {
        // Of two layers of a block each: a load has more chunks than slots.
        true => RailOptions { least_bytes: 0, slot_bytes: 2 * PIECE, slots: 2, ..RailOptions::default() },
        false => RailOptions::default(),
    };
    let options = ServeOptions { gpu_driver: Some(driver), rails, ..options(&address, 16 << 20) };
    let daemon = kvlane_server::Daemon::start(&options, &|_| {}).unwrap();
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    assert_eq!(daemon.relayed_bytes() > 0, over_rails, "small loads stay on their own link");
    assert!(daemon.stop(PATIENCE));
}

impl Daemon {
    fn start(address: &Address) -> Self {
        Self::start_slow(address, 0)
    }

    /// With GPUs that take so many microseconds for each MiB.
    fn start_slow(address: &Address, microseconds: u64) -> Self {
        Self::spawn(address, microseconds, None)
    }

    /// The same, and loads come over the other GPU's link too.
    fn start_with_rails(address: &Address, microseconds: u64) -> Self {
        Self::spawn(address, microseconds, Some((RAILS, "1")))
    }

    fn spawn(address: &Address, microseconds: u64, rails: Option<(&str, &str)>) -> Self {
        let Address::Unix(path) = address else { unreachable!() };
        let process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "daemon_process", "--nocapture"])
            .env(DAEMON, path)
            .env(SLOW, microseconds.to_string())
            .envs(rails)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + PATIENCE;
        while Tool::connect(address, PATIENCE).is_err() {
            assert!(Instant::now() < deadline, "the daemon does not start");
            std::thread::yield_now();
        }
        Self { process }
    }

    /// In order: all sessions closed, nothing left to do.
    fn stop(mut self) {
        drop(self.process.stdin.take());
        assert!(self.process.wait().unwrap().success());
    }

    /// SIGSTOP or SIGCONT.
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl GpuEngine {
    fn new(address: &Address, id: &str, driver: &Arc<FakeDriver>) -> Self {
        let gpu = Gpu::open(Arc::clone(driver) as _, 1).unwrap();
        let memory = gpu.alloc(BLOCKS * BLOCK).unwrap();
        let regions: Vec<Region> = (0..LAYERS)
            .map(|layer| Region {
                base: memory.address() + layer * BLOCKS * PIECE,
                block_stride: PIECE,
                blocks: BLOCKS,
                piece_bytes: PIECE,
                piece_offsets: vec![0],
            })
            .collect();
        let mine = WorkerGpu::with_driver(Arc::clone(driver) as _, gpu.info().uuid, &regions).unwrap();
        let worker = WorkerOptions {
            address: address.clone(),
            engine_id: id.into(),
            client: "test".into(),
            rank: 0,
            workers: 1,
            groups: vec![WorkerGroupSpec { namespace: [3; 16], layout: [4; 16], regions, replicas: 1 }],
            save_method: SaveMethod::Auto,
            save_timeout: PATIENCE,
            gpu: Some(Arc::new(mine)),
        };
        // SAFETY: the memory is freed after the worker: fields are dropped in order.
        let worker = unsafe { Worker::start(worker) }.unwrap();
        let scheduler = Scheduler::new(SchedulerOptions {
            address: address.clone(),
            engine_id: id.into(),
            client: "test".into(),
            groups: vec![GroupSpec {
                namespace: [3; 16],
                name: "test".into(),
                tokens_per_block: TOKENS,
                window_blocks: 0,
            }],
            workers: 1,
            lookup_timeout: PATIENCE,
        });
        let stream = Stream::new(&gpu, Priority::Normal).unwrap();
        Self { scheduler, worker, stream, memory, jobs: 0 }
    }

    /// Enqueues, in the engine's stream, that a block's layers get these bytes.
    fn compute(&self, block: u64, byte: u8) -> Vec<u8> {
        let bytes = vec![byte; PIECE as usize];
        for layer in 0..LAYERS {
            let dst = self.memory.address() + (layer * BLOCKS + block) * PIECE;
            let src = bytes.as_ptr().expose_provenance() as u64;
            // SAFETY: the caller keeps the bytes until the stream is done; the block is the engine's.
            unsafe { self.stream.copy(Copy { dst, src, len: PIECE }) }.unwrap();
        }
        bytes
    }

    /// Each layer's bytes of a block.
    fn block(&self, block: u64) -> Vec<u8> {
        let mut all = vec![0u8; BLOCK as usize];
        for layer in 0..LAYERS {
            let src = self.memory.address() + (layer * BLOCKS + block) * PIECE;
            let dst = all[(layer * PIECE) as usize..].as_mut_ptr().expose_provenance() as u64;
            // SAFETY: both sides live until the stream is synchronized.
            unsafe { self.stream.copy(Copy { dst, src, len: PIECE }) }.unwrap();
        }
        self.stream.synchronize().unwrap();
        all
    }

    fn save(&mut self, prompt: u64, blocks: std::ops::Range<u32>) -> Finished {
        self.jobs += 1;
        let block_ids: Vec<u32> = blocks.collect();
        let group = SaveGroupSpec {
            group: 0,
            parent: None,
            hashes: hashes(prompt, block_ids.len() as u64),
            block_ids,
        };
        // SAFETY: the stream lives.
        unsafe { self.worker.save_after(self.jobs, vec![group], self.stream.raw()) };
        self.finished()
    }

    fn start_load(&mut self, prompt: u64, blocks: std::ops::Range<u32>, early: bool) -> kvlane_client::Hit {
        let block_ids: Vec<u32> = blocks.collect();
        let asked = hashes(prompt, block_ids.len() as u64);
        let hit = self.scheduler.lookup(&[asked], u64::MAX, PATIENCE);
        assert_eq!(hit.tokens, block_ids.len() as u64 * u64::from(TOKENS));
        self.load_hit(&hit, block_ids, early);
        hit
    }

    fn load_hit(&mut self, hit: &kvlane_client::Hit, blocks: impl IntoIterator<Item = u32>, early: bool) {
        let pages = hit.pages(0, 0);
        let pages = pages.chunks(4).map(|page| u32::from_le_bytes(page.try_into().unwrap())).collect();
        self.jobs += 1;
        // SAFETY: the stream lives.
        unsafe {
            let groups = vec![LoadGroup { group: 0, block_ids: blocks.into_iter().collect(), pages }];
            self.worker.load_after(self.jobs, hit.boot, groups, self.stream.raw(), early);
        }
    }

    fn load(&mut self, prompt: u64, blocks: std::ops::Range<u32>) -> Finished {
        let hit = self.start_load(prompt, blocks, false);
        let finished = self.finished();
        self.scheduler.release(hit.boot, hit.lease);
        finished
    }

    fn finished(&self) -> Finished {
        assert!(self.worker.wait(PATIENCE));
        let mut finished = self.worker.poll();
        assert_eq!(finished.len(), 1);
        finished.remove(0)
    }

    fn settle(&self, address: &Address) {
        let mut tool = Tool::connect(address, PATIENCE).unwrap();
        tool.settle(PATIENCE).unwrap();
    }
}

#[test]
fn blocks_of_a_gpu_come_back_to_another_engine() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    blocks_come_back(&address, Daemon::start(&address));
}

#[test]
fn blocks_come_back_over_the_links_of_two_gpus() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    blocks_come_back(&address, Daemon::start_with_rails(&address, 0));
}

fn blocks_come_back(address: &Address, daemon: Daemon) {
    let driver = driver();
    let mut first = GpuEngine::new(address, "first", &driver);
    assert_eq!(first.worker.method().0, "gpu");
    let kept: Vec<Vec<u8>> = (0..8).map(|block| first.compute(block, block as u8 + 1)).collect();
    let saved = first.save(0, 0..8);
    assert!(saved.ok && saved.blocks == 8 && saved.bytes == 8 * BLOCK, "{saved:?}");
    drop(kept);
    first.settle(address);

    let mut second = GpuEngine::new(address, "second", &driver);
    let loaded = second.load(0, 20..28);
    assert!(loaded.ok && loaded.blocks == 8 && loaded.bytes == 8 * BLOCK, "{loaded:?}");
    for block in 0..8 {
        assert!(second.block(20 + block).iter().all(|&byte| byte == block as u8 + 1), "block {block}");
        assert!(second.block(block).iter().all(|&byte| byte == 0), "nothing else was written");
    }
    drop((first, second));
    daemon.stop();
}

#[test]
fn a_save_waits_for_what_the_stream_still_computes() {
    let folder = tempfile::tempdir().unwrap();
    let (address, driver) = (address(&folder), driver());
    let daemon = Daemon::start(&address);
    let mut engine = GpuEngine::new(&address, "engine", &driver);
    // Held up until the save has long been asked for.
    let gate = engine.stream.gpu().alloc(4096).unwrap();
    // SAFETY: the word lives until the end of the test.
    unsafe { engine.stream.wait_word(gate.address(), 1) }.unwrap();
    let kept = engine.compute(5, 77);
    engine.jobs += 1;
    let group = SaveGroupSpec { group: 0, parent: None, hashes: hashes(0, 1), block_ids: vec![5] };
    // SAFETY: the stream lives.
    unsafe { engine.worker.save_after(engine.jobs, vec![group], engine.stream.raw()) };
    assert!(!engine.worker.wait(Duration::from_millis(50)), "nothing to save has been computed");
    let opener = Stream::new(engine.stream.gpu(), Priority::Normal).unwrap();
    // SAFETY: as above.
    unsafe { opener.write_word(gate.address(), 1) }.unwrap();
    let saved = engine.finished();
    assert!(saved.ok && saved.blocks == 1, "{saved:?}");
    drop(kept);
    engine.settle(&address);
    assert!(engine.load(0, 9..10).ok);
    assert!(engine.block(9).iter().all(|&byte| byte == 77));
    drop(engine);
    daemon.stop();
}

#[test]
fn a_promised_load_arrives_without_the_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let (address, driver) = (address(&folder), driver());
    let daemon = Daemon::start(&address);
    let mut engine = GpuEngine::new(&address, "engine", &driver);
    let kept: Vec<Vec<u8>> = (0..4).map(|block| engine.compute(block, 40 + block as u8)).collect();
    let saved = engine.save(0, 0..4);
    assert!(saved.ok, "{saved:?} {}", engine.worker.refusal());
    drop(kept);
    engine.settle(&address);
    let hit = engine.scheduler.lookup(&[hashes(0, 4)], u64::MAX, PATIENCE);
    assert_eq!(hit.tokens, 4 * u64::from(TOKENS));
    daemon.kill();
    engine.load_hit(&hit, 10..14, false);
    let loaded = engine.finished();
    assert!(loaded.ok && loaded.blocks == 4, "{loaded:?}");
    for block in 0..4 {
        assert!(engine.block(10 + block).iter().all(|&byte| byte == 40 + block as u8));
    }
}

/// A tenth of a second for each MiB, so a fifth for four blocks: long enough to meet a load under way, and shorter than
/// the time after which a worker carries it out itself.
const VERY_SLOW: u64 = 100_000;

/// Saves four blocks and asks for an early load of them into blocks 10 to 13; returns when the load is released.
fn released(engine: &mut GpuEngine, address: &Address) {
    let kept: Vec<Vec<u8>> = (0..4).map(|block| engine.compute(block, 50 + block as u8)).collect();
    let saved = engine.save(0, 0..4);
    assert!(saved.ok, "{saved:?}");
    drop(kept);
    engine.settle(address);
    engine.start_load(0, 10..14, true);
    let released = engine.finished();
    assert_eq!((released.kind, released.ok), (JobKind::Released, true), "{released:?}");
    assert!(engine.worker.has_outstanding_loads());
}

#[test]
fn a_stream_that_waits_for_a_released_load_sees_it_and_one_that_does_not_sees_what_was_before() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    a_released_load_is_waited_for(&address, Daemon::start_slow(&address, VERY_SLOW));
}

#[test]
fn a_released_load_over_two_links_is_waited_for_in_the_same_way() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    a_released_load_is_waited_for(&address, Daemon::start_with_rails(&address, VERY_SLOW));
}

fn a_released_load_is_waited_for(address: &Address, daemon: Daemon) {
    let driver = driver();
    let mut engine = GpuEngine::new(address, "engine", &driver);
    released(&mut engine, address);
    assert!(engine.block(13).contains(&0), "the control: this stream has not waited");
    // Region by region, as a model does.
    for layer in 0..LAYERS as u32 {
        // SAFETY: the stream lives.
        unsafe { engine.worker.wait_for_loads(Some(layer), engine.stream.raw()) }.unwrap();
        for block in 0..4 {
            let bytes = &engine.block(10 + block)[layer as usize * PIECE as usize..][..PIECE as usize];
            assert!(bytes.iter().all(|&byte| byte == 50 + block as u8), "layer {layer} of block {block}");
        }
    }
    for block in 0..4 {
        assert!(engine.block(10 + block).iter().all(|&byte| byte == 50 + block as u8), "block {block}");
    }
    let ended = engine.finished();
    assert_eq!((ended.kind, ended.ok, ended.blocks), (JobKind::Load, true, 4), "{ended:?}");
    assert!(!engine.worker.has_outstanding_loads());
    drop(engine);
    daemon.stop();
}

#[test]
fn a_released_load_arrives_although_the_daemon_is_killed_in_the_middle() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    a_released_load_arrives_without_the_daemon(&address, Daemon::start_slow(&address, VERY_SLOW));
}

#[test]
fn a_released_load_over_two_links_arrives_although_the_daemon_is_killed_in_the_middle() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    a_released_load_arrives_without_the_daemon(&address, Daemon::start_with_rails(&address, VERY_SLOW));
}

fn a_released_load_arrives_without_the_daemon(address: &Address, daemon: Daemon) {
    let driver = driver();
    let mut engine = GpuEngine::new(address, "engine", &driver);
    released(&mut engine, address);
    // SAFETY: the stream lives.
    unsafe { engine.worker.wait_for_loads(None, engine.stream.raw()) }.unwrap();
    daemon.kill();
    for block in 0..4 {
        assert!(engine.block(10 + block).iter().all(|&byte| byte == 50 + block as u8), "block {block}");
    }
    let ended = engine.finished();
    assert_eq!((ended.kind, ended.ok, ended.blocks), (JobKind::Load, true, 4), "{ended:?}");
}

/// A load that a stopped daemon cannot come to: the engine has it all the same, and its end comes with the daemon.
fn taken_over(early: bool) {
    let folder = tempfile::tempdir().unwrap();
    let (address, driver) = (address(&folder), driver());
    let daemon = Daemon::start(&address);
    let mut engine = GpuEngine::new(&address, "engine", &driver);
    let kept: Vec<Vec<u8>> = (0..4).map(|block| engine.compute(block, 60 + block as u8)).collect();
    assert!(engine.save(0, 0..4).ok);
    drop(kept);
    engine.settle(&address);
    let hit = engine.scheduler.lookup(&[hashes(0, 4)], u64::MAX, PATIENCE);
    daemon.signal(Signal::STOP);
    engine.load_hit(&hit, 10..14, early);
    let released = engine.finished();
    assert_eq!((released.kind, released.ok), (JobKind::Released, true), "{released:?}");
    // SAFETY: the stream lives.
    unsafe { engine.worker.wait_for_loads(None, engine.stream.raw()) }.unwrap();
    let arrived = |engine: &GpuEngine| {
        (0..4).all(|block| engine.block(10 + block).iter().all(|&byte| byte == 60 + block as u8))
    };
    assert!(arrived(&engine));
    assert!(!engine.worker.has_finished(), "the daemon may still write: the blocks are not free yet");
    daemon.signal(Signal::CONT);
    let ended = engine.finished();
    assert_eq!((ended.kind, ended.ok, ended.blocks), (JobKind::Load, true, 4), "{ended:?}");
    assert!(!engine.worker.has_outstanding_loads() && arrived(&engine));
    drop(engine);
    daemon.stop();
}

#[test]
fn a_stopped_daemon_does_not_hold_up_a_released_load() {
    taken_over(true);
}

#[test]
fn a_stopped_daemon_does_not_keep_a_load_for_ever() {
    taken_over(false);
}

#[test]
fn memory_of_a_gpu_is_refused_where_the_daemon_has_none() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = support::start(&address);
    let engine = GpuEngine::new(&address, "engine", &driver());
    assert!(!engine.worker.is_connected());
    assert!(engine.worker.refusal().contains("GPU"), "{}", engine.worker.refusal());
    drop(engine);
    assert!(daemon.stop(Duration::from_secs(5)));
}
