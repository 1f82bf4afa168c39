//! Engines of several processes, some of which are killed, stopped or starved, and connections that break
//! between them.
//!
//! The other processes are this test binary, started again: see [`a_process_of_the_tests_below`].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod breaking;
mod damaged;
mod held_back;
mod killed;
mod load;
mod pair;
mod proxy;
mod resources;
mod role;
mod side;
mod sizes;
mod stopped;
mod storms;
#[path = "../support/mod.rs"]
mod support;

use crate::role::Role;
use crate::support::play;

/// No test: started with its part in the environment, this owns an engine, obeys the lines that it is told, and
/// answers each with one.
#[test]
fn a_process_of_the_tests_below() {
    play(Role::new, Role::obey);
}
