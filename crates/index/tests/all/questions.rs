//! The shape of answers.

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;

use kvlane_block::BlockHash;
use kvlane_index::{Index, Limits, OWNERS_A_POSITION, OwnerRuns, Question, Timing};
use proptest::prelude::*;

use crate::peer::{Peer, hashes};
use crate::world::{hash, space};

fn index() -> Index {
    Index::new([1, 2], Limits::default(), Timing::default())
}

fn ask(
    index: &Index,
    hashes: &[BlockHash],
    only_prefix: bool,
    except: Option<&str>,
    turn: u32,
) -> Vec<OwnerRuns> {
    let space = space(0);
    index.find(&Question { space: &space, hashes, only_prefix, except, turn }, Peer::START).unwrap()
}

fn runs(answer: &[OwnerRuns]) -> Vec<(&str, Vec<Range<u32>>)> {
    answer.iter().map(|owner| (&*owner.owner, owner.positions.clone())).collect()
}

#[test]
fn an_answer_names_runs_per_owner_with_epoch_address_and_age() {
    let mut index = index();
    Peer::joined(&mut index, "a").announce(&mut index, &[hashes(0..3), hashes(5..7)].concat());
    Peer::joined(&mut index, "b").announce(&mut index, &hashes(1..6));
    let answer = ask(&index, &hashes(0..8), false, None, 0);
    assert_eq!(runs(&answer), [("a", vec![0..3, 5..7]), ("b", vec![1..6])]);
    let later = Peer::START + Duration::from_secs(2);
    let (space, hashes) = (space(0), hashes(0..1));
    let question = Question { space: &space, hashes: &hashes, only_prefix: true, except: None, turn: 0 };
    let first = &index.find(&question, later).unwrap()[0];
    assert_eq!((first.epoch, &*first.address, first.age), (1, "10.0.0.1:7000", Duration::from_secs(2)));
}

#[test]
fn spaces_are_apart() {
    let mut index = index();
    Peer::joined(&mut index, "a").announce(&mut index, &hashes(0..3));
    let (other, hashes) = (space(1), hashes(0..3));
    let question = Question { space: &other, hashes: &hashes, only_prefix: false, except: None, turn: 0 };
    assert_eq!(index.find(&question, Peer::START), Ok(vec![]));
}

#[test]
fn a_prefix_ends_where_no_visible_owner_has_the_block() {
    let mut index = index();
    Peer::joined(&mut index, "a").announce(&mut index, &[hashes(0..2), hashes(5..7)].concat());
    Peer::joined(&mut index, "b").announce(&mut index, &hashes(1..4));
    assert_eq!(runs(&ask(&index, &hashes(0..8), true, None, 0)), [("a", vec![0..2]), ("b", vec![1..4])]);
    assert_eq!(runs(&ask(&index, &hashes(0..8), true, Some("b"), 0)), [("a", vec![0..2])]);
    assert_eq!(runs(&ask(&index, &hashes(1..8), true, Some("a"), 0)), [("b", vec![0..3])]);
    assert_eq!(ask(&index, &hashes(7..8), true, None, 0), []);
    assert_eq!(ask(&index, &[], true, None, 0), []);
}

#[test]
fn a_block_that_comes_twice_in_a_prompt_has_both_positions() {
    let mut index = index();
    Peer::joined(&mut index, "a").announce(&mut index, &hashes(0..1));
    let answer = ask(&index, &[hash(0), hash(0), hash(9), hash(0)], false, None, 0);
    assert_eq!(runs(&answer), [("a", vec![0..2, 3..4])]);
}

#[test]
fn turns_spread_readers_over_all_owners_of_a_block() {
    let mut index = index();
    for owner in 0..20 {
        Peer::joined(&mut index, &format!("host-{owner}")).announce(&mut index, &hashes(0..5));
    }
    let named: BTreeSet<_> = (0..20)
        .flat_map(|turn| {
            let answer = ask(&index, &hashes(0..5), true, None, turn);
            assert_eq!(answer.len(), OWNERS_A_POSITION);
            assert!(answer.iter().all(|owner| owner.positions == [0..5]));
            answer.into_iter().map(|owner| owner.owner)
        })
        .collect();
    assert_eq!(named.len(), 20);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    /// Twelve owners with random keys: each position names all of its owners, or eight of them.
    #[test]
    fn each_position_names_its_owners(
        owned in prop::collection::vec(prop::collection::btree_set(0..150u8, 0..150), 12),
        turn in any::<u32>(),
        only_prefix in any::<bool>(),
    ) {
        let mut index = index();
        for (number, keys) in owned.iter().enumerate() {
            let keys: Vec<BlockHash> = keys.iter().map(|key| hash(*key)).collect();
            Peer::joined(&mut index, &format!("{number}")).announce(&mut index, &keys);
        }
        let answer = ask(&index, &hashes(0..150), only_prefix, None, turn);
        let covered = |key: u8| owned.iter().any(|keys| keys.contains(&key));
        let end = (0..150).find(|key| only_prefix && !covered(*key)).unwrap_or(150);
        for key in 0..150u8 {
            let has = |owner: &&OwnerRuns| owner.positions.iter().any(|run| run.contains(&u32::from(key)));
            let named: Vec<usize> =
                answer.iter().filter(has).map(|owner| owner.owner.parse().unwrap()).collect();
            prop_assert!(named.iter().all(|number| owned[*number].contains(&key)));
            let owners = owned.iter().filter(|keys| keys.contains(&key)).count();
            let expected = if key < end { owners.min(OWNERS_A_POSITION) } else { 0 };
            prop_assert_eq!(named.len(), expected, "of block {}", key);
        }
        for owner in answer {
            prop_assert!(owner.positions.iter().all(|run| !run.is_empty()));
            prop_assert!(owner.positions.windows(2).all(|pair| pair[0].end < pair[1].start));
        }
    }
}
