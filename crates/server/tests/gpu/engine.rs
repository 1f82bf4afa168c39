//! An engine whose KV cache lies on a GPU, in the test's process or in one that can be killed.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use kvlane_block::{BlockId, Rank, Region};
use kvlane_client::{
    EngineStream, Finished, Hit, JobKind, LoadGroup, OwnBlocks, Release, SaveGroupSpec, Scheduler, Worker,
    WorkerGpu,
};
use kvlane_gpu::{
    Chunks, Copy, DeviceMemory, Driver, Gpu, GpuError, HostBuffer, Priority, Stream, StreamHandle,
};
use kvlane_memory::PoolPage;
use kvlane_proto::Address;

use crate::{
    driver::{BLOCKS, LAYERS, SMALL_PIECE, driver, engines_gpu, piece},
    process::{Process, say, told},
    support::{PATIENCE, TOKENS, group, hashes, scheduler, settle, worker_options},
};

/// What all blocks hold at first, and again before a load: neither zeros nor what any block was computed to be.
pub const POISON: u8 = 0;

/// Names the socket to the process that is to be an engine.
const SOCKET: &str = "KVLANE_TEST_ENGINE_AT";
const ID: &str = "KVLANE_TEST_ENGINE_ID";
/// Set where its memory is to consist of chunks.
const IN_CHUNKS: &str = "KVLANE_TEST_ENGINE_IN_CHUNKS";

/// Bytes of a block: of another seed they are others in every page.
pub fn content(seed: u8, bytes: u64) -> Vec<u8> {
    let mut all = vec![0; bytes as usize];
    let pages = all.chunks_mut(4096).enumerate();
    pages.for_each(|(index, page)| page.fill(seed ^ (index as u8).wrapping_mul(37) ^ 0xa5));
    all
}

/// A tensor a layer, in one allocation or in chunks.
pub struct GpuEngine {
    pub scheduler: Scheduler,
    pub worker: Worker,
    pub stream: Stream,
    memory: Memory,
    piece: u64,
    /// What enqueued copies may still read.
    sources: Vec<HostBuffer>,
    heard: Vec<Finished>,
    jobs: u64,
}

/// What an engine's tensors lie in.
pub enum Memory {
    Whole(DeviceMemory),
    Chunks(Chunks),
}

/// Bytes of a chunk: the smallest.
pub const CHUNK: u64 = 2 << 20;
/// Bytes from one block to the next in chunks: far apart, so that there are more chunks than a message carries.
const APART: u64 = 5 << 20;

impl Memory {
    pub fn whole(gpu: &Gpu, piece: u64) -> Result<Self, GpuError> {
        gpu.alloc(u64::from(BLOCKS) * LAYERS * piece).map(Self::Whole)
    }

    /// Chunks that pieces of at most 1 MiB cross.
    pub fn in_chunks(gpu: &Gpu, shareable: bool) -> Result<Self, GpuError> {
        let bytes = (u64::from(BLOCKS) * LAYERS + 1) * APART;
        let sizes = vec![CHUNK; bytes.div_ceil(CHUNK) as usize];
        Chunks::alloc(gpu, &sizes, shareable).map(Self::Chunks)
    }

    /// Where a layer of a block lies.
    fn address(&self, layer: u64, block: u64, piece: u64) -> u64 {
        let index = layer * u64::from(BLOCKS) + block;
        match self {
            Self::Whole(memory) => memory.address() + index * piece,
            // Every second one lies across two chunks.
            Self::Chunks(chunks) => chunks.base() + CHUNK - piece / 2 + index * APART,
        }
    }
}

/// Where the layers lie.
pub fn regions(memory: &Memory, piece: u64) -> Vec<Region> {
    let region = |layer| Region {
        base: memory.address(layer, 0, piece),
        block_stride: memory.address(0, 1, piece) - memory.address(0, 0, piece),
        blocks: BLOCKS.into(),
        piece_bytes: piece,
        piece_offsets: vec![0],
    };
    (0..LAYERS).map(region).collect()
}

impl GpuEngine {
    pub fn new(address: &Address, id: &str, driver: &Arc<dyn Driver>) -> Self {
        Self::on(&engines_gpu(driver), address, id, piece(), PATIENCE).unwrap()
    }

    /// With blocks of [`SMALL_PIECE`] a layer, in memory that consists of chunks.
    pub fn with_chunks(address: &Address, id: &str, driver: &Arc<dyn Driver>) -> Self {
        let gpu = engines_gpu(driver);
        let memory = Memory::in_chunks(&gpu, true).unwrap();
        Self::in_memory(&gpu, address, id, memory, SMALL_PIECE, PATIENCE).unwrap()
    }

    /// On a GPU of the test's choice, with layers of a block of so many bytes. An error where the GPU's memory cannot be
    /// shared.
    pub fn on(
        gpu: &Gpu,
        address: &Address,
        id: &str,
        piece: u64,
        save_timeout: Duration,
    ) -> Result<Self, GpuError> {
        Self::in_memory(gpu, address, id, Memory::whole(gpu, piece)?, piece, save_timeout)
    }

    /// The same in memory of the test's choice.
    pub fn in_memory(
        gpu: &Gpu,
        address: &Address,
        id: &str,
        memory: Memory,
        piece: u64,
        save_timeout: Duration,
    ) -> Result<Self, GpuError> {
        let regions = regions(&memory, piece);
        let mine = WorkerGpu::with_driver(gpu.driver(), gpu.info().uuid, &regions)?;
        // SAFETY: the memory is freed after the worker: fields are dropped in order.
        let blocks = unsafe { OwnBlocks::new(group(regions), Some(Arc::new(mine))) };
        let worker = Worker::start(worker_options(address, id, blocks, save_timeout)).unwrap();
        let scheduler = scheduler(address, id, PATIENCE);
        let stream = Stream::new(gpu, Priority::Normal)?;
        let (sources, heard) = (Vec::new(), Vec::new());
        let mut engine = Self { scheduler, worker, stream, memory, piece, sources, heard, jobs: 0 };
        (0..BLOCKS).for_each(|block| engine.compute(block, POISON));
        engine.synchronize();
        Ok(engine)
    }

    pub fn block_bytes(&self) -> u64 {
        LAYERS * self.piece
    }

    fn address(&self, layer: u64, block: u32) -> u64 {
        self.memory.address(layer, block.into(), self.piece)
    }

    /// Enqueues, in the engine's stream, that a block gets the bytes of a seed.
    pub fn compute(&mut self, block: u32, seed: u8) {
        let bytes = content(seed, self.block_bytes());
        let source = HostBuffer::new(self.stream.gpu(), bytes.len() as u64).unwrap();
        // SAFETY: the buffer is as long as the bytes, and nobody else has it yet.
        unsafe { source.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        for layer in 0..LAYERS {
            let src = source.address() + layer * self.piece;
            let copy = Copy { dst: self.address(layer, block), src, len: self.piece };
            // SAFETY: the buffer is kept until the stream is synchronized; the block is the engine's.
            unsafe { self.stream.copy(copy) }.unwrap();
        }
        self.sources.push(source);
    }

    pub fn synchronize(&mut self) {
        self.stream.synchronize().unwrap();
        self.sources.clear();
    }

    /// A block's bytes, layer by layer, after what the stream was given before.
    pub fn block(&mut self, block: u32) -> Vec<u8> {
        let mut all = vec![0u8; self.block_bytes() as usize];
        let base = all.as_mut_ptr().expose_provenance() as u64;
        for layer in 0..LAYERS {
            let copy =
                Copy { dst: base + layer * self.piece, src: self.address(layer, block), len: self.piece };
            // SAFETY: both sides live until the stream is synchronized.
            unsafe { self.stream.copy(copy) }.unwrap();
        }
        self.synchronize();
        all
    }

    pub fn holds(&mut self, block: u32, seed: u8) -> bool {
        self.block(block) == content(seed, self.block_bytes())
    }

    /// Blocks in a row hold the bytes of seeds in a row.
    pub fn assert_holds(&mut self, blocks: Range<u32>, first_seed: u8) {
        for (seed, block) in (first_seed..).zip(blocks) {
            assert!(self.holds(block, seed), "block {block} does not hold the bytes of seed {seed}");
        }
    }

    /// Asks for a save of a prompt's first blocks; the job.
    pub fn start_save(&mut self, prompt: u64, blocks: Range<u32>) -> u64 {
        self.jobs += 1;
        let hashes = hashes(prompt, blocks.len() as u64);
        let group =
            SaveGroupSpec { group: 0, parent: None, hashes, block_ids: blocks.map(BlockId).collect() };
        self.worker.save_after(self.jobs, vec![group], &self.engine_stream());
        self.jobs
    }

    pub fn save(&mut self, prompt: u64, blocks: Range<u32>) -> Finished {
        let job = self.start_save(prompt, blocks);
        self.end(job)
    }

    /// Computes blocks from seeds in a row, and saves them so that they are visible.
    pub fn compute_and_save(&mut self, address: &Address, prompt: u64, blocks: Range<u32>, first_seed: u8) {
        (first_seed..).zip(blocks.clone()).for_each(|(seed, block)| self.compute(block, seed));
        let saved = self.save(prompt, blocks);
        assert!(saved.ok, "{saved:?} {}", self.worker.refusal());
        settle(address);
    }

    /// A prompt's first blocks, all of which must be there.
    pub fn look_up(&mut self, prompt: u64, count: u32) -> Hit {
        let hit = self.scheduler.lookup(&[hashes(prompt, count.into())], u64::MAX, PATIENCE);
        assert_eq!(hit.tokens, u64::from(count * TOKENS));
        hit
    }

    /// How many of a prompt's first blocks are visible.
    pub fn visible(&mut self, prompt: u64, count: u32) -> u32 {
        let hit = self.scheduler.lookup(&[hashes(prompt, count.into())], u64::MAX, PATIENCE);
        if hit.tokens > 0 {
            self.scheduler.release(hit.boot, hit.lease);
        }
        hit.tokens as u32 / TOKENS
    }

    /// Asks for a load; the job.
    pub fn start_load(&mut self, hit: &Hit, blocks: impl IntoIterator<Item = u32>, release: Release) -> u64 {
        self.start_load_after(self.stream.raw(), hit, blocks, release)
    }

    /// Asks for a load into blocks that only this stream, which lives, may still be using; the job.
    pub fn start_load_after(
        &mut self,
        stream: StreamHandle,
        hit: &Hit,
        blocks: impl IntoIterator<Item = u32>,
        release: Release,
    ) -> u64 {
        let page = |bytes: &[u8]| PoolPage(u32::from_le_bytes(bytes.try_into().unwrap()));
        let pages = hit.pages(0, Rank(0)).chunks(4).map(page).collect();
        self.jobs += 1;
        let groups =
            vec![LoadGroup { group: 0, block_ids: blocks.into_iter().map(BlockId).collect(), pages }];
        // SAFETY: the caller's stream lives.
        let stream = unsafe { EngineStream::from_raw(stream) };
        self.worker.load_after(self.jobs, hit.boot, groups, &stream, release);
        self.jobs
    }

    /// Loads a prompt's first blocks.
    pub fn load(&mut self, prompt: u64, blocks: Range<u32>) -> Finished {
        let hit = self.look_up(prompt, blocks.len() as u32);
        let job = self.start_load(&hit, blocks, Release::AtEnd);
        let ended = self.end(job);
        self.scheduler.release(hit.boot, hit.lease);
        ended
    }

    /// The stream goes on when a region of all released loads is there; None is all regions.
    pub fn wait_for_loads(&self, region: Option<u32>) {
        let jobs = self.worker.outstanding_loads();
        self.worker.wait_for_loads(&jobs, region.map(|region| (0, region)), &self.engine_stream()).unwrap();
    }

    fn engine_stream(&self) -> EngineStream {
        // SAFETY: the stream lives as long as the engine, which uses this at once.
        unsafe { EngineStream::from_raw(self.stream.raw()) }
    }

    /// The job's end.
    pub fn end(&mut self, job: u64) -> Finished {
        self.hear_of(job, |kind| kind != JobKind::Released)
    }

    /// The load may be computed with, in streams that wait for it.
    pub fn released(&mut self, job: u64) -> Finished {
        self.hear_of(job, |kind| kind == JobKind::Released)
    }

    /// Waits until a load was released or has ended.
    pub fn wait_usable(&mut self, job: u64) {
        let heard = self.hear_of(job, |_| true);
        self.heard.push(heard);
    }

    /// Whether a load was released or has ended by now.
    pub fn is_usable(&mut self, job: u64) -> bool {
        self.heard.extend(self.worker.poll());
        self.heard.iter().any(|heard| heard.job == job)
    }

    /// Whether a load that has ended was released before.
    pub fn was_released(&self, job: u64) -> bool {
        self.heard.iter().any(|heard| heard.job == job && heard.kind == JobKind::Released)
    }

    /// Whether a job has ended by now.
    pub fn has_ended(&mut self, job: u64) -> bool {
        self.heard.extend(self.worker.poll());
        self.heard.iter().any(|heard| heard.job == job && heard.kind != JobKind::Released)
    }

    fn hear_of(&mut self, job: u64, of_kind: impl Fn(JobKind) -> bool) -> Finished {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.heard.extend(self.worker.poll());
            if let Some(at) = self.heard.iter().position(|heard| heard.job == job && of_kind(heard.kind)) {
                return self.heard.swap_remove(at);
            }
            assert!(
                self.worker.wait(PATIENCE) && Instant::now() < deadline,
                "nothing more is heard of job {job}: {:?}",
                self.heard
            );
        }
    }

    /// Both sides have found the daemon again.
    pub fn wait_connected(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            // It may not have noticed yet that the former daemon is gone. The first look may only read what that one has still
            // answered.
            self.scheduler.tick();
            self.scheduler.tick();
            if self.scheduler.is_connected() && self.worker.is_connected() {
                return;
            }
            assert!(Instant::now() < deadline, "not connected: {}", self.worker.refusal());
            std::thread::yield_now();
        }
    }
}

impl Drop for GpuEngine {
    fn drop(&mut self) {
        self.scheduler.close();
        // Writes the words that the stream may be waiting for.
        self.worker.close();
        let _ = self.stream.synchronize();
    }
}

/// Keeps a stream from going on, until it is opened or dropped.
pub struct Gate(HostBuffer);

impl Gate {
    pub fn across(stream: &Stream) -> Self {
        let word = HostBuffer::new(stream.gpu(), 4096).unwrap();
        // SAFETY: the word is in the buffer, which freeing keeps until the stream is idle.
        unsafe {
            word.as_ptr().cast::<u32>().write(0);
            stream.wait_word(word.address(), 1).unwrap();
        }
        Self(word)
    }

    pub fn open(&self) {
        // SAFETY: the word is in the buffer; the stream too accesses it atomically.
        unsafe { AtomicU32::from_ptr(self.0.as_ptr().cast()) }.store(1, Ordering::Release);
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
    }
}

/// Starts an engine in a process of its own.
pub fn start_process(address: &Address, id: &str) -> Process {
    start_process_with(address, id, None)
}

/// The same with memory in chunks.
pub fn start_process_in_chunks(address: &Address, id: &str) -> Process {
    start_process_with(address, id, Some((IN_CHUNKS, "1".into())))
}

fn start_process_with(address: &Address, id: &str, more: Option<(&'static str, String)>) -> Process {
    let Address::Unix(path) = address else { unreachable!() };
    let environment = [(SOCKET, path.to_str().unwrap().to_owned()), (ID, id.to_owned())];
    let environment = environment.into_iter().chain(more);
    let mut process = Process::start("engine::plays_the_engine", environment);
    assert_eq!(process.hear(), "ready");
    process
}

/// Not a test: an engine's process, which does what it is told until it is killed.
#[test]
fn plays_the_engine() {
    let (Some(socket), Ok(id)) = (std::env::var_os(SOCKET), std::env::var(ID)) else { return };
    let address = Address::Unix(socket.into());
    let mut engine = match std::env::var_os(IN_CHUNKS) {
        Some(_) => GpuEngine::with_chunks(&address, &id, &driver()),
        None => GpuEngine::new(&address, &id, &driver()),
    };
    assert!(engine.worker.is_connected(), "{}", engine.worker.refusal());
    let mut gates = Vec::new();
    say("ready");
    for words in told() {
        let number = |index: usize| words[index].parse::<u32>().unwrap();
        match words[0].as_str() {
            // prompt, blocks, first seed
            "save" => {
                engine.compute_and_save(&address, number(1).into(), 0..number(2), number(3) as u8);
                say("saved");
            }
            "ask-for-a-save" => {
                let seeds = number(3) as u8..;
                seeds.zip(0..number(2)).for_each(|(seed, block)| engine.compute(block, seed));
                engine.start_save(number(1).into(), 0..number(2));
                say("asked");
            }
            // prompt, blocks
            "ask-for-a-load" => {
                let hit = engine.look_up(number(1).into(), number(2));
                let job = engine.start_load(&hit, BLOCKS - number(2)..BLOCKS, Release::AtOnce);
                engine.released(job);
                say("asked");
            }
            "wait-for-the-first-layer" => {
                engine.wait_for_loads(Some(0));
                engine.synchronize();
                say("there");
            }
            // Nothing that is computed from here on ever happens.
            "hang" => {
                gates.push(Gate::across(&engine.stream));
                say("hanging");
            }
            other => panic!("an engine cannot {other}"),
        }
    }
}
