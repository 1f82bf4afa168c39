//! Tests of the SSD tier, within one process, as one program: each one takes seconds to link.

mod drops;
mod faults;
mod layout;
mod model;
mod path;
mod release_before;
mod stories;

#[path = "../support/failing.rs"]
mod failing;
#[path = "../support/mod.rs"]
mod support;

/// The way of all transfers. tests/staged has the other one.
const PATH: kvlane_ssd::SsdPath = kvlane_ssd::SsdPath::Direct;
