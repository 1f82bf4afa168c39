//! The kernel reads its tables in pinned memory while it runs, so a copier writes no table before its launch is done.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::support::{Gate, device_memory, fake, pattern, read, stream};
use kvlane_fake_gpu::{FakeOptions, Method};
use kvlane_gpu::{Copier, CopierOptions, Copy, DeviceMemory, Direction, GpuError, Stream};

const PIECE: usize = 64;
const PIECES: usize = 96;
const BYTES: usize = PIECE * PIECES;

/// The pieces of `from`, in reverse order in `to`.
fn reversal(to: &DeviceMemory, from: &DeviceMemory) -> Vec<Copy> {
    let at = |memory: &DeviceMemory, piece: usize| memory.address() + (piece * PIECE) as u64;
    let copy = |piece| Copy { dst: at(to, PIECES - 1 - piece), src: at(from, piece), len: PIECE as u64 };
    (0..PIECES).map(copy).collect()
}

fn reversed(content: &[u8]) -> Vec<u8> {
    content.chunks(PIECE).rev().flatten().copied().collect()
}

/// Tables for a twelfth of the pieces in all, of which two are in use at a time.
fn copier(stream: &Arc<Stream>) -> Copier {
    let options = CopierOptions { table_entries: PIECES / 12, tables: 2, ..CopierOptions::default() };
    Copier::new(Arc::clone(stream), options).unwrap()
}

#[test]
fn a_slow_device_reads_every_table_before_it_is_written_again() {
    let (driver, gpu, _) = fake(FakeOptions::default());
    let stream = stream(&gpu);
    let content = pattern(1, BYTES);
    let (from, to) = (device_memory(&stream, &content), device_memory(&stream, &pattern(2, BYTES)));
    // A launch of 512 bytes takes about 2 ms, in which all twelve tables could be written.
    driver.slow_down(Duration::from_secs(4));
    let mut copier = copier(&stream);
    // SAFETY: the ranges are the test's own, and the stream is waited for.
    let enqueued = unsafe { copier.enqueue(&reversal(&to, &from), Direction::Peer).unwrap() };
    driver.slow_down(Duration::ZERO);
    assert_eq!((enqueued.kernel.calls, enqueued.kernel.copies), (12, PIECES as u64));
    assert!(read(&stream, to.address(), BYTES) == reversed(&content));
}

#[test]
fn enqueueing_waits_only_while_all_tables_are_in_use() {
    let (driver, gpu, _) = fake(FakeOptions::default());
    let stream = stream(&gpu);
    let content = pattern(1, BYTES);
    let (from, to) = (device_memory(&stream, &content), device_memory(&stream, &pattern(2, BYTES)));
    let copies = reversal(&to, &from);
    let (first, rest) = copies.split_at(PIECES / 6);
    let mut copier = copier(&stream);
    driver.clear_log();
    let gate = Gate::across(&stream);
    // SAFETY: the ranges are the test's own, and the stream is waited for.
    unsafe { copier.enqueue(first, Direction::Peer).unwrap() };
    assert_eq!(driver.log().iter().filter(|call| call.method == Method::Kernel).count(), 2);

    let open = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: as above.
            unsafe { copier.enqueue(rest, Direction::Peer).unwrap() };
            assert!(open.load(Ordering::SeqCst), "a table was taken from a launch that had not run");
        });
        open.store(true, Ordering::SeqCst);
        gate.open();
    });
    assert!(read(&stream, to.address(), BYTES) == reversed(&content));
}

#[test]
fn a_table_whose_launch_nobody_can_wait_for_is_not_written_again() {
    let (driver, gpu, _) = fake(FakeOptions::default());
    let stream = stream(&gpu);
    let content = pattern(1, BYTES);
    let (from, to) = (device_memory(&stream, &content), device_memory(&stream, &pattern(2, BYTES)));
    let copies = reversal(&to, &from);
    let (first, rest) = copies.split_at(PIECES / 6);
    let mut copier = copier(&stream);
    driver.slow_down(Duration::from_secs(4));
    // The second of two launches waits for the first, and is enqueued although its record fails.
    driver.fail_call(0, Some("cuEventRecord"), 2, 1);
    // SAFETY: the ranges are the test's own, and the stream is waited for.
    let failed = unsafe { copier.enqueue(first, Direction::Peer) };
    assert_eq!(failed.unwrap_err().code(), Some(1));
    // SAFETY: as above.
    unsafe { copier.enqueue(rest, Direction::Peer).unwrap() };
    driver.slow_down(Duration::ZERO);
    assert!(read(&stream, to.address(), BYTES) == reversed(&content));
}

#[test]
fn a_copier_goes_on_after_calls_that_fail() {
    let (driver, gpu, _) = fake(FakeOptions::default());
    let stream = stream(&gpu);
    let content = pattern(1, BYTES);
    let (from, to) = (device_memory(&stream, &content), device_memory(&stream, &pattern(2, BYTES)));
    let copies = reversal(&to, &from);
    let mut copier = copier(&stream);
    for operation in ["cuMemHostAlloc", "cuEventCreate", "cuLaunchKernel", "cuEventRecord", "cuEventQuery"] {
        driver.fail_call(0, Some(operation), 1, 1);
        // SAFETY: the ranges are the test's own, and the stream is waited for.
        let failed = unsafe { copier.enqueue(&copies, Direction::Peer) };
        assert!(matches!(failed, Err(GpuError::Cuda { code: 1, .. })), "{operation}: {failed:?}");
    }
    // SAFETY: as above.
    unsafe { copier.enqueue(&copies, Direction::Peer).unwrap() };
    assert!(read(&stream, to.address(), BYTES) == reversed(&content));
}

#[test]
fn a_list_of_any_length_is_enqueued_in_parts() {
    const MANY: usize = 50_000;
    let (_driver, gpu, _) = fake(FakeOptions::default());
    let stream = stream(&gpu);
    let content = pattern(1, 32 * MANY);
    let (from, to) = (device_memory(&stream, &content), device_memory(&stream, &pattern(2, 32 * MANY)));
    // Every second unit of 16 bytes, so that no two copies are adjacent.
    let offsets = (0..MANY as u64).map(|index| 32 * index);
    let copies: Vec<_> = offsets
        .map(|offset| Copy { dst: to.address() + offset, src: from.address() + offset, len: 16 })
        .collect();
    let mut copier = Copier::new(Arc::clone(&stream), CopierOptions::default()).unwrap();
    // SAFETY: the ranges are the test's own, and the stream is waited for.
    let enqueued = unsafe { copier.enqueue(&copies, Direction::Peer).unwrap() };
    assert_eq!((enqueued.kernel.calls, enqueued.kernel.copies), (6, MANY as u64));
    let arrived = read(&stream, to.address(), 32 * MANY);
    let (old, units) = (pattern(2, 32 * MANY), 0..2 * MANY);
    assert!(units.into_iter().all(|unit| {
        let range = 16 * unit..16 * unit + 16;
        arrived[range.clone()] == if unit % 2 == 0 { &content[range] } else { &old[range] }[..]
    }));
}

#[test]
fn options_that_allow_nothing_are_refused() {
    let (_driver, gpu, _) = fake(FakeOptions::default());
    let stream = stream(&gpu);
    let sound = CopierOptions::default();
    for options in [
        CopierOptions { tables: 0, ..sound.clone() },
        CopierOptions { table_entries: 0, ..sound.clone() },
        CopierOptions { host_blocks: 0, ..sound.clone() },
        CopierOptions { peer_blocks: 0, ..sound },
    ] {
        assert!(matches!(Copier::new(Arc::clone(&stream), options), Err(GpuError::Invalid(_))));
    }
}
