//! An engine with memory on the host or on a GPU.

use std::sync::Arc;
use std::time::Duration;

use kvlane_fabric::{
    Access, Descriptor, Engine, EngineOptions, Handle, Op, Options, PeerId, Pieces, Place, Run, Transfer,
    Transport,
};
use kvlane_fake_gpu::{FakeDriver, FakeOptions};
use kvlane_gpu::{Copy, CopyMethods, DeviceMemory, Gpu, Priority, Stream};

use crate::support::{Memory, PATIENCE};

/// What memory is filled with when nothing is to be written there any more.
pub(crate) const CANARY: u8 = 0x55;

/// Where a side's memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum On {
    Host,
    /// Of this ordinal.
    Gpu(u32),
}

/// GPUs whose lists of copies go one by one, so that a slow list is slow between its copies.
pub(crate) fn driver() -> Arc<FakeDriver> {
    driver_with(false)
}

/// `batch`: whether lists of copies go in one call.
pub(crate) fn driver_with(batch: bool) -> Arc<FakeDriver> {
    let methods = CopyMethods { batch, kernel: false };
    Arc::new(FakeDriver::new(FakeOptions { methods, ..FakeOptions::default() }).unwrap())
}

/// Registered memory, and what tests do with it.
pub(crate) enum Bytes {
    Host(Memory),
    Gpu(DeviceMemory, Stream),
}

impl Bytes {
    pub(crate) fn new(driver: &Arc<FakeDriver>, on: On, len: usize) -> Bytes {
        match on {
            On::Host => Bytes::Host(Memory::new(len)),
            On::Gpu(ordinal) => {
                let gpu = Gpu::open(Arc::clone(driver) as _, ordinal).unwrap();
                let stream = Stream::new(&gpu, Priority::Normal).unwrap();
                Bytes::Gpu(gpu.alloc(len as u64).unwrap(), stream)
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Bytes::Host(memory) => memory.len,
            Bytes::Gpu(memory, _) => memory.bytes() as usize,
        }
    }

    pub(crate) fn put(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len());
        match self {
            // SAFETY: they are inside the memory, and the source is as long.
            Bytes::Host(memory) => unsafe {
                memory.at(at, bytes.len()).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            },
            Bytes::Gpu(memory, stream) => {
                let (dst, src) = (memory.address() + at as u64, bytes.as_ptr().expose_provenance() as u64);
                // SAFETY: both ranges live until the stream is done.
                unsafe { stream.copy(Copy { dst, src, len: bytes.len() as u64 }).unwrap() };
                stream.synchronize().unwrap();
            }
        }
    }

    pub(crate) fn get(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= self.len());
        match self {
            Bytes::Host(memory) => memory.bytes(at, len),
            Bytes::Gpu(memory, stream) => {
                let mut bytes = vec![0u8; len];
                let (src, dst) =
                    (memory.address() + at as u64, bytes.as_mut_ptr().expose_provenance() as u64);
                // SAFETY: both ranges live until the stream is done.
                unsafe { stream.copy(Copy { dst, src, len: len as u64 }).unwrap() };
                stream.synchronize().unwrap();
                bytes
            }
        }
    }

    pub(crate) fn fill(&self, byte: u8) {
        self.put(0, &vec![byte; self.len()]);
    }

    pub(crate) fn is_all(&self, byte: u8) -> bool {
        self.get(0, self.len()) == vec![byte; self.len()]
    }

    /// # Safety
    /// It is unregistered, or the engine dropped, before this.
    pub(crate) unsafe fn register(&self, engine: &Engine) -> u32 {
        let len = self.len() as u64;
        match self {
            // SAFETY: the caller's promise.
            Bytes::Host(memory) => unsafe { engine.register(memory.base, len, Access::ReadWrite).unwrap() },
            Bytes::Gpu(memory, stream) => {
                // SAFETY: the caller's promise.
                let region =
                    unsafe { engine.register_gpu(stream.gpu(), memory.address(), len, Access::ReadWrite) };
                region.unwrap()
            }
        }
    }
}

/// An engine with one region.
pub(crate) struct Side {
    pub(crate) engine: Engine,
    pub(crate) region: u32,
    pub(crate) memory: Bytes,
}

impl Side {
    pub(crate) fn new(driver: &Arc<FakeDriver>, on: On, len: usize, options: EngineOptions) -> Side {
        let engine = Engine::new(options).unwrap();
        let memory = Bytes::new(driver, on, len);
        // SAFETY: the engine is dropped first, as the first field.
        let region = unsafe { memory.register(&engine) };
        Side { engine, region, memory }
    }

    pub(crate) fn of(driver: &Arc<FakeDriver>, on: On, len: usize) -> Side {
        Side::new(driver, on, len, EngineOptions::default())
    }

    pub(crate) fn descriptor(&self) -> Descriptor {
        self.engine.describe().unwrap()
    }

    pub(crate) fn meet(&self, other: &Side) -> PeerId {
        self.engine.connect(&other.descriptor()).unwrap()
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
        self.begin(peer, op, vec![self.run(region, 0, 0, self.memory.len())])
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

/// Small parts, so that there are many; and quick to give up.
pub(crate) fn small_parts(transport: Option<Transport>) -> EngineOptions {
    let transfers = Options {
        chunk_bytes: 16 << 10,
        drain_patience: Duration::from_millis(50),
        backoff: Duration::from_millis(5),
        ..Options::default()
    };
    EngineOptions { transfers, transport, ..EngineOptions::default() }
}

/// All pages of both sides, each side's in an order of its own; no two that follow each other are neighbours.
pub(crate) fn shuffled(pages: usize, page: usize, side: &Side, region: u32) -> Vec<Run> {
    // Any numbers that have no factor in common with the pages.
    let (here, there) = (|at: usize| (at * 5 + 1) % pages, |at: usize| (at * 7919 + 3) % pages);
    (0..pages).map(|at| side.run(region, here(at) * page, there(at) * page, page)).collect()
}
