//! An engine's memory as its worker and the daemon both touch it, both ends side by side.
//!
//! A worker owns the memory in which an engine holds its KV blocks. The daemon copies out of it and, on a GPU, into it.
//! Whatever becomes of the daemon, the worker has to be able to say: from here on no copy of yours counts. For that it
//! keeps a *fence*, words that the daemon looks at before its first and after its last byte.
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
//! How a copy out goes, the same for both kinds of memory:
//! 1. The worker names blocks, the epoch of its fence, and on a GPU an event of the stream that computes them.
//! 2. The daemon waits for the event and claims room in the pool.
//! 3. It reads the fence: is it this process, at this epoch?
//! 4. It copies the blocks.
//! 5. It reads the fence again. Only if nothing has changed the copy counts.
//!
//! A worker that waits no longer raises its epoch, and then uses the blocks anew: what the daemon read of them meanwhile
//! fails step 5. A copy into an engine (a load, on GPUs only) looks at the fence likewise; but bytes once written cannot
//! be taken back, so the worker keeps the blocks of a load until the daemon has answered or is gone.
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
    AskedFlags, BlockOffsets, EVENTS, FLAGS_MAX, Flag, Flags, FlagsError, LoadPart, parts_of, word_address,
};
pub use gpu_daemon::{GpuCopyError, GpuMemory, Member};
pub use gpu_pool::Gpus;
pub use gpu_worker::{ChunkBatch, WorkerGpu};
pub use host_daemon::{CopyError, ProcessVm};
pub use host_worker::HostFence;
pub use meetings::{Answer, Meetings, Seat};
pub use own::{Copied, OwnBlocks, OwnCopies, OwnError};
pub use pace::Pace;
pub use peer::{Asked, PeerBlocks, SaveError};
pub use runs::{PlanError, Runs};
pub use worker_fence::WorkerFence;

/// What a worker is told of its GPU, and the stream of an engine that it is given.
pub use kvlane_gpu::{EngineStream, GpuError};
