//! What a KV block is: its name (hash and namespace), where its bytes lie in an engine (regions), how workers that hold
//! it alike share it (slices), and which copies move it into the pool (runs); and when two runs of bytes are one
//! (contiguous). Pure: no I/O, no clock, no unsafe.
#![forbid(unsafe_code)]

pub mod contiguous;
pub mod hash;
pub mod layout;
pub mod numbers;
pub mod runs;
pub mod slices;

pub use contiguous::{Contiguous, Position, merge, push_run};
pub use hash::{BlockHash, Cut, CutDigest, HashError, LayoutDigest, Namespace, parse_hashes};
pub use layout::{LayoutError, MAX_PIECES, Region, shard_bytes};
pub use numbers::{BlockId, PoolOffset, Rank};
pub use runs::{Run, plan};
pub use slices::{SLICE_STEP, slice};
