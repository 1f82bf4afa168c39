//! Shared by tests with several processes: memory, second processes, and what those leave open.
#![allow(
    dead_code,
    unused_imports,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "each test uses a part of it"
)]

use std::time::Duration;

mod deadline;
mod memory;
mod open;
mod process;

pub(crate) use deadline::Deadline;
pub(crate) use memory::{Memory, Random};
pub(crate) use open::{numbers, settled};
pub(crate) use process::{Process, play, say};

/// How long anything may take that is to happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
pub(crate) const MIB: usize = 1 << 20;
