//! The all-to-all of a mixture of experts: *dispatch* sends each token's row to the ranks that hold its experts, *combine*
//! brings back the weighted sum of what the experts made of it.
//!
//! ```text
//!  token 5 of rank 0 wants experts 1, 6, 7                    rank 1 holds experts 4 to 7
//!    dispatch: one row to rank 0, one to rank 1                 rows by expert: | 4 .. | 5 .. | 6: 5 | 7: 5 |
//!    combine:  w1 * y1 + w6 * y6 + w7 * y7           <---------   y6, y7 (exact), or w6 * y6 + w7 * y7 (reduced)
//! ```
//! - pure: [`Shape`], what all ranks agree on; `routing`, where each row goes; [`Arrivals`], where it lands;
//!   `layout`, the bytes of a rank's memory
//! - `cast`, rows of bfloat16 as fp8 with scales
//! - edges: `heap`, memory that all ranks of a host map; [`join()`], how they find each other's; [`Rank`], the two operations;
//!   `wait`, how a rank waits for another one, and learns that it has left
//! - [`gpu`]: the same on GPUs, by kernels
//!
//! # The protocol
//! A row has a slot in the receiver's memory that follows from the routing alone, and a word of its own. The sender writes the
//! row, then the operation's sequence number into the word. The receiver waits for that number, so words are never reset. Counts
//! and numbers share a word. Each rank sends counts to all ranks in each dispatch, also without tokens.
//!
//! Slots exist twice, for even and odd dispatches. A rank sends dispatch n + 1 after it has received n, so it has counts of n from
//! all, and each sent them after it had received n - 1. So nobody still reads n - 1 when n + 1 is written.
//!
//! Combine has the number of its dispatch. A rank writes to another one only about tokens that came with that dispatch, which the
//! other one sent after it had done with the second dispatch before.
//!
//! A rank that gets more rows than it has room for (in a masked layout, or on a GPU) receives the dispatch all the same. For each
//! row it writes a refusal into the words that combine would write, and nothing else. So no rank falls out of step, and each one
//! whose token came there learns of it when it waits for the sum.
//!
//! A rank whose process ends, that closes or that fails is noticed by those who wait for it. From then on every operation of
//! theirs fails. A rank that has sent its part of a dispatch and cannot receive it fails, too: the others are one dispatch ahead.
//!
//! `make loom` runs two ranks through up to three dispatches, and tries the orders of their steps (`under_loom`).

#![deny(unsafe_code)]
#![cfg_attr(loom, allow(dead_code, reason = "only parts without a model use it: join and gpu"))]

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("kvlane runs on 64-bit Linux");

mod arrivals;
mod cast;
mod combine;
mod error;
#[cfg(not(loom))]
pub mod gpu;
mod heap;
#[cfg(not(loom))]
mod join;
mod layout;
#[cfg_attr(loom, path = "memory_under_loom.rs")]
mod memory;
mod number;
mod rank;
mod refusal;
mod routing;
mod shape;
mod sync;
#[cfg(all(loom, test))]
mod under_loom;
mod wait;

pub use arrivals::Arrivals;
pub use cast::{SCALED, Scales, cast_to_fp8};
pub use error::{MoeError, Phase};
#[cfg(not(loom))]
pub use join::{AllGather, Terms, decline, join};
pub use number::Number;
pub use rank::{Arrived, Handle, Rank, Sent, Stats, Sum};
pub use shape::{RANKS_MAX, RowLayout, Shape, TOP_K_MAX};
