//! Each way to copy brings the bytes that a loop over the list would move, for any list.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use crate::support::{device_memory, fake, pattern, read, stream, write};
use kvlane_fake_gpu::{FakeOptions, Method};
use kvlane_gpu::plan::Thresholds;
use kvlane_gpu::{Copier, CopierOptions, Copy, CopyMethods, Direction, Pinned};
use proptest::collection::vec;
use proptest::prelude::*;

const BYTES: usize = 128 << 10;
/// Small, so that copies cross the places where registrations meet.
const CHUNK_BYTES: u64 = 12 << 10;

/// A list of copies by offsets, and how it is done.
#[derive(Debug, Clone)]
struct Case {
    copies: Vec<Copy>,
    methods: CopyMethods,
    options: CopierOptions,
    direction: Direction,
}

/// Destinations do not overlap and come in any order; sources may lie anywhere.
fn copies() -> impl Strategy<Value = Vec<Copy>> {
    let piece = (prop_oneof![1..200u64, 1..9000u64], 0..3u64, any::<bool>(), 0..BYTES as u64, any::<bool>());
    vec(piece, 0..40).prop_map(|pieces| {
        let mut copies: Vec<Copy> = Vec::new();
        let mut free = 0;
        for (len, gap, aligned, src, follows) in pieces {
            let grain = if aligned { 16 } else { 1 };
            let len = len.next_multiple_of(grain);
            let dst = (free + gap * grain).next_multiple_of(grain);
            let src = match copies.last() {
                Some(last) if follows => last.src + last.len,
                _ => src - src % grain,
            };
            if dst + len > BYTES as u64 || src + len > BYTES as u64 {
                continue;
            }
            copies.push(Copy { dst, src, len });
            free = dst + len;
        }
        copies
    })
}

fn case() -> impl Strategy<Value = Case> {
    let shape = (1..12usize, 1..4usize, 1..20_000u64, 1..5000u64);
    let direction =
        prop_oneof![Just(Direction::HostToDevice), Just(Direction::DeviceToHost), Just(Direction::Peer)];
    let in_order_or_not = prop_oneof![copies(), copies().prop_shuffle()];
    let case = (in_order_or_not, any::<bool>(), any::<bool>(), shape, direction);
    case.prop_map(|(copies, batch, kernel, (table_entries, tables, engine_bytes, piece_bytes), direction)| {
        let thresholds = Thresholds { engine_bytes, batch_bytes: engine_bytes / 2, piece_bytes };
        let options = CopierOptions { thresholds, table_entries, tables, ..CopierOptions::default() };
        Case { copies, methods: CopyMethods { batch, kernel }, options, direction }
    })
}

/// Host memory that the driver did not allocate, aligned as a pool is.
fn host_memory(content: &[u8]) -> Vec<u128> {
    let words = content.chunks_exact(16).map(|word| u128::from_ne_bytes(word.try_into().unwrap()));
    words.collect()
}

fn bytes_of(memory: &[u128]) -> Vec<u8> {
    memory.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn check(case: &Case) {
    let (driver, gpu, peer) = fake(FakeOptions { methods: case.methods.clone(), ..FakeOptions::default() });
    gpu.enable_peer(&peer).unwrap();
    let stream = stream(&gpu);
    let (source, before) = (pattern(1, BYTES), pattern(2, BYTES));
    let mut expected = before.clone();
    for Copy { dst, src, len } in case.copies.iter().copied() {
        expected[dst as usize..][..len as usize].copy_from_slice(&source[src as usize..][..len as usize]);
    }

    let from_host = case.direction == Direction::HostToDevice;
    let mut host = host_memory(if from_host { &source } else { &before });
    let host_address = host.as_mut_ptr().expose_provenance() as u64;
    // SAFETY: the memory lives until the end of this function, when the stream is idle.
    let pinned = unsafe { Pinned::new(&gpu, host_address, BYTES as u64, CHUNK_BYTES, |_| {}).unwrap() };
    let near = device_memory(&stream, if from_host { &before } else { &source });
    let far = peer.alloc(BYTES as u64).unwrap();
    write(&stream, far.address(), &before);
    let (dst_base, src_base) = match case.direction {
        Direction::HostToDevice => (near.address(), host_address),
        Direction::DeviceToHost => (host_address, near.address()),
        Direction::Peer => (far.address(), near.address()),
    };

    driver.clear_log();
    let moved = |copy: &Copy| Copy { dst: dst_base + copy.dst, src: src_base + copy.src, len: copy.len };
    let copies: Vec<Copy> = case.copies.iter().map(moved).collect();
    let options = CopierOptions { seams: pinned.seams().to_vec(), ..case.options.clone() };
    let mut copier = Copier::new(stream.clone(), options).unwrap();
    // SAFETY: the ranges lie in memory of this test, which waits for the stream before it looks at it.
    let enqueued = unsafe { copier.enqueue(&copies, case.direction).unwrap() };
    stream.synchronize().unwrap();
    let log = driver.log();

    let arrived = match case.direction {
        Direction::DeviceToHost => bytes_of(&host),
        _ => read(&stream, dst_base, BYTES),
    };
    assert!(arrived == expected, "wrong bytes");

    let bytes: u64 = case.copies.iter().map(|copy| copy.len).sum();
    assert_eq!(enqueued.single.bytes + enqueued.batch.bytes + enqueued.kernel.bytes, bytes);
    for (method, amount) in [
        (Method::Single, enqueued.single),
        (Method::Batch, enqueued.batch),
        (Method::Kernel, enqueued.kernel),
    ] {
        let calls = log.iter().filter(|call| call.method == method);
        let counted =
            calls.clone().fold((0, 0), |(copies, bytes), call| (copies + call.copies, bytes + call.bytes));
        assert_eq!(
            (calls.count() as u64, counted),
            (amount.calls, (amount.copies, amount.bytes)),
            "{method:?}"
        );
    }
    assert!(case.methods.batch || enqueued.batch.calls == 0);
    assert!(case.methods.kernel || enqueued.kernel.calls == 0);
    drop(pinned);
}

proptest! {
    #[test]
    fn copies_move_exactly_the_bytes_of_the_model(case in case()) {
        check(&case);
    }
}
