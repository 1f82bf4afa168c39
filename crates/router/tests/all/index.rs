//! The index of prefixes against a plain map.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::{HashMap, HashSet};

use kvlane_router::{body::Mark, schedule::Index};
use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A prompt of pieces, each of 256 bytes: prompts with the same first pieces have the same first marks.
fn prompt(pieces: &[u8]) -> Vec<Mark> {
    let mut hash = 7;
    pieces
        .iter()
        .enumerate()
        .map(|(place, piece)| {
            hash = xxh3_64_with_seed(&[*piece], hash);
            Mark { hash, bytes: (place as u32 + 1) * 256 }
        })
        .collect()
}

#[derive(Debug, Clone)]
enum Step {
    Insert(Vec<u8>, usize),
    /// The last block of a prompt goes, as engines evict them.
    Remove(Vec<u8>, usize),
    Forget(usize),
    Match(Vec<u8>),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pieces = || prop::collection::vec(0u8..3, 0..6);
    let node = || prop_oneof![0usize..4, 60usize..70, Just(130usize)];
    let step = prop_oneof![
        4 => (pieces(), node()).prop_map(|(pieces, node)| Step::Insert(pieces, node)),
        2 => (pieces(), node()).prop_map(|(pieces, node)| Step::Remove(pieces, node)),
        1 => node().prop_map(Step::Forget),
        4 => pieces().prop_map(Step::Match),
    ];
    prop::collection::vec(step, 0..60)
}

proptest! {
    #[test]
    fn it_answers_as_a_plain_map(steps in steps()) {
        let mut index = Index::new(1 << 14);
        let mut map: HashMap<u64, HashSet<usize>> = HashMap::new();
        let mut matched = Vec::new();
        for step in steps {
            match step {
                Step::Insert(pieces, node) => {
                    let marks = prompt(&pieces);
                    index.insert(&marks, node);
                    for mark in &marks {
                        map.entry(mark.hash).or_default().insert(node);
                    }
                }
                Step::Remove(pieces, node) => {
                    let last = prompt(&pieces).last().copied();
                    last.into_iter().for_each(|mark| index.remove_one(mark.hash, node));
                    last.and_then(|mark| map.get_mut(&mark.hash)).map(|nodes| nodes.remove(&node));
                }
                Step::Forget(node) => {
                    index.forget(node);
                    for nodes in map.values_mut() {
                        nodes.remove(&node);
                    }
                }
                Step::Match(pieces) => {
                    let marks = prompt(&pieces);
                    index.matched(&marks, &mut matched);
                    for node in 0..200 {
                        let has = |mark: &&Mark| map.get(&mark.hash).is_some_and(|nodes| nodes.contains(&node));
                        let expected = marks.iter().take_while(has).last().map_or(0, |mark| mark.bytes);
                        prop_assert_eq!(matched.get(node).copied().unwrap_or(0), expected, "node {}", node);
                    }
                }
            }
        }
        let there = map.iter().filter(|(_, nodes)| nodes.iter().any(|&node| node < 64)).count();
        prop_assert!(index.marks() >= there);
    }

    /// It never says more than what was put in, however small it is; the prompt that was put in last is there in whole.
    #[test]
    fn a_full_one_forgets_and_never_invents(prompts in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..6), 1..200)) {
        let mut index = Index::new(64);
        let mut known: HashSet<u64> = HashSet::new();
        let mut matched = Vec::new();
        for pieces in prompts {
            let marks = prompt(&pieces);
            index.matched(&marks, &mut matched);
            let most = marks.iter().take_while(|mark| known.contains(&mark.hash)).last().map_or(0, |mark| mark.bytes);
            prop_assert!(matched.first().copied().unwrap_or(0) <= most);
            index.insert(&marks, 0);
            known.extend(marks.iter().map(|mark| mark.hash));
            prop_assert!(index.marks() <= 64 && index.bytes() <= 64 * 16);
            index.matched(&marks, &mut matched);
            prop_assert_eq!(matched[0], marks.last().unwrap().bytes);
        }
    }
}

/// Complaints 10 and 35 (dynamo 4429, production-stack 687): an index that grows until the memory is gone.
#[test]
fn its_memory_is_known_from_the_start() {
    let mut index = Index::new(1 << 12);
    for start in 0..2_000u64 {
        let marks: Vec<Mark> = (0..64)
            .map(|place| Mark {
                hash: xxh3_64_with_seed(&[place], start),
                bytes: (u32::from(place) + 1) * 256,
            })
            .collect();
        index.insert(&marks, 3);
    }
    assert!(index.bytes() <= (1 << 12) * 13, "{} bytes", index.bytes());
    let filled = index.marks() as f64 / f64::from(1 << 12);
    assert!(filled > 0.99, "{filled} of its room is used");
}
