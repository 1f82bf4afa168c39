//! The blocks of each group that a lookup considers.

use kvlane_block::BlockHash;
use kvlane_policy::PrefixGroup;

use crate::api::LookupGroup;

impl<'a> LookupGroup<'a> {
    /// Hashes of the full blocks within `max_tokens`, which a lookup searches. Empty if `tokens_per_block` is 0.
    pub fn hashes_within(&self, max_tokens: u64) -> &'a [BlockHash] {
        let blocks = max_tokens.checked_div(u64::from(self.tokens_per_block)).unwrap_or_default();
        &self.hashes[..usize::try_from(blocks).unwrap_or(usize::MAX).min(self.hashes.len())]
    }
}

/// The groups as the policy crate's prefix search takes them. None if a group has 0 tokens a block, because then nothing
/// is a hit.
pub(crate) fn needs(groups: &[LookupGroup<'_>], max_tokens: u64) -> Option<Vec<PrefixGroup>> {
    let need = |group: &LookupGroup<'_>| {
        (group.tokens_per_block != 0).then(|| PrefixGroup {
            tokens_per_block: group.tokens_per_block,
            window_blocks: group.window_blocks,
            blocks: group.hashes_within(max_tokens).len() as u64,
        })
    };
    groups.iter().map(need).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::SpaceId;

    #[test]
    fn full_blocks_within_the_tokens_are_asked_for() {
        let hashes: Vec<BlockHash> = (0..5).map(|number| BlockHash([number; 16])).collect();
        let group = |tokens_per_block| LookupGroup {
            space: SpaceId(0),
            tokens_per_block,
            window_blocks: 2,
            hashes: &hashes,
        };
        let within = |tokens_per_block, max_tokens| group(tokens_per_block).hashes_within(max_tokens).len();
        assert_eq!([within(16, 0), within(16, 15), within(16, 16), within(16, 79)], [0, 0, 1, 4]);
        assert_eq!([within(16, u64::MAX), within(1, u64::MAX), within(0, 16)], [5, 5, 0]);
        let blocks = |groups: &[LookupGroup<'_>]| -> Option<Vec<u64>> {
            needs(groups, 40).map(|needs| needs.iter().map(|need| need.blocks).collect())
        };
        assert_eq!(blocks(&[group(16), group(8)]), Some(vec![2, 5]));
        assert_eq!(blocks(&[group(16), group(0)]), None);
        assert_eq!(blocks(&[]), Some(vec![]));
    }
}
