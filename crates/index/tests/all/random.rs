//! Random changes, messages in any order, restarts and goodbyes: the index never claims what the owner did not have, and
//! after quiet it has what the owners have.

use proptest::prelude::*;

use crate::world::{World, snapshot_steps, steps};

/// Few cases, because each takes a tenth of a second in a debug build. `PROPTEST_CASES` makes more for a soak.
fn config() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").map_or(64, |cases| cases.parse().unwrap());
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn the_index_follows_its_owners(steps in steps(250)) {
        World::play(&steps, None).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn changes_during_a_snapshot_are_kept(steps in snapshot_steps(120)) {
        World::play(&steps, None).map_err(TestCaseError::fail)?;
    }
}
