//! The tests of tests/all whose transfers move blocks, once more through staging memory.

#[path = "../all/drops.rs"]
mod drops;
#[path = "../all/faults.rs"]
mod faults;
#[path = "../all/model.rs"]
mod model;
#[path = "../all/release_before.rs"]
mod release_before;
#[path = "../all/stories.rs"]
mod stories;

#[path = "../support/failing.rs"]
mod failing;
#[path = "../support/mod.rs"]
mod support;

/// The way of all transfers.
const PATH: kvlane_ssd::SsdPath = kvlane_ssd::SsdPath::Staged;
