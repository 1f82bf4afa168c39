//! Properties that only a real GPU can show. Without KVLANE_TEST_DRIVER=cuda these tests do nothing. This command also runs the
//! tests of any driver, above all chunks.rs (memory by the driver's API for virtual memory), on the real GPU:
//!
//!     KVLANE_TEST_DRIVER=cuda cargo test --release -p kvlane-gpu -- --nocapture --test-threads=1
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::sync::Arc;
use std::time::Instant;

use crate::support::{device_memory, gpus, pattern, read, stream, tested_driver};
use kvlane_gpu::bench::{CopyMethod, Path, Shape};
use kvlane_gpu::calibrate::CALIBRATION_BYTES;
use kvlane_gpu::plan::Thresholds;
use kvlane_gpu::{
    Calibration, Copier, CopierOptions, Copy, Direction, HostBuffer, Pinned, RailChoice, RailOptions, Rails,
    measure_copy, measure_rails,
};

const BYTES: usize = 8 << 20;

fn is_real() -> bool {
    tested_driver() == "cuda"
}

/// Pieces of mixed length and alignment that fill the destination, in an order of their own.
fn mixed_copies() -> Vec<Copy> {
    let mut copies = Vec::new();
    let mut dst = 0;
    for (index, len) in
        [16u64, 4096, 4095, 48, 65_552, 1 << 20, 1, 262_144, 12_288].iter().cycle().enumerate()
    {
        if dst + len > BYTES as u64 {
            break;
        }
        let room = BYTES as u64 - len;
        let src = (index as u64 * 7_654_320) % room;
        copies.push(Copy { dst, src: src - src % if index % 3 == 0 { 1 } else { 16 }, len: *len });
        dst += len;
    }
    copies.reverse();
    copies
}

#[test]
fn every_way_to_copy_moves_the_same_bytes() {
    if !is_real() {
        return println!(
            "not tested: every_way_to_copy_moves_the_same_bytes: KVLANE_TEST_DRIVER is not cuda"
        );
    }
    let (gpu, peer) = gpus();
    assert!(gpu.methods().kernel, "the kernel must load");
    let stream = stream(&gpu);
    if peer.info().ordinal != gpu.info().ordinal {
        gpu.enable_peer(&peer).unwrap();
    }
    let (content, before) = (pattern(1, BYTES), pattern(2, BYTES));
    let mut expected = before.clone();
    for Copy { dst, src, len } in mixed_copies() {
        expected[dst as usize..][..len as usize].copy_from_slice(&content[src as usize..][..len as usize]);
    }
    let host = HostBuffer::new(&gpu, BYTES as u64).unwrap();
    let near = device_memory(&stream, &content);
    for direction in [Direction::HostToDevice, Direction::DeviceToHost, Direction::Peer] {
        for (use_batch, use_kernel) in [(true, true), (true, false), (false, true), (false, false)] {
            for engine_bytes in [1 << 18, u64::MAX] {
                let thresholds =
                    Thresholds { engine_bytes, batch_bytes: engine_bytes, ..Thresholds::default() };
                let options = CopierOptions {
                    use_batch,
                    use_kernel,
                    thresholds,
                    table_entries: 100,
                    ..CopierOptions::default()
                };
                let mut copier = Copier::new(Arc::clone(&stream), options).unwrap();
                let start = if direction == Direction::HostToDevice { &content } else { &before };
                // SAFETY: the stream is idle.
                unsafe { host.as_ptr().copy_from_nonoverlapping(start.as_ptr(), BYTES) };
                let far = device_memory(&crate::support::stream(&peer), &before);
                let (dst, src) = match direction {
                    Direction::HostToDevice => (far.address(), host.address()),
                    Direction::DeviceToHost => (host.address(), near.address()),
                    Direction::Peer => (far.address(), near.address()),
                };
                let moved = |copy: Copy| Copy { dst: dst + copy.dst, src: src + copy.src, len: copy.len };
                let copies: Vec<_> = mixed_copies().into_iter().map(moved).collect();
                // SAFETY: the ranges are the test's own, and the stream is waited for.
                unsafe { copier.enqueue(&copies, direction).unwrap() };
                stream.synchronize().unwrap();
                assert!(
                    read(&stream, dst, BYTES) == expected,
                    "{direction:?} batch {use_batch} kernel {use_kernel} engine from {engine_bytes}"
                );
            }
        }
    }
}

#[test]
fn a_pool_that_is_pinned_in_chunks_is_copied_across_its_seams() {
    if !is_real() {
        return println!(
            "not tested: a_pool_that_is_pinned_in_chunks_is_copied_across_its_seams: KVLANE_TEST_DRIVER is not cuda"
        );
    }
    let (gpu, _) = gpus();
    let stream = stream(&gpu);
    let content = pattern(3, BYTES);
    // Aligned to a page, as a pool is.
    let pool = vec![0u8; BYTES + 4096];
    let start = (pool.as_ptr().expose_provenance() as u64).next_multiple_of(4096);
    let first: *mut u8 = std::ptr::with_exposed_provenance_mut(start as usize);
    // SAFETY: the range is in the vector, which nobody else uses.
    unsafe { first.copy_from_nonoverlapping(content.as_ptr(), BYTES) };
    // SAFETY: the vector outlives what pins it.
    let pinned = unsafe { Pinned::new(&gpu, start, BYTES as u64, 1 << 20, |_| {}).unwrap() };
    let device = device_memory(&stream, &pattern(4, BYTES));
    let whole = Copy { dst: device.address(), src: start, len: BYTES as u64 };
    // SAFETY: the ranges are the test's own, and the stream is waited for.
    let across = unsafe { stream.copy(whole) }.and_then(|()| stream.synchronize());
    assert_eq!(across.unwrap_err().code(), Some(1), "if this works, seams are not needed");
    for use_kernel in [false, true] {
        let engine_bytes = if use_kernel { u64::MAX } else { 1 << 20 };
        let thresholds = Thresholds { engine_bytes, batch_bytes: engine_bytes, ..Thresholds::default() };
        let options = CopierOptions {
            seams: pinned.seams().to_vec(),
            use_kernel,
            thresholds,
            ..CopierOptions::default()
        };
        let fresh = device_memory(&stream, &pattern(5, BYTES));
        let mut copier = Copier::new(Arc::clone(&stream), options).unwrap();
        // SAFETY: as above.
        unsafe {
            copier.enqueue(&[Copy { dst: fresh.address(), ..whole }], Direction::HostToDevice).unwrap()
        };
        assert!(read(&stream, fresh.address(), BYTES) == content);
    }
    drop(pinned);
}

#[test]
fn loads_over_several_links_bring_the_same_bytes() {
    if !is_real() {
        return println!(
            "not tested: loads_over_several_links_bring_the_same_bytes: KVLANE_TEST_DRIVER is not cuda"
        );
    }
    let (gpu, peer) = gpus();
    if peer.info().ordinal == gpu.info().ordinal {
        return println!("not tested: loads_over_several_links_bring_the_same_bytes: there is one GPU");
    }
    let rails = Rails::new(gpu.driver(), &[], RailOptions::default()).unwrap();
    let reached = rails.loader(&gpu, "a test").reached();
    println!("NVLink to GPU {}: {:?}; rails: {reached:?}", peer.info().ordinal, gpu.is_linked(&peer));
    for total_bytes in [100 << 20, 1 << 30] {
        let shape =
            Shape { total_bytes, piece_bytes: 64 << 10, joined: 4, shuffled: true, path: Path::HostToDevice };
        let one_link = measure_copy(&gpu, &shape, CopyMethod::Contiguous).unwrap();
        println!("{} MiB, one link, contiguous: {one_link:.1} GB/s", total_bytes >> 20);
        for (slot_mib, slots) in [(2, 8), (4, 8), (8, 8), (16, 4), (16, 8), (32, 4)] {
            for staged in [false, true] {
                let rates = (0..=reached.len()).map(|count| {
                    let choice = RailChoice::List(reached[..count].iter().map(u32::to_string).collect());
                    let options =
                        RailOptions { choice, slot_bytes: slot_mib << 20, slots, ..RailOptions::default() };
                    format!("{:.1}", measure_rails(&gpu, options, &shape, staged).unwrap())
                });
                let rates: Vec<String> = rates.collect();
                let how = if staged { "staged" } else { "direct" };
                println!("  {slots} slots of {slot_mib} MiB, {how}, by number of rails: {}", rates.join(" "));
            }
        }
    }
}

#[test]
fn what_a_daemon_measures_at_its_start_is_printed() {
    if !is_real() {
        return println!(
            "not tested: what_a_daemon_measures_at_its_start_is_printed: KVLANE_TEST_DRIVER is not cuda"
        );
    }
    let (gpu, _) = gpus();
    let host = HostBuffer::new(&gpu, CALIBRATION_BYTES).unwrap();
    let start = Instant::now();
    // SAFETY: the buffer is pinned, and the test's own.
    let measured = unsafe { Calibration::measure(&gpu, host.address(), host.bytes()).unwrap() };
    println!("calibrated in {:.3} s", start.elapsed().as_secs_f64());
    for rate in measured.rates() {
        println!("{rate:?}");
        assert!(rate.gb_per_s > 0.0);
    }
    for direction in [Direction::HostToDevice, Direction::DeviceToHost] {
        println!("{direction:?}: {:?}", measured.thresholds(direction));
    }
}

#[test]
fn rates_are_printed() {
    if !is_real() {
        return println!("not tested: rates_are_printed: KVLANE_TEST_DRIVER is not cuda");
    }
    let (gpu, peer) = gpus();
    println!("{:?}", gpu.info());
    let mut paths = vec![("host to device", Path::HostToDevice), ("device to host", Path::DeviceToHost)];
    if peer.info().ordinal != gpu.info().ordinal {
        paths.push(("GPU to GPU", Path::Peer(peer)));
    }
    for (name, path) in paths {
        for piece_bytes in [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20] {
            let shape =
                Shape { total_bytes: 256 << 20, piece_bytes, joined: 1, shuffled: true, path: path.clone() };
            let mut line = format!("{name:14} {:4} KiB", piece_bytes >> 10);
            for method in [
                CopyMethod::Contiguous,
                CopyMethod::CopyEngine,
                CopyMethod::Batch,
                CopyMethod::Kernel { blocks: 8 },
                CopyMethod::Kernel { blocks: 16 },
                CopyMethod::Kernel { blocks: 32 },
                CopyMethod::Auto,
            ] {
                let rate = measure_copy(&gpu, &shape, method).unwrap();
                line += &format!("  {method:?} {rate:.1}");
            }
            println!("{line}");
        }
    }
}
