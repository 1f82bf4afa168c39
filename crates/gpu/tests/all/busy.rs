//! Shared loads while the GPUs compute.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::{read, several_gpus, stream, tested_driver, write};
use kvlane_gpu::{
    Copier, CopierOptions, Copy, DeviceMemory, Direction, Gpu, HostBuffer, Loader, Priority, RailOptions,
    Rails, Stream, Thresholds, Together,
};

/// A latent cache, in two slices of a block, one from each rank. A load has two parts.
const LAYERS: u64 = 24;
const PARTS: [std::ops::Range<u64>; 2] = [0..15, 15..LAYERS];
const SLICES: u64 = 2;
const LEN: u64 = 16 * 576 * 2;
const SLICE: u64 = LAYERS / SLICES * LEN;

/// Numbers below the count in an order that looks random.
fn shuffled(count: u64, seed: u64) -> Vec<u64> {
    let mut numbers: Vec<u64> = (0..count).collect();
    numbers.sort_by_key(|number| {
        (number + 1).wrapping_mul(seed.wrapping_mul(2) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    });
    numbers
}

/// Where the slices of all blocks lie in the pool: each rank has saved its own at once, or at different times.
fn slices(blocks: u64, room: u64, load: u64) -> Vec<u64> {
    if load % 2 == 1 {
        return shuffled(room * SLICES, load);
    }
    let base = load * 37 % (room - blocks);
    (0..blocks * SLICES).map(|index| index % SLICES * room + base + index / SLICES).collect()
}

/// The copies of a part to a GPU whose blocks lie at these places.
fn copies(part: usize, pool: u64, slices: &[u64], memory: u64, places: &[u64]) -> Vec<Copy> {
    let copy = |layer: u64, block: usize| {
        let slice = slices[block * SLICES as usize + (layer * LEN / SLICE) as usize];
        let src = pool + slice * SLICE + layer * LEN % SLICE;
        Copy { dst: memory + (layer * places.len() as u64 + places[block]) * LEN, src, len: LEN }
    };
    let per_slice = LAYERS / SLICES;
    let slices_of_part = (0..SLICES).map(|slice| slice * per_slice..(slice + 1) * per_slice);
    let ranges =
        slices_of_part.map(|slice| PARTS[part].start.max(slice.start)..PARTS[part].end.min(slice.end));
    // Slice by slice, block by block, as a daemon plans it.
    ranges
        .flat_map(|layers| {
            (0..places.len()).flat_map(move |block| layers.clone().map(move |layer| (layer, block)))
        })
        .map(|(layer, block)| copy(layer, block))
        .collect()
}

/// Keeps every multiprocessor of a GPU at work, as an engine does.
fn compute(gpu: &Gpu, until: &AtomicBool) {
    const BYTES: u64 = 64 << 20;
    let stream = Arc::new(Stream::new(gpu, Priority::Normal).unwrap());
    let memory = gpu.alloc(2 * BYTES).unwrap();
    let options = CopierOptions { peer_blocks: 1056, tables: 16, ..CopierOptions::default() };
    let mut copier = Copier::new(Arc::clone(&stream), options).unwrap();
    let thresholds = Thresholds { batch_bytes: u64::MAX, engine_bytes: u64::MAX, ..Thresholds::default() };
    copier.set_thresholds(thresholds);
    let copy = Copy { dst: memory.address() + BYTES, src: memory.address(), len: BYTES };
    while !until.load(Ordering::Relaxed) {
        // SAFETY: both halves are this function's, and are freed after the stream is idle.
        unsafe { copier.enqueue(&[copy], Direction::Peer).unwrap() };
    }
    stream.synchronize().unwrap();
}

/// Ends what runs beside a test, also if it fails.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn shared_loads_bring_right_bytes_while_the_gpus_compute() {
    let is_real = tested_driver() == "cuda";
    let (loads, blocks, room) = if is_real { (12, 624, 1400) } else { (2, 40, 60) };
    let (driver, gpus) = several_gpus();
    let pool = HostBuffer::new(&gpus[0], room * SLICES * SLICE).unwrap();
    let words = room * SLICES * SLICE / 8;
    let content = {
        let first: *mut u64 = pool.as_ptr().cast();
        // SAFETY: the buffer has these words, and nothing else uses it yet.
        (0..words).for_each(|word| unsafe { first.add(word as usize).write(word) });
        // SAFETY: nothing writes the buffer from here on.
        unsafe { std::slice::from_raw_parts(pool.as_ptr().cast_const(), words as usize * 8) }
    };
    let rails = Rails::new(driver, &[], RailOptions { least_bytes: 0, ..RailOptions::default() }).unwrap();
    rails.open_all();
    let streams: Vec<Arc<Stream>> = gpus.iter().map(stream).collect();
    let queues: Vec<&Stream> = streams.iter().map(Arc::as_ref).collect();
    let loaders: Vec<Loader> = gpus.iter().map(|gpu| rails.loader(gpu, "engine")).collect();
    let loaders: Vec<&Loader> = loaders.iter().collect();
    let bytes = blocks * LAYERS * LEN;
    let memories: Vec<DeviceMemory> = gpus.iter().map(|gpu| gpu.alloc(bytes).unwrap()).collect();
    let poison = vec![0xee; bytes as usize];
    let over = AtomicBool::new(false);
    let mut wrong = 0;
    std::thread::scope(|scope| {
        let _end = End(&over);
        if is_real {
            gpus.iter().for_each(|gpu| drop(scope.spawn(|| compute(gpu, &over))));
        }
        for load in 0..loads {
            streams
                .iter()
                .zip(&memories)
                .for_each(|(stream, memory)| write(stream, memory.address(), &poison));
            let slices = slices(blocks, room, load);
            let places: Vec<Vec<u64>> =
                (0..).zip(&gpus).map(|(gpu, _)| shuffled(blocks, load + 100 * gpu)).collect();
            let to = |gpu: usize, part| {
                copies(part, pool.address(), &slices, memories[gpu].address(), &places[gpu])
            };
            let pulls = Thresholds::idle(Direction::Peer);
            let Some(mut together) = Together::begin(&loaders, &queues, bytes, &pulls) else {
                assert!(is_real, "fake GPUs share loads");
                println!("the GPUs of this machine cannot share loads");
                break;
            };
            for part in 0..PARTS.len() {
                let lists: Vec<Vec<Copy>> = (0..gpus.len()).map(|gpu| to(gpu, part)).collect();
                // SAFETY: all memory is this test's, and is not used before the streams are waited for.
                unsafe { together.enqueue(&queues, &lists).unwrap() };
            }
            together.synchronize_or(|| false).unwrap();
            streams.iter().for_each(|stream| stream.synchronize().unwrap());
            for (gpu, memory) in memories.iter().enumerate() {
                let arrived = read(&streams[gpu], memory.address(), bytes as usize);
                for Copy { dst, src, len } in (0..PARTS.len()).flat_map(|part| to(gpu, part)) {
                    let there = &arrived[(dst - memory.address()) as usize..][..len as usize];
                    wrong +=
                        usize::from(there != &content[(src - pool.address()) as usize..][..len as usize]);
                }
            }
        }
    });
    assert_eq!(wrong, 0, "pieces of {loads} loads are wrong");
}
