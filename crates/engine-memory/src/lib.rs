//! Copies between an engine's KV blocks and the pool, by the daemon and by the engine's own worker, both ends side by side.
//!
//! A worker owns the memory in which an engine holds its KV blocks. The daemon copies out of it and, on a GPU, into it. A worker
//! must be able to void the daemon's copies at any time, even if the daemon is stopped. For that it keeps a *fence*: words that
//! the daemon reads before its first and after its last byte.
//!
//! ```text
//!  worker, host memory: 24 bytes            worker, GPU memory: one allocation of 2 MiB
//!  +0   nonce of the process   16           +0       nonce                16
//!  +16  epoch, u64 LE           8           +16      epoch, u64 LE         8
//!  +24                                      +24      not used
//!                                           +65536   flags of event 0: 256 words of 4 bytes
//!                                           +66560   flags of event 1
//!                                            ...     word f of event e stands at 65536 + 1024 e + 4 f
//!                                           +327680  end of the flags of 256 events
//!
//!  daemon, pinned host memory of a stream's copies: 4096 bytes
//!  +0   the fence as the GPU read it before the copies   24
//!  +64  the fence as the GPU read it after them          24
//! ```
//!
//! A copy out (a save), the same for both kinds of memory:
//! 1. The worker names blocks, the epoch of its fence, and on a GPU an event of the stream that computes them.
//! 2. The daemon waits for the event and claims room in the pool.
//! 3. The daemon reads the fence: is it this process, at this epoch?
//! 4. The daemon copies the blocks.
//! 5. The daemon reads the fence again. The copy counts only if nothing has changed.
//!
//! A worker that gives a save up raises its epoch before it reuses the blocks. So a copy that may have read reused blocks fails
//! step 5. A copy in (a load, on GPUs only) checks the fence the same way. But bytes that were written cannot be taken back, so
//! the worker reuses the blocks of a load only after the daemon has answered or is gone.
#![deny(unsafe_code)]

mod blocks;
mod chunks;
mod exported;
mod fence;
mod flags;
mod gpu_daemon;
mod gpu_pool;
mod gpu_worker;
mod host_daemon;
mod host_worker;
mod lane;
mod meetings;
mod own;
mod own_copies;
mod pace;
mod peer;
mod runs;
mod worker_fence;

pub use blocks::{BlockPages, GroupMemory, LoadGroup, WorkerGroupSpec, WrongPages};
pub use chunks::SharedChunks;
pub use exported::{Allocation, ChunkShare, Exported};
pub use fence::{FENCE_BYTES, FenceValue};
pub use flags::{
    AskedFlags, BlockOffsets, EVENTS, FLAGS_MAX, Flag, Flags, FlagsError, GroupPlaces, LoadPart, parts_of,
    word_address,
};
pub use gpu_daemon::{GpuCopyError, GpuMemory, Member};
pub use gpu_pool::Gpus;
pub use gpu_worker::{ChunkBatch, WorkerGpu};
pub use host_daemon::{CopyError, ProcessVm};
pub use host_worker::HostFence;
pub use meetings::{Answer, Meetings, Seat};
pub use own::{Copied, OwnBlocks, OwnCopies, OwnError};
pub use pace::Pace;
pub use peer::{CopyCondition, PeerBlocks, SaveError};
pub use runs::{PlanError, Runs};
pub use worker_fence::WorkerFence;

/// Types of this crate's API that come from the GPU crate.
pub use kvlane_gpu::{EngineStream, GpuError};
