//! Blocks in the memory of GPUs, fake ones: what a stream has yet to compute is offered when the stream has come to it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use kvlane_fabric::Access;
use kvlane_fake_gpu::{FakeDriver, FakeOptions};
use kvlane_gpu::{Copy, DeviceMemory, EngineStream, Gpu, HostBuffer, Priority, Stream};
use kvlane_handoff::{Area, Filled, HandoffId, Outcome, RankAgent, RankOptions, ReadCounts};

use crate::{BLOCKS, CONTENT, LAYERS, PIECE, SHAPE, engine, id, layers, side, side_of, until, wanted};

const BYTES: u64 = BLOCKS * PIECE * LAYERS;

/// What of a rank's is on its GPU.
struct OnGpu {
    memory: DeviceMemory,
    /// Where its engine computes.
    compute: Stream,
    copies: Stream,
}

fn gpu_rank(number: u8, token: &str, driver: &Arc<FakeDriver>) -> (crate::Rank, OnGpu) {
    let gpu = Gpu::open(Arc::clone(driver) as _, u32::from(number)).unwrap();
    let memory = gpu.alloc(BYTES).unwrap();
    let engine = engine(token);
    let base = memory.address();
    // SAFETY: tests keep the memory until the agent is dropped.
    let region = unsafe { engine.register_gpu(&gpu, base, BYTES, Access::Windows) }.unwrap();
    let key = [number; 16];
    let areas = vec![Area { region, base, bytes: BYTES }];
    let [compute, copies] = [(); 2].map(|()| Stream::new(&gpu, Priority::Normal).unwrap());
    let options = RankOptions { regions: layers(base), areas, gpu: Some(gpu), key };
    let agent = RankAgent::start(engine, options).unwrap();
    (crate::Rank { agent, memory: &mut [], key }, OnGpu { memory, compute, copies })
}

impl OnGpu {
    fn engine_stream(&self) -> EngineStream {
        // SAFETY: it is of the same GPU and lives longer.
        unsafe { EngineStream::from_raw(self.compute.raw()) }
    }

    /// The stream goes on when the word has come to `value`.
    fn waits_for(&self, word: &HostBuffer, value: u32) {
        // SAFETY: the word lives until the stream has come past it.
        unsafe { self.compute.wait_word(word.address(), value).unwrap() };
    }

    fn place(&self, layer: u64, block: u32) -> u64 {
        self.memory.address() + layer * BLOCKS * PIECE + u64::from(block) * PIECE
    }

    /// Enqueues what computes a layer of a block.
    fn compute(&self, layer: u64, block: u32, source: &HostBuffer) {
        let copy = Copy { dst: self.place(layer, block), src: source.address() + layer * PIECE, len: PIECE };
        // SAFETY: both live until the stream is done.
        unsafe { self.compute.copy(copy).unwrap() };
    }

    fn holds(&self, layer: u64, block: u32, byte: u8) -> bool {
        let mut bytes = vec![0u8; PIECE as usize];
        let dst = bytes.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: both live until the stream is done.
        unsafe { self.copies.copy(Copy { dst, src: self.place(layer, block), len: PIECE }).unwrap() };
        self.copies.synchronize().unwrap();
        bytes.iter().all(|each| *each == byte)
    }
}

fn gpus() -> Arc<FakeDriver> {
    Arc::new(FakeDriver::new(FakeOptions::default()).unwrap())
}

/// A word that streams wait for.
fn word(gpu: &Gpu) -> (HostBuffer, &'static AtomicU32) {
    let buffer = HostBuffer::new(gpu, 4).unwrap();
    // SAFETY: tests use it while the buffer lives; all access it as a whole.
    let word = unsafe { AtomicU32::from_ptr(buffer.as_ptr().cast()) };
    word.store(0, Ordering::SeqCst);
    (buffer, word)
}

/// Each layer of each block has a byte of its own.
fn of_layer(layer: u64) -> u8 {
    17 + layer as u8
}

fn layers_to_compute(gpu: &Gpu) -> HostBuffer {
    let source = HostBuffer::new(gpu, LAYERS * PIECE).unwrap();
    for layer in 0..LAYERS {
        // SAFETY: it is inside the buffer, which nothing reads yet.
        unsafe {
            source.as_ptr().add((layer * PIECE) as usize).write_bytes(of_layer(layer), PIECE as usize);
        }
    }
    source
}

fn filled(id: HandoffId, blocks: &[u32]) -> Vec<Filled> {
    vec![Filled { id, first_block: 0, blocks: blocks.to_vec(), hash: Some([1; 16]) }]
}

#[test]
fn a_layer_lands_once_the_stream_has_computed_it_and_not_before() {
    let driver = gpus();
    let (p_rank, at_p) = gpu_rank(0, "k", &driver);
    let (d_rank, at_d) = gpu_rank(1, "k", &driver);
    let (p, d) = (side_of(vec![p_rank], SHAPE, "k"), side_of(vec![d_rank], SHAPE, "k"));
    let gpu = Gpu::open(Arc::clone(&driver) as _, 0).unwrap();
    let (buffer, word) = word(&gpu);
    let source = layers_to_compute(&gpu);
    let id = id(21);
    let blocks: Vec<u32> = (0..32).collect();
    p.scheduler.begin_lending(id, CONTENT);
    d.scheduler.begin_landing(id, wanted(p.address, 0, 32));
    d.scheduler.give_room(id, &blocks);
    // The whole step is enqueued, and the next one too, before the stream computes any of it.
    p.ranks[0].agent.step_begins(filled(id, &blocks));
    for layer in 0..LAYERS {
        at_p.waits_for(&buffer, layer as u32 + 1);
        blocks.iter().for_each(|block| at_p.compute(layer, *block, &source));
        p.ranks[0].agent.layers_computed(layer as u32 + 1, &at_p.engine_stream()).unwrap();
    }
    p.ranks[0].agent.step_ends(&at_p.engine_stream()).unwrap();
    p.ranks[0].agent.step_begins(Vec::new());
    p.ranks[0].agent.step_ends(&at_p.engine_stream()).unwrap();
    for layer in 0..LAYERS {
        word.store(layer as u32 + 1, Ordering::SeqCst);
        until("the layer", || at_d.holds(layer, 31, of_layer(layer)));
        if layer + 1 < LAYERS {
            assert!(at_d.holds(layer + 1, 0, 0), "the stream has not come to the next layer");
            assert_eq!(d.scheduler.landing_status(id).unwrap().end_block, 0);
        }
    }
    let standing = d.over(id);
    assert_eq!((standing.outcome, standing.hashes), (Some(Outcome::Landed), vec![(31, [1; 16])]));
    assert!((0..LAYERS).all(|layer| blocks.iter().all(|block| at_d.holds(layer, *block, of_layer(layer)))));
    // Two engines of one process, whose driver maps memory of other processes only.
    let ReadCounts { cuda_bytes, cma_bytes, tcp_bytes, failed, .. } = d.ranks[0].agent.take_counts();
    assert_eq!((cuda_bytes, cma_bytes, tcp_bytes, failed), (0, 0, 32 * LAYERS * PIECE, 0));
    p.is_free(id);
    drop((p, d));
}

#[test]
fn blocks_go_between_a_gpu_and_the_memory_of_the_host() {
    let driver = gpus();
    let (rank, on_gpu) = gpu_rank(0, "l", &driver);
    let gpu = side_of(vec![rank], SHAPE, "l");
    let mut host = side(1, SHAPE, "l");
    host.scheduler.begin_lending(id(22), CONTENT);
    host.compute(id(22), 0, &[5, 9]);
    gpu.scheduler.begin_landing(id(22), wanted(host.address, 0, 2));
    gpu.scheduler.give_room(id(22), &[1, 40]);
    assert_eq!(gpu.over(id(22)).outcome, Some(Outcome::Landed));
    for layer in 0..LAYERS {
        assert!(
            on_gpu.holds(layer, 1, crate::value(0, layer, 0))
                && on_gpu.holds(layer, 40, crate::value(0, layer, 1))
        );
    }
    gpu.scheduler.begin_lending(id(23), CONTENT);
    gpu.ranks[0].agent.step_begins(vec![Filled {
        id: id(23),
        first_block: 0,
        blocks: vec![1, 40],
        hash: Some([1; 16]),
    }]);
    gpu.ranks[0].agent.step_ends(&on_gpu.engine_stream()).unwrap();
    host.scheduler.begin_landing(id(23), wanted(gpu.address, 0, 2));
    host.scheduler.give_room(id(23), &[60, 61]);
    assert_eq!(host.over(id(23)).outcome, Some(Outcome::Landed));
    assert!(host.holds(0, &[60, 61]));
    drop(gpu);
}
