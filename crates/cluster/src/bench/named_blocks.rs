//! [`NamedBlocks`]: which blocks an owner has, computed from how often they changed. Pure.
//!
//! ```text
//!   numbers of blocks   0 ....... kept | ................... the live ones of `turning` ...................
//!                       never change   | odd changes withdraw the oldest, even ones announce a new one
//! ```

use std::ops::Range;

use kvlane_block::{BlockHash, CutDigest, Namespace, Space};
use kvlane_index::{Changes, KeySet, SpaceDigests, bench::hash};

/// The space of all blocks.
pub(crate) const SPACE: Space = Space { namespace: Namespace([1; 16]), cut: CutDigest([2; 16]) };
/// Bytes of each block's only shard.
pub(crate) const SHARD_BYTES: u64 = 4096;

/// The blocks of one owner.
#[derive(Clone, Copy, Debug)]
pub struct NamedBlocks {
    /// The owner's number. Two owners have no block in common.
    pub owner: u64,
    /// Blocks that never change: those with the lowest numbers.
    pub kept: u64,
    /// Blocks that changes replace, at least one.
    pub turning: u64,
}

impl NamedBlocks {
    pub(crate) fn hashes(&self, numbers: Range<u64>) -> Vec<BlockHash> {
        numbers.map(|number| hash(self.owner, number)).collect()
    }

    /// The turning blocks after so many changes.
    pub(crate) fn turning_after(&self, changes: u64) -> Range<u64> {
        self.kept + changes.div_ceil(2)..self.kept + self.turning + changes / 2
    }

    /// The blocks that changed from one state to a later one, and `keys` brought to that state.
    pub(crate) fn change(&self, changes: Range<u64>, keys: &mut KeySet) -> Changes {
        let (before, after) = (self.turning_after(changes.start), self.turning_after(changes.end));
        // Blocks that came and went in between never were there.
        let announced = self.hashes(before.end.max(after.start)..after.end);
        let withdrawn = self.hashes(before.start..after.start.min(before.end));
        let digests = SpaceDigests::new(&SPACE);
        withdrawn.iter().for_each(|hash| keys.remove_digest(digests.of(hash)));
        announced.iter().for_each(|hash| keys.add_digest(digests.of(hash)));
        Changes { space: SPACE, announced, withdrawn }
    }

    /// Count and digest after so many changes.
    pub(crate) fn keys_after(&self, changes: u64) -> KeySet {
        let digests = SpaceDigests::new(&SPACE);
        let mut keys = KeySet::default();
        for number in (0..self.kept).chain(self.turning_after(changes)) {
            keys.add_digest(digests.of(&hash(self.owner, number)));
        }
        keys
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn changes_lead_from_each_state_to_each_later_one() {
        let blocks = NamedBlocks { owner: 3, kept: 5, turning: 4 };
        let all = |changes| -> BTreeSet<BlockHash> {
            let turning = blocks.turning_after(changes);
            blocks.hashes(0..5).into_iter().chain(blocks.hashes(turning)).collect()
        };
        assert_eq!((all(0).len(), all(1).len(), all(2).len()), (9, 8, 9));
        for start in 0..30 {
            for end in start..30 {
                let (mut there, mut keys) = (all(start), blocks.keys_after(start));
                let Changes { announced, withdrawn, .. } = blocks.change(start..end, &mut keys);
                assert!(withdrawn.iter().all(|hash| there.remove(hash)), "{start} {end}");
                assert!(announced.iter().all(|hash| there.insert(*hash)), "{start} {end}");
                assert_eq!((there, keys), (all(end), blocks.keys_after(end)));
                assert!(announced.len() + withdrawn.len() <= (end - start) as usize);
            }
        }
    }
}
