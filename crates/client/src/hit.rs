//! What a lookup found.

use bytes::Bytes;
use kvlane_proto::v1;

use crate::boot::BootId;

/// The answer to a lookup. With `tokens == 0` it is a miss and holds no lease.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Hit {
    /// Tokens of the prompt that are in RAM.
    pub tokens: u64,
    /// Keeps the blocks until it is released.
    pub lease: u64,
    /// The run of the daemon that this holds for.
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

const PAGE_NUMBER_BYTES: usize = 4;

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

    /// Index and first block of each group of the hit.
    pub fn groups(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        self.groups.iter().map(|group| (group.index, group.first_block))
    }

    /// Blocks of a group, from the prompt's first one, that need no saving: the hit's and those stored after it. 0 when
    /// the hit has no such group.
    pub fn stored_blocks(&self, group: u32) -> u64 {
        self.groups.iter().find(|g| g.index == group).map_or(0, |g| g.stored_blocks)
    }

    /// Pool pages of one rank's shards, little-endian `u32` a block, from the group's first block on. Empty when
    /// the hit has no such group or rank. Those of several ranks one after the other load a block that they share.
    pub fn pages(&self, group: u32, rank: u32) -> Vec<u8> {
        let Some(group) = self.groups.iter().find(|g| g.index == group) else { return Vec::new() };
        let row_bytes = group.workers * PAGE_NUMBER_BYTES;
        let at = rank as usize * PAGE_NUMBER_BYTES;
        group
            .pages
            .chunks_exact(row_bytes)
            .filter_map(|row| row.get(at..at + PAGE_NUMBER_BYTES))
            .flatten()
            .copied()
            .collect()
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
            v1::LookupResult { tokens: 96, lease: 1, groups: vec![group], ready: true },
        );
        let of = |rank| -> Vec<u32> {
            hit.pages(3, rank).chunks(4).map(|p| u32::from_le_bytes(p.try_into().unwrap())).collect()
        };
        assert_eq!((of(0), of(1), of(2)), (vec![10, 11, 12], vec![20, 21, 22], vec![]));
        assert_eq!(hit.groups().collect::<Vec<_>>(), [(3, 5)]);
        assert_eq!((hit.stored_blocks(3), hit.stored_blocks(0)), (9, 0));
        assert!(hit.pages(0, 0).is_empty());
    }
}
