//! An engine's side of the wire: [`Scheduler`] looks blocks up and never blocks its caller; [`Worker`] saves and loads blocks
//! in a thread of its own, with the daemon's pool mapped.
//!
//! No call fails because of the daemon. While the daemon is down, slow or restarted, lookups are misses, saves end without
//! effect, and promised loads are copied from the mapped pool. Reconnecting is automatic.
//!
//! [`links`] decides, without I/O; the other modules carry its decisions out.
#![forbid(unsafe_code)]

mod awaited_save;
mod boot;
mod connection;
mod daemon_user;
mod group_spec;
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

pub use awaited_save::AwaitedSave;
pub use boot::BootId;
pub use connection::ConnectError;
pub use daemon_user::{DaemonUser, NoSuchUser, Stranger};
pub use group_spec::GroupSpec;
pub use hit::{Hit, Misfit};
pub use jobs::{
    Copied, Finished, Job, JobKind, LoadGroup, Release, SaveGroupSpec, SaveMethod, Work, WorkerGroupSpec,
};
pub use links::pace::ReleaseAhead;
pub use links::{
    promises::Promises,
    scheduler::{BlockChange, BlockChanges, SchedulerStats},
};
pub use scheduler::{LookupRequest, Scheduler, SchedulerOptions};
pub use shared::{WorkerOptions, WorkerStats};
pub use tool::{CLIENT_NAME, Tool, ToolError};
pub use worker::{StartError, Worker};

/// The Unix socket used when none is named: `kvlane.sock` in this user's runtime folder.
pub fn default_address() -> Address {
    Address::Unix(RuntimeFolder::of_this_user().path().join("kvlane.sock"))
}
