//! Ids, ranks and offsets, each with a type of its own, so that one cannot be passed for another. They are plain integers at
//! run time and on the wire.

use std::fmt;

use crate::contiguous::Position;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

number! {
    /// The engine's own number of a block in its KV cache: the index of the block in each region. Below
    /// [`Region::blocks`](crate::Region::blocks).
    BlockId(u32)
}
number! {
    /// Bytes from the start of the daemon's pool.
    PoolOffset(u64)
}

number! {
    /// vLLM's number of a worker in its engine: below the number of workers, and unique in the engine.
    Rank(u32)
}

impl Rank {
    /// Which slice of a block this rank saves, where every `holders` consecutive ranks hold the same blocks.
    ///
    /// # Panics
    /// If `holders` is 0.
    pub fn slice_of(self, holders: usize) -> usize {
        self.0 as usize % holders
    }

    /// The first of the ranks that hold the same blocks as this one.
    ///
    /// # Panics
    /// As for [`Self::slice_of`].
    pub fn first_of(self, holders: usize) -> Rank {
        Rank(self.0 - self.slice_of(holders) as u32)
    }
}

impl Position for PoolOffset {
    fn after(self, bytes: u64) -> Option<PoolOffset> {
        self.0.checked_add(bytes).map(PoolOffset)
    }
}

impl PoolOffset {
    /// The end of `bytes` bytes from here, if it is inside a pool of `pool_bytes`.
    pub fn end_inside(self, bytes: u64, pool_bytes: u64) -> Option<PoolOffset> {
        self.after(bytes).filter(|end| end.0 <= pool_bytes)
    }
}
