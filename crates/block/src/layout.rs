//! Regions: where an engine's memory holds its part of each block.
//!
//! A worker describes its shard as a list of regions, usually one a layer. The shard's bytes in the pool are the
//! pieces one after the other, region after region:
//!
//! ```text
//!  engine, region 0 (layer 0)                     region 1 (layer 1)
//!  base   block 0        block 1                  base   block 0        block 1
//!   |     +-----------+  +-----------+             |     +-----------+  +-----------+
//!   +---->| k . v . . |  | K . V . . |             +---->| l . w . . |  | L . W . . |
//!         +-----------+  +-----------+                   +-----------+  +-----------+
//!          ^   ^                                          k, v, l, w: pieces of `piece_bytes` bytes
//!          piece_offsets[0], [1]    <- block_stride ->
//!
//!  pool, extent of block 0: k v l w      extent of block 1: K V L W
//! ```
//!
//! A tensor whose outer dimension is not the block (K and V apart, heads first) has piece offsets beyond its block
//! stride; that is one region too.

use thiserror::Error;

use crate::numbers::{BlockId, PoolOffset};

/// Most pieces that one region may have.
pub const MAX_PIECES: usize = 65536;

/// One strided tensor: piece p of block b is `piece_bytes` bytes at `base + b * block_stride + piece_offsets[p]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Region {
    /// Address of the tensor in the worker.
    pub base: u64,
    /// Bytes from one block to the next.
    pub block_stride: u64,
    /// How many blocks it has, at most 2^32. Block ids are below this.
    pub blocks: u64,
    /// Bytes of each piece. All pieces of a region are equally long.
    pub piece_bytes: u64,
    /// Bytes from the block's start to each piece, in the order in which the pieces lie in the pool.
    pub piece_offsets: Vec<u64>,
}

impl Region {
    /// Bytes from the first block's start to the last piece's end; None if they exceed the address space.
    pub fn span_bytes(&self) -> Option<u64> {
        let last_block = self.blocks.checked_sub(1)?.checked_mul(self.block_stride)?;
        let last_piece = self.piece_offsets.iter().copied().max().unwrap_or(0);
        last_block.checked_add(last_piece)?.checked_add(self.piece_bytes)
    }
}

/// Why a region or a plan over regions is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// A field that must not be zero is zero.
    #[error("a region's {0} is 0")]
    Zero(&'static str),
    /// No or too many pieces.
    #[error("a region has {0} pieces in a block; 1 to 65536 are possible")]
    PieceCount(usize),
    /// More blocks than a block id can name.
    #[error("a region has {0} blocks; at most 4294967296 are possible")]
    BlockCount(u64),
    /// The region ends beyond the address space.
    #[error(
        "a region at {base:#x} of {blocks} blocks, {block_stride} bytes apart, ends beyond the address space"
    )]
    Overflow {
        /// Address of the tensor.
        base: u64,
        /// How many blocks the region claims to have.
        blocks: u64,
        /// Bytes from one block to the next.
        block_stride: u64,
    },
    /// Two pieces, of one block or of two, have bytes in common.
    #[error(
        "pieces of {piece_bytes} bytes, the one at offset {offset} among them, overlap with a block stride of {block_stride}"
    )]
    Overlap {
        /// The piece that overlaps, by its offset.
        offset: u64,
        /// Bytes of a piece.
        piece_bytes: u64,
        /// Bytes from one block to the next.
        block_stride: u64,
    },
    /// A block id that a region does not have.
    #[error("block id {block_id} is out of range: the region has {blocks} blocks")]
    NoSuchBlock {
        /// The id that was requested.
        block_id: BlockId,
        /// Blocks of the smallest region.
        blocks: u64,
    },
    /// Fewer bytes than a block that several workers share must have.
    #[error("a block of {bytes} bytes cannot be cut into {slices} slices of at least 512 bytes")]
    TooSmall {
        /// Bytes of the block.
        bytes: u64,
        /// How many slices it should have: one for each rank that holds the block.
        slices: usize,
    },
    /// An extent would end beyond the pool's address space.
    #[error("an extent at pool offset {pool_offset} of {shard_bytes} bytes ends beyond 2^64")]
    PoolOffset {
        /// Start of the extent.
        pool_offset: PoolOffset,
        /// Bytes of one block in all regions, which the extent has to hold.
        shard_bytes: u64,
    },
}

impl Region {
    /// Checks what [`crate::plan`] relies on: no size is zero, every piece of every block has a valid address, and no
    /// two pieces overlap.
    pub fn validate(&self) -> Result<(), LayoutError> {
        for (what, value) in [
            ("block stride", self.block_stride),
            ("number of blocks", self.blocks),
            ("piece size", self.piece_bytes),
        ] {
            if value == 0 {
                return Err(LayoutError::Zero(what));
            }
        }
        if self.piece_offsets.is_empty() || self.piece_offsets.len() > MAX_PIECES {
            return Err(LayoutError::PieceCount(self.piece_offsets.len()));
        }
        if self.blocks > 1 << 32 {
            return Err(LayoutError::BlockCount(self.blocks));
        }
        let overflow = || LayoutError::Overflow {
            base: self.base,
            blocks: self.blocks,
            block_stride: self.block_stride,
        };
        let last_block = (self.blocks - 1).checked_mul(self.block_stride).ok_or_else(overflow)?;
        let last_piece = self.piece_offsets.iter().copied().max().unwrap_or(0);
        [last_block, last_piece, self.piece_bytes]
            .iter()
            .try_fold(self.base, |end, bytes| end.checked_add(*bytes))
            .ok_or_else(overflow)?;
        self.check_overlap(last_block)
    }

    /// Requires pieces to form rows, as in every tensor with one block dimension. A row lies inside one block stride, so
    /// the rows of neighbouring blocks do not meet. The next row starts after the last block's part of the row before.
    fn check_overlap(&self, last_block: u64) -> Result<(), LayoutError> {
        let mut offsets = self.piece_offsets.clone();
        offsets.sort_unstable();
        let mut row = offsets[0];
        let mut end = row;
        for offset in offsets {
            let in_row = offset - row + self.piece_bytes <= self.block_stride;
            if !in_row {
                row = offset;
            }
            let free_from = if in_row { end } else { end + last_block };
            if offset < free_from || self.piece_bytes > self.block_stride && self.blocks > 1 {
                return Err(LayoutError::Overlap {
                    offset,
                    piece_bytes: self.piece_bytes,
                    block_stride: self.block_stride,
                });
            }
            end = offset + self.piece_bytes;
        }
        Ok(())
    }

    /// Bytes of one block in this region.
    pub fn block_bytes(&self) -> u64 {
        self.piece_bytes.saturating_mul(self.piece_offsets.len() as u64)
    }
}

/// Bytes of one block in all regions: the length of its extent in the pool. Saturates instead of wrapping.
pub fn shard_bytes(regions: &[Region]) -> u64 {
    regions.iter().fold(0, |sum, region| sum.saturating_add(region.block_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region() -> Region {
        Region { base: 0x1000, block_stride: 1024, blocks: 8, piece_bytes: 256, piece_offsets: vec![0, 512] }
    }

    #[test]
    fn ordinary_tensors_are_valid() {
        region().validate().unwrap();
        assert_eq!(shard_bytes(&[region(), region()]), 1024);
        // K and V apart: the second piece lies behind all blocks of the first.
        Region { block_stride: 256, piece_offsets: vec![0, 256 * 8], ..region() }.validate().unwrap();
        // The order in the pool need not be that of the addresses.
        Region { piece_offsets: vec![512, 0], ..region() }.validate().unwrap();
        // A tensor that starts inside its stride: pieces at the stride's end.
        Region { piece_offsets: vec![768], ..region() }.validate().unwrap();
    }

    #[test]
    fn each_bad_field_is_named() {
        let cases = [
            (Region { block_stride: 0, ..region() }, "block stride is 0"),
            (Region { blocks: 0, ..region() }, "number of blocks is 0"),
            (Region { piece_bytes: 0, ..region() }, "piece size is 0"),
            (Region { piece_offsets: vec![], ..region() }, "0 pieces"),
            (Region { piece_offsets: vec![0; MAX_PIECES + 1], ..region() }, "65537 pieces"),
            (Region { blocks: (1 << 32) + 1, ..region() }, "4294967297 blocks"),
            (Region { base: u64::MAX - 7000, ..region() }, "beyond the address space"),
            (Region { block_stride: u64::MAX / 4, ..region() }, "beyond the address space"),
            (Region { piece_offsets: vec![u64::MAX], ..region() }, "beyond the address space"),
            (Region { piece_offsets: vec![0, 255], ..region() }, "offset 255"),
            (Region { piece_offsets: vec![0, 0], ..region() }, "offset 0"),
            // Runs into the next block's first piece.
            (Region { piece_offsets: vec![0, 1000], ..region() }, "offset 1000"),
            (Region { piece_bytes: 1025, piece_offsets: vec![0], ..region() }, "overlap"),
        ];
        for (region, sentence) in cases {
            let error = region.validate().expect_err(sentence).to_string();
            assert!(error.contains(sentence), "{error:?} should contain {sentence:?}");
        }
    }

    #[test]
    fn sizes_saturate() {
        let huge = Region { piece_bytes: u64::MAX, ..region() };
        assert_eq!(shard_bytes(&[huge.clone(), huge]), u64::MAX);
    }
}
