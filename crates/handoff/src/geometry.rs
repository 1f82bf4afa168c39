//! Where a rank's blocks lie in the memory that it has registered.
//!
//! Bytes of blocks travel in one order on both sides: region after region, each with all blocks, or block after block, each
//! with all regions, and the pieces of a region in their order. Which of both is said with each offer, so that whoever offers
//! takes the one in which more of its bytes lie next to each other.

use kvlane_block::{LayoutError, Region};
use thiserror::Error;

/// A rank's regions, each in one of the areas of memory that are registered.
#[derive(Debug, Clone)]
pub struct Geometry {
    regions: Vec<Placed>,
    blocks: u64,
}

#[derive(Debug, Clone)]
struct Placed {
    region: Region,
    /// The area, and where in it the region begins.
    area: usize,
    offset: u64,
}

/// Why regions cannot be handed over.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum GeometryError {
    /// One makes no sense.
    #[error("{0}")]
    Layout(#[from] LayoutError),
    /// One lies in none of the areas.
    #[error("a region at {base:#x} of {bytes} bytes is not inside memory that is registered")]
    Outside {
        /// Where it begins.
        base: u64,
        /// How long it is.
        bytes: u64,
    },
    /// There are none.
    #[error("a rank without layers hands nothing over")]
    Empty,
}

/// Bytes of an area.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) area: usize,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Geometry {
    /// `areas`: address and bytes of each.
    pub fn new(regions: Vec<Region>, areas: &[(u64, u64)]) -> Result<Geometry, GeometryError> {
        let place = |region: Region| {
            region.validate()?;
            let outside = || GeometryError::Outside {
                base: region.base,
                bytes: region.span_bytes().unwrap_or(u64::MAX),
            };
            let end =
                region.span_bytes().and_then(|bytes| region.base.checked_add(bytes)).ok_or_else(outside)?;
            let holds =
                |(base, bytes): &(u64, u64)| *base <= region.base && end <= base.saturating_add(*bytes);
            let area = areas.iter().position(holds).ok_or_else(outside)?;
            let offset = region.base - areas[area].0;
            Ok(Placed { region, area, offset })
        };
        let regions: Vec<Placed> = regions.into_iter().map(place).collect::<Result<_, GeometryError>>()?;
        let blocks = regions.iter().map(|placed| placed.region.blocks).min().ok_or(GeometryError::Empty)?;
        Ok(Geometry { regions, blocks })
    }

    /// Of how many regions each block consists.
    pub fn regions(&self) -> u32 {
        self.regions.len() as u32
    }

    /// Bytes of a block in these regions; 0 if there are none such.
    pub fn bytes_of(&self, regions: std::ops::Range<u32>) -> u64 {
        let regions = self.regions.get(regions.start as usize..regions.end as usize).unwrap_or_default();
        regions.iter().map(|placed| placed.region.block_bytes()).sum()
    }

    /// Of how many pieces a block consists in these regions.
    pub(crate) fn pieces_of(&self, regions: std::ops::Range<u32>) -> usize {
        let regions = self.regions.get(regions.start as usize..regions.end as usize).unwrap_or_default();
        regions.iter().map(|placed| placed.region.piece_offsets.len()).sum()
    }

    /// Whether it has these blocks.
    pub(crate) fn has(&self, blocks: &[u32]) -> bool {
        blocks.iter().all(|block| u64::from(*block) < self.blocks)
    }

    /// The bytes of these regions of blocks, in the order in which they travel; neighbours are one.
    ///
    /// # Panics
    /// If there is no such region or block.
    pub(crate) fn ranges(
        &self,
        blocks: &[u32],
        regions: std::ops::Range<u32>,
        is_by_block: bool,
    ) -> Vec<Range> {
        assert!(self.has(blocks), "a block that this rank does not have");
        let regions = &self.regions[regions.start as usize..regions.end as usize];
        let mut ranges: Vec<Range> = Vec::new();
        let mut add = |placed: &Placed, block: u32| {
            let begin = placed.offset + u64::from(block) * placed.region.block_stride;
            for piece in &placed.region.piece_offsets {
                let (offset, len) = (begin + piece, placed.region.piece_bytes);
                match ranges.last_mut() {
                    Some(last) if last.area == placed.area && last.offset + last.len == offset => {
                        last.len += len;
                    }
                    _ => ranges.push(Range { area: placed.area, offset, len }),
                }
            }
        };
        if is_by_block {
            blocks.iter().for_each(|block| regions.iter().for_each(|placed| add(placed, *block)));
        } else {
            regions.iter().for_each(|placed| blocks.iter().for_each(|block| add(placed, *block)));
        }
        ranges
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn layers(stride: u64, apart: u64) -> Vec<Region> {
        let layer = |index| Region {
            base: 0x1000 + index * apart,
            block_stride: stride,
            blocks: 8,
            piece_bytes: 64,
            piece_offsets: vec![0],
        };
        (0..2).map(layer).collect()
    }

    #[test]
    fn neighbours_are_one_range_in_the_order_that_suits_the_layout() {
        let apart = Geometry::new(layers(64, 512), &[(0x1000, 1024)]).unwrap();
        let both = |geometry: &Geometry, is_by_block| geometry.ranges(&[2, 3], 0..2, is_by_block).len();
        assert_eq!((both(&apart, false), both(&apart, true)), (2, 4));
        let together = Geometry::new(layers(128, 64), &[(0x1000, 1024)]).unwrap();
        assert_eq!((both(&together, false), both(&together, true)), (4, 1));
        let range = |offset, len| Range { area: 0, offset, len };
        assert_eq!(apart.ranges(&[2, 3], 1..2, false), [range(512 + 128, 128)]);
        assert_eq!((together.bytes_of(0..2), together.bytes_of(1..2), together.regions()), (128, 64, 2));
        assert_eq!(together.bytes_of(1..3), 0, "there is no such region");
    }

    #[test]
    fn a_region_outside_of_what_is_registered_is_refused() {
        let refused = Geometry::new(layers(64, 512), &[(0x1000, 1023)]).unwrap_err();
        assert_eq!(refused, GeometryError::Outside { base: 0x1200, bytes: 512 });
        assert_eq!(Geometry::new(Vec::new(), &[]).unwrap_err(), GeometryError::Empty);
    }
}
