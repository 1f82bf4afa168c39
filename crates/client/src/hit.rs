//! The answer to a lookup, and the check that it fits before it is promised.

use bytes::Bytes;
use kvlane_block::Rank;
use kvlane_proto::{
    packed::{PAGE_NUMBER_BYTES, Pages},
    v1,
};
use thiserror::Error;

use crate::{boot::BootId, group_spec::GroupSpec};

/// Why a hit does not fit its lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Misfit {
    /// A miss must have neither a lease nor blocks.
    #[error("a miss with a lease or blocks")]
    MissWithBlocks,
    /// More tokens than the lookup allows.
    #[error("{tokens} tokens, of {max_tokens} that were asked for")]
    TooManyTokens {
        /// In the daemon's answer.
        tokens: u64,
        /// Allowed by the hashes and the bound of the lookup.
        max_tokens: u64,
    },
    /// The answer does not have the engine's groups.
    #[error("{named} groups, and the engine has {groups}")]
    Groups {
        /// Number of groups in the answer.
        named: usize,
        /// Number of groups that the engine opened.
        groups: usize,
    },
    /// A group does not match the number of tokens.
    #[error("group {index}: {what}")]
    Group {
        /// Index of the group among the engine's.
        index: u32,
        /// The first mismatch that was found.
        what: &'static str,
    },
}

/// The answer to a lookup. With `tokens == 0` it is a miss and holds no lease.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Hit {
    /// Number of tokens, from the prompt's start, whose blocks are in RAM.
    pub tokens: u64,
    /// Keeps the blocks in place until it is released.
    pub lease: u64,
    /// The run of the daemon that granted the lease.
    pub boot: BootId,
    groups: Vec<Group>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Group {
    index: u32,
    first_block: u64,
    stored_blocks: u64,
    pages: Bytes,
    workers: usize,
}

impl Hit {
    pub(crate) fn from_reply(boot: BootId, result: v1::LookupResult) -> Self {
        let groups = result
            .groups
            .into_iter()
            .map(|group| Group {
                index: group.group,
                first_block: group.first_block,
                stored_blocks: group.stored_blocks,
                workers: group.workers.max(1) as usize,
                pages: group.pages,
            })
            .collect();
        Self { tokens: result.tokens, lease: result.lease, boot, groups }
    }

    /// Checks that this fits a lookup of at most `max_tokens`, from an engine of these groups and workers. A hit that does not
    /// fit must not be promised.
    ///
    /// # Errors
    /// The first [`Misfit`] that was found.
    pub fn check(&self, groups: &[GroupSpec], workers: u32, max_tokens: u64) -> Result<(), Misfit> {
        let tokens = self.tokens;
        if tokens == 0 {
            let is_empty = self.lease == 0 && self.groups.is_empty();
            return if is_empty { Ok(()) } else { Err(Misfit::MissWithBlocks) };
        }
        if tokens > max_tokens {
            return Err(Misfit::TooManyTokens { tokens, max_tokens });
        }
        if self.groups.len() != groups.len() {
            return Err(Misfit::Groups { named: self.groups.len(), groups: groups.len() });
        }
        for (index, spec) in groups.iter().enumerate() {
            let index = index as u32;
            let of_group = self.groups.iter().find(|group| group.index == index);
            let group = of_group.ok_or(Misfit::Group { index, what: "it is missing" })?;
            let wrong = |what| Err(Misfit::Group { index, what });
            let block_tokens = u64::from(spec.tokens_per_block);
            if tokens.checked_rem(block_tokens) != Some(0) {
                return wrong("the tokens are no whole number of its blocks");
            }
            let end = tokens / block_tokens;
            let first_block = match spec.window_blocks {
                0 => 0,
                window => end.saturating_sub(window.into()),
            };
            if group.first_block != first_block {
                return wrong("another first block");
            }
            if group.workers != workers as usize {
                return wrong("another number of workers");
            }
            let pages = (end - first_block).checked_mul(workers.into());
            if pages.is_none() || Pages::parse(&group.pages).ok().map(|pages| pages.len() as u64) != pages {
                return wrong("another number of pages");
            }
            if group.stored_blocks < end {
                return wrong("fewer blocks are stored than hit");
            }
        }
        Ok(())
    }

    /// Index and first block of each group of the hit.
    pub fn groups(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        self.groups.iter().map(|group| (group.index, group.first_block))
    }

    /// Number of blocks of a group, from the prompt's first one, that need no save: the hit's, and stored ones after it. 0 if
    /// the hit has no such group.
    pub fn stored_blocks(&self, group: u32) -> u64 {
        self.groups.iter().find(|g| g.index == group).map_or(0, |g| g.stored_blocks)
    }

    /// Pool pages of one rank's shards, as a little-endian `u32` per block, from the group's first block on. Empty if the hit
    /// has no such group or rank. To load blocks that several ranks share, concatenate the pages of these ranks.
    pub fn pages(&self, group: u32, rank: Rank) -> Vec<u8> {
        let Some(group) = self.groups.iter().find(|g| g.index == group) else { return Vec::new() };
        let Ok(pages) = Pages::parse(&group.pages) else { return Vec::new() };
        pages.column(rank.0 as usize, group.workers).flat_map(u32::to_le_bytes).collect()
    }

    /// As [`pages`](Self::pages), for blocks named by their numbers in the prompt. None if one of them is not in the hit.
    pub fn pages_of(&self, group: u32, rank: Rank, blocks: &[u64]) -> Option<Vec<u8>> {
        let group = self.groups.iter().find(|g| g.index == group)?;
        let (pages, rank) = (Pages::parse(&group.pages).ok()?, rank.0 as usize);
        let mut found = Vec::with_capacity(blocks.len() * PAGE_NUMBER_BYTES);
        for block in blocks {
            let row = usize::try_from(block.checked_sub(group.first_block)?).ok()?;
            let place = row.checked_mul(group.workers)?.checked_add(rank)?;
            found.extend(pages.get(place).filter(|_| rank < group.workers)?.to_le_bytes());
        }
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_taken_apart_by_rank() {
        let pages: Vec<u8> = [10u32, 20, 11, 21, 12, 22].iter().flat_map(|p| p.to_le_bytes()).collect();
        let group =
            v1::HitGroup { group: 3, first_block: 5, pages: pages.into(), workers: 2, stored_blocks: 9 };
        let hit = Hit::from_reply(
            [7; 16],
            v1::LookupResult { tokens: 96, lease: 1, groups: vec![group], ready: true, is_recorded: false },
        );
        let of = |rank| -> Vec<u32> {
            hit.pages(3, Rank(rank)).chunks(4).map(|p| u32::from_le_bytes(p.try_into().unwrap())).collect()
        };
        assert_eq!((of(0), of(1), of(2)), (vec![10, 11, 12], vec![20, 21, 22], vec![]));
        let some = |rank, blocks: &[u64]| {
            let pages = hit.pages_of(3, Rank(rank), blocks)?;
            Some(Pages::parse(&pages).unwrap().iter().collect::<Vec<_>>())
        };
        assert_eq!((some(1, &[7, 5]), some(0, &[])), (Some(vec![22, 20]), Some(vec![])));
        // Before and behind the hit, a rank that is not, a group that is not.
        assert_eq!([some(0, &[4]), some(0, &[8]), some(2, &[5]), some(0, &[u64::MAX])], [const { None }; 4]);
        assert_eq!(hit.pages_of(0, Rank(0), &[5]), None);
        assert_eq!(hit.groups().collect::<Vec<_>>(), [(3, 5)]);
        assert_eq!((hit.stored_blocks(3), hit.stored_blocks(0)), (9, 0));
        assert!(hit.pages(0, Rank(0)).is_empty());
    }

    /// An engine with a group that needs all blocks, and one with a window of two and larger blocks.
    #[test]
    fn a_hit_of_several_groups_fits_as_the_daemon_counts_it() {
        let spec = |tokens_per_block, window_blocks| GroupSpec {
            namespace: [1; 16],
            name: "group".into(),
            tokens_per_block,
            window_blocks,
            crosses_hosts: false,
        };
        let specs = [spec(16, 0), spec(32, 2)];
        let answer = |tokens: u64, first_block: u64| {
            let group = |index, first_block: u64, end: u64| v1::HitGroup {
                group: index,
                first_block,
                pages: vec![0; (end - first_block) as usize * 8].into(),
                workers: 2,
                stored_blocks: end,
            };
            // In any order.
            let groups = vec![group(1, first_block, tokens / 32), group(0, 0, tokens / 16)];
            let hit = Hit::from_reply(
                [7; 16],
                v1::LookupResult { tokens, lease: 1, groups, ready: true, is_recorded: false },
            );
            hit.check(&specs, 2, 1 << 40)
        };
        assert_eq!(answer(96, 1), Ok(()));
        assert_eq!(answer(32, 0), Ok(()), "fewer blocks than the window has");
        assert!(matches!(answer(96, 0), Err(Misfit::Group { index: 1, .. })));
        assert!(matches!(answer(48, 0), Err(Misfit::Group { index: 1, .. })), "one block and a half");
        assert_eq!(Hit::default().check(&specs, 2, 0), Ok(()));
    }
}
