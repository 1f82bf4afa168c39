//! Decides what to keep and what a prompt can reuse: eviction order and hit length, over plain numbers.
//!
//! Pure: no I/O, no clock, no locks. A *slot* is the store's number for a block.
#![forbid(unsafe_code)]

mod hit;
mod lru;

pub use hit::{PrefixGroup, longest_hit};
pub use lru::PrefixLru;
