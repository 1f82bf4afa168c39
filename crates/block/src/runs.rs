//! Copy plans: which contiguous bytes move between an engine and the pool.

use crate::contiguous::{Contiguous, Position, push_run};
use crate::layout::{LayoutError, Region, shard_bytes};
use crate::numbers::{BlockId, PoolOffset};

/// Bytes that are contiguous on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Address in the engine's process.
    pub engine_addr: u64,
    /// Start of the bytes in the pool.
    pub pool_offset: PoolOffset,
    /// Length in bytes; never 0.
    pub len: u64,
}

impl Contiguous for Run {
    type One = u64;
    type Other = PoolOffset;

    fn begin(&self) -> (u64, PoolOffset) {
        (self.engine_addr, self.pool_offset)
    }

    fn bytes(&self) -> u64 {
        self.len
    }

    fn with_bytes(self, len: u64) -> Run {
        Run { len, ..self }
    }
}

/// The copies that move `blocks` between the engine and their extents in the pool, in order.
///
/// Copies that are adjacent on both sides become one run: a whole block if the engine holds it contiguously, and several
/// blocks if neighbouring ids also lie in neighbouring extents. The regions must be valid ([`Region::validate`]). An
/// unknown block id is an error, and nothing is planned.
pub fn plan(regions: &[Region], blocks: &[(BlockId, PoolOffset)]) -> Result<Vec<Run>, LayoutError> {
    let shard_bytes = shard_bytes(regions);
    let known_blocks = regions.iter().map(|region| region.blocks).min().unwrap_or(0);
    let mut runs: Vec<Run> = Vec::with_capacity(blocks.len() * regions.len());
    for &(block_id, pool_offset) in blocks {
        if u64::from(block_id.0) >= known_blocks {
            return Err(LayoutError::NoSuchBlock { block_id, blocks: known_blocks });
        }
        if pool_offset.after(shard_bytes).is_none() {
            return Err(LayoutError::PoolOffset { pool_offset, shard_bytes });
        }
        let mut next_offset = pool_offset;
        for region in regions {
            let block = region.base + u64::from(block_id.0) * region.block_stride;
            for offset in &region.piece_offsets {
                push_run(
                    &mut runs,
                    Run { engine_addr: block + offset, pool_offset: next_offset, len: region.piece_bytes },
                );
                next_offset.0 += region.piece_bytes;
            }
        }
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent((id, offset): (u32, u64)) -> (BlockId, PoolOffset) {
        (BlockId(id), PoolOffset(offset))
    }

    #[test]
    fn a_contiguous_block_is_one_run_and_so_are_neighbours_in_both_spaces() {
        // Cross-layer layout: 32 pieces fill the stride.
        let region = Region {
            base: 0x10000,
            block_stride: 32 * 4096,
            blocks: 100,
            piece_bytes: 4096,
            piece_offsets: (0..32).map(|piece| piece * 4096).collect(),
        };
        let block = region.block_stride;
        let extents = [(7, 0), (8, block), (9, 5 * block)].map(extent);
        let runs = plan(std::slice::from_ref(&region), &extents).unwrap();
        let at = |id: u64| region.base + id * block;
        assert_eq!(
            runs,
            [
                Run { engine_addr: at(7), pool_offset: PoolOffset(0), len: 2 * block },
                Run { engine_addr: at(9), pool_offset: PoolOffset(5 * block), len: block },
            ]
        );
    }

    #[test]
    fn the_smallest_region_bounds_the_block_ids() {
        let region =
            |blocks| Region { base: 0, block_stride: 16, blocks, piece_bytes: 16, piece_offsets: vec![0] };
        let error = plan(&[region(8), region(4)], &[(3, 0), (4, 32)].map(extent)).unwrap_err();
        assert_eq!(error, LayoutError::NoSuchBlock { block_id: BlockId(4), blocks: 4 });
        assert!(error.to_string().contains("block id 4"));
        assert!(matches!(plan(&[region(8)], &[extent((0, u64::MAX))]), Err(LayoutError::PoolOffset { .. })));
        assert!(matches!(plan(&[], &[extent((0, 0))]), Err(LayoutError::NoSuchBlock { .. })));
        assert_eq!(plan(&[region(8)], &[]).unwrap(), []);
    }
}
