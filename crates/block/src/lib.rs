//! What a KV block is: its name (hash and namespace), where its bytes lie in an engine (regions), and which copies
//! move it into the pool (runs). Pure: no I/O, no clock, no unsafe.
#![forbid(unsafe_code)]

pub mod hash;
pub mod layout;
pub mod runs;

pub use hash::{BlockHash, Cut, CutDigest, HashError, LayoutDigest, Namespace, parse_hashes};
pub use layout::{LayoutError, MAX_PIECES, Region, shard_bytes};
pub use runs::{Run, plan};
