//! A pool, blocks whose bytes follow from their number, and calls that wait.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests")]
#![allow(dead_code, reason = "each test binary uses a part")]

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use kvlane_block::{BlockHash, BlockKey, CutDigest, Namespace, PoolExtent, PoolOffset, SealedShard, Space};
use kvlane_memory::{Arena, ArenaOptions, HugePages, Numa};
use kvlane_policy::Memo;
use kvlane_ssd::{DeviceOptions, Options, Read, ReadEnd, Record, Refused, SsdTier, WriteEnd};

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const SPACE: Space = Space { namespace: Namespace([7; 16]), cut: CutDigest([9; 16]) };

/// Memory, handed out once from its start on, or again after `reset`.
pub(crate) struct Pool {
    pub(crate) arena: Arc<Arena>,
    next: u64,
}

impl Pool {
    pub(crate) fn new(bytes: u64) -> Pool {
        let options = ArenaOptions { bytes, hugepages: HugePages::Off, numa: Numa::Off, threads: 1 };
        Pool { arena: Arc::new(Arena::create(&options, &|_| {}).unwrap()), next: 0 }
    }

    pub(crate) fn reset(&mut self) {
        self.next = 0;
    }

    pub(crate) fn extents(&mut self, lengths: &[u64]) -> Vec<PoolExtent> {
        let take = |&bytes: &u64| {
            let offset = PoolOffset(self.next);
            self.next += bytes.next_multiple_of(4096);
            assert!(self.next <= self.arena.bytes(), "the test's pool is too small");
            PoolExtent { offset, bytes }
        };
        lengths.iter().map(take).collect()
    }

    #[allow(clippy::mut_from_ref, unsafe_code)]
    pub(crate) fn bytes(&self, extent: &PoolExtent) -> &mut [u8] {
        // SAFETY: inside of the arena; tests touch an extent only while no transfer has it.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.arena.base().add(extent.offset.0 as usize),
                extent.bytes as usize,
            )
        }
    }

    /// The record of a block, filled into the pool.
    pub(crate) fn record(&mut self, block: &Block) -> Record {
        let shards = self.extents(&block.lengths).into_iter().enumerate().map(|(shard, extent)| {
            let bytes = self.bytes(&extent);
            block.fill(shard, bytes);
            SealedShard { extent, crc32c: kvlane_block::crc32c(bytes) }
        });
        Record { key: block.key, shards: shards.collect(), memo: Memo::NOTHING }
    }
}

/// A block whose bytes follow from its number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) key: BlockKey,
    pub(crate) lengths: Vec<u64>,
}

pub(crate) fn hash(number: u64) -> BlockHash {
    let mut bytes = [0xA5; 16];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    BlockHash(bytes)
}

impl Block {
    pub(crate) fn new(number: u64, lengths: &[u64]) -> Block {
        Block { key: BlockKey { space: SPACE, hash: hash(number) }, lengths: lengths.to_vec() }
    }

    fn fill(&self, shard: usize, bytes: &mut [u8]) {
        let seed = u64::from_le_bytes(*self.key.hash.0.first_chunk().unwrap());
        let mut state = (seed << 20 | shard as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        for word in bytes.chunks_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
        }
    }

    /// Asserts that these are the block's bytes.
    pub(crate) fn check(&self, pool: &Pool, extents: &[PoolExtent]) {
        for (shard, extent) in extents.iter().enumerate() {
            let mut expected = vec![0; extent.bytes as usize];
            self.fill(shard, &mut expected);
            assert!(pool.bytes(extent) == expected, "wrong bytes in shard {shard} of {:?}", self.key.hash);
        }
    }
}

pub(crate) fn device(path: &Path, capacity: u64) -> DeviceOptions {
    DeviceOptions { path: path.to_path_buf(), capacity: Some(capacity) }
}

/// Options of this test program: its transfers all take one way. Little staging, so that it is often full.
pub(crate) fn options_for(devices: Vec<DeviceOptions>) -> Options {
    Options { path: crate::PATH, staging_bytes: 2 * MIB, ..Options::new(devices) }
}

/// One device of some small segments.
pub(crate) fn small(path: &Path) -> Options {
    Options { segment_bytes: Some(256 * KIB), ..options_for(vec![device(path, 4 * MIB + 64 * KIB)]) }
}

pub(crate) fn open(options: Options, pool: &Pool) -> SsdTier {
    SsdTier::open(options, pool.arena.clone()).unwrap()
}

pub(crate) fn start_write(tier: &SsdTier, record: Record) -> Result<Receiver<WriteEnd>, Refused> {
    let (end, ends) = channel();
    tier.write(record, move |how| end.send(how).unwrap_or(()))?;
    Ok(ends)
}

pub(crate) fn write(tier: &SsdTier, pool: &mut Pool, block: &Block) -> WriteEnd {
    let record = pool.record(block);
    start_write(tier, record).unwrap().recv_timeout(PATIENCE).unwrap()
}

/// Writes a block in memory that is given back.
pub(crate) fn store(tier: &SsdTier, pool: &mut Pool, block: &Block) {
    let mark = pool.next;
    assert_eq!(write(tier, pool, block), WriteEnd::Stored);
    pool.next = mark;
}

pub(crate) fn start_read(
    tier: &SsdTier,
    key: BlockKey,
    into: Vec<PoolExtent>,
) -> Result<Receiver<ReadEnd>, Refused> {
    let (end, ends) = channel();
    let read = Read { key, into, deadline: None };
    tier.read(read, move |how| end.send(how).unwrap_or(()))?;
    Ok(ends)
}

/// Reads a block and, if it is found, checks its bytes. None if the tier says that it has not got it.
pub(crate) fn fetch(tier: &SsdTier, pool: &mut Pool, block: &Block) -> Option<ReadEnd> {
    let mark = pool.next;
    let into = pool.extents(&block.lengths);
    for extent in &into {
        pool.bytes(extent).fill(0xEE);
    }
    let end = match start_read(tier, block.key, into.clone()) {
        Err(Refused::Absent) => None,
        started => Some(started.unwrap().recv_timeout(PATIENCE).unwrap()),
    };
    if let Some(ReadEnd::Found { crcs }) = &end {
        block.check(pool, &into);
        assert_eq!(crcs.len(), block.lengths.len());
    }
    pool.next = mark;
    end
}

pub(crate) fn is_found(tier: &SsdTier, pool: &mut Pool, block: &Block) -> bool {
    matches!(fetch(tier, pool, block), Some(ReadEnd::Found { .. }))
}

pub(crate) fn close(tier: SsdTier) {
    assert!(tier.close(PATIENCE));
}
