//! The atomics of a rank's words, and how its thread lets others run. With `--cfg loom` these are loom's.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(loom)]
pub(crate) use loom::thread::yield_now;
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
pub(crate) use std::thread::{sleep, yield_now};

/// A model has no time: others run instead.
#[cfg(loom)]
pub(crate) fn sleep(_: std::time::Duration) {
    yield_now();
}
