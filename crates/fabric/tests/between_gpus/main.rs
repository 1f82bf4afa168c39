//! Engines of processes of one host with memory on (fake) GPUs, which copy out of each other's memory. Bytes arrive, or do not
//! count when the memory is taken back, or its process is killed or stopped. Memory of a process that is gone is free at once.
//!
//! The other processes are this test binary, started again: see [`a_process_of_the_tests_below`].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod given_back;
mod idle;
mod killed;
mod lies;
mod lost;
mod meetings;
mod rates;
mod refused;
mod resources;
mod reused;
mod role;
mod shapes;
mod side;
mod stopped;
#[path = "../support/mod.rs"]
mod support;
mod visible;
mod windows;

use crate::role::Role;
use crate::support::play;

/// No test: started with its part in the environment, this owns an engine, obeys the lines that it is told, and
/// answers each with one.
#[test]
fn a_process_of_the_tests_below() {
    play(Role::new, Role::obey);
}
