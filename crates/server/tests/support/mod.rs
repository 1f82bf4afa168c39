//! A daemon and an engine in one process, over a real socket.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, reason = "a test may fail here")]

use std::time::{Duration, Instant};

use kvlane_block::{BlockHash, BlockId, Rank, Region};
use kvlane_client::{
    DaemonUser, GroupSpec, Hit, LoadGroup, OwnBlocks, SaveGroupSpec, SaveMethod, Scheduler, SchedulerOptions,
    Tool, Worker, WorkerGroupSpec, WorkerOptions,
};
use kvlane_memory::{ArenaOptions, HugePages, Numa, PoolPage};
use kvlane_proto::Address;
use kvlane_server::{Daemon, ServeOptions};

pub const BLOCK_BYTES: usize = 3 * 4096 + 512;
pub const TOKENS: u32 = 16;
pub const PATIENCE: Duration = Duration::from_secs(20);

pub fn options(address: &Address, pool_bytes: u64) -> ServeOptions {
    ServeOptions {
        arena: ArenaOptions { bytes: pool_bytes, hugepages: HugePages::Off, numa: Numa::Off, threads: 1 },
        listen: vec![address.clone()],
        http: None,
        http_hosts: Vec::new(),
        seal_threads: 2,
        scrub_bytes_per_s: 0,
        lease_ttl: Duration::from_secs(60),
        policy: kvlane_policy::Choice::default(),
        otlp: None,
        sessions_max: 64,
        hit_windows: kvlane_policy::Window::DEFAULT.into(),
        ssd: None,
        cluster: None,
        fetch_wait: Duration::from_secs(1),
        copies_share: 0.25,
        gpu_driver: None,
        rails: kvlane_gpu::RailOptions::default(),
        save_link_share: 0.5,
        calibrate: false,
    }
}

pub fn start(address: &Address) -> Daemon {
    Daemon::start(&options(address, 16 << 20), &|_| {}).unwrap()
}

pub fn address(folder: &tempfile::TempDir) -> Address {
    Address::Unix(folder.path().join("kvlane.sock"))
}

pub fn hashes(first: u64, count: u64) -> Vec<BlockHash> {
    (first..first + count)
        .map(|n| {
            BlockHash(u128::from(n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835).to_le_bytes())
        })
        .collect()
}

/// The only worker of an engine with one KV cache group.
pub fn worker_options(
    address: &Address,
    id: &str,
    blocks: OwnBlocks,
    save_timeout: Duration,
) -> WorkerOptions {
    WorkerOptions {
        address: address.clone(),
        daemon_user: DaemonUser::default(),
        engine_id: id.into(),
        client: "test".into(),
        rank: Rank(0),
        workers: 1,
        blocks,
        save_method: SaveMethod::Auto,
        save_timeout,
        release_ahead: kvlane_client::ReleaseAhead::default(),
    }
}

/// The group of such an engine.
pub fn group(regions: Vec<Region>) -> Vec<WorkerGroupSpec> {
    vec![WorkerGroupSpec { namespace: [3; 16], layout: [4; 16], regions, replicas: 1 }]
}

/// The scheduler of such an engine.
pub fn scheduler(address: &Address, id: &str, lookup_timeout: Duration) -> Scheduler {
    scheduler_of(address, id, lookup_timeout, &[([3; 16], 0)])
}

/// The scheduler of an engine with groups of these namespaces and windows, in blocks.
pub fn scheduler_of(
    address: &Address,
    id: &str,
    lookup_timeout: Duration,
    groups: &[([u8; 16], u32)],
) -> Scheduler {
    let group = |&(namespace, window_blocks): &([u8; 16], u32)| GroupSpec {
        namespace,
        name: "test".into(),
        tokens_per_block: TOKENS,
        window_blocks,
        crosses_hosts: false,
    };
    Scheduler::new(SchedulerOptions {
        address: address.clone(),
        daemon_user: DaemonUser::default(),
        engine_id: id.into(),
        client: "test".into(),
        groups: groups.iter().map(group).collect(),
        workers: 1,
        lookup_timeout,
        follows_journal: true,
    })
    .unwrap()
}

/// An engine with one worker whose KV memory is two tensors.
pub struct Engine {
    pub scheduler: Scheduler,
    pub worker: Worker,
    pub memory: Vec<u8>,
    pub blocks: usize,
    next_job: u64,
}

impl Engine {
    pub fn start(address: &Address, id: &str, method: SaveMethod) -> Self {
        Self::with_timeouts(address, id, method, Duration::from_secs(5), Duration::from_secs(5))
    }

    pub fn with_timeouts(
        address: &Address,
        id: &str,
        method: SaveMethod,
        lookup_timeout: Duration,
        save_timeout: Duration,
    ) -> Self {
        Self::new(address, id, method, save_timeout, || scheduler(address, id, lookup_timeout))
    }

    /// Of which the scheduler is there already.
    pub fn with_scheduler(address: &Address, id: &str, scheduler: Scheduler) -> Self {
        Self::new(address, id, SaveMethod::Auto, Duration::from_secs(5), || scheduler)
    }

    fn new(
        address: &Address,
        id: &str,
        method: SaveMethod,
        save_timeout: Duration,
        scheduler: impl FnOnce() -> Scheduler,
    ) -> Self {
        let blocks = 64;
        let memory: Vec<u8> = (0..blocks * BLOCK_BYTES).map(|i| (i * 31 + i / 4096) as u8).collect();
        let base = memory.as_ptr() as u64;
        // Layer 0: one piece of 8192 bytes a block; layer 1: two pieces of 2304, apart.
        let first = Region {
            base,
            block_stride: 8192,
            blocks: blocks as u64,
            piece_bytes: 8192,
            piece_offsets: vec![0],
        };
        let rest = blocks as u64 * 2304;
        let second = Region {
            base: base + blocks as u64 * 8192,
            block_stride: 2304,
            blocks: blocks as u64,
            piece_bytes: 2304,
            piece_offsets: vec![0, rest],
        };
        // SAFETY: `Drop` closes the worker before the memory goes.
        let own = unsafe { OwnBlocks::new(group(vec![first, second]), None) };
        let worker = WorkerOptions { save_method: method, ..worker_options(address, id, own, save_timeout) };
        let worker = Worker::start(worker).unwrap();
        Self { scheduler: scheduler(), worker, memory, blocks, next_job: 0 }
    }

    /// Both sides have found the daemon again.
    pub fn wait_connected(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while !(self.scheduler.is_connected() && self.worker.is_connected()) {
            assert!(Instant::now() < deadline, "not connected: {}", self.worker.refusal());
            self.scheduler.tick();
            std::thread::yield_now();
        }
    }

    /// The bytes of one block, as the pool keeps them.
    pub fn block(&self, id: usize) -> Vec<u8> {
        let second = self.blocks * 8192;
        let third = second + self.blocks * 2304;
        let mut bytes = self.memory[id * 8192..][..8192].to_vec();
        bytes.extend_from_slice(&self.memory[second + id * 2304..][..2304]);
        bytes.extend_from_slice(&self.memory[third + id * 2304..][..2304]);
        bytes
    }

    pub fn save(&mut self, first: u64, ids: std::ops::Range<u32>) -> kvlane_client::Finished {
        let parent = (!first.is_multiple_of(1000)).then(|| hashes(first - 1, 1)[0]);
        let hashes = hashes(first, ids.len() as u64);
        self.next_job += 1;
        let group = SaveGroupSpec { group: 0, parent, hashes, block_ids: ids.map(BlockId).collect() };
        self.worker.save(self.next_job, vec![group]);
        self.finished()
    }

    pub fn load(&mut self, hit: &Hit, ids: std::ops::Range<u32>) -> kvlane_client::Finished {
        let page = |bytes: &[u8]| PoolPage(u32::from_le_bytes(bytes.try_into().unwrap()));
        let pages = hit.pages(0, Rank(0)).chunks(4).map(page).collect();
        self.next_job += 1;
        self.worker.load(
            self.next_job,
            hit.boot,
            vec![LoadGroup { group: 0, block_ids: ids.map(BlockId).collect(), pages }],
        );
        self.finished()
    }

    pub fn look_up(&mut self, first: u64, count: u64) -> Hit {
        self.scheduler.lookup(&[hashes(first, count)], u64::MAX, PATIENCE)
    }

    /// Looks up until the answer has `tokens`, as after a restart.
    pub fn look_up_until(&mut self, first: u64, count: u64, tokens: u64) -> Hit {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let hit = self.look_up(first, count);
            if hit.tokens == tokens {
                return hit;
            }
            assert!(Instant::now() < deadline, "still {} tokens instead of {tokens}", hit.tokens);
            self.scheduler.release(hit.boot, hit.lease);
            std::thread::yield_now();
        }
    }

    fn finished(&self) -> kvlane_client::Finished {
        assert!(self.worker.wait(PATIENCE), "the job did not end");
        let mut finished = self.worker.poll();
        assert_eq!(finished.len(), 1);
        assert_eq!(finished[0].job, self.next_job);
        finished.remove(0)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.scheduler.close();
        self.worker.close();
    }
}

pub fn settle(address: &Address) {
    Tool::connect(address, PATIENCE).unwrap().settle(PATIENCE).unwrap();
}
