//! Numbers that travel together, each with a type of its own: one that is passed for another does not compile. They are plain
//! integers at run time, and on the wire.

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
    /// A block of an engine's KV cache, by the engine's own number: which of the strided blocks of a region. Below
    /// [`Region::blocks`](crate::Region::blocks).
    BlockId(u32)
}
number! {
    /// Bytes from the start of the daemon's pool.
    PoolOffset(u64)
}

impl Position for PoolOffset {
    fn after(self, bytes: u64) -> Option<PoolOffset> {
        self.0.checked_add(bytes).map(PoolOffset)
    }
}

impl PoolOffset {
    /// Where so many bytes from here end, if that is inside a pool of this size.
    pub fn end_inside(self, bytes: u64, pool_bytes: u64) -> Option<PoolOffset> {
        self.after(bytes).filter(|end| end.0 <= pool_bytes)
    }
}
