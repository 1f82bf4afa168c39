//! [`Pieces`]: the bytes that a caller asks to move, as one range, pages or runs. Checks them against both sides' regions.

use std::sync::Arc;

use thiserror::Error;

use crate::runs::{Place, Run, append};

/// Pages of one region: page `i` begins at `offset + stride * i`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pages {
    /// The region, by its number at its owner.
    pub region: u32,
    /// Where page 0 begins in the region, in bytes.
    pub offset: u64,
    /// Bytes from the start of one page to that of the next. With 0 all pages are the same.
    pub stride: u64,
    /// The pages to move, in the order of the transfer.
    pub indices: Arc<[u32]>,
}

/// The bytes that a transfer moves. Lists have any length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pieces {
    /// One range, contiguous on both sides.
    Contiguous(Run),
    /// The n-th page here is the n-th page there, `page_bytes` each.
    Paged {
        /// The same on both sides.
        page_bytes: u64,
        /// The pages here. The n-th one moves from or to the n-th page of `remote`.
        local: Pages,
        /// The pages at the peer, as many as here.
        remote: Pages,
    },
    /// Ranges of any length.
    Runs(Vec<Run>),
}

/// One of the two sides of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The process that asks for the transfer.
    Local,
    /// The peer on the other side.
    Remote,
}

/// Why pieces cannot be moved.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ShapeError {
    /// The two page lists have different lengths.
    #[error("{local} pages here and {remote} at the peer; each page needs its counterpart")]
    UnequalPages {
        /// Pages in the list of this side.
        local: usize,
        /// Pages in the list of the peer's side.
        remote: usize,
    },
    /// A region is not registered on its side, or not any more.
    #[error("region {region} of the {side:?} side is not registered")]
    NoSuchRegion {
        /// The side on which the pieces name it.
        side: Side,
        /// The number that the pieces name.
        region: u32,
    },
    /// Bytes lie beyond the end of their region, or their offset overflows.
    #[error(
        "{len} bytes from byte {offset} of region {region} of the {side:?} side, which has {region_bytes} bytes"
    )]
    OutOfBounds {
        /// The side of the region.
        side: Side,
        /// The region's number.
        region: u32,
        /// The first byte, from the start of the region.
        offset: u64,
        /// The bytes from `offset` on.
        len: u64,
        /// The length of the region.
        region_bytes: u64,
    },
}

/// The lengths of the regions of both sides.
pub trait RegionLengths {
    /// Bytes of a region; None if there is no such region.
    fn region_bytes(&self, side: Side, region: u32) -> Option<u64>;
}

impl Pieces {
    /// All bytes as runs. Neighbours that continue each other on both sides are joined.
    ///
    /// # Errors
    /// A run does not lie inside its regions, or the page lists differ in length.
    pub fn runs(&self, regions: &impl RegionLengths) -> Result<Vec<Run>, ShapeError> {
        let mut runs = Vec::new();
        match self {
            Pieces::Contiguous(run) => add(&mut runs, *run, regions)?,
            Pieces::Runs(list) => {
                for run in list {
                    add(&mut runs, *run, regions)?;
                }
            }
            Pieces::Paged { page_bytes, local, remote } => {
                if local.indices.len() != remote.indices.len() {
                    return Err(ShapeError::UnequalPages {
                        local: local.indices.len(),
                        remote: remote.indices.len(),
                    });
                }
                for (here, there) in local.indices.iter().zip(remote.indices.iter()) {
                    let local = local.place(*here, *page_bytes, Side::Local, regions)?;
                    let remote = remote.place(*there, *page_bytes, Side::Remote, regions)?;
                    append(&mut runs, Run { local, remote, len: *page_bytes });
                }
            }
        }
        Ok(runs)
    }
}

impl Pages {
    /// Pages of a region that consists of pages of `page_bytes` bytes, one behind the other.
    pub fn of(region: u32, page_bytes: u64, indices: impl Into<Arc<[u32]>>) -> Pages {
        Pages { region, offset: 0, stride: page_bytes, indices: indices.into() }
    }

    /// The first byte of a page. Checks that the whole page lies inside the region.
    fn place(
        &self,
        index: u32,
        len: u64,
        side: Side,
        regions: &impl RegionLengths,
    ) -> Result<Place, ShapeError> {
        let offset = u64::from(index).checked_mul(self.stride).and_then(|far| far.checked_add(self.offset));
        let place = Place { region: self.region, offset: offset.unwrap_or(u64::MAX) };
        check(place, len, side, regions)?;
        Ok(place)
    }
}

fn add(runs: &mut Vec<Run>, run: Run, regions: &impl RegionLengths) -> Result<(), ShapeError> {
    check(run.local, run.len, Side::Local, regions)?;
    check(run.remote, run.len, Side::Remote, regions)?;
    append(runs, run);
    Ok(())
}

fn check(place: Place, len: u64, side: Side, regions: &impl RegionLengths) -> Result<(), ShapeError> {
    let Place { region, offset } = place;
    let region_bytes = regions.region_bytes(side, region).ok_or(ShapeError::NoSuchRegion { side, region })?;
    match offset.checked_add(len) {
        Some(end) if end <= region_bytes => Ok(()),
        _ => Err(ShapeError::OutOfBounds { side, region, offset, len, region_bytes }),
    }
}
