//! A host: a pool, its store, and its part in a cluster.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use kvlane_block::{BlockHash, CutDigest, Namespace, PoolExtent, Space};
use kvlane_cluster::{
    Cluster, ClusterOptions, ClusterStatus, Directory, Replica, ReplicaOptions, ReplicaStatus,
};
use kvlane_fabric::Transport;
use kvlane_index::State;
use kvlane_memory::{Arena, ArenaOptions, HugePages, Numa, PAGE_BYTES};
use kvlane_store::{
    Background, Caller, Chain, ClaimOutcome, FetchPlan, LookupGroup, OwnerId, ShardClaim, ShardNumber,
    SpaceId, Store, StoreOptions, WriterId,
};

/// Long enough for a loaded machine; reached only by a test that fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
pub(crate) const TOKEN: &str = "a token of these tests";
pub(crate) const MODEL: Namespace = Namespace([1; 16]);
/// A namespace that must not cross hosts.
const OF_THIS_HOST: Namespace = Namespace([2; 16]);
pub(crate) const CUT: CutDigest = CutDigest([5; 16]);
const ENGINE: OwnerId = OwnerId(1);
/// Pages of each shard.
const SHARDS: [u64; 2] = [32, 16];
pub(crate) const BLOCK_BYTES: u64 = 48 * PAGE_BYTES;
const POOL_PAGES: u64 = 48 * 256;

/// Hashes of a prompt's blocks.
pub(crate) fn prompt(number: u8, blocks: u16) -> Vec<BlockHash> {
    let hash = |block: u16| {
        let mut hash = [number; 16];
        hash[1..3].copy_from_slice(&block.to_le_bytes());
        BlockHash(hash)
    };
    (0..blocks).map(hash).collect()
}

/// What a shard of a block holds.
fn content(hash: &BlockHash, shard: u32) -> u8 {
    hash.0[0].wrapping_mul(31).wrapping_add(hash.0[1].wrapping_mul(7)).wrapping_add(shard as u8)
}

pub(crate) fn shard_bytes() -> [u64; 2] {
    SHARDS.map(|pages| pages * PAGE_BYTES)
}

pub(crate) struct Host {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) store: Arc<Store>,
    pub(crate) address: SocketAddr,
    arena: Arc<Arena>,
    space: SpaceId,
    own: SpaceId,
    _background: Background,
}

impl Drop for Host {
    fn drop(&mut self) {
        self.cluster.stop();
    }
}

/// A replica of an index.
pub(crate) struct Index {
    pub(crate) replica: Arc<Replica>,
    pub(crate) address: SocketAddr,
}

impl Drop for Index {
    fn drop(&mut self) {
        self.replica.stop();
    }
}

impl Index {
    pub(crate) fn start() -> Self {
        Self::at(free_address())
    }

    pub(crate) fn at(address: SocketAddr) -> Self {
        let options = ReplicaOptions {
            listen: vec![address],
            advertise: Vec::new(),
            token: TOKEN.into(),
            tls: None,
            name: "a replica".into(),
            seed: [7, 9],
        };
        Self { replica: Replica::start(options).unwrap(), address }
    }

    pub(crate) fn wait(&self, until: impl Fn(&ReplicaStatus) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !until(&self.replica.status()) {
            assert!(Instant::now() < deadline, "{:?}", self.replica.status());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Until it follows owners with so many blocks, each.
    pub(crate) fn wait_for(&self, blocks: &[u64]) {
        self.wait(|status| {
            let mut found: Vec<u64> = status
                .owners
                .iter()
                .filter(|owner| owner.is_visible && owner.state == State::Following)
                .map(|owner| owner.keys.count)
                .collect();
            found.sort_unstable();
            found == blocks
        });
    }
}

/// A port that is free now.
pub(crate) fn free_address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Connections of tests that run beside get ports from 32,768 on, and could take such a one before it is used.
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let place = (std::process::id() as u16).wrapping_mul(61).wrapping_add(number) % 20_000;
        let address = SocketAddr::from(([127, 0, 0, 1], 10_000 + place));
        if std::net::TcpListener::bind(address).is_ok() {
            return address;
        }
    }
}

impl Host {
    fn new(
        listen: SocketAddr,
        directory: Directory,
        transport: Option<Transport>,
        answer_within: Duration,
    ) -> Self {
        Self::advertised(listen, Vec::new(), directory, transport, answer_within, POOL_PAGES)
    }

    fn advertised(
        listen: SocketAddr,
        advertise: Vec<SocketAddr>,
        directory: Directory,
        transport: Option<Transport>,
        answer_within: Duration,
        pool_pages: u64,
    ) -> Self {
        let options = ArenaOptions {
            bytes: pool_pages * PAGE_BYTES,
            hugepages: HugePages::Off,
            numa: Numa::Off,
            threads: 1,
        };
        let arena = Arc::new(Arena::create(&options, &|_| {}).unwrap());
        let options = ClusterOptions {
            listen: vec![listen],
            advertise,
            token: TOKEN.into(),
            tls: None,
            transport,
            socket_threads: 1,
            directory,
            answer_within,
            name: listen.to_string(),
        };
        let cluster = Cluster::open(options, &arena).unwrap();
        let store =
            Store::with_tiers(Arc::clone(&arena), StoreOptions::default(), None, vec![cluster.source()]);
        let own =
            store.space(OF_THIS_HOST, "known by its name", CUT, &SHARDS.map(|pages| pages * PAGE_BYTES));
        let space = store.space(MODEL, "a model", CUT, &SHARDS.map(|pages| pages * PAGE_BYTES));
        store.let_cross_hosts(space);
        let _background = store.start_background(1, 0).unwrap();
        cluster.start(&store).unwrap();
        let address = cluster.addresses()[0];
        Self { cluster, store, address, arena, space, own, _background }
    }

    /// One that dials nobody.
    pub(crate) fn alone() -> Self {
        Self::with(Vec::new(), false)
    }

    /// One with these peers, and maybe itself among them, that do not answer it.
    pub(crate) fn with(mut peers: Vec<String>, and_itself: bool) -> Self {
        let address = free_address();
        if and_itself {
            peers.push(address.to_string());
        }
        Self::new(address, Directory::Peers(peers), None, Duration::from_millis(500))
    }

    /// One with room for a thousand blocks.
    pub(crate) fn large(peers: Vec<String>) -> Self {
        let peers = Directory::Peers(peers);
        Self::advertised(free_address(), Vec::new(), peers, None, PATIENCE / 4, 4 * POOL_PAGES)
    }

    pub(crate) fn at(address: SocketAddr, peers: &[SocketAddr], transport: Option<Transport>) -> Self {
        let peers = peers.iter().map(ToString::to_string).collect();
        Self::new(address, Directory::Peers(peers), transport, PATIENCE / 4)
    }

    /// Hosts with an index of these replicas, which know each other.
    pub(crate) fn indexed<const COUNT: usize>(replicas: &[&Index], answer_within: Duration) -> [Self; COUNT] {
        let hosts = [(); COUNT].map(|()| Self::indexed_at(free_address(), replicas, answer_within));
        for host in &hosts {
            host.wait(|status| {
                let reached = status.members.iter().filter(|member| member.is_reached).count();
                let replicas_reached = status.replicas.iter().filter(|replica| replica.is_reached).count();
                (reached, replicas_reached) == (COUNT - 1, replicas.len())
            });
        }
        hosts
    }

    pub(crate) fn indexed_at(address: SocketAddr, replicas: &[&Index], answer_within: Duration) -> Self {
        let names = replicas.iter().map(|replica| replica.address.to_string()).collect();
        Self::new(address, Directory::Index(names), Some(Transport::TCP), answer_within)
    }

    /// One that names an address which is not its own.
    pub(crate) fn indexed_under(advertise: SocketAddr, replicas: &[&Index]) -> Self {
        let names = replicas.iter().map(|replica| replica.address.to_string()).collect();
        let directory = Directory::Index(names);
        Self::advertised(free_address(), vec![advertise], directory, None, PATIENCE / 4, POOL_PAGES)
    }

    pub(crate) fn pair(transport: Option<Transport>) -> [Self; 2] {
        Self::cluster([transport; 2])
    }

    /// Hosts that have all reached each other.
    pub(crate) fn cluster<const COUNT: usize>(transports: [Option<Transport>; COUNT]) -> [Self; COUNT] {
        let addresses = [(); COUNT].map(|()| free_address());
        let mut number = 0;
        let hosts = transports.map(|transport| {
            number += 1;
            let others: Vec<SocketAddr> =
                (0..COUNT).filter(|other| *other != number - 1).map(|other| addresses[other]).collect();
            Self::at(addresses[number - 1], &others, transport)
        });
        for host in &hosts {
            host.wait(|status| {
                status.members.len() == COUNT - 1
                    && status.members.iter().all(|member| member.is_reached && !member.name.is_empty())
            });
        }
        hosts
    }

    pub(crate) fn wait(&self, until: impl Fn(&ClusterStatus) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !until(&self.cluster.status()) {
            assert!(Instant::now() < deadline, "{:?}", self.cluster.status());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub(crate) fn save(&self, blocks: &[BlockHash]) {
        self.save_chained(Chain::Start, blocks);
    }

    /// Saves what follows the first blocks of a prompt, which this host need not have.
    pub(crate) fn save_after(&self, blocks: &[BlockHash], first: usize) {
        self.save_chained(Chain::Unchained, &blocks[first..]);
    }

    fn save_chained(&self, chain: Chain, blocks: &[BlockHash]) {
        let mut claims: Vec<ShardClaim> = Vec::new();
        for (shard, pages) in (0..).zip(SHARDS) {
            let mut outcomes = Vec::new();
            let caller = Caller {
                owner: ENGINE,
                writer: WriterId(10),
                space: self.space,
                shard: ShardNumber(shard),
                now: Instant::now(),
            };
            self.store.claim(&caller, chain, blocks, &mut outcomes);
            for (outcome, hash) in outcomes.iter().zip(blocks) {
                if let ClaimOutcome::Claimed(claim) = outcome {
                    let at = PoolExtent { offset: claim.page.offset(), bytes: pages * PAGE_BYTES };
                    self.bytes_at(at).fill(content(hash, shard));
                    claims.push(*claim);
                }
            }
        }
        self.store.commit(&claims, Instant::now());
        assert!(self.store.settle(PATIENCE));
    }

    pub(crate) fn arena_bytes(&self) -> u64 {
        self.arena.bytes()
    }

    /// Makes the space that must not cross hosts the one that is used.
    pub(crate) fn use_own_space(&mut self) {
        self.space = self.own;
    }

    pub(crate) fn space(&self) -> SpaceId {
        self.space
    }

    fn group<'a>(&self, blocks: &'a [BlockHash]) -> LookupGroup<'a> {
        LookupGroup { space: self.space, tokens_per_block: 16, window_blocks: 0, hashes: blocks }
    }

    pub(crate) fn plan(&self, blocks: &[BlockHash]) -> Option<FetchPlan> {
        let finding = self.store.find(&[self.group(blocks)], u64::MAX);
        finding.wait_until(Instant::now() + PATIENCE).ok().unwrap()
    }

    /// Carries a plan out.
    pub(crate) fn take(&self, plan: FetchPlan, within: Duration) {
        let (done, is_done) = channel();
        let now = Instant::now();
        self.store.fetch(plan, now, now + within, move || done.send(()).unwrap());
        is_done.recv_timeout(2 * PATIENCE).unwrap();
    }

    /// Brings what others have more of. False: nothing.
    pub(crate) fn fetch(&self, blocks: &[BlockHash]) -> bool {
        let plan = self.plan(blocks);
        let has_more = plan.is_some();
        plan.into_iter().for_each(|plan| self.take(plan, PATIENCE));
        has_more
    }

    /// Blocks of a hit, whose bytes are right.
    pub(crate) fn hit(&self, blocks: &[BlockHash]) -> u64 {
        let Some(hit) = self.store.lookup(ENGINE, &[self.group(blocks)], u64::MAX, Instant::now()) else {
            return 0;
        };
        for (pages, hash) in hit.groups[0].pages.chunks(SHARDS.len()).zip(blocks) {
            for ((shard, page), count) in (0..).zip(pages).zip(SHARDS) {
                let at = PoolExtent { offset: page.offset(), bytes: count * PAGE_BYTES };
                let expected = content(hash, shard);
                assert!(self.bytes_at(at).iter().all(|byte| *byte == expected), "{hash:?} {shard}");
            }
        }
        self.store.release(ENGINE, hit.lease);
        hit.tokens / 16
    }

    /// Changes a bit of a block behind the store's back.
    pub(crate) fn flip_a_bit(&self, hash: &BlockHash) {
        let space = Space { namespace: MODEL, cut: CUT };
        let lengths = SHARDS.map(|pages| pages * PAGE_BYTES);
        let loan = self.store.lend(space, &lengths, &[*hash], Instant::now()).unwrap();
        let shard = loan.blocks[0].as_ref().unwrap()[1];
        self.bytes_at(shard.extent)[77] ^= 4;
    }

    #[allow(clippy::mut_from_ref, reason = "the pool is shared memory")]
    fn bytes_at(&self, at: PoolExtent) -> &mut [u8] {
        // SAFETY: the store handed this extent out for as long as it is used here.
        unsafe {
            std::slice::from_raw_parts_mut(self.arena.base().add(at.offset.0 as usize), at.bytes as usize)
        }
    }
}
