//! Hits of models with several KV cache groups, by their engines' events.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{collections::HashSet, time::Instant};

use kvlane_kv_events::{BlockRemoved, BlockStored, ExternalHash};
use kvlane_router::knowledge::{Blocks, Parent, chain};
use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_64;

const SIZE: u32 = 4;
const FULL: u32 = 2;
const WINDOW: u32 = 0;
const STATE: u32 = 1;
/// The window's tokens. Three blocks hold all but the last one.
const SEEN: u32 = 2 * SIZE + 2;
/// A state's block is as long as two.
const STEP: usize = 2;

fn tokens(pieces: &[u8]) -> Vec<u32> {
    pieces.iter().flat_map(|&piece| (0..SIZE).map(move |place| u32::from(piece) * SIZE + place)).collect()
}

fn hash(pieces: &[u8]) -> ExternalHash {
    ExternalHash::Number(xxh3_64(pieces))
}

fn stored(pieces: &[u8], group: u32, ends: &[usize], medium: &str) -> BlockStored {
    let (kind, window, step) = match group {
        FULL => ("full_attention", None, 1),
        WINDOW => ("sliding_window", Some(SEEN), 1),
        _ => ("mamba", None, STEP),
    };
    BlockStored {
        hashes: ends.iter().map(|&end| hash(&pieces[..end])).collect(),
        parent: None,
        // vLLM's events of windows also have tokens of blocks that it does not keep.
        tokens: if group == FULL { tokens(pieces) } else { tokens(&pieces[..1]) },
        block_size: SIZE * step as u32,
        lora_id: None,
        medium: Some(medium.into()),
        lora_name: None,
        extra_keys: Vec::new(),
        group: Some(group),
        kind: Some(kind.into()),
        window,
    }
}

fn take(blocks: &mut Blocks, node: usize, event: &BlockStored) {
    blocks.learn(node, event);
    let mut next = Some((0, Parent::OfEvent));
    while let Some((from, parent)) = next {
        next = blocks.stored(node, event, from, parent);
    }
}

fn found(blocks: &mut Blocks, pieces: &[u8], node: usize) -> usize {
    let mut hit = None;
    blocks.matched(
        &chain(&tokens(pieces), SIZE, None, None),
        &[u64::MAX, u64::MAX],
        Instant::now(),
        |of, count| {
            if of == node {
                assert_eq!(hit.replace(count), None);
            }
        },
    );
    hit.unwrap()
}

/// The longest hit by the rules of vLLM, tried from the longest on.
fn longest(held: &HashSet<(u32, usize)>, count: usize) -> usize {
    let has = |group: u32, first: usize, end: usize| (first..=end).all(|end| held.contains(&(group, end)));
    let fits = |&end: &usize| {
        end.is_multiple_of(STEP)
            && has(FULL, 1, end)
            && has(WINDOW, end.saturating_sub(3) + 1, end)
            && has(STATE, end, end)
    };
    (1..=count).rev().find(fits).unwrap_or(0)
}

proptest! {
    #[test]
    fn a_hit_ends_where_every_group_has_what_it_needs(
        count in 1usize..24,
        windows in prop::collection::vec(prop::bool::weighted(0.8), 24),
        states in prop::collection::vec(any::<bool>(), 24),
        full in 1usize..24,
        removed in prop::collection::vec((0u32..3, 1usize..24), 0..6),
        node in prop_oneof![Just(3usize), Just(70)],
    ) {
        let pieces: Vec<u8> = (0..count as u8).collect();
        let ends = |wanted: &[bool]| -> Vec<usize> { (1..=count).filter(|end| wanted[end - 1]).collect() };
        let kept: [(u32, Vec<usize>); 3] = [
            (FULL, (1..=count).collect()),
            (WINDOW, ends(&windows)),
            (STATE, ends(&states).into_iter().filter(|end| end.is_multiple_of(STEP)).collect()),
        ];
        let mut blocks = Blocks::new(1 << 12);
        let mut held = HashSet::new();
        for (group, ends) in &kept {
            for &end in ends {
                held.insert((*group, end));
            }
            take(&mut blocks, node, &stored(&pieces, *group, ends, "GPU"));
        }
        for (group, end) in removed {
            let end = end.min(count);
            held.remove(&(group, end));
            let hashes = vec![hash(&pieces[..end])];
            blocks.removed(node, &BlockRemoved { hashes, medium: Some("GPU".into()), group: Some(group) });
        }
        let asked: Vec<u8> = (0..full.min(count) as u8).collect();
        prop_assert_eq!(found(&mut blocks, &asked, node), longest(&held, asked.len()));
    }
}

/// Gemma 3 and gpt-oss begin with a sliding window, so that is their group 0. Its last blocks were taken for a beginning, and
/// such engines seemed to have nothing.
#[test]
fn the_group_with_full_attention_says_how_long_a_beginning_is_whatever_its_number() {
    let pieces: Vec<u8> = (0..20).collect();
    let mut blocks = Blocks::new(1 << 12);
    let all: Vec<usize> = (1..=20).collect();
    blocks.learn(0, &stored(&pieces, WINDOW, &[18, 19, 20], "GPU"));
    take(&mut blocks, 0, &stored(&pieces, FULL, &all, "GPU"));
    take(&mut blocks, 0, &stored(&pieces, WINDOW, &[18, 19, 20], "GPU"));
    assert_eq!(found(&mut blocks, &pieces, 0), 20);
    assert_eq!(blocks.stats(0).block_size, Some(SIZE));
    assert_eq!((blocks.stats(0).stored, blocks.stats(0).unattached), (20, 0));
    // A prompt that shares only its beginning finds no window there.
    assert_eq!(found(&mut blocks, &pieces[..10], 0), 0);
    // The engine's pool may have it.
    take(&mut blocks, 0, &stored(&pieces, WINDOW, &[8, 9, 10], "CPU"));
    assert_eq!(found(&mut blocks, &pieces[..10], 0), 10);
    assert_eq!(found(&mut blocks, &pieces[..12], 0), 10);
    // Another engine runs there now, with one group.
    blocks.forget(0);
    take(
        &mut blocks,
        0,
        &BlockStored { kind: None, window: None, group: None, ..stored(&pieces, FULL, &all, "GPU") },
    );
    assert_eq!(found(&mut blocks, &pieces[..10], 0), 10);
}

#[test]
fn a_pool_has_a_hit_where_it_has_blocks_of_every_group() {
    let pieces: Vec<u8> = (0..20).collect();
    let mut blocks = Blocks::new(1 << 12);
    let all: Vec<usize> = (1..=20).collect();
    take(&mut blocks, 3, &stored(&pieces, FULL, &all, "CPU"));
    take(&mut blocks, 3, &stored(&pieces, WINDOW, &[6, 7, 8, 18, 20], "CPU"));
    let chain = chain(&tokens(&pieces), SIZE, None, None);
    assert_eq!(blocks.pooled(&chain, 20, &[(0, 1 << 3)]), 8);
    blocks.learn(5, &stored(&pieces, FULL, &[], "CPU"));
    take(&mut blocks, 5, &stored(&pieces, WINDOW, &[19], "CPU"));
    assert_eq!(blocks.pooled(&chain, 20, &[(0, 1 << 3 | 1 << 5)]), 20);
    // An engine computes a prompt's last token itself, and one block less needs another window.
    assert_eq!(blocks.pooled(&chain, 19, &[(0, 1 << 3 | 1 << 5)]), 8);
}

#[test]
fn a_promised_prompt_counts_for_every_group() {
    let pieces: Vec<u8> = (0..20).collect();
    let mut blocks = Blocks::new(1 << 12);
    let all: Vec<usize> = (1..=20).collect();
    take(&mut blocks, 0, &stored(&pieces, FULL, &all, "GPU"));
    blocks.learn(0, &stored(&pieces, WINDOW, &[], "GPU"));
    assert_eq!(found(&mut blocks, &pieces, 0), 0);
    blocks.promise(&chain(&tokens(&pieces), SIZE, None, None), 0, Instant::now());
    assert_eq!(found(&mut blocks, &pieces, 0), 20);
}

/// Mistral 7B of 2023 has windows in all layers. Its only group was taken for one beside a group that there is not.
#[test]
fn a_single_group_makes_up_beginnings_whatever_its_kind() {
    let pieces: Vec<u8> = (0..20).collect();
    let mut blocks = Blocks::new(1 << 12);
    let all: Vec<usize> = (1..=20).collect();
    let only = BlockStored { tokens: tokens(&pieces), ..stored(&pieces, WINDOW, &all, "GPU") };
    take(&mut blocks, 0, &only);
    assert_eq!((found(&mut blocks, &pieces, 0), blocks.stats(0).block_size), (20, Some(SIZE)));
}

/// vLLM 0.32 names the end of a prompt inside a block by the hash there, with tokens since the last hash.
#[test]
fn the_end_of_a_prompt_inside_a_block_is_none_of_its_blocks() {
    let pieces: Vec<u8> = (0..8).collect();
    let mut blocks = Blocks::new(1 << 12);
    let long = BlockStored { block_size: 2 * SIZE, ..stored(&pieces, FULL, &[2, 4, 6, 8], "GPU") };
    take(&mut blocks, 0, &long);
    let inside = BlockStored {
        parent: Some(hash(&pieces)),
        tokens: tokens(&[9]),
        ..stored(&[0, 1, 2, 3, 4, 5, 6, 7, 9], FULL, &[9], "GPU")
    };
    take(&mut blocks, 0, &inside);
    assert_eq!((blocks.stats(0).block_size, blocks.stats(0).unattached), (Some(2 * SIZE), 0));
    // A state's block is as long as it was, too.
    take(&mut blocks, 0, &stored(&pieces, STATE, &[8], "GPU"));
    take(&mut blocks, 0, &BlockStored { block_size: SIZE, ..stored(&pieces, STATE, &[7], "GPU") });
    let chain = chain(&tokens(&pieces), 2 * SIZE, None, None);
    let mut hits = Vec::new();
    blocks.matched(&chain, &[1], Instant::now(), |_, count| hits.push(count));
    assert_eq!(hits, [4]);
}

/// Gemma 4's layers have pages of two sizes, so full attention may have the longer blocks.
#[test]
fn of_a_window_with_shorter_blocks_those_count_that_end_with_a_block_of_the_beginning() {
    let pieces: Vec<u8> = (0..20).collect();
    let mut blocks = Blocks::new(1 << 12);
    let all: Vec<usize> = (2..=20).step_by(2).collect();
    take(&mut blocks, 0, &BlockStored { block_size: 2 * SIZE, ..stored(&pieces, FULL, &all, "GPU") });
    take(&mut blocks, 0, &stored(&pieces, WINDOW, &[7, 8, 9, 10, 11, 18], "GPU"));
    let chain = chain(&tokens(&pieces), 2 * SIZE, None, None);
    let mut hits = Vec::new();
    blocks.matched(&chain, &[1], Instant::now(), |_, count| hits.push(count));
    assert_eq!(hits, [5], "40 tokens: the window's three blocks before hold those that end at 8 and 10");
}

#[test]
fn a_second_group_with_full_attention_has_to_hold_the_beginning_too() {
    let pieces: Vec<u8> = (0..20).collect();
    let mut blocks = Blocks::new(1 << 12);
    let all: Vec<usize> = (1..=20).collect();
    take(&mut blocks, 0, &stored(&pieces, FULL, &all, "GPU"));
    let second = |ends: &[usize]| BlockStored { group: Some(7), ..stored(&pieces, FULL, ends, "GPU") };
    take(&mut blocks, 0, &second(&all));
    assert_eq!(found(&mut blocks, &pieces, 0), 20);
    let gone = BlockRemoved { hashes: vec![hash(&pieces[..13])], medium: Some("GPU".into()), group: Some(7) };
    blocks.removed(0, &gone);
    assert_eq!(found(&mut blocks, &pieces, 0), 12);
}

/// Whatever an engine says of its groups, a look-up ends soon.
#[test]
fn odd_groups_cost_no_more_than_so_many_looks() {
    let pieces: Vec<u8> = (0..200).collect();
    let mut blocks = Blocks::new(1 << 18);
    let all: Vec<usize> = (1..=200).collect();
    take(&mut blocks, 0, &stored(&pieces, FULL, &all, "GPU"));
    for group in (3..400).chain([u32::MAX]) {
        let odd = BlockStored {
            group: Some(group),
            window: Some(u32::MAX),
            ..stored(&pieces, WINDOW, &all, "GPU")
        };
        take(&mut blocks, 0, &odd);
    }
    assert_eq!(found(&mut blocks, &pieces, 0), 200);
}
