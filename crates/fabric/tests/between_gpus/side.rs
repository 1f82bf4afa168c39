//! An engine with a region on a fake GPU, and what its memory holds.

use std::sync::Arc;

use kvlane_fabric::{
    Access, Descriptor, Engine, EngineOptions, Handle, Op, PathStatus, PeerId, Pieces, Place, Run, Transfer,
};
use kvlane_fake_gpu::{FakeDriver, FakeOptions};
use kvlane_gpu::{Chunks, Copy, DeviceMemory, Gpu, Priority, Stream};

use crate::support::{Deadline, PATIENCE};

/// How memory is allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// As cudaMalloc does.
    Whole,
    /// In chunks of 2 MiB, as torch's expandable segments do.
    Chunks,
    /// In chunks that no other process can map, as vLLM's sleep mode does.
    OwnChunks,
}

#[expect(dead_code, reason = "freed when dropped")]
enum Held {
    Whole(DeviceMemory),
    Chunks(Chunks),
}

/// Memory of a GPU.
pub(crate) struct Bytes {
    pub(crate) address: u64,
    pub(crate) len: usize,
    stream: Stream,
    _held: Held,
}

impl Bytes {
    pub(crate) fn new(gpu: &Gpu, kind: Kind, len: usize) -> Bytes {
        let (address, held) = match kind {
            Kind::Whole => {
                let memory = gpu.alloc(len as u64).unwrap();
                (memory.address(), Held::Whole(memory))
            }
            Kind::Chunks | Kind::OwnChunks => {
                let sizes = vec![2 << 20; len.div_ceil(2 << 20)];
                let chunks = Chunks::alloc(gpu, &sizes, kind == Kind::Chunks).unwrap();
                (chunks.base(), Held::Chunks(chunks))
            }
        };
        Bytes { address, len, stream: Stream::new(gpu, Priority::Normal).unwrap(), _held: held }
    }

    fn copy(&self, dst: u64, src: u64, len: usize) {
        // SAFETY: both ranges live until the stream is done.
        unsafe { self.stream.copy(Copy { dst, src, len: len as u64 }).unwrap() };
        self.stream.synchronize().unwrap();
    }

    pub(crate) fn put(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        self.copy(self.address + at as u64, bytes.as_ptr().expose_provenance() as u64, bytes.len());
    }

    pub(crate) fn get(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= self.len);
        let mut bytes = vec![0u8; len];
        self.copy(bytes.as_mut_ptr().expose_provenance() as u64, self.address + at as u64, len);
        bytes
    }

    pub(crate) fn fill(&self, byte: u8) {
        self.put(0, &vec![byte; self.len]);
    }

    pub(crate) fn all(&self) -> Vec<u8> {
        self.get(0, self.len)
    }

    pub(crate) fn is_all(&self, byte: u8) -> bool {
        self.all().iter().all(|found| *found == byte)
    }
}

/// An engine with one region.
pub(crate) struct Side {
    pub(crate) engine: Engine,
    pub(crate) region: u32,
    pub(crate) memory: Bytes,
    pub(crate) gpu: Gpu,
    pub(crate) driver: Arc<FakeDriver>,
}

impl Side {
    /// On a host with these GPUs, with memory on the one of this ordinal, which is not registered.
    pub(crate) fn on(
        gpus: FakeOptions,
        ordinal: u32,
        kind: Kind,
        len: usize,
        options: EngineOptions,
    ) -> Side {
        let driver = Arc::new(FakeDriver::new(gpus).unwrap());
        let gpu = Gpu::open(Arc::clone(&driver) as _, ordinal).unwrap();
        let memory = Bytes::new(&gpu, kind, len);
        let engine = Engine::new(options).unwrap();
        Side { engine, region: 0, memory, gpu, driver }
    }

    /// With its memory registered.
    pub(crate) fn new(ordinal: u32, kind: Kind, len: usize, options: EngineOptions) -> Side {
        let mut side = Side::on(FakeOptions::default(), ordinal, kind, len, options);
        side.region = side.register(Access::ReadWrite);
        side
    }

    pub(crate) fn of(ordinal: u32, len: usize) -> Side {
        Side::new(ordinal, Kind::Whole, len, EngineOptions::default())
    }

    pub(crate) fn register(&self, access: Access) -> u32 {
        let Bytes { address, len, .. } = self.memory;
        // SAFETY: the engine is dropped before its memory, as the first field.
        unsafe { self.engine.register_gpu(&self.gpu, address, len as u64, access).unwrap() }
    }

    /// Registers a part of its memory, as another region.
    pub(crate) fn register_part(&self, at: usize, len: usize) -> u32 {
        assert!(at + len <= self.memory.len);
        let address = self.memory.address + at as u64;
        // SAFETY: as above.
        unsafe { self.engine.register_gpu(&self.gpu, address, len as u64, Access::ReadWrite).unwrap() }
    }

    /// Connects, and waits until bytes go by cuda.
    pub(crate) fn meet(&self, descriptor: &Descriptor) -> PeerId {
        let peer = self.engine.connect(descriptor).unwrap();
        self.is_neighbour(peer);
        peer
    }

    /// Connects, and waits until bytes go by cuda or it is known why not. Before that they may go through slots.
    pub(crate) fn connect(&self, descriptor: &Descriptor) -> PeerId {
        let peer = self.engine.connect(descriptor).unwrap();
        let deadline = Deadline::after(PATIENCE);
        while !self.path(peer, "cuda").is_some_and(|path| path.is_up || path.trouble.is_some()) {
            assert!(!deadline.has_passed(), "{:?}", self.engine.paths(peer));
            std::thread::yield_now();
        }
        peer
    }

    pub(crate) fn is_neighbour(&self, peer: PeerId) {
        let deadline = Deadline::after(PATIENCE);
        while !self.path(peer, "cuda").is_some_and(|path| path.is_up) {
            assert!(!deadline.has_passed(), "{:?}", self.engine.paths(peer));
            std::thread::yield_now();
        }
    }

    pub(crate) fn path(&self, peer: PeerId, carrier: &str) -> Option<PathStatus> {
        self.engine.paths(peer).into_iter().find(|path| path.carrier == carrier)
    }

    /// Why bytes do not go by cuda, once that is known.
    pub(crate) fn trouble(&self, peer: PeerId) -> String {
        let deadline = Deadline::after(PATIENCE);
        loop {
            if let Some(trouble) = self.path(peer, "cuda").and_then(|path| path.trouble) {
                return trouble;
            }
            assert!(!deadline.has_passed(), "{:?}", self.engine.paths(peer));
            std::thread::yield_now();
        }
    }

    pub(crate) fn run(&self, region: u32, local: usize, remote: usize, len: usize) -> Run {
        let place = |region, offset: usize| Place { region, offset: offset as u64 };
        Run { local: place(self.region, local), remote: place(region, remote), len: len as u64 }
    }

    pub(crate) fn begin(&self, peer: PeerId, op: Op, runs: Vec<Run>) -> Handle {
        self.engine.begin(peer, Transfer { op, ..Transfer::write(Pieces::Runs(runs)) }).unwrap()
    }

    /// All bytes of both regions.
    pub(crate) fn move_all(&self, peer: PeerId, op: Op, region: u32) -> Handle {
        self.begin(peer, op, vec![self.run(region, 0, 0, self.memory.len)])
    }

    /// Mappings of GPU memory in this side's driver, without those of a few bytes that a carrier keeps for itself.
    pub(crate) fn mapped(&self) -> usize {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let is_one = |line: &&str| {
            let (begin, end) = line.split_whitespace().next().unwrap().split_once('-').unwrap();
            let [begin, end] = [begin, end].map(|address| u64::from_str_radix(address, 16).unwrap());
            // A driver maps everything near the first memory that it allocated.
            let is_near = begin.abs_diff(self.memory.address) < 64 << 30;
            line.contains("kvlane-fake-gpu") && is_near && end - begin > 4096
        };
        maps.lines().filter(is_one).count()
    }

    /// Waits until only this many of [`Side::mapped`] are left.
    pub(crate) fn unmaps_down_to(&self, own: usize) {
        let deadline = Deadline::after(PATIENCE);
        while self.mapped() > own {
            assert!(!deadline.has_passed(), "{} mappings are left, of {own}", self.mapped());
            std::thread::yield_now();
        }
    }

    /// Bytes that went through pinned memory of the host.
    pub(crate) fn staged(&self) -> u64 {
        let staged = self.engine.staged();
        staged.to_gpus + staged.from_gpus
    }
}

pub(crate) fn done(handle: &Handle) {
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Ok(())));
}

/// Bytes that tell where they are from.
pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut word = seed | 1;
    let byte = |_| {
        word = word.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (word >> 33) as u8
    };
    (0..len).map(byte).collect()
}
