//! [`PoolPage`]: the number of a page of the pool.

use std::fmt;

use kvlane_block::PoolOffset;

/// Bytes of a page, the unit of extents.
pub const PAGE_BYTES: u64 = 4096;

/// A page of the pool, counted from its start. On the wire it stands for the extent that it begins.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolPage(pub u32);

impl PoolPage {
    /// Offset of the page in the pool. Does not check that the pool is that long.
    pub fn offset(self) -> PoolOffset {
        PoolOffset(u64::from(self.0) * PAGE_BYTES)
    }
}

impl fmt::Display for PoolPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
