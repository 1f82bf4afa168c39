//! Tests of the fabric, within one process, as one program: each one takes seconds to link.

mod engine;
mod messages;
mod shapes;
mod transfers;
mod trust;
mod windows;

#[path = "../support/mod.rs"]
mod support;
