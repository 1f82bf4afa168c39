//! Controls: the random test fails as soon as one mechanism is taken away.

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestCaseError, TestRunner};

use crate::world::{Step, Without, World, snapshot_steps, steps};

fn fails(without: Without, steps: impl Strategy<Value = Vec<Step>>) {
    let config = Config { cases: 2000, failure_persistence: None, max_shrink_iters: 0, ..Config::default() };
    let result = TestRunner::new(config)
        .run(&steps, |steps| World::play(&steps, Some(without)).map_err(TestCaseError::fail));
    assert!(result.is_err(), "the random test does not need {without:?}");
}

#[test]
fn without_epochs_it_fails() {
    fails(Without::Epochs, steps(250));
}

#[test]
fn without_the_order_of_numbers_it_fails() {
    fails(Without::Order, steps(250));
}

#[test]
fn without_the_digest_it_fails() {
    fails(Without::Digest, steps(250));
}

#[test]
fn without_the_sweep_it_fails() {
    fails(Without::Sweep, steps(250));
}

#[test]
fn without_the_numbers_of_parts_it_fails() {
    fails(Without::LateParts, snapshot_steps(120));
}
