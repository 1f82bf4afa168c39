//! Four workers of one engine that hold the same blocks, as with latent attention: each saves a quarter, each loads all.
#![allow(clippy::unwrap_used, reason = "a test may fail here")]

mod support;

use std::{
    io::Read,
    ops::Range,
    process::{Child, Command, Stdio},
    sync::{Arc, LazyLock},
    time::{Duration, Instant},
};

use kvlane_block::Region;
use kvlane_client::{
    Finished, GroupSpec, Hit, JobKind, LoadGroup, Release, SaveGroupSpec, SaveMethod, Scheduler,
    SchedulerOptions, Tool, Worker, WorkerGpu, WorkerGroupSpec, WorkerOptions,
};
use kvlane_gpu::{
    Copy, DeviceMemory, Gpu, Priority, Stream,
    fake::{FakeDriver, FakeOptions},
};
use kvlane_proto::Address;
use kvlane_server::ServeOptions;
use support::{PATIENCE, TOKENS, address, hashes, options, settle};

const RANKS: u32 = 4;
/// As DeepSeek-V3: 61 layers of 576 numbers of two bytes a token.
const LAYERS: usize = 61;
const LAYER_BYTES: usize = 576 * 2 * TOKENS as usize;
const BLOCK_BYTES: usize = LAYERS * LAYER_BYTES;
const BLOCKS: usize = 12;
const POOL_BYTES: u64 = 64 << 20;
/// What blocks hold that nobody has written.
const POISON: u8 = 0xee;

/// The bytes of a block of a prompt, in the order of its layers: wherever a part of them ends up, it is told apart.
fn content(block: usize) -> &'static [u8] {
    static ALL: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
        let byte = |block: usize, at: usize| (at * 31 + at / 512 * 7 + block * 13) as u8;
        (0..4).map(|block| (0..BLOCK_BYTES).map(|at| byte(block, at)).collect()).collect()
    });
    &ALL[block]
}

/// Where the workers' blocks are.
#[derive(Clone, Copy)]
enum Place<'a> {
    Host(SaveMethod),
    Gpus(&'a Arc<FakeDriver>),
}

/// One worker's blocks: a tensor a layer, in one allocation.
enum Memory {
    Host(Vec<u8>),
    Gpu { memory: DeviceMemory, stream: Stream },
}

impl Memory {
    fn new(place: Place<'_>, rank: u32) -> Self {
        let mut made = match place {
            Place::Host(_) => Self::Host(vec![0; BLOCKS * BLOCK_BYTES]),
            Place::Gpus(driver) => {
                let gpu = Gpu::open(Arc::clone(driver) as _, rank).unwrap();
                let memory = gpu.alloc((BLOCKS * BLOCK_BYTES) as u64).unwrap();
                Self::Gpu { memory, stream: Stream::new(&gpu, Priority::Normal).unwrap() }
            }
        };
        (0..BLOCKS).for_each(|block| made.write(block, &[POISON; BLOCK_BYTES]));
        made
    }

    fn base(&self) -> u64 {
        match self {
            Self::Host(bytes) => bytes.as_ptr() as u64,
            Self::Gpu { memory, .. } => memory.address(),
        }
    }

    fn regions(&self) -> Vec<Region> {
        let layer = |layer: usize| Region {
            base: self.base() + (layer * BLOCKS * LAYER_BYTES) as u64,
            block_stride: LAYER_BYTES as u64,
            blocks: BLOCKS as u64,
            piece_bytes: LAYER_BYTES as u64,
            piece_offsets: vec![0],
        };
        (0..LAYERS).map(layer).collect()
    }

    fn write(&mut self, block: usize, bytes: &[u8]) {
        for (layer, bytes) in bytes.chunks(LAYER_BYTES).enumerate() {
            let at = (layer * BLOCKS + block) * LAYER_BYTES;
            match self {
                Self::Host(memory) => memory[at..][..LAYER_BYTES].copy_from_slice(bytes),
                Self::Gpu { memory, stream } => {
                    let src = bytes.as_ptr().expose_provenance() as u64;
                    let copy = Copy { dst: memory.address() + at as u64, src, len: LAYER_BYTES as u64 };
                    // SAFETY: both sides live until the stream is synchronized below.
                    unsafe { stream.copy(copy) }.unwrap();
                }
            }
        }
        if let Self::Gpu { stream, .. } = self {
            stream.synchronize().unwrap();
        }
    }

    /// One layer of a block, after what the stream waits for.
    fn layer(&self, block: usize, layer: usize) -> Vec<u8> {
        let at = (layer * BLOCKS + block) * LAYER_BYTES;
        match self {
            Self::Host(memory) => memory[at..][..LAYER_BYTES].to_vec(),
            Self::Gpu { memory, stream } => {
                let mut bytes = vec![0; LAYER_BYTES];
                let dst = bytes.as_mut_ptr().expose_provenance() as u64;
                let copy = Copy { dst, src: memory.address() + at as u64, len: LAYER_BYTES as u64 };
                // SAFETY: both sides live until the stream is synchronized.
                unsafe { stream.copy(copy) }.unwrap();
                stream.synchronize().unwrap();
                bytes
            }
        }
    }

    fn block(&self, block: usize) -> Vec<u8> {
        (0..LAYERS).flat_map(|layer| self.layer(block, layer)).collect()
    }

    fn stream(&self) -> u64 {
        match self {
            Self::Host(_) => 0,
            Self::Gpu { stream, .. } => stream.raw(),
        }
    }
}

/// One worker; closed before its memory goes.
struct Rank {
    worker: Worker,
    memory: Memory,
}

struct Engine {
    scheduler: Scheduler,
    ranks: Vec<Rank>,
    /// Workers that share a block.
    replicas: u32,
    jobs: u64,
}

impl Engine {
    fn new(address: &Address, id: &str, place: Place<'_>, workers: u32, replicas: u32) -> Self {
        let rank = |rank: u32| {
            let memory = Memory::new(place, rank);
            let regions = memory.regions();
            let (save_method, gpu) = match place {
                Place::Host(method) => (method, None),
                Place::Gpus(driver) => {
                    let uuid = Gpu::open(Arc::clone(driver) as _, rank).unwrap().info().uuid;
                    let gpu = WorkerGpu::with_driver(Arc::clone(driver) as _, uuid, &regions).unwrap();
                    (SaveMethod::Auto, Some(Arc::new(gpu)))
                }
            };
            // Ranks that hold the same blocks say the same.
            let layout = [replicas as u8 * 16 + (rank / replicas) as u8; 16];
            let worker = WorkerOptions {
                address: address.clone(),
                engine_id: id.into(),
                client: "test".into(),
                rank,
                workers,
                groups: vec![WorkerGroupSpec { namespace: [3; 16], layout, regions, replicas }],
                save_method,
                save_timeout: PATIENCE,
                gpu,
            };
            // SAFETY: the memory is freed after the worker: fields are dropped in order.
            Rank { worker: unsafe { Worker::start(worker) }.unwrap(), memory }
        };
        let ranks: Vec<Rank> = (0..workers).map(rank).collect();
        let mut scheduler = Scheduler::new(SchedulerOptions {
            address: address.clone(),
            engine_id: id.into(),
            client: "test".into(),
            groups: vec![GroupSpec {
                namespace: [3; 16],
                name: "test".into(),
                tokens_per_block: TOKENS,
                window_blocks: 0,
            }],
            workers,
            lookup_timeout: PATIENCE,
        });
        let deadline = Instant::now() + PATIENCE;
        while !scheduler.is_ready() {
            assert!(
                Instant::now() < deadline,
                "{:?} {}",
                scheduler.last_refusal(),
                ranks[0].worker.refusal()
            );
            scheduler.tick();
            std::thread::yield_now();
        }
        Self { scheduler, ranks, replicas, jobs: 0 }
    }

    /// Computes blocks of a prompt in all ranks and saves them; the ends by rank.
    fn save(&mut self, blocks: Range<u32>) -> Vec<Finished> {
        self.jobs += 1;
        for rank in &mut self.ranks {
            for (index, block) in (0..).zip(blocks.clone()) {
                rank.memory.write(block as usize, content(index));
            }
            let block_ids: Vec<u32> = blocks.clone().collect();
            let hashes = hashes(0, block_ids.len() as u64);
            let group = SaveGroupSpec { group: 0, parent: None, hashes, block_ids };
            // SAFETY: the stream lives.
            unsafe { rank.worker.save_after(self.jobs, vec![group], rank.memory.stream()) };
        }
        self.finished()
    }

    fn look_up(&mut self, blocks: u64) -> Hit {
        let hit = self.scheduler.lookup(&[hashes(0, blocks)], u64::MAX, PATIENCE);
        assert_eq!(hit.tokens, blocks * u64::from(TOKENS));
        hit
    }

    fn start_load(&mut self, hit: &Hit, blocks: Range<u32>, early: bool) {
        self.jobs += 1;
        for (rank, number) in self.ranks.iter().zip(0..) {
            let first = number / self.replicas * self.replicas;
            let pages =
                (first..first + self.replicas).flat_map(|peer| hit.pages(0, peer)).collect::<Vec<u8>>();
            let pages = pages.chunks(4).map(|page| u32::from_le_bytes(page.try_into().unwrap())).collect();
            let groups = vec![LoadGroup { group: 0, block_ids: blocks.clone().collect(), pages }];
            let release = if early { Release::AtOnce } else { Release::AtEnd };
            // SAFETY: the stream lives.
            unsafe { rank.worker.load_after(self.jobs, hit.boot, groups, rank.memory.stream(), release) };
        }
    }

    /// One end of a job for each rank.
    fn finished(&self) -> Vec<Finished> {
        let end = |rank: &Rank| {
            assert!(rank.worker.wait(PATIENCE));
            let mut finished = rank.worker.poll();
            assert_eq!(finished.len(), 1, "{finished:?}");
            finished.remove(0)
        };
        self.ranks.iter().map(end).collect()
    }

    /// Every rank has the prompt's blocks there, and nothing was written beside them.
    fn check(&self, blocks: Range<u32>) {
        for (number, rank) in self.ranks.iter().enumerate() {
            for (index, block) in (0..).zip(blocks.clone()) {
                assert!(
                    rank.memory.block(block as usize) == content(index),
                    "block {index} of rank {number}"
                );
            }
            let beside = blocks.end as usize;
            assert!(rank.memory.block(beside).iter().all(|byte| *byte == POISON));
        }
    }
}

fn assert_ended(ends: &[Finished], kind: JobKind, blocks: u64) {
    for end in ends {
        assert!(end.ok && end.kind == kind && end.blocks == blocks, "{end:?}");
    }
}

/// Bytes of the pool that an engine's save takes, in a daemon of its own, and the bytes that each rank saved.
fn saved(method: SaveMethod, workers: u32, replicas: u32) -> (u64, Vec<u64>) {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = kvlane_server::Daemon::start(&options(&address, POOL_BYTES), &|_| {}).unwrap();
    let mut engine = Engine::new(&address, "engine", Place::Host(method), workers, replicas);
    let ends = engine.save(0..4);
    assert_ended(&ends, JobKind::Save, 4);
    settle(&address);
    let used = Tool::connect(&address, PATIENCE).unwrap().status().unwrap().used_bytes;
    drop(engine);
    assert!(daemon.stop(PATIENCE));
    (used, ends.iter().map(|end| end.bytes).collect())
}

#[test]
fn four_workers_take_as_much_of_the_pool_as_one_and_save_a_quarter_each() {
    for method in [SaveMethod::Auto, SaveMethod::Mapped] {
        let (alone, _) = saved(method, 1, 1);
        let (shared, by_rank) = saved(method, RANKS, RANKS);
        let ratio = shared as f64 / alone as f64;
        // Each slice ends with a page of its own.
        let rounding = f64::from(RANKS) * 4096.0 / BLOCK_BYTES as f64;
        assert!((ratio - 1.0).abs() <= rounding && rounding < 0.02, "{ratio:.4} of the pool of one worker");
        assert_eq!(by_rank.iter().sum::<u64>(), 4 * BLOCK_BYTES as u64);
        for bytes in by_rank {
            let percent = bytes as f64 * 100.0 / (4 * BLOCK_BYTES) as f64;
            assert!((percent - 25.0).abs() < 1.0, "{percent} % by one rank");
        }
        // The control: workers that do not share.
        let (apart, _) = saved(method, RANKS, 1);
        assert!(apart as f64 / alone as f64 > 3.9);
    }
}

fn round_trip(address: &Address, place: Place<'_>, method: &str) {
    let mut first = Engine::new(address, "first", place, RANKS, RANKS);
    assert_eq!(first.ranks[3].worker.method().0, method);
    assert_ended(&first.save(0..4), JobKind::Save, 4);
    settle(address);
    drop(first);

    let mut second = Engine::new(address, "second", place, RANKS, RANKS);
    let hit = second.look_up(4);
    second.start_load(&hit, 6..10, false);
    let ends = second.finished();
    assert_ended(&ends, JobKind::Load, 4);
    assert!(ends.iter().all(|end| end.bytes == 4 * BLOCK_BYTES as u64));
    second.check(6..10);
    assert_eq!(second.ranks[0].worker.refusal(), "");
    second.scheduler.release(hit.boot, hit.lease);
    // In pairs they are another cut, whose blocks these are not.
    let mut pairs = Engine::new(address, "pairs", place, RANKS, 2);
    assert_eq!(pairs.scheduler.lookup(&[hashes(0, 4)], u64::MAX, PATIENCE).tokens, 0);
    assert_ended(&pairs.save(0..2), JobKind::Save, 2);
    settle(address);
    let hit = pairs.look_up(2);
    pairs.start_load(&hit, 6..8, false);
    assert_ended(&pairs.finished(), JobKind::Load, 2);
    pairs.check(6..8);
}

#[test]
fn every_rank_loads_the_slices_of_all_by_process_vm() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let _daemon = kvlane_server::Daemon::start(&options(&address, POOL_BYTES), &|_| {}).unwrap();
    round_trip(&address, Place::Host(SaveMethod::Auto), "process_vm");
}

#[test]
fn every_rank_loads_the_slices_of_all_by_mapping() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let _daemon = kvlane_server::Daemon::start(&options(&address, POOL_BYTES), &|_| {}).unwrap();
    round_trip(&address, Place::Host(SaveMethod::Mapped), "mapped");
}

#[test]
fn a_load_with_the_pages_of_one_slice_ends_as_failed() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let _daemon = kvlane_server::Daemon::start(&options(&address, POOL_BYTES), &|_| {}).unwrap();
    let mut engine = Engine::new(&address, "engine", Place::Host(SaveMethod::Auto), RANKS, RANKS);
    engine.save(0..1);
    settle(&address);
    let hit = engine.look_up(1);
    engine.replicas = 1;
    engine.start_load(&hit, 6..7, false);
    for end in engine.finished() {
        assert!(!end.ok && end.detail.contains("4 slices"), "{end:?}");
    }
}

/// A daemon in a process of its own, since a driver imports only what another process exported.
struct GpuDaemon(Child);

/// Names the socket to the process that is to be a daemon.
const DAEMON: &str = "KVLANE_TEST_REPLICATED_DAEMON_AT";
/// How slow its GPUs are, in microseconds for each MiB.
const SLOW: &str = "KVLANE_TEST_REPLICATED_DAEMON_SLOW";
/// A load of two blocks takes a fifth of a second: long enough to meet it under way, and shorter than the time after
/// which a worker carries it out itself.
const VERY_SLOW: u64 = 100_000;

fn driver() -> Arc<FakeDriver> {
    Arc::new(FakeDriver::new(FakeOptions { devices: RANKS, ..FakeOptions::default() }).unwrap())
}

/// Not a test: the daemon's process, which the tests start from this very binary. It ends with its standard input.
#[test]
fn daemon_process() {
    let Some(socket) = std::env::var_os(DAEMON) else { return };
    let driver = driver();
    driver.slow_down(Duration::from_micros(std::env::var(SLOW).unwrap().parse().unwrap()));
    let options =
        ServeOptions { gpu_driver: Some(driver), ..options(&Address::Unix(socket.into()), POOL_BYTES) };
    let daemon = kvlane_server::Daemon::start(&options, &|_| {}).unwrap();
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    assert!(daemon.stop(PATIENCE));
}

impl GpuDaemon {
    fn start(address: &Address, microseconds: u64) -> Self {
        let Address::Unix(path) = address else { unreachable!() };
        let process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "daemon_process", "--nocapture"])
            .env(DAEMON, path)
            .env(SLOW, microseconds.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + PATIENCE;
        while Tool::connect(address, PATIENCE).is_err() {
            assert!(Instant::now() < deadline, "the daemon does not start");
            std::thread::yield_now();
        }
        Self(process)
    }

    fn stop(mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().unwrap().success());
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn every_rank_loads_the_slices_of_all_into_its_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let (address, driver) = (address(&folder), driver());
    let daemon = GpuDaemon::start(&address, 0);
    round_trip(&address, Place::Gpus(&driver), "gpu");
    daemon.stop();
}

/// An engine with an early load of two blocks into 6 and 7 that is released in every rank and under way.
fn released(address: &Address, driver: &Arc<FakeDriver>) -> Engine {
    let mut engine = Engine::new(address, "engine", Place::Gpus(driver), RANKS, RANKS);
    assert_ended(&engine.save(0..2), JobKind::Save, 2);
    settle(address);
    let hit = engine.look_up(2);
    engine.start_load(&hit, 6..8, true);
    for released in engine.finished() {
        assert_eq!((released.kind, released.ok), (JobKind::Released, true), "{released:?}");
    }
    engine
}

#[test]
fn a_flag_says_that_all_layers_up_to_it_are_there_whichever_slices_they_are_of() {
    let folder = tempfile::tempdir().unwrap();
    let (address, driver) = (address(&folder), driver());
    let daemon = GpuDaemon::start(&address, VERY_SLOW);
    let engine = released(&address, &driver);
    let last = engine.ranks.last().unwrap();
    assert!(last.memory.layer(7, LAYERS - 1) != content(1)[(LAYERS - 1) * LAYER_BYTES..], "the control");
    for layer in 0..LAYERS {
        for (number, rank) in engine.ranks.iter().enumerate() {
            // SAFETY: the stream lives.
            unsafe { rank.worker.wait_for_loads(Some(layer as u32), rank.memory.stream()) }.unwrap();
            for (index, block) in [(0, 6), (1, 7)] {
                let wanted = &content(index)[layer * LAYER_BYTES..][..LAYER_BYTES];
                assert!(
                    rank.memory.layer(block, layer) == wanted,
                    "layer {layer} of {block} in rank {number}"
                );
            }
        }
    }
    assert_ended(&engine.finished(), JobKind::Load, 2);
    engine.check(6..8);
    let refusals: Vec<String> = engine.ranks.iter().map(|rank| rank.worker.refusal()).collect();
    assert!(refusals.iter().all(String::is_empty), "the daemon has carried them out, not {refusals:?}");
    drop(engine);
    daemon.stop();
}

#[test]
fn a_worker_takes_all_slices_from_its_mapping_when_the_daemon_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let (address, driver) = (address(&folder), driver());
    let daemon = GpuDaemon::start(&address, VERY_SLOW);
    let engine = released(&address, &driver);
    for rank in &engine.ranks {
        // SAFETY: the stream lives.
        unsafe { rank.worker.wait_for_loads(None, rank.memory.stream()) }.unwrap();
    }
    daemon.kill();
    engine.check(6..8);
    assert_ended(&engine.finished(), JobKind::Load, 2);
}

#[test]
fn a_promised_load_of_all_slices_arrives_after_the_daemon_is_gone() {
    let folder = tempfile::tempdir().unwrap();
    let (address, driver) = (address(&folder), driver());
    let daemon = GpuDaemon::start(&address, 0);
    let mut engine = Engine::new(&address, "engine", Place::Gpus(&driver), RANKS, RANKS);
    assert_ended(&engine.save(0..2), JobKind::Save, 2);
    settle(&address);
    let hit = engine.look_up(2);
    daemon.kill();
    engine.start_load(&hit, 6..8, false);
    assert_ended(&engine.finished(), JobKind::Load, 2);
    engine.check(6..8);
}
