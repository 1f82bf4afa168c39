//! Workers describe their shards over real sockets: which descriptions are refused, and what the status shows.

#![allow(clippy::unwrap_used, reason = "a test may fail here")]

use std::time::{Duration, Instant};

use crate::support::*;
use kvlane_block::{Axis, Dimension, Heads, LayerLayout, Region, ShardLayout, ShardPlace};
use kvlane_client::{OwnBlocks, Scheduler, Tool, Worker, WorkerGroupSpec};
use kvlane_proto::Address;

const BLOCKS: u64 = 8;

/// 4096 bytes a block, in as many heads.
fn layout(heads: u32) -> ShardLayout {
    let dimension = |axis, index, size| Dimension { axis, index: Some(index), size };
    let layer = LayerLayout {
        name: "model.layers.0.attn".into(),
        part: 0,
        dtype: "torch.bfloat16".into(),
        element_bytes: 2,
        backend: "FLASH_ATTN".into(),
        dimensions: vec![
            dimension(Axis::Head, 0, heads),
            dimension(Axis::Token, 1, 16),
            dimension(Axis::Content, 2, 128 / heads),
        ],
        heads: Some(Heads { count: heads, size: 64 / heads, place: None }),
        tokens: Some(16),
    };
    let place = ShardPlace { index: 0, holders: 1, tensor_parallel: 1, pipeline_parallel: 1 };
    ShardLayout { place, layers: vec![layer] }
}

/// An engine of one worker. The memory goes after the worker.
struct Described {
    worker: Worker,
    _scheduler: Scheduler,
    _memory: Vec<u8>,
}

impl Described {
    fn start(address: &Address, id: &str, digest: u8, layout: Option<ShardLayout>) -> Self {
        let memory = vec![0; 4096 * BLOCKS as usize];
        let base = memory.as_ptr() as u64;
        let region =
            Region { base, block_stride: 4096, blocks: BLOCKS, piece_bytes: 4096, piece_offsets: vec![0] };
        let mut scheduler = scheduler(address, id, PATIENCE);
        let deadline = Instant::now() + PATIENCE;
        while !scheduler.is_connected() {
            assert!(Instant::now() < deadline, "the scheduler is not connected");
            scheduler.tick();
            std::thread::yield_now();
        }
        let group =
            WorkerGroupSpec { namespace: [3; 16], layout: [digest; 16], regions: vec![region], replicas: 1 };
        // SAFETY: fields are dropped in their order, so the worker is closed before the memory goes.
        let own = unsafe { OwnBlocks::new(vec![group], None) }.described(vec![layout]);
        let worker = Worker::start(worker_options(address, id, own, Duration::from_secs(5))).unwrap();
        Self { worker, _scheduler: scheduler, _memory: memory }
    }
}

#[test]
fn a_worker_whose_digest_has_another_description_hears_what_differs() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let _daemon = start(&address);
    let first = Described::start(&address, "first", 1, Some(layout(8)));
    assert!(first.worker.wait_registered(PATIENCE), "{}", first.worker.refusal());

    let other = Described::start(&address, "other", 1, Some(layout(4)));
    assert!(!other.worker.wait_registered(PATIENCE));
    let refusal = other.worker.refusal();
    let difference = "layer model.layers.0.attn: 4 KV heads x 16 here, 8 KV heads x 8 there";
    assert!(refusal.contains(difference), "{refusal}");

    // Neither those that say the same nor those of earlier versions, which say nothing.
    for (id, described) in [("same", Some(layout(8))), ("silent", None)] {
        let engine = Described::start(&address, id, 1, described);
        assert!(engine.worker.wait_registered(PATIENCE), "{}", engine.worker.refusal());
    }
    assert!(first.worker.is_connected());
}

#[test]
fn a_description_of_other_bytes_than_the_regions_have_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let _daemon = start(&address);
    let mut twice = layout(8);
    twice.layers[0].dimensions[1].size = 32;
    let engine = Described::start(&address, "engine", 1, Some(twice));
    let refusal = engine.worker.refusal();
    assert!(refusal.contains("describes 8192 bytes of a block, and its regions have 4096"), "{refusal}");
}

#[test]
fn status_tells_the_layout_of_each_space() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let _daemon = start(&address);
    let engines = [("eight", 1, Some(layout(8))), ("four", 2, Some(layout(4))), ("silent", 3, None)]
        .map(|(id, digest, layout)| Described::start(&address, id, digest, layout));
    for engine in &engines {
        assert!(engine.worker.wait_registered(PATIENCE), "{}", engine.worker.refusal());
    }
    let status = Tool::connect(&address, PATIENCE).unwrap().status().unwrap();
    let mut layouts: Vec<_> = status.namespaces.into_iter().map(|space| space.layout).collect();
    layouts.sort();
    let (four, eight) = (
        "1 layer, 4 KV heads x 16, bfloat16, 16 tokens, HNC",
        "1 layer, 8 KV heads x 8, bfloat16, 16 tokens, HNC",
    );
    assert_eq!(layouts, ["", four, eight]);
}
