//! Copies by a worker's own process, into blocks on a GPU.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use kvlane_block::{BlockId, Rank, Region};
use kvlane_engine_memory::{Copied, LoadGroup, OwnBlocks, OwnError, WorkerGpu, WorkerGroupSpec};
use kvlane_fake_gpu::{FakeDriver, FakeOptions};
use kvlane_gpu::{Driver, Gpu};
use kvlane_memory::{Arena, ArenaOptions, HugePages, Numa, PoolPage, PoolView};

/// What a GPU's blocks hold is the daemon's to copy: this process would read addresses of the GPU as its own.
#[test]
fn a_worker_on_a_gpu_loads_by_itself_and_saves_nothing() {
    let driver = Arc::new(FakeDriver::new(FakeOptions::default()).unwrap()) as Arc<dyn Driver>;
    let gpu = Gpu::open(Arc::clone(&driver), 0).unwrap();
    let memory = gpu.alloc(2 << 20).unwrap();
    let region = Region {
        base: memory.address(),
        block_stride: 4096,
        blocks: 4,
        piece_bytes: 4096,
        piece_offsets: vec![0],
    };
    let worker = WorkerGpu::with_driver(driver, gpu.info().uuid, std::slice::from_ref(&region)).unwrap();
    let group = WorkerGroupSpec { namespace: [1; 16], layout: [2; 16], regions: vec![region], replicas: 1 };
    // SAFETY: the memory lives to the end of the test, and nobody else uses its blocks.
    let blocks = unsafe { OwnBlocks::new(vec![group], Some(Arc::new(worker))) };
    let copies = blocks.of_rank(Rank(0)).unwrap();
    let options = ArenaOptions { bytes: 64 << 10, hugepages: HugePages::Off, numa: Numa::Off, threads: 1 };
    let pool = Arena::create(&options, &|_| {}).unwrap();
    let view = PoolView::map(pool.descriptor(true).unwrap(), pool.bytes(), true).unwrap();

    let load = LoadGroup { group: 0, block_ids: vec![BlockId(2)], pages: vec![PoolPage(5)] };
    assert_eq!(copies.load(&[load], None, &view), Ok(Copied { blocks: 1, bytes: 4096 }));
    assert_eq!(copies.save(&[(0, vec![(BlockId(2), PoolPage(5))])], &view), Err(OwnError::OnGpu));
}
