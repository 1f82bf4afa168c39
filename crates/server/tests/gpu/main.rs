//! Engines on a GPU: the daemon, in a process of its own, copies out of and into memory that it imported.
//!
//! The tests run on the fake driver, and on a real GPU with:
//!
//!     KVLANE_TEST_DRIVER=cuda cargo test --release -p kvlane-server --test gpu -- --nocapture --test-threads=1
#![allow(unreachable_pub, reason = "a test binary has no other crates")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail here")]

mod canary;
mod chunks;
mod daemon;
mod driver;
mod engine;
mod faults;
mod kills;
mod loads;
mod process;
mod several_groups;
#[path = "../support/mod.rs"]
mod support;
