//! An engine's side of the wire: the scheduler's connection, which never blocks, and a worker's connection with
//! the mapped pool and the thread that moves blocks.
//!
//! Nothing here fails because of the daemon: while it is down, slow or restarted, lookups are misses, saves end
//! without effect, and promised loads are finished from the mapping. Reconnecting is automatic.

mod backoff;
mod connection;
mod daemon_user;
mod fence;
mod gpu;
mod group;
mod hit;
mod loading;
mod mover;
mod nonce;
mod pace;
mod pools;
mod scheduler;
mod standing;
mod tool;
mod worker;

use kvlane_memory::RuntimeFolder;
use kvlane_proto::Address;

pub use connection::ConnectError;
pub use daemon_user::{DaemonUser, NoSuchUser, Stranger};
pub use gpu::WorkerGpu;
pub use hit::Hit;
pub use pools::Promises;
pub use scheduler::{GroupSpec, Scheduler, SchedulerOptions, SchedulerStats};
pub use tool::{Tool, ToolError};
pub use worker::{
    Finished, JobKind, LoadGroup, Release, SaveGroupSpec, SaveMethod, StartError, Worker, WorkerGroupSpec,
    WorkerOptions, WorkerStats,
};

/// The Unix socket used when none is named: `kvlane.sock` in this user's runtime folder.
pub fn default_address() -> Address {
    Address::Unix(RuntimeFolder::of_this_user().path().join("kvlane.sock"))
}

/// Name and version that clients give in their greeting when the caller has nothing better.
pub const CLIENT_NAME: &str = concat!("kvlane ", env!("CARGO_PKG_VERSION"));

/// 16 random bytes that name one run of the daemon.
pub type BootId = [u8; 16];
