//! Memory of chunks: one process shares it by descriptors, and another maps it as one range.
//!
//! This binary starts itself again to be the other process: see [`plays_the_role_it_was_started_for`].
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail like tests")]

mod support;

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use kvlane_fake_gpu::{FakeDriver, FakeOptions, driver_named};
use kvlane_gpu::{
    AddressMap, ChunkRange, Chunks, Copier, CopierOptions, Copy, Direction, Gpu, GpuError, HostBuffer,
    ImportedChunks, MappedImport, detect,
};
use support::role::{Role, asked_role, hand_over, listen, say};
use support::{gpus, pattern, read, stream, tested_driver, write};

const MIB: u64 = 1 << 20;
/// Of unequal sizes.
const SIZES: [u64; 3] = [2 * MIB, 6 * MIB, 2 * MIB];
const BYTES: u64 = 10 * MIB;

// ---- the other process ----

#[test]
fn plays_the_role_it_was_started_for() {
    match asked_role().as_deref() {
        Some("engine") => engine(),
        Some(other) => panic!("there is no role {other}"),
        None => {}
    }
}

/// Hands its chunks over, and then checks what came back.
fn engine() {
    let gpu = Gpu::open(detect(driver_named).unwrap(), 0).unwrap();
    let stream = stream(&gpu);
    let memory = Chunks::alloc(&gpu, &SIZES, true).unwrap();
    write(&stream, memory.base(), &pattern(7, BYTES as usize));
    let ranges = gpu.chunk_ranges(&[(memory.base() + 5, BYTES - 5)]).unwrap();
    assert_eq!(ranges, [ChunkRange { base: memory.base(), chunks: SIZES.to_vec() }]);
    say(&[memory.base().to_string()]);
    hand_over(&exported(&gpu, &ranges[0]));
    assert_eq!(listen(), ["loaded"]);
    assert!(read(&stream, memory.base(), BYTES as usize) == pattern(9, BYTES as usize));
    say(&["right".into()]);
    assert_eq!(listen(), [""; 0]);
}

fn exported(gpu: &Gpu, range: &ChunkRange) -> Vec<OwnedFd> {
    let mut address = range.base;
    let chunks = range.chunks.iter().map(|bytes| {
        // Any address in the chunk will do.
        let descriptor = gpu.export_chunk(address + 4096).unwrap();
        address += bytes;
        descriptor
    });
    chunks.collect()
}

fn import(gpu: &Gpu, engine_base: u64, descriptors: &[OwnedFd]) -> ImportedChunks {
    let mut range = ImportedChunks::begin(gpu, gpu.info().uuid, engine_base, BYTES).unwrap();
    for (bytes, descriptor) in SIZES.iter().zip(descriptors) {
        range.push(*bytes, descriptor.as_fd()).unwrap();
    }
    range
}

// ---- tests ----

#[test]
fn chunks_of_another_process_are_one_range_that_copies_cross() {
    let mut engine = Role::start("engine", &tested_driver());
    let base: u64 = engine.hear()[0].parse().unwrap();
    let (gpu, _) = gpus();
    let stream = stream(&gpu);
    // Closed as soon as they are imported.
    let imported = import(&gpu, base, &engine.take_descriptors(SIZES.len()));
    let map = AddressMap::new([imported.mapped().unwrap()]).unwrap();
    let pool = HostBuffer::new(&gpu, BYTES).unwrap();
    for (use_batch, use_kernel) in [(true, true), (true, false), (false, true), (false, false)] {
        let options = CopierOptions { use_batch, use_kernel, ..CopierOptions::default() };
        let mut copier = Copier::new(Arc::clone(&stream), options).unwrap();
        // Of 48 KiB and 3 MiB: each boundary of chunks lies inside a piece.
        for piece in [48 << 10, 3 * MIB] {
            let pieces =
                (0..BYTES.div_ceil(piece)).map(|index| (index * piece, piece.min(BYTES - index * piece)));
            let copies = pieces.map(|(at, len)| Copy {
                dst: pool.address() + at,
                src: map.local(base + at, len).unwrap(),
                len,
            });
            let copies: Vec<Copy> = copies.collect();
            // SAFETY: the stream is idle, and the ranges live until it is again.
            unsafe {
                pool.as_ptr().write_bytes(0, BYTES as usize);
                copier.enqueue(&copies, Direction::DeviceToHost).unwrap();
            }
            stream.synchronize().unwrap();
            // SAFETY: the stream is idle.
            let saved = unsafe { std::slice::from_raw_parts(pool.as_ptr(), BYTES as usize) };
            assert!(saved == pattern(7, BYTES as usize), "pieces of {piece} bytes by {:?}", copier.methods());
        }
    }
    write(&stream, map.local(base, BYTES).unwrap(), &pattern(9, BYTES as usize));
    engine.tell(&["loaded".into()]);
    assert_eq!(engine.hear(), ["right"]);
    drop(imported);
    engine.end();
}

#[test]
fn a_chunk_outlives_the_process_that_made_it() {
    let mut engine = Role::start("engine", &tested_driver());
    let base: u64 = engine.hear()[0].parse().unwrap();
    let descriptors = engine.take_descriptors(SIZES.len());
    engine.kill();
    let (gpu, _) = gpus();
    let imported = import(&gpu, base, &descriptors);
    drop(descriptors);
    let local = imported.mapped().unwrap().local_base;
    assert!(read(&stream(&gpu), local, BYTES as usize) == pattern(7, BYTES as usize));
}

#[test]
fn a_gpu_that_does_not_reach_a_chunk_maps_it_and_fails_to_copy_it() {
    let host = |visible, reachable| {
        let options = FakeOptions { visible: Some(visible), reachable, ..FakeOptions::default() };
        Gpu::open(Arc::new(FakeDriver::new(options).unwrap()), 0).unwrap()
    };
    let holder = host(vec![0], true);
    let memory = Chunks::alloc(&holder, &SIZES, true).unwrap();
    write(&stream(&holder), memory.base(), &pattern(3, BYTES as usize));
    let range = ChunkRange { base: memory.base(), chunks: SIZES.to_vec() };
    for (number, reachable) in [(0, false), (1, true), (1, false)] {
        let gpu = host(vec![number], reachable);
        let mut chunks = ImportedChunks::begin_from_any(&gpu, memory.base(), BYTES).unwrap();
        for (bytes, chunk) in SIZES.iter().zip(exported(&holder, &range)) {
            chunks.push(*bytes, chunk.as_fd()).unwrap();
        }
        let (stream, mut found) = (stream(&gpu), vec![0; BYTES as usize]);
        let dst = found.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: both ranges live until the stream is waited for.
        unsafe { stream.copy(Copy { dst, src: chunks.chunks().base(), len: BYTES }).unwrap() };
        let copied = stream.synchronize();
        assert_eq!(copied.is_ok(), number == 0 || reachable, "{copied:?}");
        assert_eq!(found == pattern(3, BYTES as usize), copied.is_ok());
    }
}

#[test]
fn chunks_are_told_from_other_memory_which_is_shared_as_a_whole() {
    let (gpu, _) = gpus();
    let (whole, chunks) = (gpu.alloc(BYTES).unwrap(), Chunks::alloc(&gpu, &SIZES, true).unwrap());
    assert!(!gpu.is_chunked(whole.address() + 1).unwrap());
    assert!(gpu.export(whole.address()).is_ok());
    assert!(matches!(gpu.export_chunk(whole.address()), Err(GpuError::NotShareable { .. })));
    assert!(gpu.is_chunked(chunks.base() + BYTES - 1).unwrap());
    assert!(gpu.export(chunks.base()).is_err());
}

#[test]
fn memory_that_was_not_made_for_sharing_says_what_to_do() {
    let (gpu, _) = gpus();
    let secret = Chunks::alloc(&gpu, &SIZES, false).unwrap();
    assert!(gpu.is_chunked(secret.base()).unwrap());
    let error = gpu.export_chunk(secret.base()).unwrap_err();
    assert!(matches!(error, GpuError::NotShareable { .. }), "{error:?}");
    for wanted in ["expandable_segments", "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=1", "sleep mode"] {
        assert!(error.to_string().contains(wanted), "{error}");
    }
}

#[test]
fn tensors_that_share_a_chunk_are_one_range_and_others_are_not() {
    let (gpu, _) = gpus();
    let memory = Chunks::alloc(&gpu, &SIZES, true).unwrap();
    let other = Chunks::alloc(&gpu, &[2 * MIB], true).unwrap();
    let base = memory.base();
    let tensors = [(base + MIB, 3 * MIB), (base + 4 * MIB, MIB), (other.base(), 1), (base + 100, 1)];
    let ranges = gpu.chunk_ranges(&tensors).unwrap();
    // Where the other memory lies is the driver's choice, and it may be just before.
    let wanted: HashMap<u64, u64> =
        [(base, SIZES[0]), (base + SIZES[0], SIZES[1]), (other.base(), 2 * MIB)].into();
    let mut found = HashMap::new();
    for range in &ranges {
        let mut address = range.base;
        for bytes in &range.chunks {
            assert_eq!(found.insert(address, *bytes), None, "a chunk is in two ranges: {ranges:?}");
            address += bytes;
        }
    }
    assert_eq!(found, wanted);
    let holds = |range: &&ChunkRange| (range.base..range.base + range.bytes()).contains(&base);
    assert!(ranges.iter().find(holds).unwrap().chunks.ends_with(&SIZES[..2]), "{ranges:?}");
    // Beyond the last chunk is nothing.
    let beyond = Chunks::alloc(&gpu, &[2 * MIB], true).unwrap();
    let (end, bytes) = (beyond.base(), beyond.bytes());
    drop(beyond);
    assert!(gpu.chunk_ranges(&[(end, bytes)]).is_err());
    assert!(gpu.chunk_ranges(&[(u64::MAX, 2)]).is_err());
}

#[test]
fn a_range_with_a_missing_chunk_is_not_to_be_had() {
    let (gpu, _) = gpus();
    let memory = Chunks::alloc(&gpu, &SIZES, true).unwrap();
    let range = ChunkRange { base: memory.base(), chunks: SIZES.to_vec() };
    let mut imported = import(&gpu, 1 << 40, &exported(&gpu, &range)[..2]);
    let error = imported.mapped().unwrap_err().to_string();
    assert!(error.contains("a chunk is missing") && error.contains("8388608"), "{error}");
    imported.push(SIZES[2], gpu.export_chunk(memory.base() + 8 * MIB).unwrap().as_fd()).unwrap();
    let MappedImport { engine_base, bytes, .. } = imported.mapped().unwrap();
    assert_eq!((engine_base, bytes), (1 << 40, BYTES));
}

#[test]
fn what_a_peer_says_of_its_chunks_is_not_believed() {
    let (gpu, _) = gpus();
    let uuid = gpu.info().uuid;
    let begin = |base, bytes| ImportedChunks::begin(&gpu, uuid, base, bytes);
    let total = gpu.info().total_bytes;
    for (base, bytes) in [(4096, 0), (4096, total + 2 * MIB), (u64::MAX - MIB, 2 * MIB), (4096, 2 * MIB + 1)]
    {
        assert!(begin(base, bytes).is_err(), "{base} {bytes}");
    }
    let elsewhere = ImportedChunks::begin(&gpu, [7; 16], 4096, 2 * MIB);
    assert!(matches!(elsewhere, Err(GpuError::WrongDevice { .. })));

    let memory = Chunks::alloc(&gpu, &[2 * MIB], true).unwrap();
    let chunk = gpu.export_chunk(memory.base()).unwrap();
    let mut range = begin(4096, 4 * MIB).unwrap();
    // Larger than it is, of a size that nothing has, none at all, more than the range has room for.
    for bytes in [4 * MIB, MIB, 0, 6 * MIB, u64::MAX] {
        assert!(range.push(bytes, chunk.as_fd()).is_err(), "{bytes}");
    }
    let file = File::open("/dev/null").unwrap();
    assert!(range.push(2 * MIB, file.as_fd()).is_err());
    assert!(range.mapped().is_err());
    // None of that spoiled what is right.
    range.push(2 * MIB, chunk.as_fd()).unwrap();
    range.push(2 * MIB, chunk.as_fd()).unwrap();
    assert!(range.push(2 * MIB, chunk.as_fd()).is_err());
    assert!(range.mapped().is_ok());
}

#[test]
fn dropped_chunks_are_unmapped() {
    let (gpu, _) = gpus();
    let memory = Chunks::alloc(&gpu, &SIZES, true).unwrap();
    let chunk = gpu.export_chunk(memory.base()).unwrap();
    let mut range = ImportedChunks::begin(&gpu, gpu.info().uuid, 4096, 2 * MIB).unwrap();
    range.push(2 * MIB, chunk.as_fd()).unwrap();
    let local = range.mapped().unwrap().local_base;
    let (driver, device) = gpu.raw();
    assert_eq!(driver.address_range(device, local).unwrap(), (local, 2 * MIB));
    drop(range);
    assert!(driver.address_range(device, local).is_err());
    // The exporter's own mapping is another.
    assert!(driver.address_range(device, memory.base()).is_ok());
}
