//! Ranks on GPUs: memory of a GPU that all ranks of the host reach, and kernels that send, wait and sum.
//!
//! ```text
//!   GpuRank   checks a call, and launches
//!     schedule    how large launches are (pure)
//!     parameters  what a kernel is told
//!     reach       the memory of the other ranks
//!     watch       a thread: which ranks are gone, and why a kernel failed
//!   kernels/*.cu  CUDA C++, compiled by scripts/build_kernels.py; tests run it on CPUs
//! ```
//! A call enqueues work in the caller's stream and returns. It allocates nothing, so graphs may capture it. A kernel numbers its
//! dispatch itself, by a word on the GPU: so a graph can be replayed.

mod kernels;
mod limits;
mod parameters;
mod rank;
mod reach;
mod schedule;
mod scratch;
mod watch;

pub use limits::{GPU_EXPERTS_MAX, GPU_RANKS_MAX, GPU_TOKENS_MAX};
pub use rank::{Cast, Combine, Dispatched, GpuOptions, GpuRank, Input, Output, Phases, join_on_gpu};
