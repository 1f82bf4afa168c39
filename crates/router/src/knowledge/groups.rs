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

/// Most groups of a node beside the one whose blocks make up a prompt's beginning. Models have a few.
const GROUPS_MAX: usize = 16;
/// Most looks at blocks of other groups in a look-up. With more to see, the nodes that come last have no hit.
pub(super) const LOOKS_MAX: usize = 1 << 16;

/// The groups of one node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Groups {
    /// The group with full attention. None until the engine has named its kind, and for models without one.
    full: Option<u32>,
    others: Vec<Other>,
}

/// A group that decides where a hit ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Other {
    group: u32,
    tokens_a_block: u32,
    needs: Needs,
}

/// A group's part of a hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Needs {
    /// Blocks of so many tokens, of which the last one is computed.
    Window(u32),
    /// The state at its end.
    State,
    /// All blocks: full attention in a second group.
    All,
}

impl Other {
    /// In blocks of `size` tokens: how many of them a block of the group is, and how many of the group's blocks a hit needs.
    /// None if these end elsewhere, so that their hashes are no prompt's.
    fn in_blocks_of(self, size: u32) -> Option<(usize, usize)> {
        let own = self.tokens_a_block;
        let blocks = match self.needs {
            Needs::Window(tokens) => tokens.saturating_sub(1).div_ceil(own).max(1),
            Needs::State => 1,
            Needs::All => u32::MAX,
        };
        if size == 0 {
            return None;
        }
        if own.is_multiple_of(size) {
            return Some(((own / size) as usize, blocks as usize));
        }
        // Smaller blocks count where they end with one of `size`.
        size.is_multiple_of(own).then(|| (1, blocks.div_ceil(size / own) as usize))
    }
}

impl Groups {
    /// Takes note of the kind of group that stored blocks are of.
    pub(super) fn learn(&mut self, event: &BlockStored) {
        let (Some(group), Some(kind)) = (event.group, event.kind.as_deref()) else { return };
        if event.block_size == 0 {
            // An offloading connector names blocks by their hashes only.
            return;
        }
        let needs = match (kind, event.window) {
            ("full_attention" | "mla_attention" | "sink_full_attention", _) => {
                if *self.full.get_or_insert(group) == group {
                    return;
                }
                Needs::All
            }
            ("mamba", _) => Needs::State,
            ("sliding_window" | "sliding_window_mla", Some(window)) => Needs::Window(window),
            // How long a chunk is, no event says.
            _ => return,
        };
        let is_full = self.others.len() >= GROUPS_MAX;
        match self.others.iter_mut().find(|other| other.group == group) {
            // The end of a prompt inside a block has a size of its own.
            Some(other) => other.tokens_a_block = other.tokens_a_block.max(event.block_size),
            None if is_full => {}
            None => self.others.push(Other { group, tokens_a_block: event.block_size, needs }),
        }
    }

    /// Whether this group's blocks make up a prompt's beginning.
    pub(super) fn is_full(&self, group: Option<u32>) -> bool {
        // Older engines name no kind, and some no group. Models without full attention mostly have one group.
        group.is_none_or(|group| self.full.map_or(group == 0, |full| full == group))
    }

    /// Whether blocks of this group decide where a hit ends.
    pub(super) fn is_other(&self, group: Option<u32>) -> bool {
        self.full.is_some() && self.others.iter().any(|other| Some(other.group) == group)
    }

    /// Whether all blocks of a prompt's beginning are a hit.
    pub(super) fn are_one(&self) -> bool {
        self.full.is_none() || self.others.is_empty()
    }

    /// How many of the first `count` blocks of `size` tokens are a hit. `holds(group, block)`: whether the group's block that
    /// ends with the prompt's block `block` is held. It is called at most `looks` times, of which those made are taken off.
    pub(super) fn hit(
        &self,
        size: u32,
        count: usize,
        looks: &mut usize,
        mut holds: impl FnMut(u32, usize) -> bool,
    ) -> usize {
        let mut end = count;
        // The lowest end for which each group was seen to hold all blocks up to the hit's: ends only get lower.
        let mut held_from = vec![usize::MAX; self.others.len()];
        'shorter: while end > 0 {
            for (other, held_from) in self.others.iter().zip(&mut held_from) {
                let Some((step, blocks)) = other.in_blocks_of(size) else { continue };
                if !end.is_multiple_of(step) {
                    end -= end % step;
                    continue 'shorter;
                }
                let before = blocks.saturating_sub(1).saturating_mul(step);
                let lowest = end.saturating_sub(before).max(step);
                let mut at = end.min(held_from.saturating_sub(step));
                while at >= lowest {
                    let Some(left) = looks.checked_sub(1) else { return 0 };
                    *looks = left;
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

/// The key of a group's block beside those of a beginning.
pub(super) fn of_group(block: u64, group: u32) -> u64 {
    // Splitmix64's last steps, so that keys of groups share nothing with a block's.
    let mixed = block ^ (u64::from(group) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}
