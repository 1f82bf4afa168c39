//! Loads of a model whose layers belong to two groups, which are released before their end.
//!
//! ```text
//!  layer          0       1       2       3       4       5
//!  full                           0                       1
//!  window         0       1               2       3                 the last two blocks of a prompt
//! ```

use std::{sync::Arc, time::Instant};

use kvlane_block::{BlockId, Rank, Region};
use kvlane_client::{
    EngineStream, Finished, JobKind, LoadGroup, OwnBlocks, Release, SaveGroupSpec, Scheduler, Worker,
    WorkerGpu, WorkerGroupSpec,
};
use kvlane_gpu::{Copy, DeviceMemory, HostBuffer, Priority, Stream};
use kvlane_memory::PoolPage;
use kvlane_proto::Address;

use crate::{
    daemon::Daemon,
    driver::{BLOCKS, VERY_SLOW, driver, engines_gpu, is_real, many, piece},
    support::{PATIENCE, address, hashes, scheduler_of, settle, worker_options},
};

/// The layers of each group, by region.
const LAYERS_OF: [&[u32]; 2] = [&[2, 5], &[0, 1, 3, 4]];
const LAYERS: u32 = 6;
const WINDOW_BLOCKS: u32 = 2;

struct Hybrid {
    scheduler: Scheduler,
    worker: Worker,
    stream: Stream,
    memory: DeviceMemory,
    heard: Vec<Finished>,
}

impl Hybrid {
    fn new(address: &Address) -> Self {
        let gpu = engines_gpu(&driver());
        let memory = gpu.alloc(u64::from(BLOCKS * LAYERS) * piece()).unwrap();
        let region = |layer: &u32| Region {
            base: place(&memory, *layer, 0),
            block_stride: piece(),
            blocks: BLOCKS.into(),
            piece_bytes: piece(),
            piece_offsets: vec![0],
        };
        let group = |(number, layers): (u8, &&[u32])| WorkerGroupSpec {
            namespace: [number; 16],
            layout: [number; 16],
            regions: layers.iter().map(region).collect(),
            replicas: 1,
        };
        let groups: Vec<WorkerGroupSpec> = (0..).zip(&LAYERS_OF).map(group).collect();
        let regions: Vec<Region> = groups.iter().flat_map(|group| group.regions.clone()).collect();
        let mine = WorkerGpu::with_driver(gpu.driver(), gpu.info().uuid, &regions).unwrap();
        // SAFETY: the memory is freed after the worker: fields are dropped in order.
        let blocks = unsafe { OwnBlocks::new(groups, Some(Arc::new(mine))) };
        let blocks = blocks.read_by(LAYERS_OF.map(<[u32]>::to_vec).to_vec());
        let worker = Worker::start(worker_options(address, "hybrid", blocks, PATIENCE)).unwrap();
        let groups = [([0; 16], 0), ([1; 16], WINDOW_BLOCKS)];
        let scheduler = scheduler_of(address, "hybrid", PATIENCE, &groups);
        let stream = Stream::new(&gpu, Priority::Normal).unwrap();
        let mut engine = Self { scheduler, worker, stream, memory, heard: Vec::new() };
        (0..LAYERS).for_each(|layer| (0..BLOCKS).for_each(|block| engine.write(layer, block, 0)));
        engine
    }

    fn write(&mut self, layer: u32, block: u32, value: u8) {
        let source = HostBuffer::new(self.stream.gpu(), piece()).unwrap();
        // SAFETY: the buffer has so many bytes, and nobody else has it.
        unsafe { source.as_ptr().write_bytes(value, piece() as usize) };
        let copy = Copy { dst: place(&self.memory, layer, block), src: source.address(), len: piece() };
        // SAFETY: both sides live until the stream is synchronized.
        unsafe { self.stream.copy(copy) }.unwrap();
        self.stream.synchronize().unwrap();
    }

    /// Whether all bytes of a block in a layer are this one, after what the stream was given before.
    fn holds(&self, layer: u32, block: u32, value: u8) -> bool {
        let mut all = vec![0u8; piece() as usize];
        let dst = all.as_mut_ptr().expose_provenance() as u64;
        let copy = Copy { dst, src: place(&self.memory, layer, block), len: piece() };
        // SAFETY: both sides live until the stream is synchronized.
        unsafe { self.stream.copy(copy) }.unwrap();
        self.stream.synchronize().unwrap();
        all.iter().all(|byte| *byte == value)
    }

    fn engine_stream(&self) -> EngineStream {
        // SAFETY: the stream lives as long as the engine, which uses this at once.
        unsafe { EngineStream::from_raw(self.stream.raw()) }
    }

    fn wait_for(&self, region: Option<(u32, u32)>) {
        let jobs = self.worker.outstanding_loads();
        self.worker.wait_for_loads(&jobs, region, &self.engine_stream()).unwrap();
    }

    /// What is heard first of this kind. A release and an end may come together.
    fn hear(&mut self, kind: JobKind) -> Finished {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.heard.extend(self.worker.poll());
            if let Some(at) = self.heard.iter().position(|heard| heard.kind == kind) {
                return self.heard.swap_remove(at);
            }
            assert!(self.worker.wait(PATIENCE) && Instant::now() < deadline, "no {kind:?}");
        }
    }

    /// Computes and saves a prompt, and asks for an early load of it into other blocks: which blocks then belong to which block
    /// of the prompt.
    fn load_released(&mut self, address: &Address) -> [Vec<(u32, u32)>; 2] {
        for (layers, first) in LAYERS_OF.iter().zip([0, 8]) {
            for (layer, block) in
                layers.iter().flat_map(|layer| (0..many()).map(move |block| (*layer, block)))
            {
                self.write(layer, first + block, value(layer, block));
            }
        }
        let save = |(group, first): (u32, u32)| SaveGroupSpec {
            group,
            parent: None,
            hashes: hashes(0, many().into()),
            block_ids: (first..first + many()).map(BlockId).collect(),
        };
        let saved = [(0, 0), (1, 8)].map(save).to_vec();
        self.worker.save_after(1, saved, &self.engine_stream());
        let saved = self.hear(JobKind::Save);
        assert!(saved.ok, "{saved:?}");
        settle(address);
        let of_prompt = hashes(0, many().into());
        let hit = self.scheduler.lookup(&[of_prompt.clone(), of_prompt], u64::MAX, PATIENCE);
        let loaded = [
            (0..many()).map(|block| (20 + block, block)).collect::<Vec<_>>(),
            (many() - WINDOW_BLOCKS..many()).map(|block| (block, block)).collect(),
        ];
        let group = |(group, blocks): (u32, &Vec<(u32, u32)>)| {
            let pages = hit.pages(group, Rank(0));
            let page = |bytes: &[u8]| PoolPage(u32::from_le_bytes(bytes.try_into().unwrap()));
            LoadGroup {
                group,
                block_ids: blocks.iter().map(|(block, _)| BlockId(*block)).collect(),
                pages: pages.chunks(4).map(page).collect(),
            }
        };
        let groups = (0..).zip(&loaded).map(group).collect();
        self.worker.load_after(2, hit.boot, groups, &self.engine_stream(), Release::AtOnce);
        let released = self.hear(JobKind::Released);
        assert!(released.ok, "{released:?}");
        assert!(!self.worker.outstanding_loads().is_empty() || is_real());
        loaded
    }

    /// Waits for a layer alone, and looks at what came last in it first.
    fn assert_layer(&self, layer: u32, loaded: &[Vec<(u32, u32)>; 2]) {
        let of = |(_, layers): &(u32, &&[u32])| layers.contains(&layer);
        let (group, layers) = (0..).zip(&LAYERS_OF).find(of).unwrap();
        let region = layers.iter().position(|of| *of == layer).unwrap() as u32;
        self.wait_for(Some((group, region)));
        for (block, of_prompt) in loaded[group as usize].iter().rev() {
            assert!(self.holds(layer, *block, value(layer, *of_prompt)), "layer {layer} of block {block}");
        }
    }
}

fn place(memory: &DeviceMemory, layer: u32, block: u32) -> u64 {
    memory.address() + u64::from(layer * BLOCKS + block) * piece()
}

fn value(layer: u32, block: u32) -> u8 {
    (1 + layer * 16 + block) as u8
}

#[test]
fn each_layer_is_waited_for_in_the_group_to_which_it_belongs() {
    for first in [0, 2, 3] {
        let folder = tempfile::tempdir().unwrap();
        let address = address(&folder);
        let daemon = Daemon::start_slow(&address, VERY_SLOW);
        let mut engine = Hybrid::new(&address);
        let loaded = engine.load_released(&address);
        let (last, of_prompt) = loaded[0][many() as usize - 1];
        // A real GPU may be done by now.
        assert!(
            is_real() || !engine.holds(5, last, value(5, of_prompt)),
            "the control: nothing was waited for"
        );
        (first..LAYERS).for_each(|layer| engine.assert_layer(layer, &loaded));
        let ended = engine.hear(JobKind::Load);
        assert_eq!((ended.ok, ended.blocks), (true, u64::from(many() + WINDOW_BLOCKS)), "{ended:?}");
        drop(engine);
        daemon.stop();
    }
}

#[test]
fn a_daemon_that_is_killed_between_two_groups_keeps_no_layer_from_coming() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start_slow(&address, VERY_SLOW);
    let mut engine = Hybrid::new(&address);
    let loaded = engine.load_released(&address);
    engine.assert_layer(0, &loaded);
    daemon.kill();
    (0..LAYERS).for_each(|layer| engine.assert_layer(layer, &loaded));
    let ended = engine.hear(JobKind::Load);
    assert!(ended.ok, "{ended:?}");
}
