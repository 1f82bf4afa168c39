//! Transfers of GPUs' memory, on fake GPUs.
//!
//! The other processes are this test binary, started again: see [`a_process_of_the_tests_below`].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

#[path = "../certificates/mod.rs"]
mod certificates;
mod failing;
mod given_back;
mod heard;
mod killed;
mod role;
mod shapes;
mod side;
#[path = "../support/mod.rs"]
mod support;
mod ways;

use crate::role::Role;
use crate::support::play;

/// No test: started with its part in the environment, this owns an engine with memory on a GPU, obeys the lines that it is
/// told, and answers each with one.
#[test]
fn a_process_of_the_tests_below() {
    play(Role::new, Role::obey);
}
