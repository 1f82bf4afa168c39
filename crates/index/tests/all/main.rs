//! Tests of the block index, as one program: each one takes seconds to link.
#![allow(clippy::unwrap_used, reason = "a test may fail here")]
#![allow(clippy::single_range_in_vec_init, reason = "an answer is a list of runs")]

mod bounds;
mod controls;
mod owners;
mod peer;
mod questions;
mod random;
mod snapshots;
mod world;
