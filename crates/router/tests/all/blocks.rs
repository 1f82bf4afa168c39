//! Blocks by KV events, in any order and any number of times, against plain sets.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    collections::{HashMap, HashSet},
    time::Instant,
};

use kvlane_kv_events::{BlockRemoved, BlockStored, ExternalHash, ExtraKey};
use kvlane_router::knowledge::{BlockStats, Blocks, Parent, chain, seed};
use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_64_with_seed;

const SIZE: u32 = 4;

/// The tokens of a prompt of pieces, each of one block.
fn tokens(pieces: &[u8]) -> Vec<u32> {
    pieces.iter().flat_map(|&piece| [u32::from(piece); SIZE as usize]).collect()
}

/// What an engine calls the last block of these. Engines of the same salt hash alike.
fn engines(pieces: &[u8], salt: u64) -> ExternalHash {
    ExternalHash::Number(xxh3_64_with_seed(pieces, salt))
}

fn stored(pieces: &[u8], from: usize, salt: u64, medium: Option<&str>) -> BlockStored {
    BlockStored {
        hashes: (from..pieces.len()).map(|last| engines(&pieces[..=last], salt)).collect(),
        parent: (from > 0).then(|| engines(&pieces[..from], salt)),
        tokens: tokens(&pieces[from..]),
        block_size: SIZE,
        lora_id: None,
        medium: medium.map(str::to_owned),
        lora_name: None,
        extra_keys: Vec::new(),
        group: None,
        kind: None,
        window: None,
    }
}

fn take(blocks: &mut Blocks, node: usize, event: &BlockStored) {
    let mut next = Some((0, Parent::OfEvent));
    while let Some((from, parent)) = next {
        next = blocks.stored(node, event, from, parent);
    }
}

fn found(blocks: &mut Blocks, chain: &[u64]) -> HashMap<usize, usize> {
    let mut found = HashMap::new();
    blocks.matched(chain, &[u64::MAX, u64::MAX], Instant::now(), |node, count| {
        assert!(found.insert(node, count).is_none());
    });
    found
}

fn count(blocks: &mut Blocks, pieces: &[u8], node: usize) -> usize {
    found(blocks, &chain(&tokens(pieces), SIZE, None, None))[&node]
}

#[derive(Debug, Clone)]
enum Step {
    Store(Vec<u8>, usize, usize, bool),
    Remove(Vec<u8>, usize, bool),
    Clear(usize),
    Restart(usize),
    Match(Vec<u8>),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pieces = || prop::collection::vec(0u8..3, 1..6);
    let node = || prop_oneof![0usize..3, 63usize..66];
    let step = prop_oneof![
        5 => (pieces(), 0usize..5, node(), any::<bool>())
            .prop_map(|(pieces, from, node, on_gpu)| Step::Store(pieces, from, node, on_gpu)),
        3 => (pieces(), node(), any::<bool>()).prop_map(|(pieces, node, on_gpu)| Step::Remove(pieces, node, on_gpu)),
        1 => node().prop_map(Step::Clear),
        1 => node().prop_map(Step::Restart),
        4 => pieces().prop_map(Step::Match),
    ];
    prop::collection::vec(step, 0..80)
}

proptest! {
    #[test]
    fn they_answer_as_plain_sets_do(steps in steps()) {
        let mut blocks = Blocks::new(1 << 12);
        let mut held: HashSet<(usize, bool, Vec<u8>)> = HashSet::new();
        // What an engine's hash names is known once any event named it: two nodes of three hash alike.
        let mut named: HashSet<(u64, Vec<u8>)> = HashSet::new();
        let salt = |node: usize| u64::from(node.is_multiple_of(3));
        let medium = |on_gpu: bool| if on_gpu { Some("GPU") } else { Some("CPU") };
        for step in steps {
            match step {
                Step::Store(pieces, from, node, on_gpu) => {
                    let from = from.min(pieces.len() - 1);
                    take(&mut blocks, node, &stored(&pieces, from, salt(node), medium(on_gpu)));
                    // Complaint 30: at the root they would be the beginning of another prompt.
                    if from == 0 || named.contains(&(salt(node), pieces[..from].to_vec())) {
                        for last in from..pieces.len() {
                            named.insert((salt(node), pieces[..=last].to_vec()));
                            held.insert((node, on_gpu, pieces[..=last].to_vec()));
                        }
                    }
                }
                Step::Remove(pieces, node, on_gpu) => {
                    let hashes = vec![engines(&pieces, salt(node))];
                    let medium = medium(on_gpu).map(str::to_owned);
                    blocks.removed(node, &BlockRemoved { hashes, medium, group: None });
                    held.remove(&(node, on_gpu, pieces));
                }
                Step::Clear(node) => {
                    blocks.cleared(node);
                    held.retain(|(of, _, _)| *of != node);
                }
                Step::Restart(node) => {
                    blocks.forget(node);
                    held.retain(|(of, _, _)| *of != node);
                    prop_assert_eq!(blocks.stats(node), BlockStats::default());
                }
                Step::Match(pieces) => {
                    let found = found(&mut blocks, &chain(&tokens(&pieces), SIZE, None, None));
                    for node in 0..128 {
                        let has = |last: &usize| {
                            [true, false].iter().any(|&on_gpu| held.contains(&(node, on_gpu, pieces[..=*last].to_vec())))
                        };
                        let expected = (0..pieces.len()).take_while(has).count();
                        prop_assert_eq!(found[&node], expected, "node {}", node);
                    }
                }
            }
        }
    }

    /// A prompt is another one with another salt, adapter or size of blocks; a block's name covers all before it.
    #[test]
    fn chains_tell_prompts_apart(
        tokens in prop::collection::vec(0u32..3, 8..300),
        place in any::<prop::sample::Index>(),
        size in 1u32..80,
    ) {
        let plain = chain(&tokens, size, None, None);
        prop_assert_eq!(plain.len(), tokens.len() / size as usize);
        let mut other = tokens.clone();
        let place = place.index(other.len());
        other[place] += 7;
        let changed = place / size as usize;
        for (at, (one, two)) in plain.iter().zip(chain(&other, size, None, None)).enumerate() {
            prop_assert_eq!(*one == two, at < changed);
        }
        for unlike in [
            chain(&tokens, size, Some(""), None),
            chain(&tokens, size, Some("a"), None),
            chain(&tokens, size, None, Some("")),
            chain(&tokens, size, None, Some("a")),
            chain(&tokens, size + 1, None, None),
        ] {
            prop_assert!(!plain.iter().any(|block| unlike.contains(block)));
        }
    }
}

#[test]
fn adapters_and_salts_come_with_the_events() {
    let mut blocks = Blocks::new(1 << 10);
    let adapted = BlockStored {
        lora_name: Some("pirate".into()),
        extra_keys: vec![vec![ExtraKey::Text("pirate".into())], vec![ExtraKey::Text("pirate".into())]],
        ..stored(&[1, 2], 0, 1, None)
    };
    take(&mut blocks, 0, &adapted);
    let salted = BlockStored {
        extra_keys: vec![vec![ExtraKey::Text("mine".into())], vec![]],
        ..stored(&[1, 2], 0, 2, None)
    };
    take(&mut blocks, 1, &salted);
    let pictured =
        BlockStored { extra_keys: vec![vec![ExtraKey::Other], vec![]], ..stored(&[1, 2], 0, 3, None) };
    take(&mut blocks, 2, &pictured);
    let mut of = |adapter, salt| {
        let found = found(&mut blocks, &chain(&tokens(&[1, 2]), SIZE, adapter, salt));
        [found[&0], found[&1], found[&2]]
    };
    assert_eq!(of(Some("pirate"), None), [2, 0, 0]);
    assert_eq!(of(None, Some("mine")), [0, 2, 0]);
    assert_eq!(of(None, None), [0, 0, 0]);
    assert_ne!(seed(SIZE, None), seed(SIZE, Some("")));
}

/// Complaint 41 (llm-d-router 878): events of the CPU's tier come without tokens, and were dropped.
#[test]
fn blocks_that_move_to_another_medium_without_their_tokens_are_still_held() {
    let mut blocks = Blocks::new(1 << 10);
    take(&mut blocks, 0, &stored(&[1, 2], 0, 0, Some("GPU")));
    let offloaded =
        BlockStored { parent: None, tokens: Vec::new(), block_size: 0, ..stored(&[1, 2], 0, 0, Some("CPU")) };
    take(&mut blocks, 0, &offloaded);
    let removed = |medium: &str| BlockRemoved {
        hashes: vec![engines(&[1], 0), engines(&[1, 2], 0)],
        medium: Some(medium.into()),
        group: None,
    };
    blocks.removed(0, &removed("GPU"));
    assert_eq!(count(&mut blocks, &[1, 2], 0), 2);
    blocks.removed(0, &removed("CPU"));
    assert_eq!(count(&mut blocks, &[1, 2], 0), 0);
    // One whose tokens were never told is counted, and not guessed.
    take(&mut blocks, 0, &BlockStored { hashes: vec![engines(&[7], 0)], ..offloaded });
    assert_eq!(blocks.stats(0).unattached, 1);
}

/// Complaint 30 (Infera 73): a hybrid model's block of 768 tokens was read as none.
#[test]
fn blocks_are_as_long_as_the_engine_says() {
    let mut blocks = Blocks::new(1 << 10);
    let long: Vec<u32> = (0..2000).collect();
    let event = BlockStored {
        hashes: vec![engines(&[1], 0), engines(&[1, 2], 0)],
        tokens: long[..1536].to_vec(),
        block_size: 768,
        ..stored(&[1], 0, 0, None)
    };
    take(&mut blocks, 3, &event);
    assert_eq!(blocks.stats(3).block_size, Some(768));
    assert_eq!(found(&mut blocks, &chain(&long, 768, None, None))[&3], 2);
    // Events that do not fit together change nothing but a count; nor do those of other groups of layers.
    for wrong in [
        BlockStored { block_size: 0, ..event.clone() },
        BlockStored { block_size: 767, ..event.clone() },
        BlockStored { tokens: long[..10].to_vec(), ..event.clone() },
        BlockStored { block_size: u32::MAX, ..event.clone() },
    ] {
        let before = blocks.stats(3).unattached;
        take(&mut blocks, 3, &wrong);
        assert_eq!((blocks.stats(3).unattached, blocks.stats(3).block_size), (before + 2, Some(768)));
    }
    take(&mut blocks, 4, &BlockStored { group: Some(1), ..event });
    assert_eq!(blocks.stats(4), BlockStats::default());
}

#[test]
fn memory_is_bounded_and_taken_when_it_is_needed() {
    let mut blocks = Blocks::new(1 << 12);
    assert_eq!(blocks.bytes(), 0);
    for start in 0..3000u32 {
        let pieces: Vec<u32> = (0..16 * SIZE).map(|token| start * 1000 + token).collect();
        let hashes = (0..16).map(|block| ExternalHash::Number(u64::from(start * 100 + block))).collect();
        take(&mut blocks, 0, &BlockStored { hashes, tokens: pieces, ..stored(&[1], 0, 0, None) });
    }
    // A block of one medium, the engine's hashes of two, and nothing of the other medium.
    assert!(blocks.bytes() <= (1 << 12) * (13 + 2 * 11), "{} bytes", blocks.bytes());
}

/// One engine reports blocks that it has saved, another engine reports its own. Each engine can load all of them.
#[test]
fn a_pool_holds_what_any_of_its_nodes_told_of_another_medium_than_its_device() {
    let mut blocks = Blocks::new(1 << 12);
    let pieces = [1, 2, 3, 4];
    take(&mut blocks, 3, &stored(&pieces[..2], 0, 7, Some("CPU")));
    take(&mut blocks, 70, &stored(&pieces[..3], 0, 7, None));
    take(&mut blocks, 70, &stored(&pieces[..3], 2, 7, Some("CPU")));
    take(&mut blocks, 5, &stored(&pieces, 0, 7, Some("CPU")));
    let chain = chain(&tokens(&pieces), SIZE, None, None);
    let pool = [(0, 1 << 3), (1, 1 << 6)];
    assert_eq!(blocks.pooled(&chain, chain.len(), &pool), 3);
    assert_eq!(blocks.pooled(&chain, chain.len(), &pool[1..]), 0, "its first block is on a device");
    let removed =
        BlockRemoved { hashes: vec![engines(&pieces[..2], 7)], medium: Some("CPU".into()), group: None };
    blocks.removed(3, &removed);
    assert_eq!(
        (blocks.pooled(&chain, chain.len(), &pool), blocks.pooled(&chain, chain.len(), &[(0, 1 << 5)])),
        (1, 4)
    );
}
