//! An engine's side of the wire: the scheduler's connection, which never blocks, and a worker's connection with
//! the mapped pool and the thread that moves blocks.
//!
//! Nothing here fails because of the daemon: while it is down, slow or restarted, lookups are misses, saves end
//! without effect, and promised loads are finished from the mapping. Reconnecting is automatic.
#![forbid(unsafe_code)]

mod boot;
mod connection;
mod daemon_user;
mod group_spec;
mod hand_off;
mod hit;
mod jobs;
pub mod links;
mod mover;
mod pools;
mod processes;
mod scheduler;
mod shared;
mod tool;
mod wire_gpu;
mod worker;

pub use kvlane_engine_memory::{EngineStream, GpuError, OwnBlocks, OwnError, WorkerGpu};
use kvlane_memory::RuntimeFolder;
use kvlane_proto::Address;

pub use boot::BootId;
pub use connection::ConnectError;
pub use daemon_user::{DaemonUser, NoSuchUser, Stranger};
pub use group_spec::GroupSpec;
pub use hand_off::HandOff;
pub use hit::{Hit, Misfit};
pub use jobs::{
    Copied, Finished, Job, JobKind, LoadGroup, Release, SaveGroupSpec, SaveMethod, Work, WorkerGroupSpec,
};
pub use links::{
    promises::Promises,
    scheduler::{BlockChange, BlockChanges, SchedulerStats},
};
pub use scheduler::{Scheduler, SchedulerOptions};
pub use shared::{WorkerOptions, WorkerStats};
pub use tool::{CLIENT_NAME, Tool, ToolError};
pub use worker::{StartError, Worker};

/// The Unix socket used when none is named: `kvlane.sock` in this user's runtime folder.
pub fn default_address() -> Address {
    Address::Unix(RuntimeFolder::of_this_user().path().join("kvlane.sock"))
}
