//! Loads of the same bytes to several GPUs: every GPU gets them all, and each link brings an even share.
//!
//! On a machine with two GPUs or more, this measures what sharing gains. One GPU counts as two, and the rates mean nothing:
//!
//!     KVLANE_TEST_DRIVER=cuda cargo test --release -p kvlane-gpu --test all -- --nocapture of_this_machine
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::{Gate, device_memory, pattern, read, several_gpus, stream, tested_driver};
use kvlane_fake_gpu::{FakeDriver, FakeOptions};
use kvlane_gpu::{
    Copier, CopierOptions, Copy, CopyMethods, DeviceMemory, Direction, Driver, Gpu, GpuError, HostBuffer,
    Loader, RailOptions, Rails, Staging, Stream, Thresholds, Together,
};
use proptest::collection::vec;
use proptest::prelude::*;

const BYTES: usize = 128 << 10;
const PIECE: u64 = 512;
/// Some pieces by the kernel, some by copy engines.
const PULLS: Thresholds = Thresholds { engine_bytes: 4096, batch_bytes: 2048, piece_bytes: 256 };
const OUT_OF_MEMORY: u32 = 2;
const INVALID_VALUE: u32 = 1;
const ILLEGAL_ADDRESS: u32 = 700;

/// Small slots, and no load is too small.
fn small() -> RailOptions {
    RailOptions { slot_bytes: 4096, slots: 2, least_bytes: 0, ..RailOptions::default() }
}

fn driver(devices: u32) -> Arc<FakeDriver> {
    Arc::new(FakeDriver::new(FakeOptions { devices, ..FakeOptions::default() }).unwrap())
}

/// GPUs that load from one pool, each into memory of its own, which is poisoned.
struct Team {
    rails: Arc<Rails>,
    loaders: Vec<Loader>,
    streams: Vec<Arc<Stream>>,
    memories: Vec<DeviceMemory>,
    pool: HostBuffer,
}

impl Team {
    fn new(driver: &Arc<FakeDriver>, gpus: &[u32], options: RailOptions) -> Team {
        let rails = Rails::new(Arc::clone(driver) as Arc<dyn Driver>, &[], options).unwrap();
        Team::of(driver, gpus, rails)
    }

    fn of(driver: &Arc<FakeDriver>, gpus: &[u32], rails: Arc<Rails>) -> Team {
        let open = |gpu: &u32| Gpu::open(Arc::clone(driver) as Arc<dyn Driver>, *gpu).unwrap();
        let gpus: Vec<Gpu> = gpus.iter().map(open).collect();
        let pool = HostBuffer::new(&gpus[0], BYTES as u64).unwrap();
        // SAFETY: the buffer has these bytes, and nothing is enqueued.
        unsafe { pool.as_ptr().copy_from_nonoverlapping(pattern(1, BYTES).as_ptr(), BYTES) };
        let streams: Vec<Arc<Stream>> = gpus.iter().map(stream).collect();
        let memories = streams.iter().map(|stream| device_memory(stream, &pattern(2, BYTES))).collect();
        let loaders = gpus.iter().map(|gpu| rails.loader(gpu, "engine")).collect();
        Team { rails, loaders, streams, memories, pool }
    }

    fn streams(&self) -> Vec<&Stream> {
        self.streams.iter().map(Arc::as_ref).collect()
    }

    fn begin(&self) -> Option<Together<'_>> {
        let loaders: Vec<&Loader> = self.loaders.iter().collect();
        Together::begin(&loaders, &self.streams(), BYTES as u64, &PULLS)
    }

    /// The same copies, by offsets, for each GPU.
    fn copies(&self, part: &[Copy]) -> Vec<Vec<Copy>> {
        let of = |memory: &DeviceMemory| {
            let moved = |copy: &Copy| Copy {
                dst: memory.address() + copy.dst,
                src: self.pool.address() + copy.src,
                len: copy.len,
            };
            part.iter().map(moved).collect()
        };
        self.memories.iter().map(of).collect()
    }

    fn enqueue(&self, together: &mut Together<'_>, part: &[Copy]) -> Result<(), GpuError> {
        // SAFETY: pool and memories are this team's, and are not used before everything is waited for.
        unsafe { together.enqueue(&self.streams(), &self.copies(part)) }
    }

    /// A whole load; None where each would have to load by itself.
    fn load(&self, part: &[Copy]) -> Option<()> {
        let mut together = self.begin()?;
        self.enqueue(&mut together, part).unwrap();
        together.synchronize_or(|| false).unwrap();
        self.streams.iter().for_each(|stream| stream.synchronize().unwrap());
        Some(())
    }

    fn assert_loaded(&self, expected: &[u8]) {
        for (number, (memory, stream)) in self.memories.iter().zip(&self.streams).enumerate() {
            assert!(read(stream, memory.address(), BYTES) == expected, "wrong bytes on GPU {number}");
        }
    }
}

/// All pieces of the pool, in reverse order in the memory.
fn reversal() -> Vec<Copy> {
    let pieces = BYTES as u64 / PIECE;
    let copy = |piece| Copy { dst: (pieces - 1 - piece) * PIECE, src: piece * PIECE, len: PIECE };
    (0..pieces).map(copy).collect()
}

fn reversed() -> Vec<u8> {
    pattern(1, BYTES).chunks(PIECE as usize).rev().flatten().copied().collect()
}

#[derive(Debug, Clone)]
struct Case {
    /// By offsets, part by part; destinations do not overlap.
    parts: Vec<Vec<Copy>>,
    gpus: u32,
    options: RailOptions,
    methods: CopyMethods,
    /// A device that takes longer.
    slow: Option<u32>,
}

fn case() -> impl Strategy<Value = Case> {
    let piece = (prop_oneof![1..200u64, 1..9000u64], 0..3u64, any::<bool>(), 0..BYTES as u64, any::<bool>());
    let parts = vec(vec(piece, 0..20), 1..4).prop_map(|parts| {
        let (mut free, mut follow) = (0, 0);
        let mut place = |(len, gap, aligned, src, follows): (u64, u64, bool, u64, bool)| {
            let grain = if aligned { 16 } else { 1 };
            let len: u64 = len.next_multiple_of(grain);
            let dst = (free + gap * grain).next_multiple_of(grain);
            let src = if follows { follow } else { src - src % grain };
            if dst + len > BYTES as u64 || src + len > BYTES as u64 {
                return None;
            }
            (free, follow) = (dst + len, src + len);
            Some(Copy { dst, src, len })
        };
        parts.into_iter().map(|part| part.into_iter().filter_map(&mut place).collect()).collect()
    });
    let how = (2..5u32, 1..600u64, 1..4usize, any::<bool>(), any::<bool>(), proptest::option::of(0..4u32));
    (parts, how).prop_map(|(parts, (gpus, units, slots, batch, kernel, slow))| {
        let options = RailOptions { slot_bytes: units * 16, slots, ..small() };
        Case { parts, gpus, options, methods: CopyMethods { batch, kernel }, slow }
    })
}

/// Loads the parts, each followed by a flag on every GPU. Another stream reads a part's bytes as soon as its flag is there.
fn check(case: &Case) {
    let options = FakeOptions { devices: case.gpus, methods: case.methods.clone(), ..FakeOptions::default() };
    let driver = Arc::new(FakeDriver::new(options).unwrap());
    let team = Team::new(&driver, &(0..case.gpus).collect::<Vec<_>>(), case.options.clone());
    let readers: Vec<_> =
        team.loaders.iter().zip(&team.streams).map(|(_, main)| stream(main.gpu())).collect();
    let flags: Vec<_> = team.streams.iter().map(|stream| device_memory(stream, &[0; 64])).collect();
    let arrived: Vec<_> = team
        .streams
        .iter()
        .map(|stream| HostBuffer::new(stream.gpu(), (BYTES * case.parts.len()) as u64).unwrap())
        .collect();
    if let Some(slow) = case.slow {
        driver.slow_down_device(slow, Duration::from_millis(20));
    }
    let mut together = team.begin().unwrap();
    for (index, part) in (0..).zip(&case.parts) {
        team.enqueue(&mut together, part).unwrap();
        for (gpu, main) in team.streams.iter().enumerate() {
            let flag = flags[gpu].address() + 4 * index;
            let seen = arrived[gpu].address() + index * BYTES as u64;
            let whole = Copy { dst: seen, src: team.memories[gpu].address(), len: BYTES as u64 };
            // SAFETY: all of it is memory of this test, which waits for all streams before it looks at it.
            unsafe {
                main.write_word(flag, 1).unwrap();
                readers[gpu].wait_word(flag, 1).unwrap();
                readers[gpu].copy(whole).unwrap();
            }
        }
    }
    together.synchronize_or(|| false).unwrap();
    drop(together);
    readers.iter().chain(&team.streams).for_each(|stream| stream.synchronize().unwrap());

    let content = pattern(1, BYTES);
    let mut expected = pattern(2, BYTES);
    for (index, part) in case.parts.iter().enumerate() {
        for Copy { dst, src, len } in part.iter().copied() {
            let range = dst as usize..(dst + len) as usize;
            expected[range.clone()].copy_from_slice(&content[src as usize..][..len as usize]);
            for arrived in &arrived {
                // SAFETY: the part of the buffer, which no stream touches any more.
                let seen = unsafe { std::slice::from_raw_parts(arrived.as_ptr().add(index * BYTES), BYTES) };
                assert!(seen[range.clone()] == expected[range.clone()], "part {index} came after its flag");
            }
        }
    }
    team.assert_loaded(&expected);
    // Every byte once over one of the links, and a part's bytes evenly, but for the last copy of a share.
    let links = team.rails.bytes_by_link();
    let total: u64 = case.parts.iter().flatten().map(|copy| copy.len).sum();
    assert_eq!(links.values().sum::<u64>(), total);
    let longest = |part: &Vec<Copy>| part.iter().map(|copy| copy.len.min(case.options.slot_bytes) + 1).max();
    let uneven: u64 = case.parts.iter().filter_map(longest).sum();
    for bytes in links.values() {
        assert!(bytes.abs_diff(total / u64::from(case.gpus)) <= uneven, "{links:?} of {total}");
    }
    assert_eq!(team.rails.relayed_bytes(), 0);
}

proptest! {
    #[test]
    fn every_gpu_gets_exactly_the_bytes_of_the_model(case in case()) {
        check(&case);
    }
}

#[test]
fn each_of_four_links_brings_a_quarter() {
    let driver = driver(4);
    let team = Team::new(&driver, &[0, 1, 2, 3], small());
    team.load(&reversal()).unwrap();
    team.assert_loaded(&reversed());
    for (link, bytes) in team.rails.bytes_by_link() {
        let percent = bytes as f64 * 100.0 / BYTES as f64;
        assert!((percent - 25.0).abs() < 1.0, "{percent} % over the link of GPU {link}");
    }
}

#[test]
fn nothing_waits_on_the_host_although_nothing_can_be_read_yet() {
    let driver = driver(3);
    let team = Team::new(&driver, &[0, 1, 2], small());
    let gates: Vec<Gate> = team.streams.iter().map(|stream| Gate::across(stream)).collect();
    let mut together = team.begin().unwrap();
    team.enqueue(&mut together, &reversal()).unwrap();
    // Two slots are full, and eleven chunks are enqueued: a slot waits for all its readers.
    gates[..2].iter().for_each(Gate::open);
    team.streams[..2].iter().for_each(|stream| assert!(!stream.is_idle().unwrap()));
    gates[2].open();
    together.synchronize_or(|| false).unwrap();
    team.assert_loaded(&reversed());
}

#[test]
fn gpus_that_cannot_share_load_by_themselves_and_their_rings_stay_usable() {
    let driver = driver(3);
    let team = Team::new(&driver, &[0, 1, 2], small());
    let loaders: Vec<&Loader> = team.loaders.iter().collect();
    let streams = team.streams();
    let begin = |loaders: &[&Loader], streams: &[&Stream], bytes| {
        Together::begin(loaders, streams, bytes, &PULLS).is_some()
    };
    assert!(!begin(&loaders[..1], &streams[..1], BYTES as u64), "nobody to share with");
    assert!(!begin(&[loaders[0], loaders[0]], &[streams[0], streams[0]], BYTES as u64), "one GPU twice");
    // A link in use: here by a load of the first GPU alone that belongs to another engine.
    let other = team.rails.loader(team.streams[0].gpu(), "another");
    let busy = other.begin(&team.streams[0], BYTES as u64, &PULLS, Staging::Off);
    assert_eq!(busy.rails(), 2);
    assert!(!begin(&loaders, &streams, BYTES as u64));
    drop(busy);
    team.load(&reversal()).unwrap();
    team.assert_loaded(&reversed());

    let large = Team::new(&driver, &[0, 1], RailOptions { least_bytes: BYTES as u64 + 1, ..small() });
    assert!(large.load(&reversal()).is_none(), "too small");
    for choice in ["off", "0"] {
        let choice = choice.parse().unwrap();
        assert!(Team::new(&driver, &[0, 1], RailOptions { choice, ..small() }).begin().is_none());
    }
    let options = FakeOptions { devices: 2, linked: false, ..FakeOptions::default() };
    let apart = Arc::new(FakeDriver::new(options).unwrap());
    assert!(Team::new(&apart, &[0, 1], small()).begin().is_none(), "no NVLink");
    let named = RailOptions { choice: "0,1".parse().unwrap(), ..small() };
    assert!(Team::new(&apart, &[0, 1], named).load(&reversal()).is_some(), "by its user's order");
    apart.fail_call(1, Some("cuMemAlloc"), 2, OUT_OF_MEMORY);
    assert!(
        Team::new(&apart, &[0, 1], RailOptions { choice: "0,1".parse().unwrap(), ..small() })
            .begin()
            .is_none()
    );
}

#[test]
fn lists_that_differ_are_refused() {
    let driver = driver(2);
    let team = Team::new(&driver, &[0, 1], small());
    let mut together = team.begin().unwrap();
    let mut copies = team.copies(&reversal());
    copies[1][7].src += 16;
    // SAFETY: as in `Team::enqueue`.
    let refused = unsafe { together.enqueue(&team.streams(), &copies) };
    assert!(matches!(refused, Err(GpuError::Invalid(_))));
    together.synchronize_or(|| false).unwrap();
    team.assert_loaded(&pattern(2, BYTES));
}

#[test]
fn a_call_that_fails_in_the_middle_leaves_nothing_under_way() {
    for device in [0, 2] {
        for operation in ["cuMemcpyAsync", "cuStreamWaitValue32", "cuStreamWriteValue32", "cuEventRecord"] {
            let driver = driver(3);
            let team = Team::new(&driver, &[0, 1, 2], small());
            let mut together = team.begin().unwrap();
            let nth = if operation == "cuEventRecord" { 2 } else { 9 };
            driver.fail_call(device, Some(operation), nth, INVALID_VALUE);
            let failed = team.enqueue(&mut together, &reversal());
            assert_eq!(failed.unwrap_err().code(), Some(INVALID_VALUE), "{operation}");
            together.synchronize_or(|| false).unwrap();
            team.streams.iter().for_each(|stream| stream.synchronize().unwrap());
            drop(together);
            assert_eq!(team.rails.bytes_by_link().values().sum::<u64>(), 0);
            // Alone they still load, whatever became of the rings.
            let pool = team.pool.address();
            for (gpu, loader) in team.loaders.iter().enumerate() {
                let stream = &team.streams[gpu];
                let mut copier = Copier::new(Arc::clone(stream), Default::default()).unwrap();
                let mut loading = loader.begin(stream, BYTES as u64, &PULLS, Staging::Off);
                let copies = [Copy { dst: team.memories[gpu].address(), src: pool, len: BYTES as u64 }];
                // SAFETY: as in `Team::enqueue`.
                unsafe { loading.enqueue(&mut copier, &copies).unwrap() };
                loading.synchronize().unwrap();
                stream.synchronize().unwrap();
            }
            team.assert_loaded(&pattern(1, BYTES));
        }
    }
}

#[test]
fn a_gpu_that_is_lost_under_way_brings_no_wrong_bytes_to_the_others() {
    let driver = driver(3);
    let team = Team::new(&driver, &[0, 1, 2], small());
    let gates: Vec<Gate> = team.streams.iter().map(|stream| Gate::across(stream)).collect();
    let mut together = team.begin().unwrap();
    team.enqueue(&mut together, &reversal()).unwrap();
    // In the middle of filling its ring, or of reading those of the others.
    driver.fail_work(1, 3, ILLEGAL_ADDRESS);
    gates.iter().for_each(Gate::open);
    let (observer, memory) = (stream(team.streams[0].gpu()), team.memories[0].address());
    let (poison, whole) = (pattern(2, BYTES), reversed());
    let mut looks = 0;
    let failed = together.synchronize_or(|| {
        looks += 1;
        let now = read(&observer, memory, BYTES);
        let right = |at: usize| now[at] == poison[at] || now[at] == whole[at];
        // The first two times nobody has ended a wait yet, and the third time it is about to happen.
        assert!((0..BYTES).all(right) || looks > 3, "bytes that nothing brought");
        looks >= 3
    });
    assert!(failed.unwrap_err().is_sticky());
    for gpu in [0, 2] {
        team.streams[gpu].synchronize().unwrap();
    }
    drop(together);
    assert!(team.begin().is_none(), "one of them is gone");
    let rest = Team::of(&driver, &[0, 2], Arc::clone(&team.rails));
    rest.load(&reversal()).unwrap();
    rest.assert_loaded(&reversed());
}

/// Blocks of 61 layers, together in the pool and apart in the engine, as of a latent cache.
fn latent_blocks(blocks: u64) -> Vec<Copy> {
    const LAYERS: u64 = 61;
    const LEN: u64 = 64 * 576 * 2;
    let copy = |at: u64| {
        let (block, layer) = (at / LAYERS, at % LAYERS);
        Copy { dst: (layer * blocks + block) * LEN, src: at * LEN, len: LEN }
    };
    (0..blocks * LAYERS).map(copy).collect()
}

#[test]
fn gpus_of_this_machine_share_a_load() {
    let (driver, gpus) = several_gpus();
    let part = latent_blocks(if driver.name() == "cuda" { 256 } else { 2 });
    let bytes: u64 = part.iter().map(|copy| copy.len).sum();
    let pool = HostBuffer::new(&gpus[0], bytes).unwrap();
    let content = pattern(1, bytes as usize);
    // SAFETY: the buffer has these bytes, and nothing is enqueued.
    unsafe { pool.as_ptr().copy_from_nonoverlapping(content.as_ptr(), content.len()) };
    let options = RailOptions { least_bytes: 0, ..RailOptions::default() };
    let rails = Rails::new(driver, &[], options).unwrap();
    rails.open_all();
    let streams: Vec<Arc<Stream>> = gpus.iter().map(stream).collect();
    let queues: Vec<&Stream> = streams.iter().map(Arc::as_ref).collect();
    let loaders: Vec<Loader> = gpus.iter().map(|gpu| rails.loader(gpu, "engine")).collect();
    let poison = vec![0xee; content.len()];
    let memories: Vec<DeviceMemory> = streams.iter().map(|stream| device_memory(stream, &poison)).collect();
    let moved = |memory: &DeviceMemory| {
        let to =
            |copy: &Copy| Copy { dst: memory.address() + copy.dst, src: pool.address() + copy.src, ..*copy };
        part.iter().map(to).collect::<Vec<Copy>>()
    };
    let copies: Vec<Vec<Copy>> = memories.iter().map(moved).collect();
    let mut copiers: Vec<Copier> = streams
        .iter()
        .map(|stream| Copier::new(Arc::clone(stream), CopierOptions::default()).unwrap())
        .collect();
    let rate = |start: Instant| bytes as f64 / 1e9 / start.elapsed().as_secs_f64();
    let modes = [("idle", Thresholds::idle as fn(_) -> _), ("beside compute", Thresholds::beside_compute)];
    for (mode, thresholds) in modes {
        // The second round of each is the one that counts.
        for _ in 0..2 {
            let start = Instant::now();
            for (copier, copies) in copiers.iter_mut().zip(&copies) {
                copier.set_thresholds(thresholds(Direction::HostToDevice));
                // SAFETY: all memory is this test's, and is not used before the streams are waited for.
                unsafe { copier.enqueue(copies, Direction::HostToDevice).unwrap() };
            }
            streams.iter().for_each(|stream| stream.synchronize().unwrap());
            let alone = rate(start);
            streams
                .iter()
                .zip(&memories)
                .for_each(|(stream, memory)| crate::support::write(stream, memory.address(), &poison));
            let loaders: Vec<&Loader> = loaders.iter().collect();
            let start = Instant::now();
            let pulls = thresholds(Direction::Peer);
            let Some(mut together) = Together::begin(&loaders, &queues, bytes, &pulls) else {
                println!("the GPUs of this machine cannot share loads");
                assert!(tested_driver() != "fake");
                return;
            };
            // SAFETY: as above.
            unsafe { together.enqueue(&queues, &copies).unwrap() };
            let enqueued = start.elapsed().as_secs_f64() * 1e3;
            together.synchronize_or(|| false).unwrap();
            streams.iter().for_each(|stream| stream.synchronize().unwrap());
            let shared = rate(start);
            println!(
                "{} GPUs, {mode}: {alone:.1} GB/s each by itself, {shared:.1} GB/s each shared, enqueued in {enqueued:.2} ms",
                gpus.len(),
            );
            for (stream, memory) in streams.iter().zip(&memories) {
                let arrived = read(stream, memory.address(), content.len());
                for Copy { dst, src, len } in part.iter().copied() {
                    let (there, here) = (&arrived[dst as usize..][..len as usize], &content[src as usize..]);
                    assert!(there == &here[..len as usize], "wrong bytes on {}", stream.gpu().info().ordinal);
                }
            }
        }
    }
    println!("bytes by link: {:?}", rails.bytes_by_link());
}
