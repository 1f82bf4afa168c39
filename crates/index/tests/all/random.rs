//! Random changes, messages in any order, restarts and goodbyes: the index never claims what the owner did not have, and
//! after quiet it has what the owners have.

use proptest::prelude::*;

use crate::world::{World, snapshot_steps, steps};

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_index_follows_its_owners(steps in steps(250)) {
        World::play(&steps, None).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn changes_during_a_snapshot_are_kept(steps in snapshot_steps(120)) {
        World::play(&steps, None).map_err(TestCaseError::fail)?;
    }
}
