//! A KV block: its name, its bytes, and the copies that move it. Pure: no I/O, no clock, no unsafe.
//!
//! - `hash`, `key`: the name of a block is its hash, namespace and cut.
//! - `layout`: the regions of an engine's memory that hold it. `sealed`: its extents in the pool.
//! - `runs`: the copies between both. `contiguous`: when two of them become one.
//! - `slices`: how workers that hold the same block share it, so that each saves a part.
//! - `shard_layout`: a description of its bytes. `layout_difference`: compares two descriptions.
//! - `checksum`: crc32c.
//! - `numbers`: ids, ranks and offsets, each with a type of its own.
#![forbid(unsafe_code)]

pub mod checksum;
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

pub use checksum::{Crc32c, crc32c};
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
