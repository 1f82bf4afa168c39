//! Maps a rank's blocks to ranges of the memory that it has registered.
//!
//! Both sides put a READ's bytes in one of two orders: region after region, each with all blocks, or block after block, each
//! with all regions. The pieces of a region keep their order. Each offer names the order; the rank that offers takes the one
//! with fewer ranges.

use kvlane_block::{LayoutError, Region};
use thiserror::Error;

/// A rank's regions, each in one of the registered areas of memory.
#[derive(Debug, Clone)]
pub struct Geometry {
    regions: Vec<PlacedRegion>,
    /// Number of blocks that every region has.
    blocks: u64,
}

#[derive(Debug, Clone)]
struct PlacedRegion {
    region: Region,
    /// Index of the area, and the region's first byte in it.
    area: usize,
    offset: u64,
}

/// Why a rank's regions cannot be handed over.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum GeometryError {
    /// A region is inconsistent in itself.
    #[error("{0}")]
    Layout(#[from] LayoutError),
    /// A region lies in none of the areas.
    #[error("a region at {base:#x} of {bytes} bytes is not inside memory that is registered")]
    Outside {
        /// Address of its first byte in this process.
        base: u64,
        /// Length of its span; `u64::MAX` if that overflows.
        bytes: u64,
    },
    /// The rank has no regions.
    #[error("a rank without layers hands nothing over")]
    Empty,
}

/// Consecutive bytes of an area.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AreaRange {
    pub(crate) area: usize,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Geometry {
    /// `areas`: address and length of each registered area.
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
            Ok(PlacedRegion { region, area, offset })
        };
        let regions: Vec<PlacedRegion> =
            regions.into_iter().map(place).collect::<Result<_, GeometryError>>()?;
        let blocks = regions.iter().map(|placed| placed.region.blocks).min().ok_or(GeometryError::Empty)?;
        Ok(Geometry { regions, blocks })
    }

    /// Number of regions of a block.
    pub fn regions(&self) -> u32 {
        self.regions.len() as u32
    }

    /// Bytes of a block in these regions; 0 if one of them does not exist.
    pub fn bytes_of(&self, regions: std::ops::Range<u32>) -> u64 {
        let regions = self.regions.get(regions.start as usize..regions.end as usize).unwrap_or_default();
        regions.iter().map(|placed| placed.region.block_bytes()).sum()
    }

    /// Number of pieces of a block in these regions; 0 if one of them does not exist.
    pub(crate) fn pieces_of(&self, regions: std::ops::Range<u32>) -> usize {
        let regions = self.regions.get(regions.start as usize..regions.end as usize).unwrap_or_default();
        regions.iter().map(|placed| placed.region.piece_offsets.len()).sum()
    }

    /// Whether every region has all these blocks.
    pub(crate) fn has(&self, blocks: &[u32]) -> bool {
        blocks.iter().all(|block| u64::from(*block) < self.blocks)
    }

    /// The bytes of these regions of these blocks, in the order in which they travel. Adjacent bytes become one range.
    ///
    /// # Panics
    /// If there is no such region or block.
    pub(crate) fn ranges(
        &self,
        blocks: &[u32],
        regions: std::ops::Range<u32>,
        is_by_block: bool,
    ) -> Vec<AreaRange> {
        assert!(self.has(blocks), "a block that this rank does not have");
        let regions = &self.regions[regions.start as usize..regions.end as usize];
        let mut ranges: Vec<AreaRange> = Vec::new();
        let mut add = |placed: &PlacedRegion, block: u32| {
            let begin = placed.offset + u64::from(block) * placed.region.block_stride;
            for piece in &placed.region.piece_offsets {
                let (offset, len) = (begin + piece, placed.region.piece_bytes);
                match ranges.last_mut() {
                    Some(last) if last.area == placed.area && last.offset + last.len == offset => {
                        last.len += len;
                    }
                    _ => ranges.push(AreaRange { area: placed.area, offset, len }),
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
        let range = |offset, len| AreaRange { area: 0, offset, len };
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
