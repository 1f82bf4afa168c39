//! The daemon reads fence and flags where a worker writes them: at each offset of the diagram in lib.rs.
#![allow(clippy::unwrap_used)]

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use kvlane_block::Region;
use kvlane_engine_memory::{
    EVENTS, FENCE_BYTES, FenceValue, Flags, HostFence, ProcessVm, WorkerFence, WorkerGpu, word_address,
};
use kvlane_fake_gpu::{FakeDriver, FakeOptions};
use kvlane_gpu::{Copy, Driver, Gpu, Priority, Stream};
use kvlane_memory::{ProbeError, peer_pidfd};

const NONCE: [u8; 16] = *b"nonce of engine.";

fn probe(address: u64, nonce: [u8; 16]) -> Result<ProcessVm, ProbeError> {
    let (one, _other) = UnixStream::pair().unwrap();
    ProcessVm::probe(std::process::id(), peer_pidfd(&one).unwrap(), address, nonce)
}

#[test]
fn the_daemon_reads_the_fence_that_a_worker_holds_in_host_memory() {
    let fence = HostFence::new(NONCE);
    let process = probe(fence.address(), NONCE).unwrap();
    assert_eq!(process.fence(), Ok(1));
    fence.raise_to(0x0102_0304_0506);
    assert_eq!(process.fence(), Ok(0x0102_0304_0506));
    fence.raise_to(3);
    assert_eq!(process.fence(), Ok(0x0102_0304_0506), "it never falls: what was given up stays so");
    // The controls: read eight bytes too far, or with another nonce.
    assert_eq!(probe(fence.address() + 8, NONCE).unwrap_err(), ProbeError::WrongNonce);
    assert_eq!(probe(fence.address(), [0; 16]).unwrap_err(), ProbeError::WrongNonce);
}

#[test]
fn a_worker_writes_fence_and_flags_into_gpu_memory_where_the_daemon_looks() {
    let driver = Arc::new(FakeDriver::new(FakeOptions::default()).unwrap()) as Arc<dyn Driver>;
    let gpu = Gpu::open(Arc::clone(&driver), 0).unwrap();
    let blocks = gpu.alloc(2 << 20).unwrap();
    let region = Region {
        base: blocks.address(),
        block_stride: 4096,
        blocks: 4,
        piece_bytes: 4096,
        piece_offsets: vec![0],
    };
    let worker = Arc::new(WorkerGpu::with_driver(driver, gpu.info().uuid, &[region]).unwrap());
    let base = worker.exported().fence.base;
    let stream = Stream::new(&gpu, Priority::Normal).unwrap();
    let read = |offset: u64, bytes: &mut [u8]| {
        let dst = bytes.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: both sides live until the stream is synchronized.
        unsafe { stream.copy(Copy { dst, src: base + offset, len: bytes.len() as u64 }) }.unwrap();
        stream.synchronize().unwrap();
    };
    let fence_now = || {
        let mut bytes = [0; FENCE_BYTES];
        read(0, &mut bytes);
        FenceValue::from_bytes(bytes)
    };
    let word = |offset: u64| {
        let mut bytes = [0; 4];
        read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    };

    let fence = WorkerFence::new(NONCE, Some(Arc::clone(&worker)));
    assert_eq!(fence_now(), FenceValue { nonce: NONCE, epoch: 1 });
    fence.raise_to(0x0102_0304);
    assert_eq!(fence_now(), FenceValue { nonce: NONCE, epoch: 0x0102_0304 });

    // The last event's first two words, which stand at 65536 + 1024 * 255.
    let first = word_address(worker.first_flag(), EVENTS - 1, 0);
    assert_eq!(first, base + 65536 + 1024 * 255);
    assert_eq!((word(65536), word(326_656), word(326_660)), (0, 0, 0));
    worker.write_flags(&Flags::new(first, 7, vec![0], vec![vec![1], vec![2]], vec![1, 2]));
    assert_eq!((word(65536), word(326_656), word(326_660), word(326_664)), (0, 7, 7, 0));
}
