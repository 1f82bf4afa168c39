//! Loads over several links: the bytes are those of the model. Rails serve one load at a time, and the end of a load, also of a
//! failed one, leaves no work in progress.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::sync::Arc;
use std::time::Duration;

use crate::support::{Gate, device_memory, pattern, read, stream};
use kvlane_fake_gpu::{FakeDriver, FakeOptions};
use kvlane_gpu::bench::{CopyMethod, Path, Shape};
use kvlane_gpu::{
    Copier, CopierOptions, Copy, CopyMethods, DeviceMemory, Driver, Gpu, GpuError, HostBuffer, Loader,
    Pinned, RailLoad, RailOptions, Rails, Staging, Stream, Thresholds, measure_rails, measure_together,
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

fn open(driver: &Arc<FakeDriver>, ordinal: u32) -> Gpu {
    Gpu::open(Arc::clone(driver) as Arc<dyn Driver>, ordinal).unwrap()
}

fn rails(driver: &Arc<FakeDriver>, options: RailOptions) -> Arc<Rails> {
    Rails::new(Arc::clone(driver) as Arc<dyn Driver>, &[], options).unwrap()
}

/// A target with a pool to load from and memory to load into, poisoned.
struct Target {
    gpu: Gpu,
    stream: Arc<Stream>,
    copier: Copier,
    pool: HostBuffer,
    memory: DeviceMemory,
}

impl Target {
    fn new(driver: &Arc<FakeDriver>, ordinal: u32) -> Target {
        let gpu = open(driver, ordinal);
        let stream = stream(&gpu);
        let copier = Copier::new(Arc::clone(&stream), CopierOptions::default()).unwrap();
        let pool = HostBuffer::new(&gpu, BYTES as u64).unwrap();
        // SAFETY: the buffer has these bytes, and nothing is enqueued.
        unsafe { pool.as_ptr().copy_from_nonoverlapping(pattern(1, BYTES).as_ptr(), BYTES) };
        let memory = device_memory(&stream, &pattern(2, BYTES));
        Target { gpu, stream, copier, pool, memory }
    }

    /// All pieces, in reverse order in the memory.
    fn reversal(&self) -> Vec<Copy> {
        let pieces = BYTES as u64 / PIECE;
        let copy = |piece| Copy {
            dst: self.memory.address() + (pieces - 1 - piece) * PIECE,
            src: self.pool.address() + piece * PIECE,
            len: PIECE,
        };
        (0..pieces).map(copy).collect()
    }

    fn enqueue(&mut self, loading: &mut RailLoad<'_>) {
        let copies = self.reversal();
        // SAFETY: pool and memory are this target's, and are not used before the streams are waited for.
        unsafe { loading.enqueue(&mut self.copier, &copies).unwrap() };
    }

    /// A whole load; how many rails it used.
    fn load(&mut self, loader: &Loader) -> usize {
        let mut loading = loader.begin(&self.stream, BYTES as u64, &PULLS, Staging::Off);
        self.enqueue(&mut loading);
        loading.synchronize().unwrap();
        self.stream.synchronize().unwrap();
        loading.rails()
    }

    fn reversed(&self) -> Vec<u8> {
        pattern(1, BYTES).chunks(PIECE as usize).rev().flatten().copied().collect()
    }

    fn assert_loaded(&self) {
        assert!(read(&self.stream, self.memory.address(), BYTES) == self.reversed(), "wrong bytes");
    }
}

#[derive(Debug, Clone)]
struct Case {
    /// By offsets, part by part; destinations do not overlap.
    parts: Vec<Vec<Copy>>,
    rails: u32,
    options: RailOptions,
    methods: CopyMethods,
    chunk_bytes: u64,
    /// A device that takes longer.
    slow: Option<u32>,
    staging: Staging,
}

fn case() -> impl Strategy<Value = Case> {
    let piece = (prop_oneof![1..200u64, 1..9000u64], 0..3u64, any::<bool>(), 0..BYTES as u64, any::<bool>());
    let parts = vec(vec(piece, 0..20), 1..5).prop_map(|parts| {
        let mut free = 0;
        let mut follow = 0;
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
    let ring = (1..600u64, 1..4usize, prop_oneof![Just(0), 0..100_000u64]);
    let staging = prop_oneof![Just(Staging::Off), Just(Staging::BesideRails), Just(Staging::On)];
    let how = (any::<bool>(), any::<bool>(), 1..40_000u64, proptest::option::of(0..4u32), staging);
    (parts, 0..4u32, ring, how).prop_map(
        |(parts, rails, ring, (batch, kernel, chunk_bytes, slow, staging))| {
            let (units, slots, least_bytes) = ring;
            let options = RailOptions { slot_bytes: units * 16, slots, least_bytes, ..small() };
            Case { parts, rails, options, methods: CopyMethods { batch, kernel }, chunk_bytes, slow, staging }
        },
    )
}

/// Loads the parts, each followed by a flag. Another stream reads a part's bytes as soon as its flag is there.
fn check(case: &Case) {
    let options =
        FakeOptions { devices: 1 + case.rails, methods: case.methods.clone(), ..FakeOptions::default() };
    let driver = Arc::new(FakeDriver::new(options).unwrap());
    let gpu = open(&driver, 0);
    let (main, reader) = (stream(&gpu), stream(&gpu));
    let content = pattern(1, BYTES);
    let pool: Vec<u128> =
        content.chunks_exact(16).map(|word| u128::from_ne_bytes(word.try_into().unwrap())).collect();
    let base = pool.as_ptr().expose_provenance() as u64;
    // SAFETY: the pool lives until the end of this function, when all streams are idle.
    let pinned = unsafe { Pinned::new(&gpu, base, BYTES as u64, case.chunk_bytes, |_| {}).unwrap() };
    let rails = Rails::new(Arc::clone(&driver) as _, pinned.seams(), case.options.clone()).unwrap();
    let loader = rails.loader(&gpu, "engine");
    let memory = device_memory(&main, &pattern(2, BYTES));
    let flags = device_memory(&main, &[0; 64]);
    let arrived = HostBuffer::new(&gpu, (BYTES * case.parts.len()) as u64).unwrap();
    if let Some(slow) = case.slow {
        driver.slow_down_device(slow, Duration::from_millis(20));
    }

    let bytes: u64 = case.parts.iter().flatten().map(|copy| copy.len).sum();
    let options = CopierOptions { seams: pinned.seams().to_vec(), ..CopierOptions::default() };
    let mut copier = Copier::new(Arc::clone(&main), options).unwrap();
    let mut loading = loader.begin(&main, bytes, &PULLS, case.staging);
    let is_large = bytes >= case.options.least_bytes;
    let wanted = if is_large { case.rails as usize } else { 0 };
    let staged = match case.staging {
        Staging::Off => false,
        Staging::BesideRails => wanted > 0,
        Staging::On => is_large,
    };
    assert_eq!((loading.rails(), loading.is_staged()), (wanted, staged));
    for (index, part) in (0..).zip(&case.parts) {
        let moved =
            |copy: &Copy| Copy { dst: memory.address() + copy.dst, src: base + copy.src, len: copy.len };
        let copies: Vec<Copy> = part.iter().map(moved).collect();
        let seen = arrived.address() + index * BYTES as u64;
        // SAFETY: the ranges lie in memory of this test, which waits for all streams before it looks at it.
        unsafe {
            loading.enqueue(&mut copier, &copies).unwrap();
            main.write_word(flags.address() + 4 * index, 1).unwrap();
            reader.wait_word(flags.address() + 4 * index, 1).unwrap();
            reader.copy(Copy { dst: seen, src: memory.address(), len: BYTES as u64 }).unwrap();
        }
    }
    loading.synchronize().unwrap();
    main.synchronize().unwrap();
    reader.synchronize().unwrap();

    let mut expected = pattern(2, BYTES);
    for (index, part) in case.parts.iter().enumerate() {
        // SAFETY: the part of the buffer, which no stream touches any more.
        let seen = unsafe { std::slice::from_raw_parts(arrived.as_ptr().add(index * BYTES), BYTES) };
        for Copy { dst, src, len } in part.iter().copied() {
            let range = dst as usize..(dst + len) as usize;
            expected[range.clone()].copy_from_slice(&content[src as usize..][..len as usize]);
            assert!(seen[range.clone()] == expected[range], "part {index} was not there when its flag was");
        }
    }
    assert!(read(&main, memory.address(), BYTES) == expected, "wrong bytes");
    let relayed = rails.relayed_bytes();
    assert!(relayed <= bytes && (wanted > 0 || relayed == 0));
    let by_link = rails.bytes_by_link();
    assert_eq!(by_link.values().sum::<u64>(), bytes);
    assert_eq!(bytes - by_link.get(&0).unwrap_or(&0), relayed);
}

proptest! {
    #[test]
    fn loads_over_rails_move_exactly_the_bytes_of_the_model(case in case()) {
        check(&case);
    }
}

#[test]
fn a_load_is_enqueued_at_once_although_it_has_more_chunks_than_slots() {
    let driver = driver(3);
    let rails = rails(&driver, small());
    let mut target = Target::new(&driver, 0);
    let loader = rails.loader(&target.gpu, "engine");
    let gate = Gate::across(&target.stream);
    let mut loading = loader.begin(&target.stream, BYTES as u64, &PULLS, Staging::Off);
    assert_eq!(loading.rails(), 2);
    driver.clear_log();
    target.enqueue(&mut loading);
    // A third of the bytes over each: 11 chunks through 2 slots, and nothing is read out of them behind the gate.
    for rail in [1, 2] {
        assert_eq!(driver.log().iter().filter(|call| call.device == rail).count(), 11);
    }
    assert!(!target.stream.is_idle().unwrap());
    gate.open();
    target.stream.synchronize().unwrap();
    loading.synchronize().unwrap();
    let relayed = rails.relayed_bytes();
    assert!(relayed.abs_diff(BYTES as u64 * 2 / 3) <= 2 * PIECE, "{relayed} bytes");
    target.assert_loaded();
}

#[test]
fn no_link_waits_until_the_calls_for_another_one_are_made() {
    let driver = driver(3);
    let rails = rails(&driver, small());
    let mut target = Target::new(&driver, 0);
    let options = CopierOptions { use_kernel: false, ..CopierOptions::default() };
    target.copier = Copier::new(Arc::clone(&target.stream), options).unwrap();
    let loader = rails.loader(&target.gpu, "engine");
    driver.clear_log();
    read(&target.stream, target.memory.address(), 1);
    let main = driver.log()[0].stream;
    let gate = Gate::across(&target.stream);
    let mut loading = loader.begin(&target.stream, BYTES as u64, &PULLS, Staging::Off);
    driver.clear_log();
    target.enqueue(&mut loading);
    let (mut bytes, mut apart) = ([0u64; 3], 0);
    // All but the target's reads of the rings.
    for call in driver.log().iter().filter(|call| call.device != 0 || call.stream == main) {
        bytes[call.device as usize] += call.bytes;
        apart = apart.max(bytes.iter().max().unwrap() - bytes.iter().min().unwrap());
    }
    gate.open();
    target.stream.synchronize().unwrap();
    loading.synchronize().unwrap();
    target.assert_loaded();
    assert_eq!(bytes.iter().sum::<u64>(), BYTES as u64);
    // A slot each, and one more for those whose turn has come.
    assert!(apart <= 2 * 4096, "{apart} bytes apart");
}

#[test]
fn a_staged_load_comes_in_long_runs_and_one_that_finds_the_ring_in_use_piece_by_piece() {
    let driver = driver(1);
    let rails = rails(&driver, small());
    let mut target = Target::new(&driver, 0);
    let loader = rails.loader(&target.gpu, "engine");
    assert_eq!(loader.staging(1 << 20, 64, 4), Staging::On);
    assert_eq!(
        loader.staging(1 << 20, 32, 1),
        Staging::BesideRails,
        "pieces of 32 KiB wait for nobody but rails"
    );
    assert_eq!(loader.staging(1 << 20, 8, 1), Staging::Off, "pieces of 128 KiB are brought each for itself");
    for pieces in [64, 32] {
        let apart = loader.staging(1 << 20, pieces, 64);
        assert_eq!(apart, Staging::Off, "what lies apart in the host's memory too gains nothing");
    }
    for in_use in [false, true] {
        let other = stream(&target.gpu);
        let under_way = in_use.then(|| loader.begin(&other, BYTES as u64, &PULLS, Staging::On));
        let mut loading = loader.begin(&target.stream, BYTES as u64, &PULLS, Staging::On);
        assert_eq!((loading.rails(), loading.is_staged()), (0, !in_use));
        driver.clear_log();
        target.enqueue(&mut loading);
        loading.synchronize().unwrap();
        target.stream.synchronize().unwrap();
        drop((loading, under_way));
        // The pieces lie one after the other in the pool: a run for each slot.
        let log = driver.log();
        let in_runs: u64 =
            log.iter().filter(|call| call.bytes / call.copies == 4096).map(|call| call.bytes).sum();
        assert_eq!(in_runs, if in_use { 0 } else { BYTES as u64 });
        let all: u64 = log.iter().map(|call| call.bytes).sum();
        assert_eq!(all - in_runs, BYTES as u64, "and each piece is written once");
        target.assert_loaded();
        assert_eq!(rails.unstaged_loads(), u64::from(in_use));
    }
    assert_eq!((rails.staged_bytes(), rails.relayed_bytes()), (BYTES as u64, 0));
    assert_eq!(rails.bytes_by_link()[&0], 2 * BYTES as u64);
}

#[test]
fn a_gpu_without_memory_for_its_own_ring_is_loaded_piece_by_piece() {
    let driver = driver(1);
    let rails = rails(&driver, small());
    let mut target = Target::new(&driver, 0);
    let loader = rails.loader(&target.gpu, "engine");
    driver.fail_call(0, Some("cuMemAlloc"), 1, OUT_OF_MEMORY);
    for _ in 0..2 {
        let mut loading = loader.begin(&target.stream, BYTES as u64, &PULLS, Staging::On);
        target.enqueue(&mut loading);
        loading.synchronize().unwrap();
        target.stream.synchronize().unwrap();
        drop(loading);
        target.assert_loaded();
    }
}

#[test]
fn a_staged_load_that_fails_ends_and_the_next_arrives() {
    for code in [INVALID_VALUE, ILLEGAL_ADDRESS] {
        let driver = driver(1);
        let rails = rails(&driver, small());
        let mut target = Target::new(&driver, 0);
        let loader = rails.loader(&target.gpu, "engine");
        driver.fail_work(0, 3, code);
        let mut loading = loader.begin(&target.stream, BYTES as u64, &PULLS, Staging::On);
        assert!(loading.is_staged());
        let copies = target.reversal();
        // SAFETY: pool and memory are this target's, and are not used before the streams are waited for.
        let enqueued = unsafe { loading.enqueue(&mut target.copier, &copies) };
        // Whoever notices first.
        let over = loading.synchronize();
        assert_eq!(enqueued.map(drop).and(over).unwrap_err().code(), Some(code));
        let _ = target.stream.synchronize();
        drop(loading);
        if code == INVALID_VALUE {
            let mut next = loader.begin(&target.stream, BYTES as u64, &PULLS, Staging::On);
            target.enqueue(&mut next);
            next.synchronize().unwrap();
            target.stream.synchronize().unwrap();
            drop(next);
            target.assert_loaded();
        }
    }
}

#[test]
fn nothing_is_written_before_what_the_load_comes_after() {
    let driver = driver(2);
    // More slots than chunks: the rail can do all its part behind the gate.
    let rails = rails(&driver, RailOptions { slots: 64, ..small() });
    let mut target = Target::new(&driver, 0);
    let loader = rails.loader(&target.gpu, "engine");
    let observer = stream(&target.gpu);
    let gate = Gate::across(&target.stream);
    let mut loading = loader.begin(&target.stream, BYTES as u64, &PULLS, Staging::Off);
    target.enqueue(&mut loading);
    let up = driver.log().iter().find(|call| call.device == 1).map(|call| call.stream).unwrap();
    // SAFETY: the stream lives as long as the load.
    unsafe { driver.stream_synchronize(1, up).unwrap() };
    let before = read(&observer, target.memory.address(), BYTES);
    gate.open();
    assert!(before == pattern(2, BYTES), "written too early");
    target.stream.synchronize().unwrap();
    loading.synchronize().unwrap();
    target.assert_loaded();
}

#[test]
fn a_slow_rail_delays_the_load_and_nothing_else() {
    let driver = driver(3);
    let rails = rails(&driver, small());
    let mut target = Target::new(&driver, 0);
    let loader = rails.loader(&target.gpu, "engine");
    driver.slow_down_device(2, Duration::from_millis(500));
    assert_eq!(target.load(&loader), 2);
    target.assert_loaded();
}

#[test]
fn a_rail_serves_one_load_at_a_time() {
    let driver = driver(3);
    let rails = rails(&driver, small());
    let (mut first, mut second) = (Target::new(&driver, 0), Target::new(&driver, 1));
    let loaders = [rails.loader(&first.gpu, "first"), rails.loader(&second.gpu, "second")];
    let mut under_way = loaders[0].begin(&first.stream, BYTES as u64, &PULLS, Staging::Off);
    assert_eq!(under_way.rails(), 2);
    first.enqueue(&mut under_way);
    assert_eq!(second.load(&loaders[1]), 0, "one link is lent, the other is the first load's own");
    second.assert_loaded();
    first.stream.synchronize().unwrap();
    drop(under_way);
    first.assert_loaded();
    assert_eq!(second.load(&loaders[1]), 2, "all are idle again");
}

#[test]
fn a_gpu_that_is_being_loaded_lends_nothing() {
    let driver = driver(3);
    let rails = rails(&driver, RailOptions { least_bytes: BYTES as u64, ..small() });
    let (first, mut second) = (Target::new(&driver, 0), Target::new(&driver, 1));
    let loaders = [rails.loader(&first.gpu, "first"), rails.loader(&second.gpu, "second")];
    // Too small for rails, but on its own link.
    let little = loaders[0].begin(&first.stream, 1, &PULLS, Staging::Off);
    assert_eq!(little.rails(), 0);
    assert_eq!(second.load(&loaders[1]), 1);
    drop(little);
    assert_eq!(second.load(&loaders[1]), 2);
    second.assert_loaded();
}

#[test]
fn the_workers_of_an_engine_share_the_links_that_none_of_them_needs() {
    let driver = driver(5);
    let rails = rails(&driver, small());
    let mut workers = [Target::new(&driver, 0), Target::new(&driver, 1)];
    let loaders = [rails.loader(&workers[0].gpu, "engine"), rails.loader(&workers[1].gpu, "engine")];
    // Three others for two workers: one each, and never the link of the other worker.
    driver.clear_log();
    let [first, second] = &mut workers;
    let mut one = loaders[0].begin(&first.stream, BYTES as u64, &PULLS, Staging::Off);
    let mut other = loaders[1].begin(&second.stream, BYTES as u64, &PULLS, Staging::Off);
    assert_eq!((one.rails(), other.rails()), (1, 1));
    first.enqueue(&mut one);
    second.enqueue(&mut other);
    for (worker, loading) in [(&first, &mut one), (&second, &mut other)] {
        worker.stream.synchronize().unwrap();
        loading.synchronize().unwrap();
        worker.assert_loaded();
    }
    drop((one, other));
    // Alone again, it may have all.
    let [mine, theirs] = loaders;
    drop(theirs);
    assert_eq!(first.load(&mine), 4);
}

#[test]
fn gpus_are_opened_before_they_are_needed_and_one_that_cannot_be_is_left_out() {
    let driver = driver(3);
    let rails = rails(&driver, small());
    assert!(!driver.methods(1).kernel, "not open yet");
    driver.fail_call(2, Some("cuDevicePrimaryCtxRetain"), 1, OUT_OF_MEMORY);
    assert_eq!(rails.open_all(), [0, 1]);
    assert!(driver.methods(1).kernel && !driver.methods(2).kernel);
    let mut target = Target::new(&driver, 0);
    let loader = rails.loader(&target.gpu, "engine");
    assert_eq!(loader.reached(), [1]);
    assert_eq!(target.load(&loader), 1);
    target.assert_loaded();
    // Where nothing joins them they would only take memory.
    let apart = FakeDriver::new(FakeOptions { devices: 3, linked: false, ..FakeOptions::default() }).unwrap();
    let apart = Arc::new(apart);
    let none: [u32; 0] = [];
    assert_eq!(self::rails(&apart, small()).open_all(), none);
    let named = RailOptions { choice: "1,2".parse().unwrap(), ..small() };
    assert_eq!(self::rails(&apart, named).open_all(), [1, 2]);
}

#[test]
fn a_gpu_without_memory_for_a_ring_lends_nothing() {
    let driver = driver(3);
    let rails = rails(&driver, small());
    let mut target = Target::new(&driver, 0);
    let loader = rails.loader(&target.gpu, "engine");
    driver.fail_call(1, Some("cuMemAlloc"), 1, OUT_OF_MEMORY);
    for _ in 0..2 {
        assert_eq!(target.load(&loader), 1);
        target.assert_loaded();
    }
}

#[test]
fn gpus_that_nothing_joins_are_no_rails_unless_they_are_named() {
    let options = FakeOptions { devices: 3, linked: false, ..FakeOptions::default() };
    let driver = Arc::new(FakeDriver::new(options).unwrap());
    let mut target = Target::new(&driver, 0);
    let auto = rails(&driver, small());
    assert_eq!(target.load(&auto.loader(&target.gpu, "engine")), 0);
    target.assert_loaded();
    let named = rails(&driver, RailOptions { choice: "1,2".parse().unwrap(), ..small() });
    assert_eq!(target.load(&named.loader(&target.gpu, "engine")), 2);
    driver.fail_call(2, Some("cuCtxEnablePeerAccess"), 1, INVALID_VALUE);
    assert_eq!(target.load(&named.loader(&target.gpu, "engine")), 1);
    let off = rails(&driver, RailOptions { choice: "off".parse().unwrap(), ..small() });
    assert_eq!(target.load(&off.loader(&target.gpu, "engine")), 0);
}

#[test]
fn a_copy_that_fails_on_a_rail_fails_the_load_and_not_the_next() {
    let driver = driver(3);
    let rails = rails(&driver, small());
    let mut target = Target::new(&driver, 0);
    let loader = rails.loader(&target.gpu, "engine");
    driver.fail_work(1, 3, INVALID_VALUE);
    let mut loading = loader.begin(&target.stream, BYTES as u64, &PULLS, Staging::Off);
    target.enqueue(&mut loading);
    target.stream.synchronize().unwrap();
    assert_eq!(loading.synchronize().unwrap_err().code(), Some(INVALID_VALUE));
    drop(loading);
    assert_eq!(rails.relayed_bytes(), 0);
    assert_eq!(target.load(&loader), 1, "the other rail goes on");
    target.assert_loaded();
}

#[test]
fn a_call_that_fails_in_the_middle_leaves_nothing_under_way() {
    let driver = driver(2);
    for operation in ["cuMemcpyAsync", "cuStreamWaitValue32", "cuStreamWriteValue32"] {
        let rails = rails(&driver, small());
        let mut target = Target::new(&driver, 0);
        let loader = rails.loader(&target.gpu, "engine");
        let mut loading = loader.begin(&target.stream, BYTES as u64, &PULLS, Staging::Off);
        assert_eq!(loading.rails(), 1);
        driver.fail_call(1, Some(operation), 5, INVALID_VALUE);
        let copies = target.reversal();
        // SAFETY: pool and memory are the target's, and are not used before the streams are waited for.
        let failed = unsafe { loading.enqueue(&mut target.copier, &copies) };
        assert_eq!(failed.unwrap_err().code(), Some(INVALID_VALUE), "{operation}");
        target.stream.synchronize().unwrap();
        loading.synchronize().unwrap();
        drop(loading);
        assert_eq!((target.load(&loader), rails.relayed_bytes()), (0, 0), "{operation}");
        target.assert_loaded();
    }
}

#[test]
fn a_gpu_that_is_lost_lends_nothing() {
    let driver = driver(2);
    let rails = rails(&driver, small());
    let mut target = Target::new(&driver, 0);
    let loader = rails.loader(&target.gpu, "engine");
    assert_eq!(target.load(&loader), 1);
    driver.fail_call(1, None, 1, ILLEGAL_ADDRESS);
    let mut loading = loader.begin(&target.stream, BYTES as u64, &PULLS, Staging::Off);
    let copies = target.reversal();
    // SAFETY: pool and memory are the target's, and are not used before the streams are waited for.
    assert!(unsafe { loading.enqueue(&mut target.copier, &copies) }.unwrap_err().is_sticky());
    target.stream.synchronize().unwrap();
    assert!(loading.synchronize().unwrap_err().is_sticky());
    drop(loading);
    assert_eq!(target.load(&loader), 0);
    target.assert_loaded();
}

#[test]
fn a_rail_that_is_lost_under_way_holds_the_load_up_only_until_nobody_minds_wrong_bytes() {
    let driver = driver(3);
    let rails = rails(&driver, small());
    let mut target = Target::new(&driver, 0);
    let loader = rails.loader(&target.gpu, "engine");
    let gate = Gate::across(&target.stream);
    let mut loading = loader.begin(&target.stream, BYTES as u64, &PULLS, Staging::Off);
    assert_eq!(loading.rails(), 2);
    target.enqueue(&mut loading);
    // Two slots are full, or will be: it is lost with one of the first chunks, or with the third.
    driver.fail_work(1, 1, ILLEGAL_ADDRESS);
    gate.open();
    let observer = stream(&target.gpu);
    // What the lost rail was to bring: the middle third of the load, which the reversal leaves there.
    let third = BYTES / 3 + 2 * PIECE as usize..2 * BYTES / 3 - 3 * 4096;
    let mut looks = 0;
    let failed = loading.synchronize_or(|| {
        looks += 1;
        let now = read(&observer, target.memory.address(), BYTES);
        let untouched = now[third.clone()] == pattern(2, BYTES)[third.clone()];
        // The first two times nobody has ended a wait yet, and the third time it is about to happen.
        assert!(untouched || looks > 3, "bytes that nothing brought");
        looks >= 3
    });
    assert!(failed.unwrap_err().is_sticky() && looks >= 3);
    target.stream.synchronize().unwrap();
    drop(loading);
    assert_eq!(rails.relayed_bytes(), 0);
    assert_eq!(target.load(&loader), 1, "the other rail goes on");
    target.assert_loaded();
}

#[test]
fn a_load_that_nobody_waited_for_is_over_when_its_rails_serve_the_next() {
    let driver = driver(2);
    let rails = rails(&driver, small());
    let mut target = Target::new(&driver, 0);
    let loader = rails.loader(&target.gpu, "engine");
    driver.slow_down_device(1, Duration::from_millis(200));
    let mut loading = loader.begin(&target.stream, BYTES as u64, &PULLS, Staging::Off);
    target.enqueue(&mut loading);
    drop(loading);
    driver.slow_down_device(1, Duration::ZERO);
    // The rail's half, which the reversal brings to the start of the memory. This stream has waited for nothing.
    let observer = stream(&target.gpu);
    let half = read(&observer, target.memory.address(), BYTES / 2);
    let whole = target.reversed();
    assert!(half == whole[..BYTES / 2], "still under way");
    target.assert_loaded();
    assert_eq!(target.load(&loader), 1);
}

fn measured() -> Shape {
    let (total_bytes, piece_bytes, joined) = (1 << 20, 4096, 4);
    Shape { total_bytes, piece_bytes, joined, shuffled: true, path: Path::HostToDevice }
}

#[test]
fn rates_over_rails_are_measured_and_the_bytes_checked() {
    let driver = driver(4);
    let gpu = open(&driver, 0);
    let shape = measured();
    let options = RailOptions { choice: "1,3".parse().unwrap(), ..small() };
    for staged in [false, true] {
        let rate = measure_rails(&gpu, options.clone(), &shape, staged).unwrap();
        assert!(rate > 0.0 && rate.is_finite());
    }
    assert!(
        driver.log().iter().any(|call| call.device == 3) && driver.log().iter().all(|call| call.device != 2)
    );
    driver.fail_work(3, 4, INVALID_VALUE);
    let failed = measure_rails(&gpu, options.clone(), &shape, true);
    assert_eq!(failed.unwrap_err().code(), Some(INVALID_VALUE));
    // Fewer rails than were asked for would be measured as if they were slow.
    driver.fail_call(1, Some("cuMemAlloc"), 1, OUT_OF_MEMORY);
    assert!(matches!(measure_rails(&gpu, options.clone(), &shape, true), Err(GpuError::Unsupported { .. })));
    let from_the_gpu = Shape { path: Path::DeviceToHost, ..shape };
    assert!(matches!(measure_rails(&gpu, options, &from_the_gpu, false), Err(GpuError::Invalid(_))));
}

#[test]
fn rates_of_several_gpus_at_once_are_measured_and_the_bytes_checked() {
    let driver = driver(3);
    let gpus = [open(&driver, 0), open(&driver, 2)];
    let shape = measured();
    for (method, staged) in
        [(CopyMethod::Contiguous, false), (CopyMethod::Auto, false), (CopyMethod::Auto, true)]
    {
        let rate = measure_together(&gpus, &shape, method, staged).unwrap();
        assert!(rate > 0.0 && rate.is_finite());
    }
    assert!(driver.log().iter().all(|call| call.device != 1));
    // One fails in the third round; the other one is not left waiting.
    for staged in [false, true] {
        driver.fail_work(2, 6, INVALID_VALUE);
        let failed = measure_together(&gpus, &shape, CopyMethod::Auto, staged);
        assert_eq!(failed.unwrap_err().code(), Some(INVALID_VALUE));
    }
    let from_the_gpu = Shape { path: Path::DeviceToHost, ..shape.clone() };
    for (gpus, shape) in [(&gpus[..], &from_the_gpu), (&[], &shape)] {
        let refused = measure_together(gpus, shape, CopyMethod::Auto, false);
        assert!(matches!(refused, Err(GpuError::Invalid(_))));
    }
}
