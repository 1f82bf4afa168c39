//! Tests of a daemon within the tests' process, as one program: each one takes seconds to link.

mod engine;
mod hand_off;
mod journal;
mod layouts;
mod model_agrees;
mod strangers;
mod wire;

#[path = "../../../client/tests/simulation/daemon.rs"]
mod model;
#[path = "../support/mod.rs"]
mod support;
