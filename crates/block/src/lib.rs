//! What a KV block is: its name (hash, namespace and cut: key), where its bytes lie in an engine (regions) and in the pool
//! (sealed), how workers that hold it alike share it (slices), which copies move it into the pool (runs), when two runs of
//! bytes are one (contiguous), and what its bytes are (shard_layout), so that two sides can compare it (layout_difference).
//! Pure: no I/O, no clock, no unsafe.
#![forbid(unsafe_code)]

pub mod contiguous;
pub mod hash;
pub mod key;
pub mod layout;
pub mod layout_difference;
pub mod numbers;
pub mod runs;
pub mod sealed;
pub mod shard_layout;
pub mod slices;

pub use contiguous::{Contiguous, Position, merge, push_run};
pub use hash::{BlockHash, Cut, CutDigest, HashError, LayoutDigest, Namespace, parse_hashes};
pub use key::{BlockKey, Space};
pub use layout::{LayoutError, MAX_PIECES, Region, shard_bytes};
pub use layout_difference::{Aspect, LayoutDifference, LayoutDifferences};
pub use numbers::{BlockId, PoolOffset, Rank};
pub use runs::{Run, plan};
pub use sealed::{PoolExtent, SealedShard};
pub use shard_layout::{
    Axis, DescriptionError, Dimension, HeadPlace, Heads, LayerLayout, ShardLayout, ShardPlace,
};
pub use slices::{SLICE_STEP, slice};
