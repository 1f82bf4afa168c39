//! `longest_hit` against its definition, tried for every length.
use kvlane_policy::{PrefixGroup, longest_hit};
use proptest::prelude::*;
use std::collections::HashSet;

fn is_hit(groups: &[PrefixGroup], resident: &[Vec<bool>], tokens: u64) -> bool {
    groups.iter().zip(resident).all(|(group, resident)| {
        let size = u64::from(group.tokens_per_block);
        let end = tokens / size;
        tokens.is_multiple_of(size)
            && end <= group.blocks
            && (group.first_block(tokens)..end).all(|block| resident[block as usize])
    })
}

fn group() -> impl Strategy<Value = (PrefixGroup, Vec<bool>)> {
    (1u32..5, 0u32..4, prop::collection::vec(prop::bool::weighted(0.8), 0..24)).prop_map(
        |(tokens_per_block, window_blocks, resident)| {
            (PrefixGroup { tokens_per_block, window_blocks, blocks: resident.len() as u64 }, resident)
        },
    )
}

proptest! {
    #[test]
    fn is_the_longest_and_asks_once(groups in prop::collection::vec(group(), 1..4), max_tokens in 0u64..80) {
        let (groups, resident): (Vec<_>, Vec<_>) = groups.into_iter().unzip();
        let longest = (0..=max_tokens).rev().find(|&tokens| is_hit(&groups, &resident, tokens));
        let mut asked = HashSet::new();
        let found = longest_hit(&groups, max_tokens, |group, block| {
            assert!(asked.insert((group, block)), "asked twice for block {block} of group {group}");
            resident[group][block as usize]
        });
        prop_assert_eq!(Some(found), longest);
    }
}

#[test]
fn no_groups_or_no_common_length_is_a_miss() {
    assert_eq!(longest_hit(&[], 100, |_, _| true), 0);
    let group = |tokens_per_block| PrefixGroup { tokens_per_block, window_blocks: 0, blocks: 10 };
    let coprime = [group(u32::MAX), group(u32::MAX - 1), group(u32::MAX - 2)];
    assert_eq!(longest_hit(&coprime, u64::MAX, |_, _| true), 0);
}

#[test]
fn a_window_needs_only_its_end() {
    let full = PrefixGroup { tokens_per_block: 16, window_blocks: 0, blocks: 10 };
    let sliding = PrefixGroup { tokens_per_block: 16, window_blocks: 2, blocks: 10 };
    // Blocks 6 and 7 of the window group are there, nothing else.
    let visible = |group: usize, block: u64| group == 0 || block == 6 || block == 7;
    assert_eq!(longest_hit(&[full, sliding], 160, visible), 128);
    assert_eq!(sliding.first_block(128), 6);
    assert_eq!(full.first_block(128), 0);
}
