//! A worker's memory of one KV cache group: the slice of a block that it saves, and the slices that a load writes.

use kvlane_block::{BlockId, LayoutError, Rank, Region, ShardLayout, shard_bytes, slice};
use kvlane_memory::PoolPage;
use thiserror::Error;

/// This rank's part of one KV cache group.
#[derive(Debug, Clone)]
pub struct WorkerGroupSpec {
    /// Namespace of the group, as the scheduler opened it.
    pub namespace: [u8; 16],
    /// Digest of the shard's shape; the same in all ranks that hold the same blocks.
    pub layout: [u8; 16],
    /// Where the blocks lie in this process.
    pub regions: Vec<Region>,
    /// Number of consecutive ranks that hold the same blocks, this one included. Each saves one slice of a block, and loads
    /// all slices. 1 if no other rank holds these blocks.
    pub replicas: u32,
}

/// Blocks of one group to load from the pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadGroup {
    /// Index of the group.
    pub group: u32,
    /// The engine's blocks that the load writes.
    pub block_ids: Vec<BlockId>,
    /// Pool pages, one per block. For blocks that several ranks hold: all pages of the first rank's slice, then all of the
    /// second's, and so on.
    pub pages: Vec<PoolPage>,
}

/// The numbers of a load's block ids and pages do not match.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{blocks} block ids of {slices} slices came with {pages} pages")]
pub struct WrongPages {
    /// Number of block ids.
    pub blocks: usize,
    /// Slices of each block.
    pub slices: usize,
    /// Number of pages; should be `blocks` times `slices`.
    pub pages: usize,
}

/// A worker's group, with its blocks cut into slices.
#[derive(Debug, Clone)]
pub struct GroupMemory {
    namespace: [u8; 16],
    layout: [u8; 16],
    /// The regions of a whole block.
    regions: Vec<Region>,
    /// The regions of each slice, in the order of the ranks that save them; one slice if no other rank holds the blocks.
    slices: Vec<Vec<Region>>,
    /// Index of the slice that this rank saves.
    own: usize,
    /// See [`read_by`](Self::read_by).
    layers: Vec<u32>,
    shard_layout: Option<ShardLayout>,
}

/// Blocks of the engine, each with the first page of the pool extent that holds one slice of it.
pub type BlockPages = Vec<(BlockId, PoolPage)>;

impl GroupMemory {
    /// The group in this rank, which saves its own slice.
    ///
    /// # Errors
    /// [`LayoutError`] if a region is inconsistent, or the blocks are too small to be sliced.
    pub fn new(spec: WorkerGroupSpec, rank: Rank) -> Result<Self, LayoutError> {
        let WorkerGroupSpec { namespace, layout, regions, replicas } = spec;
        regions.iter().try_for_each(Region::validate)?;
        let count = replicas.max(1) as usize;
        let slices = match count {
            1 => vec![regions.clone()],
            _ => slice(&regions, count)?,
        };
        Ok(Self {
            namespace,
            layout,
            regions,
            slices,
            own: rank.slice_of(count),
            layers: Vec::new(),
            shard_layout: None,
        })
    }

    /// Tells the order in which the model reads the regions, among those of all groups: for each region the place of the first
    /// layer that reads it, or a later region of the group. Without it regions are read in their order.
    #[must_use]
    pub fn read_by(self, layers: Vec<u32>) -> Self {
        Self { layers, ..self }
    }

    /// The place in the model of the layer that needs this region first.
    pub fn layer_of(&self, region: usize) -> u32 {
        self.layers.get(region).copied().unwrap_or(region as u32)
    }

    /// Adds a description of the shard's contents.
    #[must_use]
    pub fn described(self, shard_layout: Option<ShardLayout>) -> Self {
        Self { shard_layout, ..self }
    }

    /// Namespace of the group, as the scheduler opened it.
    pub fn namespace(&self) -> [u8; 16] {
        self.namespace
    }

    /// Digest of the shard's shape.
    pub fn layout(&self) -> [u8; 16] {
        self.layout
    }

    /// Description of the shard's contents, if there is one.
    pub fn shard_layout(&self) -> Option<&ShardLayout> {
        self.shard_layout.as_ref()
    }

    /// The regions of each slice, in the order of the ranks that save them.
    pub fn slices(&self) -> &[Vec<Region>] {
        &self.slices
    }

    /// The whole block's regions.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// The regions of the slice that this rank saves.
    pub fn shard(&self) -> &[Region] {
        &self.slices[self.own]
    }

    /// Bytes of a whole block.
    pub fn block_bytes(&self) -> u64 {
        shard_bytes(&self.regions)
    }

    /// The regions of each slice, and the blocks of a load with that slice's pages.
    pub fn places(&self, group: &LoadGroup) -> Result<Vec<(&[Region], BlockPages)>, WrongPages> {
        let (blocks, pages, slices) = (group.block_ids.len(), group.pages.len(), self.slices.len());
        if pages != blocks * slices {
            return Err(WrongPages { blocks, slices, pages });
        }
        let places = |(index, slice)| {
            let pages = &group.pages[index * blocks..][..blocks];
            (slice, group.block_ids.iter().copied().zip(pages.iter().copied()).collect())
        };
        Ok(self.slices.iter().map(Vec::as_slice).enumerate().map(places).collect())
    }

    /// Converts ends counted in the block's regions to ends counted in its slices' regions, of which there may be more, because
    /// a slice may end inside a region.
    pub fn ends_in_slices(&self, region_ends: &[u32]) -> Vec<u32> {
        let mut pieces = self.slices.iter().flatten().map(Region::block_bytes);
        let (mut count, mut at) = (0, 0);
        let mut in_slices = |bytes: u64| {
            while at < bytes {
                let Some(piece) = pieces.next() else { break };
                at += piece;
                count += 1;
            }
            count
        };
        region_ends.iter().map(|end| in_slices(shard_bytes(&self.regions[..*end as usize]))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(layers: u64, replicas: u32, rank: u32) -> GroupMemory {
        let layer = |layer: u64| Region {
            base: layer << 20,
            block_stride: 1024,
            blocks: 8,
            piece_bytes: 1024,
            piece_offsets: vec![0],
        };
        let regions = (0..layers).map(layer).collect();
        let spec = WorkerGroupSpec { namespace: [1; 16], layout: [2; 16], regions, replicas };
        GroupMemory::new(spec, Rank(rank)).unwrap()
    }

    #[test]
    fn a_rank_saves_its_slice_and_loads_all() {
        let second = memory(5, 2, 3);
        assert_eq!((shard_bytes(second.shard()), second.block_bytes()), (2560, 5120));
        assert_eq!(second.shard()[0].piece_offsets, [512], "the second half of layer 2");
        let pages = |numbers: &[u32]| numbers.iter().copied().map(PoolPage).collect::<Vec<_>>();
        let at = |block, page| (BlockId(block), PoolPage(page));
        let block_ids = vec![BlockId(4), BlockId(6)];
        let load = LoadGroup { group: 0, block_ids, pages: pages(&[10, 11, 20, 21]) };
        let places = second.places(&load).unwrap();
        assert_eq!(places[0].1, [at(4, 10), at(6, 11)]);
        assert_eq!(places[1], (second.shard(), vec![at(4, 20), at(6, 21)]));
        let short = LoadGroup { pages: pages(&[10, 11]), ..load };
        assert!(second.places(&short).unwrap_err().to_string().contains("2 slices"));
    }

    #[test]
    fn ends_count_both_halves_of_a_layer_that_is_cut() {
        assert_eq!(memory(5, 2, 0).ends_in_slices(&[2, 3, 5]), [2, 4, 6]);
        assert_eq!(memory(5, 1, 0).ends_in_slices(&[2, 3, 5]), [2, 3, 5]);
        assert_eq!(memory(4, 2, 0).ends_in_slices(&[1, 2, 4]), [1, 2, 4], "cut between two layers");
    }
}
