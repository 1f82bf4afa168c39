//! Engines of processes of one host, which read each other's memory. Bytes arrive, or do not count when a process is killed,
//! stopped, closed, or forbidden to read.
//!
//! The other processes are this test binary, started again: see [`a_process_of_the_tests_below`].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod cancelled;
mod closed;
mod descriptors;
mod fallback;
mod gate;
mod given_back;
mod handicaps;
mod killed;
mod late;
mod resources;
mod role;
mod shapes;
mod side;
mod stopped;
#[path = "../support/mod.rs"]
mod support;
mod windows;

use crate::role::Role;
use crate::support::play;

/// No test: started with its part in the environment, this owns an engine, obeys the lines that it is told, and
/// answers each with one.
#[test]
fn a_process_of_the_tests_below() {
    play(Role::new, Role::obey);
}
