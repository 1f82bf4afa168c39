//! What a prompt needs of each group for a hit.

use kvlane_block::BlockHash;
use kvlane_policy::PrefixGroup;

use crate::api::LookupGroup;

impl<'a> LookupGroup<'a> {
    /// The hashes of the full blocks within so many tokens: those that a lookup looks for. None without tokens a block.
    pub fn asked(&self, max_tokens: u64) -> &'a [BlockHash] {
        let blocks = max_tokens.checked_div(u64::from(self.tokens_per_block)).unwrap_or_default();
        &self.hashes[..usize::try_from(blocks).unwrap_or(usize::MAX).min(self.hashes.len())]
    }
}

/// What each group needs. None if a group has no tokens a block: then nothing is a hit.
pub(crate) fn needs(groups: &[LookupGroup<'_>], max_tokens: u64) -> Option<Vec<PrefixGroup>> {
    let need = |group: &LookupGroup<'_>| {
        (group.tokens_per_block != 0).then(|| PrefixGroup {
            tokens_per_block: group.tokens_per_block,
            window_blocks: group.window_blocks,
            blocks: group.asked(max_tokens).len() as u64,
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
        let asked = |tokens_per_block, max_tokens| group(tokens_per_block).asked(max_tokens).len();
        assert_eq!([asked(16, 0), asked(16, 15), asked(16, 16), asked(16, 79)], [0, 0, 1, 4]);
        assert_eq!([asked(16, u64::MAX), asked(1, u64::MAX), asked(0, 16)], [5, 5, 0]);
        let blocks = |groups: &[LookupGroup<'_>]| -> Option<Vec<u64>> {
            needs(groups, 40).map(|needs| needs.iter().map(|need| need.blocks).collect())
        };
        assert_eq!(blocks(&[group(16), group(8)]), Some(vec![2, 5]));
        assert_eq!(blocks(&[group(16), group(0)]), None);
        assert_eq!(blocks(&[]), Some(vec![]));
    }
}
