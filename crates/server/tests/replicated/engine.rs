//! An engine of several workers, or some of its workers, with memory on the host or on fake GPUs.

use std::{
    ops::Range,
    sync::{Arc, LazyLock},
    time::Instant,
};

use kvlane_block::{BlockId, Region};
use kvlane_client::{
    DaemonUser, EngineStream, Finished, GroupSpec, Hit, JobKind, LoadGroup, OwnBlocks, Release,
    SaveGroupSpec, SaveMethod, Scheduler, SchedulerOptions, Worker, WorkerGpu, WorkerGroupSpec,
    WorkerOptions,
};
use kvlane_fake_gpu::{FakeDriver, FakeOptions};
use kvlane_gpu::{Copy, DeviceMemory, Gpu, Priority, Stream};
use kvlane_memory::PoolPage;
use kvlane_proto::Address;

use crate::support::{PATIENCE, TOKENS, hashes};

pub const RANKS: u32 = 4;
/// As DeepSeek-V3: 61 layers of 576 numbers of two bytes a token.
pub const LAYERS: usize = 61;
pub const LAYER_BYTES: usize = 576 * 2 * TOKENS as usize;
pub const BLOCK_BYTES: usize = LAYERS * LAYER_BYTES;
pub const BLOCKS: usize = 12;
pub const POOL_BYTES: u64 = 64 << 20;
/// What blocks hold that nobody has written.
pub const POISON: u8 = 0xee;

/// The bytes of a block of a prompt, in the order of its layers: wherever a part of them ends up, it is told apart.
pub fn content(block: usize) -> &'static [u8] {
    static ALL: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
        let byte = |block: usize, at: usize| (at * 31 + at / 512 * 7 + block * 13) as u8;
        (0..4).map(|block| (0..BLOCK_BYTES).map(|at| byte(block, at)).collect()).collect()
    });
    &ALL[block]
}

/// Where the workers' blocks are.
#[derive(Clone, Copy)]
pub enum Place<'a> {
    Host(SaveMethod),
    Gpus(&'a Arc<FakeDriver>),
}

/// One worker's blocks: a tensor a layer, in one allocation.
pub enum Memory {
    Host(Vec<u8>),
    Gpu { memory: DeviceMemory, stream: Stream },
}

impl Memory {
    pub fn new(place: Place<'_>, rank: u32) -> Self {
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

    pub fn base(&self) -> u64 {
        match self {
            Self::Host(bytes) => bytes.as_ptr() as u64,
            Self::Gpu { memory, .. } => memory.address(),
        }
    }

    pub fn regions(&self) -> Vec<Region> {
        let layer = |layer: usize| Region {
            base: self.base() + (layer * BLOCKS * LAYER_BYTES) as u64,
            block_stride: LAYER_BYTES as u64,
            blocks: BLOCKS as u64,
            piece_bytes: LAYER_BYTES as u64,
            piece_offsets: vec![0],
        };
        (0..LAYERS).map(layer).collect()
    }

    pub fn write(&mut self, block: usize, bytes: &[u8]) {
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
    pub fn layer(&self, block: usize, layer: usize) -> Vec<u8> {
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

    pub fn block(&self, block: usize) -> Vec<u8> {
        (0..LAYERS).flat_map(|layer| self.layer(block, layer)).collect()
    }

    pub fn stream(&self) -> EngineStream {
        match self {
            Self::Host(_) => EngineStream::DEFAULT,
            // SAFETY: the stream lives as long as this memory, and tests use this at once.
            Self::Gpu { stream, .. } => unsafe { EngineStream::from_raw(stream.raw()) },
        }
    }
}

/// One worker; closed before its memory goes.
pub struct Rank {
    pub worker: Worker,
    pub memory: Memory,
}

impl Rank {
    pub fn new(
        address: &Address,
        id: &str,
        place: Place<'_>,
        rank: u32,
        workers: u32,
        replicas: u32,
    ) -> Self {
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
        let group = WorkerGroupSpec { namespace: [3; 16], layout, regions, replicas };
        // SAFETY: the memory is freed after the worker: fields are dropped in order.
        let blocks = unsafe { OwnBlocks::new(vec![group], gpu) };
        let worker = WorkerOptions {
            address: address.clone(),
            daemon_user: DaemonUser::default(),
            engine_id: id.into(),
            client: "test".into(),
            rank: kvlane_block::Rank(rank),
            workers,
            blocks,
            save_method,
            save_timeout: PATIENCE,
            release_ahead: kvlane_client::ReleaseAhead::default(),
        };
        Rank { worker: Worker::start(worker).unwrap(), memory }
    }

    /// Has the rank's stream wait for a region of all released loads.
    pub fn wait_for_loads(&self, region: Option<u32>) {
        let jobs = self.worker.outstanding_loads();
        self.worker.wait_for_loads(&jobs, region.map(|region| (0, region)), &self.memory.stream()).unwrap();
    }

    /// Computes blocks of a prompt and saves them.
    pub fn save(&mut self, job: u64, blocks: Range<u32>) {
        for (index, block) in (0..).zip(blocks.clone()) {
            self.memory.write(block as usize, content(index));
        }
        let block_ids: Vec<BlockId> = blocks.map(BlockId).collect();
        let hashes = hashes(0, block_ids.len() as u64);
        let group = SaveGroupSpec { group: 0, parent: None, hashes, block_ids };
        self.worker.save_after(job, vec![group], &self.memory.stream());
    }

    /// Loads blocks whose slices lie at these pages.
    pub fn load(&self, job: u64, boot: [u8; 16], blocks: Range<u32>, pages: Vec<u32>, early: bool) {
        let groups = vec![LoadGroup {
            group: 0,
            block_ids: blocks.map(BlockId).collect(),
            pages: pages.into_iter().map(PoolPage).collect(),
        }];
        let release = if early { Release::AtOnce } else { Release::AtEnd };
        self.worker.load_after(job, boot, groups, &self.memory.stream(), release);
    }

    /// The end of a job.
    pub fn finished(&self) -> Finished {
        assert!(self.worker.wait(PATIENCE));
        let mut finished = self.worker.poll();
        assert_eq!(finished.len(), 1, "{finished:?}");
        finished.remove(0)
    }

    /// The end of a load whose request may be released before: who was left alone by its daemon has the blocks, and
    /// waits only for the daemon's end.
    pub fn ended(&self) -> Finished {
        loop {
            assert!(self.worker.wait(PATIENCE));
            let mut ends = self.worker.poll();
            ends.retain(|end| end.kind != JobKind::Released);
            if let Some(end) = ends.pop() {
                return end;
            }
        }
    }

    /// The prompt's blocks are there, and nothing was written beside them.
    pub fn check(&self, number: usize, blocks: Range<u32>) {
        for (index, block) in (0..).zip(blocks.clone()) {
            assert!(self.memory.block(block as usize) == content(index), "block {index} of rank {number}");
        }
        let beside = blocks.end as usize;
        assert!(self.memory.block(beside).iter().all(|byte| *byte == POISON));
    }
}

pub struct Engine {
    pub scheduler: Scheduler,
    /// Those of this process, the first ones.
    pub ranks: Vec<Rank>,
    /// Workers that share a block.
    pub replicas: u32,
    pub jobs: u64,
}

impl Engine {
    pub fn new(address: &Address, id: &str, place: Place<'_>, workers: u32, replicas: u32) -> Self {
        Self::with_ranks(address, id, place, workers, replicas, 0..workers)
    }

    /// Of whose workers only some are in this process; the others come of themselves.
    pub fn with_ranks(
        address: &Address,
        id: &str,
        place: Place<'_>,
        workers: u32,
        replicas: u32,
        here: Range<u32>,
    ) -> Self {
        let ranks: Vec<Rank> =
            here.map(|rank| Rank::new(address, id, place, rank, workers, replicas)).collect();
        let mut scheduler = Scheduler::new(SchedulerOptions {
            address: address.clone(),
            daemon_user: DaemonUser::default(),
            engine_id: id.into(),
            client: "test".into(),
            groups: vec![GroupSpec {
                namespace: [3; 16],
                name: "test".into(),
                tokens_per_block: TOKENS,
                window_blocks: 0,
                crosses_hosts: false,
            }],
            workers,
            lookup_timeout: PATIENCE,
            follows_journal: false,
        })
        .unwrap();
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
    pub fn save(&mut self, blocks: Range<u32>) -> Vec<Finished> {
        self.jobs += 1;
        self.ranks.iter_mut().for_each(|rank| rank.save(self.jobs, blocks.clone()));
        self.finished()
    }

    pub fn look_up(&mut self, blocks: u64) -> Hit {
        let hit = self.scheduler.lookup(&[hashes(0, blocks)], u64::MAX, PATIENCE);
        assert_eq!(hit.tokens, blocks * u64::from(TOKENS));
        hit
    }

    /// The pages of all slices that a rank loads.
    pub fn pages(&self, hit: &Hit, rank: u32) -> Vec<u32> {
        let first = rank / self.replicas * self.replicas;
        let pages = (first..first + self.replicas)
            .flat_map(|peer| hit.pages(0, kvlane_block::Rank(peer)))
            .collect::<Vec<u8>>();
        pages.chunks(4).map(|page| u32::from_le_bytes(page.try_into().unwrap())).collect()
    }

    pub fn start_load(&mut self, hit: &Hit, blocks: Range<u32>, early: bool) {
        self.jobs += 1;
        for (rank, number) in self.ranks.iter().zip(0..) {
            rank.load(self.jobs, hit.boot, blocks.clone(), self.pages(hit, number), early);
        }
    }

    /// One end of a job for each rank.
    pub fn finished(&self) -> Vec<Finished> {
        self.ranks.iter().map(Rank::finished).collect()
    }

    /// Every rank has the prompt's blocks there, and nothing was written beside them.
    pub fn check(&self, blocks: Range<u32>) {
        self.ranks.iter().enumerate().for_each(|(number, rank)| rank.check(number, blocks.clone()));
    }
}

pub fn assert_ended(ends: &[Finished], kind: JobKind, blocks: u64) {
    for end in ends {
        assert!(end.ok && end.kind == kind && end.blocks == blocks, "{end:?}");
    }
}

pub fn driver() -> Arc<FakeDriver> {
    Arc::new(FakeDriver::new(FakeOptions { devices: RANKS, ..FakeOptions::default() }).unwrap())
}
