//! The KV cache groups of a node's model, by its engine's events. Pure.
//!
//! A hit takes all blocks of the group with full attention, a sliding window's last blocks before the hit's end, and the state
//! of state-space layers there:
//!
//! ```text
//!   full     | 0 | 1 | 2 | 3 | 4 | 5 |      held: 0 to 5
//!   window                   | 4 |          held: 4, of which a hit needs one
//!   a hit ends here:             ^          behind block 4
//! ```
//! vLLM publishes the same hash for blocks of all groups that end with the same token.

use kvlane_kv_events::BlockStored;

/// Most groups of a node beside that with full attention. Models have a few.
const GROUPS_MAX: usize = 64;

/// The groups of one node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Groups {
    /// The group with full attention. None until the engine has named its kind.
    full: Option<u32>,
    others: Vec<Other>,
}

/// A group of which a hit needs blocks before its end only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Other {
    group: u32,
    tokens_a_block: u32,
    /// Blocks that a hit needs.
    blocks: u32,
}

impl Groups {
    /// Takes note of the kind of group that stored blocks are of.
    pub(super) fn learn(&mut self, event: &BlockStored) {
        let (Some(group), Some(kind)) = (event.group, event.kind.as_deref()) else { return };
        let size = event.block_size.max(1);
        let blocks = match (kind, event.window) {
            ("full_attention" | "mla_attention" | "sink_full_attention", _) => {
                self.full.get_or_insert(group);
                return;
            }
            ("mamba", _) => 1,
            ("sliding_window" | "sliding_window_mla", Some(window)) => {
                window.saturating_sub(1).div_ceil(size).max(1)
            }
            // How long a chunk is, no event says.
            _ => return,
        };
        let now = Other { group, tokens_a_block: size, blocks };
        let is_full = self.others.len() >= GROUPS_MAX;
        match self.others.iter_mut().find(|other| other.group == group) {
            Some(other) => *other = now,
            None if is_full => {}
            None => self.others.push(now),
        }
    }

    /// Whether a prompt's beginning is as long as this group's blocks go.
    pub(super) fn is_full(&self, group: Option<u32>) -> bool {
        // Older engines name no kind, and some no group.
        let is_first = |group: u32| group == 0 && !self.is_other(Some(group));
        group.is_none_or(|group| self.full.map_or_else(|| is_first(group), |full| full == group))
    }

    /// Whether blocks of this group decide where a hit ends.
    pub(super) fn is_other(&self, group: Option<u32>) -> bool {
        self.others.iter().any(|other| Some(other.group) == group)
    }

    /// Whether all blocks of a prompt's beginning are a hit.
    pub(super) fn are_one(&self) -> bool {
        self.others.is_empty()
    }

    /// How many of the first `count` blocks of `size` tokens are a hit. `holds(group, block)`: whether the group's block that
    /// ends with the prompt's block `block` is held.
    pub(super) fn hit(&self, size: u32, count: usize, mut holds: impl FnMut(u32, usize) -> bool) -> usize {
        let mut end = count;
        // The lowest end for which each group was seen to hold all blocks up to the hit's: ends only get lower.
        let mut held_from = vec![usize::MAX; self.others.len()];
        'shorter: while end > 0 {
            for (other, held_from) in self.others.iter().zip(&mut held_from) {
                // Blocks of other sizes end elsewhere, and their hashes are no prompt's.
                let Some(step) = (other.tokens_a_block as usize)
                    .checked_div(size as usize)
                    .filter(|step| *step > 0 && other.tokens_a_block.is_multiple_of(size))
                else {
                    continue;
                };
                if !end.is_multiple_of(step) {
                    end -= end % step;
                    continue 'shorter;
                }
                let before = (other.blocks as usize).saturating_sub(1).saturating_mul(step);
                let lowest = end.saturating_sub(before).max(step);
                let mut at = end.min(held_from.saturating_sub(step));
                while at >= lowest {
                    if !holds(other.group, at - 1) {
                        // No hit ends at this block, or so shortly behind it that it needs it.
                        end = at - step;
                        continue 'shorter;
                    }
                    *held_from = at;
                    at -= step;
                }
            }
            return end;
        }
        0
    }
}

/// The key of a group's block beside those of full attention.
pub(super) fn of_group(block: u64, group: u32) -> u64 {
    // Splitmix64's last steps, so that keys of groups share nothing with a block's.
    let mixed = block ^ u64::from(group + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}
