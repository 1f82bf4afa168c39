//! Tests of replacement policies, as one program: each one takes seconds to link.

mod ceiling;
mod hit;
mod learned;
mod lru;
mod policies;
mod replay;
mod workloads_are_what_they_say;

#[path = "../workloads/mod.rs"]
mod workloads;
