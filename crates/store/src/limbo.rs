//! Extents that outlive their block because a reader or a writer still uses them.

use std::collections::HashMap;

use kvlane_memory::PoolPage;

use crate::api::{ShardNumber, StoredBlock, WriterId};

/// Contiguous pool bytes of one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) page: PoolPage,
    pub(crate) bytes: u64,
}

struct Remains {
    /// Leases and checks that read all extents.
    readers: u32,
    extents: Vec<Remnant>,
}

struct Remnant {
    shard: ShardNumber,
    extent: Extent,
    writer: Option<WriterId>,
}

/// The extents of dead blocks. Each function returns the ones that became free by it.
#[derive(Default)]
pub(crate) struct Limbo {
    blocks: HashMap<StoredBlock, Remains>,
    bytes: u64,
}

impl Limbo {
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Extent> + '_ {
        self.blocks.values().flat_map(|remains| remains.extents.iter().map(|remnant| remnant.extent))
    }

    /// Takes over a dead block, with extent and writer of each shard. A shard that is still being written keeps its extent
    /// until its writer is done, and all do until the last reader is.
    pub(crate) fn insert(
        &mut self,
        block: StoredBlock,
        readers: u32,
        shards: impl Iterator<Item = (ShardNumber, Extent, Option<WriterId>)>,
    ) -> Vec<Extent> {
        let extents: Vec<Remnant> =
            shards.map(|(shard, extent, writer)| Remnant { shard, extent, writer }).collect();
        self.bytes += extents.iter().map(|remnant| remnant.extent.bytes).sum::<u64>();
        self.blocks.insert(block, Remains { readers, extents });
        self.sweep(block)
    }

    /// One lease or check on the dead block ended.
    pub(crate) fn reader_done(&mut self, block: StoredBlock) -> Vec<Extent> {
        if let Some(remains) = self.blocks.get_mut(&block) {
            remains.readers = remains.readers.saturating_sub(1);
        }
        self.sweep(block)
    }

    /// The writer of this shard is done with it.
    pub(crate) fn writer_done(&mut self, block: StoredBlock, shard: ShardNumber) -> Vec<Extent> {
        if let Some(remains) = self.blocks.get_mut(&block) {
            for remnant in remains.extents.iter_mut().filter(|remnant| remnant.shard == shard) {
                remnant.writer = None;
            }
        }
        self.sweep(block)
    }

    /// The writer can no longer write anything.
    pub(crate) fn writer_gone(&mut self, writer: WriterId) -> Vec<Extent> {
        let mut touched = Vec::new();
        for (&block, remains) in &mut self.blocks {
            for remnant in remains.extents.iter_mut().filter(|remnant| remnant.writer == Some(writer)) {
                remnant.writer = None;
                touched.push(block);
            }
        }
        touched.into_iter().flat_map(|block| self.sweep(block)).collect()
    }

    fn sweep(&mut self, block: StoredBlock) -> Vec<Extent> {
        let mut unused = Vec::new();
        if let Some(remains) = self.blocks.get_mut(&block)
            && remains.readers == 0
        {
            remains.extents.retain(|remnant| {
                if remnant.writer.is_none() {
                    unused.push(remnant.extent);
                }
                remnant.writer.is_some()
            });
            if remains.extents.is_empty() {
                self.blocks.remove(&block);
            }
        }
        self.bytes -= unused.iter().map(|extent| extent.bytes).sum::<u64>();
        unused
    }
}
